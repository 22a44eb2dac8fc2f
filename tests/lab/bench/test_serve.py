"""A synthetic model behind the server: the engine process makes it, and the bench compares it with its own copy."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

from espalier import SamplingParams
from espalier.bench.clients import HttpResponse, post_request_bytes
from espalier.cli.serve import plain_settings
from espalier.errors import EspalierError
from espalier.request import Output
from lab import shape_worker
from lab.__main__ import main as lab
from lab.bench import engines, serve, synthetic_models
from lab.bench.server import exchange_all
from tests.lab.synthetic.test_checkpoint import SHAPE

TREE = ["--steps", "3", "--topk", "2", "--num-draft-tokens", "8"]
SIZES = {"max_batch": 2, "max_context": 64, "num_pages": 40, "page_size": 4, "prefix_cache": False}


@pytest.fixture
def tiny(monkeypatch):
    """--shape names a tiny model, on the CPU."""
    monkeypatch.setattr(synthetic_models, "find_shape", lambda name: SHAPE)
    for module in (engines, shape_worker):
        monkeypatch.setattr(module, "require_gpu", lambda what: torch.device("cpu"))


def test_the_engine_process_makes_the_model(tiny):
    sent = {"recipe": {"shape": "tiny", "seed": 0, "accept_length": 4.0}, "settings": plain_settings(SIZES)}
    with shape_worker.load(json.loads(json.dumps(sent))) as llm:
        assert llm.tokenizer is None and llm.inputs.model_info.vocab_size == SHAPE.target.vocab_size
        recipe = synthetic_models.recipe_with_accept_length("tiny", 0, 4.0)
        models = engines.ShapeEngines(recipe, SIZES, torch.device("cpu")).models
        [prompt] = models.prompts([8])
        [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=16))
        assert models.follows(prompt, output.token_ids) and output.speculation.drafted


@pytest.fixture
def echoing():
    """A server whose answers are the requests, in two chunks for a stream.  bodies: what it was sent."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            body = json.loads(data)
            bodies.append(body)
            self.send_response(400 if body.get("bad") else 200)
            if not body["stream"]:
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (data[:9], data[9:], b""):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()

        def log_message(self, *args):
            pass

    bodies = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        rounds = {'espalier_rounds_total{bucket="1",run="graph"}': 3.0, "espalier_harvests_total": 9.0}
        yield SimpleNamespace(port=server.server_port, bodies=bodies, metrics=lambda: rounds)
        server.shutdown()
        thread.join()


def test_clients_read_whole_responses(echoing):
    sent = [{"stream": i % 2 == 0, "bad": i == 3, "text": "é" * 100_000 * i} for i in range(5)]
    answers = exchange_all(echoing.port, [post_request_bytes("/x", body) for body in sent])
    assert [answer.status for answer in answers] == [200, 200, 200, 400, 200]
    for body, answer in zip(sent, answers, strict=True):
        data = json.dumps(body).encode()
        content = answer.received.partition(b"\r\n\r\n")[2]
        chunks = b"9\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (data[:9], len(data) - 9, data[9:])
        # pytest would take minutes to show the difference of two such answers.
        is_whole = content == (chunks if body["stream"] else data)
        assert is_whole, (len(content), len(data))
        assert answer.sent_at < answer.first_at <= answer.ended_at


def test_bench_serve_of_a_shape(tiny, echoing, monkeypatch, tmp_path):
    started, bodies = [], echoing.bodies

    @contextmanager
    def serving(settings, *flags, start):
        started.append((settings, flags, start))
        yield echoing

    monkeypatch.setattr(serve, "running_server", serving)
    out = tmp_path / "out.json"
    flags = ["--shape", "tiny", "--accept-length", "4", *TREE, "--page-size", "4"]
    sizes = ["--concurrency", "1,2", "--context", "8", "--tokens", "12", "--repeats", "1"]
    assert lab(["serve", *flags, *sizes, "--json", str(out)]) == 0
    [(settings, sent, start)] = started
    assert start == ("lab", "server")
    assert sent == ("--shape", "tiny", "--accept-length", "4.0")
    # A full batch of full contexts; "auto" would take the GPU's memory for the first of the two models.
    assert settings["num_pages"] == 1 + 2 * -(-(21 + 2 * 4 + 1) // 4)
    cells = json.loads(out.read_text())["cells"]
    assert [cell["concurrency"] for cell in cells] == [1, 2]
    # The server says that it launched no further round, and its answers are no tokens.
    assert all(cell["rounds"][0] > 0 and cell["rounds"][1:] == [0, 0] and not cell["num_equal"] for cell in cells)
    # Streams and whole answers, an untimed run and a timed one.
    assert [len(bodies), {len(body["prompt"]) for body in bodies}] == [4 * 3, {8}]
    assert all(body["return_token_ids"] and body["ignore_eos"] for body in bodies)


def test_a_failed_request_is_no_figure():
    failed = Output("", [], "abort", error="no page is free")
    engine = SimpleNamespace(scheduler=SimpleNamespace(num_rounds=SimpleNamespace(total=lambda: 0)))
    llm = SimpleNamespace(engine=engine, tokenizer=None, generate=lambda prompts, params: [failed])
    with pytest.raises(EspalierError, match="a request failed: no page is free"):
        serve.ServeBench(SimpleNamespace(llm=llm), None)._run_offline([[1]], 2)


@pytest.mark.parametrize(
    "choices, answer",
    [
        ([{"text": "a", "token_ids": [1, 2]}, {"text": "b", "token_ids": [3]}], [1, 2, 3]),
        ([{"text": "a"}, {"text": "b"}], "ab"),
        ([], ""),
    ],
)
def test_the_answer_of_a_stream_is_read(choices, answer):
    events = [json.dumps({"choices": [choice]}).encode() for choice in choices]
    data = b"".join(b"data: %b\n\n" % event for event in (*events, b"[DONE]"))
    received = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    exchange = HttpResponse(0.0, received=bytearray(received), arrivals=[(1.0, len(received))])
    assert serve.streamed_answer(exchange) == answer


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["server", "--shape", "nothing"], "nothing"),
        (["server", "bundled", "--shape", "llama-3.1-8b"], "--model is not for --shape"),
        (["server", "--shape", "llama-3.1-8b", "--dtype", "float32"], "--dtype is not for --shape"),
        (["server", "--shape", "llama-3.1-8b", "--replicas", "2"], "--shape is for one engine"),
        (["serve", "--soak", "3", "--shape", "llama-3.1-8b"], "--shape is not for --soak"),
    ],
)
def test_flags_that_do_not_fit(arguments, message, capsys):
    assert lab(arguments) == 2
    assert message in capsys.readouterr().err
