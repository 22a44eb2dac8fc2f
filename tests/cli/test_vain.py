"""What would be measured in vain is refused before anything is loaded, and what was measured is kept."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from espalier.bench import drive
from espalier.errors import EspalierError
from espalier.terminal.console import require_writable, stdout
from tests.cli.test_cli import instead, run, tiny, tiny_heldout  # noqa: F401  (fixtures)
from tests.pairwise import fewer
from tests.test_llm import paths  # noqa: F401  (a fixture)


@pytest.fixture
def model(tiny, tiny_heldout):  # noqa: F811
    return tiny


def refused(capsys, *arguments):
    """The one line that a command says that loads nothing."""
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.fixture
def nothing_loads(monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("espalier.llm.build_engine", load)
    monkeypatch.setattr("lab.bench.server.subprocess", None)


WRITES = [
    ["lab", "round", "--json"],
    ["lab", "round", "--acceptance", "--json"],
    ["bench", "choose", "--out"],
    ["lab", "generate", "--json"],
    ["lab", "prefill", "--json"],
    ["bench", "load", "--json"],
    ["lab", "serve", "--json"],
    ["lab", "kernels", "--json"],
    ["lab", "floor", "--json"],
]


@pytest.mark.parametrize("command", WRITES, ids=" ".join)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(command, nothing_loads, tmp_path, capsys):
    assert f"{command[-1]} {tmp_path} cannot be written (it is a directory)" in refused(capsys, *command, tmp_path)
    assert "none is not a directory" in refused(capsys, *command, tmp_path / "none" / "file")


def test_a_table_of_linear_layers_that_cannot_be_written_or_read_is_refused_before_tuning(tmp_path, capsys):
    assert "cannot be written (it is a directory)" in refused(capsys, "doctor", "--tune", "--choices", tmp_path)
    (tmp_path / "table.json").write_text("[")
    said = refused(capsys, "doctor", "--tune", "--choices", tmp_path / "table.json")
    assert "is no table of linear layers" in said


def test_what_may_not_be_written_is_refused_and_nothing_else_is_touched(tmp_path, monkeypatch):
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("kept")
    for path in (None, there, new):
        require_writable("--json", path)
    assert there.read_text() == "kept" and not new.exists()
    monkeypatch.setattr(os, "access", lambda *_: False)
    for path in (there, new):
        with pytest.raises(EspalierError, match="permission denied"):
            require_writable("--json", path)


EARLY = [
    (["generate", "x", "--temperature", "-1"], "temperature=-1.0 is not supported"),
    (["generate", "x", "--n", "0"], "n=0 is not supported"),
    (["generate", "x", "--stop-token-ids", "99"], "stop_token_ids entry=99 is not supported"),
    (["generate", "x", "--logit-bias", '{"99": 1}'], "logit_bias token=99 is not supported"),
    (["generate", "a", "a" * 200], "prompt 1 of 2: the prompt is too long: it has 200 tokens"),
    (["demo", "--max-tokens", "0"], "--max-tokens=0 is not supported"),
    (["demo", "--prompts", "3"], "--prompts=3 is not supported; use 1 to 2"),
    (["serve", "--chat-template", "/no/such/file"], "--chat-template /no/such/file cannot be read"),
    (["serve", "--chat-template", "/dev/null"], "--chat-template /dev/null is empty"),
    (["serve", "--chat-template", "BROKEN"], "BROKEN is no Jinja template (Encountered unknown tag 'broken'"),
    (["generate", "--chat", "--file", "TOKENS"], "--chat is for messages, and --file holds token ids"),
    (["serve", "--engine-timeout", "0"], "--engine-timeout=0.0 is not supported; use seconds, 1 or more"),
    (["serve", "--max-file-bytes", "9"], "--max-file-bytes is for --batch-dir"),
    (["serve", "--max-context", "1"], "max_context=1 is not supported"),
    (["lab", "generate", "--prompts", "99x9"], "99 prompts at once are above max_batch=8; give --max-batch 99"),
    (["lab", "generate", "--tokens", "900", "--max-context", "900"], "max_context=900; give --max-context 1028"),
    (["bench", "load", "--requests", "0"], "--requests=0 is not supported"),
    (["bench", "load", "--rate", "0"], "--rate=0.0 is not supported"),
    (["lab", "serve", "--concurrency", "x"], "--concurrency=x is not supported"),
    (["doctor", "--page-size", "0"], "page_size=0 is not supported"),
]


@pytest.mark.parametrize(("command", "said"), EARLY, ids=[said for _, said in EARLY])
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    command, said, model, nothing_loads, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("espalier.server.run.serve", None)
    monkeypatch.chdir(tmp_path)
    Path("BROKEN").write_text("{% broken %}")
    Path("TOKENS").write_text('{"prompt": [1, 2]}')
    own = model if command[0] in ("generate", "demo") else []
    assert said in refused(
        capsys, *command[: 1 + (command[0] in ("bench", "lab"))], *own, *command[1 + (command[0] in ("bench", "lab")) :]
    )


MEASURED = [
    (["lab", "round"], "--json"),
    (["lab", "round", "--acceptance"], "--json"),
    (["bench", "choose", "--max-batch", "1"], "--json"),
    (["bench", "choose", "--max-batch", "1"], "--out"),
]


@pytest.mark.parametrize(
    ("command", "flag"), fewer(MEASURED, lambda command, flag: flag == "--out" or "round" in command), ids=str
)
def test_figures_are_kept_where_whoever_reads_the_table_has_left(command, flag, model, monkeypatch, tmp_path):
    def left(_):
        raise BrokenPipeError

    monkeypatch.setattr("espalier.terminal.console.align_table", left)
    file = tmp_path / "figures.json"
    sizes = (
        ["--tokens", "6", "--prompts", "2"]
        if "--acceptance" in command
        else ["--tokens", "6", "--context", "8", "--repeats", "1"]
    )
    with pytest.raises(BrokenPipeError):
        _run_through(*command, *sizes, flag, file, *model)
    assert file.read_text().startswith("{")


def _run_through(*arguments):
    """A command, without what main makes of a reader who has left: it would close this process's stdout."""
    from espalier.cli.main import make_parser
    from lab.__main__ import make_parser as make_lab

    words = [str(argument) for argument in arguments]
    asked = make_lab().parse(words[1:]) if words[0] == "lab" else make_parser().parse(words)
    return asked.run(asked)


