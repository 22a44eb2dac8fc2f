"""A synthetic model behind the server: the engine process makes it, and the bench compares it with its own copy."""

import json
from contextlib import contextmanager

import pytest
import torch

from espalier import SamplingParams
from espalier.bench import engines, serve, synthetic_models
from espalier.cli import shape_worker
from espalier.cli.main import main
from espalier.cli.serve import sendable
from tests.synthetic.test_checkpoint import SHAPE

TREE = ["--steps", "3", "--topk", "2", "--num-draft-tokens", "8"]
SIZES = {"max_batch": 2, "max_context": 64, "num_pages": 40, "page_size": 4, "prefix_cache": False}


@pytest.fixture
def tiny(monkeypatch):
    """--shape names a tiny model, on the CPU."""
    monkeypatch.setattr(synthetic_models, "find_shape", lambda name: SHAPE)
    for module in (engines, shape_worker):
        monkeypatch.setattr(module, "require_gpu", lambda what: torch.device("cpu"))


def test_the_engine_process_makes_the_model(tiny):
    sent = {"recipe": {"shape": "tiny", "seed": 0, "accept_length": 4.0}, "settings": sendable(SIZES)}
    with shape_worker.load(json.loads(json.dumps(sent))) as llm:
        assert llm.tokenizer is None and llm.inputs.facts.vocab_size == SHAPE.target.vocab_size
        recipe = synthetic_models.recipe_of("tiny", 0, 4.0, None)
        models = engines.OfShape(recipe, SIZES, torch.device("cpu")).models
        [prompt] = models.prompts([8])
        [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=16))
        assert models.follows(prompt, output.token_ids) and output.speculation.drafted


class Echoing:
    """A server whose answers are the requests."""

    def __init__(self):
        self.bodies = []

    def connect(self):
        return self

    def close(self):
        pass


def test_bench_serve_of_a_shape(tiny, monkeypatch, tmp_path):
    started, server = [], Echoing()

    @contextmanager
    def serving(settings, *flags):
        started.append((settings, flags))
        yield server

    def exchange(connection, path, body):
        server.bodies.append(json.loads(body))
        return 200, body

    monkeypatch.setattr(serve, "serving", serving)
    monkeypatch.setattr(serve, "exchange", exchange)
    out = tmp_path / "out.json"
    flags = ["--shape", "tiny", "--accept-length", "4", *TREE, "--page-size", "4"]
    sizes = ["--concurrency", "1,2", "--context", "8", "--tokens", "12", "--repeats", "1"]
    assert main(["bench", "serve", *flags, *sizes, "--json", str(out)]) == 0
    [(settings, sent)] = started
    assert sent == ("--shape", "tiny", "--accept-length", "4.0")
    # A full batch of full contexts; "auto" would take the GPU's memory for the first of the two models.
    assert settings["num_pages"] == 1 + 2 * -(-(21 + 2 * 4 + 1) // 4)
    assert [cell["concurrency"] for cell in json.loads(out.read_text())["cells"]] == [1, 2]
    # Streams and whole answers, a warm-up and a repetition.
    assert [len(server.bodies), {len(body["prompt"]) for body in server.bodies}] == [4 * 3, {8}]
    assert all(body["return_token_ids"] and body["ignore_eos"] for body in server.bodies)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["serve", "--shape", "nothing"], "nothing"),
        (["serve", "model", "--shape", "llama-3.1-8b"], "--model is not for --shape"),
        (["serve", "--shape", "llama-3.1-8b", "--dtype", "float32"], "--dtype is not for --shape"),
        (["serve", "bundled", "--accept-length", "3"], "--accept-length is for a named shape"),
        (["bench", "serve", "--soak", "3", "--shape", "llama-3.1-8b"], "--shape is not for --soak"),
    ],
)
def test_flags_that_do_not_fit(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
