"""`bench load --url`: what is sent and when, how a response is read, and what counts as answered and as good."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.bench import open_loop
from espalier.bench.clients import Address, HttpResponse, SentRequest, parse_address, parse_response
from espalier.bench.load import Arrivals, Timeline
from espalier.bench.open_loop import LatencyLimits
from espalier.bench.traffic import CHAT, COMPLETIONS, Traffic, request_bodies
from espalier.cli.main import main
from espalier.errors import EspalierError

STANDARD = {"model", "messages", "stream", "stream_options", "temperature", "max_tokens"}
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts):
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def received(data, cuts=()):
    """A response that came in these pieces, the first at 1.0 s, the next at 2.0 s."""
    ends = sorted({*cuts, len(data)})
    return HttpResponse(0.0, received=bytearray(data), arrivals=[(1.0 + i, end) for i, end in enumerate(ends)])


def events_of(*texts, usage=None, end=True):
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks += [{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": usage}}] if usage else []
    lines = [f"data: {json.dumps(each)}\n\n".encode() for each in chunks]
    return [*lines, b"data: [DONE]\n\n"] if end else lines


@given(st.data())
def test_an_event_has_the_time_at_which_its_last_byte_came(data):
    lines = [b"data: %d\n\n" % i for i in range(5)]
    stream = b"".join(lines)
    borders = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *borders], [*borders, len(stream)], strict=True)]
    whole = HEAD + chunked(*pieces)
    exchange = received(whole, data.draw(st.sets(st.integers(len(HEAD), len(whole) - 1), max_size=8)))
    # A line is complete with the chunk that has its end.
    chunk_ends, in_stream, in_response = [], 0, len(HEAD)
    for piece in pieces:
        in_stream += len(piece)
        in_response += len(b"%x\r\n" % len(piece)) + len(piece)
        chunk_ends.append((in_stream, in_response))
        in_response += 2
    expected = []
    for i in range(5):
        line_end = (i + 1) * len(lines[0]) - 1
        needed = next(response for stream_end, response in chunk_ends if stream_end >= line_end)
        expected.append((next(at for at, end in exchange.arrivals if end >= needed), b"%d" % i))
    assert list(exchange.events()) == expected
    assert exchange.body() == stream and exchange.is_complete


def test_a_response_without_chunks_is_read_by_arrival():
    plain = b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\ndata: 2\n\n"
    assert list(received(plain, [28]).events()) == [(1.0, b"1"), (2.0, b"2")]
    sized = b"HTTP/1.1 404 no\r\nContent-Length: 2\r\n\r\n{}"
    assert received(sized).is_complete and not received(sized[:-1]).is_complete and received(sized).body() == b"{}"


def asked(*events):
    """The request whose response has an event each second."""
    parts = HEAD + chunked(*events)
    cuts, at = [], len(HEAD)
    for event in events:
        at += len(chunked(event)) - len(chunked())
        cuts.append(at)
    result = SentRequest(Timeline(0.5))
    parse_response(received(parts, cuts), result)
    return result


def test_tokens_are_counted_by_usage_and_times_by_chunk():
    found = asked(*events_of("", "a", "bc", "d", usage=7))
    assert (found.error, found.text, found.num_prompt_tokens, found.num_output_tokens) == ("", "abcd", 5, 7)
    assert found.timeline.chunks == [(2.0, 1), (3.0, 1), (4.0, 5)]
    assert (found.timeline.ttft_s, found.timeline.tpot_s, found.timeline.latency_s) == (
        1.5,
        2 / 6,
        3.5,
    )
    assert asked(*events_of("a", "b")).num_output_tokens == 2
    texts = [
        {"text": "a"},
        {"delta": {"reasoning_content": "b"}},
        {"delta": {"tool_calls": [{"function": {"arguments": "c"}}]}},
    ]
    lines = [f"data: {json.dumps({'choices': [each]})}\n\n".encode() for each in texts]
    assert asked(*lines, b"data: [DONE]\n\n").text == "abc"


def test_chunks_with_token_ids_count_them_though_they_have_no_text():
    choices = [{"text": "", "token_ids": [3, 4]}, {"text": "", "token_ids": [5]}, {"text": "", "token_ids": []}]
    lines = [f"data: {json.dumps({'choices': [each]})}\n\n".encode() for each in choices]
    found = asked(*lines, b"data: [DONE]\n\n")
    assert (found.error, found.num_output_tokens, found.timeline.chunks) == ("", 3, [(1.0, 2), (2.0, 1)])


def test_a_prompt_may_be_token_ids():
    talks = Traffic((2, 5), (3, 9), num_prefixes=1, prefix_words=6, vocab_size=7).conversations(12, seed=0)
    prompts = [next(request_bodies(talk, COMPLETIONS, [], {}))["prompt"] for talk in talks]
    assert {len(prompt) for prompt in prompts} == {8, 9, 10, 11} and {each for ids in prompts for each in ids} == set(
        range(7)
    )
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1 < len({tuple(prompt) for prompt in prompts})


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (events_of("a", end=False), "the stream has no end"),
        (
            events_of(""),
            'the answer has no text; for a model without a tokenizer add "return_token_ids": true to --extra-body',
        ),
        ([*events_of("a", end=False), b'data: {"error": {"message": "full"}}\n\n'], "the stream ended early: full"),
    ],
)
def test_half_an_answer_is_none(events, why):
    assert asked(*events).error == why


def test_goodput_counts_who_is_within_every_limit():
    slow_start, slow_tokens = Timeline(0.0, [(2.0, 1), (2.1, 1)]), Timeline(0.0, [(0.1, 1), (4.1, 2)])
    held = [
        [LatencyLimits(ttft, itl).are_met_by(each) for each in (slow_start, slow_tokens)]
        for ttft, itl in ((None, None), (1000, None), (None, 1000), (1000, 1000), (2000, 2000))
    ]
    assert held == [[True, True], [False, True], [True, False], [False, False], [True, True]]
    assert LatencyLimits(None, 1).are_met_by(Timeline(0.0, [(9.0, 1)]))


def test_arrivals_may_be_even_or_in_bursts():
    assert Arrivals(rate=4.0, burst=1).arrival_times(4) == [0.0, 0.25, 0.5, 0.75]
    assert Arrivals(rate=4.0, burst=3).arrival_times(7) == [0.0] * 3 + [0.75] * 3 + [1.5]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_a_turn_sends_all_that_was_said(endpoint):
    traffic = Traffic((2, 5), (3, 9), num_turns=3, num_prefixes=2, prefix_words=6)
    talks = traffic.conversations(12, seed=0)
    assert talks == traffic.conversations(12, seed=0) != traffic.conversations(12, seed=1)
    assert len({talk.prefix for talk in talks}) == 2 and all(len(talk.prefix.split()) == 6 for talk in talks)
    answers = []
    for i, body in enumerate(request_bodies(talks[0], endpoint, answers, {"model": "m", "extra": 1})):
        turn = talks[0].turns[i]
        assert 2 <= len(turn.text.split()) <= 5 and body["max_tokens"] == turn.max_tokens and 3 <= turn.max_tokens <= 9
        texts = [
            each for turn, answer in zip(talks[0].turns, [*answers, None], strict=False) for each in (turn.text, answer)
        ]
        said = [talks[0].prefix, *texts[: 2 * i + 1]]
        if endpoint == CHAT:
            assert [each["content"] for each in body["messages"]] == said
            assert [each["role"] for each in body["messages"]] == ["system", *["user", "assistant"] * i, "user"]
        else:
            assert body["prompt"] == " ".join(said)
        assert (body["extra"], body["stream"]) == (1, True)
        answers.append(f"answer {i}")
    assert i == 2


@pytest.fixture
def scripted():
    """A server that streams three chunks, or refuses those of these numbers.  bodies: what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            if self.path == "/metrics":
                # Three rounds of two tokens for each request, and seven of five tokens before all of them.
                line = 'espalier_rounds_by_accept_length_total{length="%d"} %.1f\n'
                rounds = line % (5, 7) + line % (2, 3 * len(found.bodies))
                self.answer(found.metrics_status, f"# TYPE\n{rounds}".encode())
                return
            self.answer(found.models_status, json.dumps({"data": [{"id": "its model"}]}).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            # Each request has a thread.
            with answering:
                found.bodies.append(body)
                found.keys.append(self.headers["authorization"])
                number = len(found.bodies)
            if number in found.refused:
                self.answer(429, b'{"error": {"message": "the queue is full"}}')
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(chunked(*events_of("a", "b", "c", usage=6)))

        def answer(self, status, data):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    answering = threading.Lock()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        found = SimpleNamespace(url=url, bodies=[], keys=[], refused=(), models_status=200, metrics_status=200)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def test_any_server_is_measured_at_each_rate(scripted, tmp_path, capsys):
    out, scripted.refused = tmp_path / "out.json", (4, 8, 12, 16)
    flags = ["--rate", "200,400", "--arrivals", "bursts", "--burst", "4", "--requests", "8", "--ttft-limit", "60000"]
    more = ["--prefixes", "1", "--api-key", "secret", "--json", str(out)]
    assert main(["bench", "load", "--url", scripted.url, *flags, *more]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["rate"], cell["requests"], cell["answered"]) for cell in cells] == [(200, 8, 6), (400, 8, 6)]
    for cell in cells:
        assert cell["errors"] == {"status 429: the queue is full": 2}
        assert (cell["tokens_in"], cell["tokens_out"], cell["good_share"]) == (30, 36, 0.75)
        assert cell["ttft_ms"]["p50"] <= cell["end_to_end_ms"]["p50"] <= 1e3 * cell["seconds"]
    shown = capsys.readouterr().out
    assert "6 of 8" in shown and "2 requests without an answer: status 429: the queue is full" in shown
    # The first is the one that is not counted; any server knows these fields.
    assert len(scripted.bodies) == 1 + 16
    assert all(body.keys() == STANDARD and body["model"] == "its model" for body in scripted.bodies)
    assert set(scripted.keys) == {"Bearer secret"}
    # A prompt that was sent at the first rate would be in the prefix cache at the second.
    assert len({body["messages"][-1]["content"] for body in scripted.bodies}) == 1 + 16