def test_a_reader_who_has_left_is_left_to_main(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(BrokenPipeError):
            stdout().print("x")
        # Nothing is left to be written when it is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)


TOO_LONG = [
    (["generate", "--tokens", "9000"], "--prompts 1x128 and --tokens 9000 need 9128"),
    (["generate", "--prompts", "8x9", "1x999999"], "--prompts 1x999999 and --tokens 256 need 1000255"),
    (["round", "--context", "9,99999"], "--context 99999 and --tokens 96 need 100095"),
    (["choose", "--context", "99999"], "--context 99999 and --tokens 96 need 100095"),
    (["serve", "--context", "9999", "--tokens", "1"], "--context 9999 and --tokens 1 need 10000"),
    (["load", "--output", "9000,9000", "--input", "9,9"], "--input 9,9 and --output 9000,9000 need 9009"),
    (["prefill", "--prompts", "2x9", "1x9999"], "--prompts 1x9999 and the token after it need 10000"),
]


@pytest.mark.parametrize(("command", "said"), TOO_LONG, ids=[" ".join(command) for command, _ in TOO_LONG])
def test_a_request_of_more_tokens_than_the_model_has_positions_is_told_in_the_flags_own_numbers(
    command, said, nothing_loads, capsys
):
    line = refused(capsys, "lab", *command)
    assert line == f"espalier: {said} tokens a request, and the model takes at most 2048; ask for less\n"


ROOM = [
    (["round", "--batch", "1,4", "--max-batch", "2"], "--max-batch=2 is too small for this measurement; use 4 or more"),
    (
        ["round", "--context", "8", "--tokens", "9", "--max-context", "16"],
        "--max-context=16 is too small for this measurement; use 17",
    ),
    (
        ["choose", "--context", "8", "--tokens", "9", "--max-context", "16"],
        "--max-context=16 is too small for this measurement; use 17",
    ),
    (
        ["serve", "--context", "8", "--tokens", "9", "--max-context", "16"],
        "--max-context=16 is too small for this measurement; use 17",
    ),
    (
        ["load", "--input", "8,8", "--output", "9,9", "--max-context", "16"],
        "--max-context=16 is too small for this measurement; use 17",
    ),
    (
        ["load", "--input", "8,8", "--output", "9,9", "--max-context", "-1"],
        "--max-context=-1 is too small for this measurement; use 17",
    ),
    (["prefill", "--running", "2", "--max-batch", "2"], "--max-batch=2 is too small for this measurement; use 3"),
    (
        ["prefill", "--prompts", "1x16", "--max-context", "16"],
        "--max-context=16 is too small for this measurement; use 17",
    ),
    (["round", "--tokens", "1"], "--tokens=1 is not supported: the first comes of no round"),
    (["round", "--acceptance", "--tokens", "1"], "--tokens=1 is not supported"),
]


@pytest.mark.parametrize(("command", "said"), ROOM, ids=[" ".join(command) for command, _ in ROOM])
def test_a_size_below_what_is_measured_is_refused(command, said, nothing_loads, capsys):
    assert said in refused(capsys, "lab", *command)


def test_room_is_just_enough_or_left_open(model, capsys):
    sizes = ["--context", "8", "--tokens", "9", "--repeats", "1", "--batch", "3"]
    for room in (["--max-context", "17"], ["--max-context", "auto"]):
        assert run("lab", "round", *sizes, *instead(model, "--max-batch", "auto", *room)) == 0
        assert "3/3" in capsys.readouterr().out


LOADED = [
    (
        ["round", "--context", "60", "--tokens", "8", "--batch", "2", "--num-pages", "8", "--repeats", "1"],
        "no round held 2 requests of 60",
    ),
    (["round", "--acceptance", "--prompts", "3", "--tokens", "8"], "there are 2 held-out texts"),
    (["round", "--acceptance", "--prompts", "2", "--tokens", "96"], "--tokens=96 after prompts of up to 6"),
    (["round", "--acceptance", "--steps", "0", "--topk", "1", "--num-draft-tokens", "1"], "steps=0 drafts nothing"),
    (["prefill", "--prompts", "1x30", "--running", "1", "--max-context", "31"], "had ended before a prompt of 30"),
]


@pytest.mark.parametrize(("command", "said"), LOADED, ids=[said for _, said in LOADED])
def test_what_a_model_has_no_room_for_is_refused_in_one_line(command, said, model, capsys):
    assert said in refused(capsys, "lab", command[0], *instead(model, *command[1:]))


def test_a_model_without_a_tokenizer_is_given_as_many_random_tokens_as_it_takes(monkeypatch):
    drawn, randint = [], torch.randint
    monkeypatch.setattr(torch, "randint", lambda *given, **how: drawn.append(given[2]) or randint(*given, **how))
    llm = SimpleNamespace(tokenizer=None, model_config=SimpleNamespace(vocab_size=300))
    monkeypatch.setattr(drive, "heldout_texts", None)
    prompts = drive.heldout_prompts(llm, 3, 9000)
    assert [len(prompt) for prompt in prompts] == [9000] * 3 and prompts[0] != prompts[1]
    assert drawn == [(64, 192)]


OTHERS = [
    (["lab", "round", "--prompts", "2"], "--prompts is for --acceptance; add that, or leave --prompts out"),
    (["lab", "round", "--accept-length", "3"], "--accept-length is for --shape"),
    (["lab", "round", "--all-buckets"], "--all-buckets is for --shape"),
    (["lab", "round", "--own-size"], "--own-size is for --shape"),
    (["lab", "round", "--acceptance", "--batch", "2"], "--batch is not for --acceptance; leave one out"),
    (["lab", "round", "--acceptance", "--repeats", "2"], "--repeats is not for --acceptance"),
    (["lab", "round", "--acceptance", "--compare", "transformers"], "--compare is not for --acceptance"),
    (["bench", "choose", "--no-prefix-cache"], "--prefix-cache is not for bench choose"),
    (["bench", "choose", "--by-batch", '{"8": {"steps": 0}}'], "--by-batch is not for bench choose"),
    (["bench", "choose", "--tensor-parallel", "2"], "--tensor-parallel=2: bench choose measures on one GPU"),
    (["quantize", "bundled", "--to", "fp8", "--out", "x", "--json", "./x"], "--json and --out name one path"),
    (["lab", "round", "--tensor-parallel", "2"], "--tensor-parallel=2: a mode of lab round that loads a model"),
    (["lab", "round", "--figures", "x", "--shape", "llama-3.1-8b"], "--shape is not for --figures"),
    (["lab", "round", "--figures", "x", "--json", "y"], "--json is not for --figures"),
    (["lab", "round", "--shape", "llama-3.1-8b", "--repeats", "2"], "--repeats is not for --shape"),
    (["lab", "generate", "--tree", "3,2,8", "--steps", "3"], "--steps is not for --tree"),
    (["lab", "generate", "--tree", "plain", "--algorithm", "none"], "--algorithm is not for --tree"),
    (["lab", "generate", "--accept-length", "3"], "--accept-length is for a named shape"),
    (["lab", "serve", "--soak", "9", "--tokens", "2"], "--tokens is not for --soak"),
    (["lab", "serve", "--soak", "9", "--concurrency", "2"], "--concurrency is not for --soak"),
    (["lab", "serve", "--bad-host", "--tokens", "2"], "--tokens is not for --bad-host"),
    (["lab", "serve", "--bad-host", "--soak", "9"], "--soak is not for --bad-host"),
    (["bench", "load", "--think", "5"], "--think needs --turns; add that"),
    (["bench", "load", "--prefix-length", "7"], "--prefix-length needs --prefixes"),
    (["bench", "load", "--arrivals", "fixed"], "--arrivals needs --rate"),
    (["bench", "load", "--rate", "3", "--burst", "4"], "--burst needs --arrivals bursts"),
    (["bench", "load", "--url", "http://x", "--concurrency", "2", "--arrivals", "fixed"], "--arrivals needs --rate"),
    (["bench", "load", "--rate", "inf"], "--rate=inf is not supported"),
    (["doctor", "--shapes", "llama-3.1-8b"], "--shapes is for --tune"),
    (["doctor", "--choices", "x"], "--choices is for --tune"),
    (["doctor", "--draft-weights", "fp8"], "--draft-weights is for --tune; add that"),
    (["generate", "x", "--logprobs", "2"], "--logprobs is printed by --json alone; add that"),
    (["generate", "x", "--prompt-logprobs", "2"], "--prompt-logprobs is printed by --json alone"),
    (["doctor", "--matrix", "--tune"], "--tune is not for --matrix"),
    (["doctor", "--matrix", "--page-size", "8"], "--page-size is not for --matrix"),
    (["doctor", "--tune", "--max-batch", "2"], "--max-batch is not for --tune; leave"),
    (["doctor", "--tune", "--shapes", "llama-3.1-8b", "--model", "bundled"], "--model is not for --tune --shapes"),
]


@pytest.mark.parametrize(("command", "said"), OTHERS, ids=[" ".join(command) for command, _ in OTHERS])
def test_a_flag_that_would_have_no_effect_is_refused_by_name(command, said, nothing_loads, capsys):
    assert said in refused(capsys, *command)


@pytest.mark.parametrize(
    "command", fewer([["round"], ["load"], ["prefill"]], lambda command: command == ["round"]), ids=str
)
def test_of_a_named_shape_an_accept_length_of_nothing_is_refused(command, monkeypatch, capsys):
    for module in ("shaped", "engines"):
        monkeypatch.setattr(f"lab.bench.{module}.require_gpu", lambda what: torch.device("cpu"))
    monkeypatch.setattr("lab.bench.shaped.SyntheticModels", None)
    monkeypatch.setattr("lab.bench.engines.ShapeEngines", None)
    assert run("lab", *command, "--shape", "llama-3.1-8b", "--accept-length", "0") == 2
    assert "accept length 0.0 is out of reach" in capsys.readouterr().err
    if command == ["round"]:
        assert "--steps is not for --shape" in refused(capsys, "lab", *command, "--shape", "x", "--steps", "3")


def test_a_batch_without_an_answer_is_not_told_to_run_again(tmp_path, capsys):
    given = tmp_path / "in.jsonl"
    given.write_text("{}\n")
    said = refused(capsys, "batch", given, tmp_path / "out.jsonl", "--url", "http://127.0.0.1:1")
    assert said.endswith("start a server there, or correct it\n")