def test_the_time_before_the_first_arrival_does_not_count(monkeypatch):
    now = [10.0]

    async def converse(talk, due):
        now[0] = due + 2
        return []

    monkeypatch.setattr(open_loop, "perf_counter", lambda: now[0])
    talks = Traffic((1, 1), (1, 1)).conversations(1, seed=0)
    monkeypatch.setattr(Arrivals, "arrival_times", lambda self, count: [5.0])
    [seconds, _] = asyncio.run(
        open_loop._measure_server(
            SimpleNamespace(run_conversation=converse), talks, Arrivals(rate=0.2, burst=1), lambda: None
        )
    )
    assert seconds == 2


def test_turns_follow_their_answers_and_more_fields_are_a_flag(scripted, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--rate", "100", "--requests", "1", "--turns", "2", "--think", "0", "--endpoint", "completions"]
    more = ["--extra-body", '{"ignore_eos": true}', "--model", "mine", "--json", str(out)]
    assert main(["bench", "load", "--url", scripted.url, *flags, *more]) == 0
    assert json.loads(out.read_text())["cells"][0]["answered"] == 2
    _, first, second = scripted.bodies
    assert second["prompt"].startswith(f"{first['prompt']} abc ") and second["ignore_eos"] and second["model"] == "mine"


@pytest.mark.parametrize("status", [200, 404])
def test_a_dataset_is_sent_and_accept_length_is_the_servers(scripted, tmp_path, status):
    file, out, scripted.metrics_status = tmp_path / "in.jsonl", tmp_path / "out.json", status
    file.write_text('{"turns": ["one", "two"], "category": "code"}')
    flags = ["--temperature", "0", "0.5", "--no-thinking", "--think", "0", "--output", "5,5", "--json", str(out)]
    assert main(["bench", "load", "--url", scripted.url, "--dataset", str(file), "--rate", "50", *flags]) == 0
    report = json.loads(out.read_text())
    assert list(report["models"].values()) == ["its model"] and report["load"]["dataset"] == str(file)
    _, *bodies = scripted.bodies
    assert [body["temperature"] for body in bodies] == [0, 0, 0.5, 0.5]
    assert [[each["content"] for each in body["messages"]] for body in bodies[:2]] == [["one"], ["one", "abc", "two"]]
    assert all(
        body["chat_template_kwargs"] == {"enable_thinking": False} and body["max_tokens"] == 5 for body in bodies
    )
    for cell in report["cells"]:
        code = cell["categories"]["code"]
        assert (code["requests"], cell["accept_length"]) == (2, 2.0 if status == 200 else None)
        assert code["accept_length"] == cell["accept_length"]


def test_so_many_requests_at_once_follow_one_another(scripted, tmp_path, monkeypatch):
    out, at_once, most = tmp_path / "out.json", [0], [0]
    converse = open_loop.LoadTarget.run_conversation

    async def counted(self, talk, due):
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        asked = await converse(self, talk, due)
        at_once[0] -= 1
        return asked

    monkeypatch.setattr(open_loop.LoadTarget, "run_conversation", counted)
    assert (
        main(["bench", "load", "--url", scripted.url, "--concurrency", "3", "--requests", "7", "--json", str(out)]) == 0
    )
    [cell] = json.loads(out.read_text())["cells"]
    assert (cell["rate"], cell["answered"], most[0]) == (None, 7, 3)


def test_a_plot_has_every_server_and_rate(scripted, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    urls = ["--url", scripted.url, "--url", scripted.url.replace("127.0.0.1", "localhost")]
    assert main(["bench", "load", *urls, "--rate", "100,300", "--requests", "3", "--plot", str(plot)]) == 0
    assert all(name in plot.read_text() for name in ("127.0.0.1:", "localhost:", "ttft, ms", "arrivals a second"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--url", "nowhere"], "use an address such as"),
        (["--url", "http://x:port"], "use an address such as"),
        (["--timeout", "2"], "--timeout is for a running server; give its --url too"),
        (["--url", "http://x", "--concurrency", "0"], "--concurrency=0"),
        (["--url", "http://x", "--concurrency", "3", "--plot", "x.svg"], "--plot draws figures by --rate"),
        (["--url", "http://x", "--concurrency", "3", "--rate", "2"], "not allowed with"),
        (["--url", "http://x", "--max-batch", "3"], "--max-batch is not for --url"),
        (["--url", "http://x", "--shape", "llama-3.1-8b"], "run `python -m lab load`"),
        (["--url", "http://x", "--prefix-words", "3"], "it is now `--prefix-length`"),
        (["--url", "http://x", "--rate", "0"], "--rate=0.0"),
        (["--url", "http://x", "--turns", "0"], "--turns=0"),
        (["--url", "http://x", "--plot", "x.txt"], "--plot x.txt is not a kind of picture"),
        (["--url", "http://x", "--extra-body", "[1]"], "is not a JSON object"),
        (["--url", "http://x", "--token-ids", "9", "--turns", "2"], "--turns needs a text"),
        (["--url", "http://x", "--token-ids", "9", "--endpoint", "chat"], "--endpoint chat needs a text"),
        (["--url", "http://x", "--token-ids", "0"], "--token-ids=0"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, says, capsys):
    try:
        code = main(["bench", "load", *flags])
    except SystemExit as left:
        code = left.code
    assert code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(("status", "says"), [(401, "answers 401; give the server's key"), (404, "correct the path")])
def test_a_status_of_the_models_is_said_with_its_remedy(scripted, monkeypatch, status, says, capsys):
    monkeypatch.setattr(scripted, "models_status", status)
    assert main(["bench", "load", "--url", scripted.url, "--requests", "1"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("named", [[], ["--model", "x"]], ids=["its first model", "a named model"])
def test_a_server_that_is_not_there_is_to_be_started(named, capsys):
    assert main(["bench", "load", "--url", "http://127.0.0.1:1", *named]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--url http://127.0.0.1:1 cannot be reached" in line and line.endswith(
        "; start a server there, or correct it"
    )


def test_an_address_may_have_a_path_and_tls():
    address = parse_address("https://x/llm/v1/")
    assert address == Address("x", 443, True, "/llm") and str(address) == "https://x:443/llm"
    with pytest.raises(EspalierError, match="use an address such as"):
        parse_address("ftp://x")
