"""The command line: one line for what is wrong, figures and text for what is right, over a tiny model."""

import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from espalier import cli
from espalier.attention import BACKENDS
from espalier.cli import demo, generate
from espalier.cli.demo import draw_round_tree
from espalier.cli.main import parse
from espalier.config import EngineConfig, SpeculationConfig
from espalier.engine.launch_input import DraftTree, RoundTrace
from espalier.errors import EspalierError
from espalier.llm import LLM
from espalier.request import PARAMS_WITH_FLAGS, Output, SamplingParams
from espalier.terminal.console import ASCII_SIGNS, align_table, has_colour, stdout, waiting
from espalier.terminal.flags import api_keys, engine_settings, sampling_params
from lab import __main__ as lab
from tests.test_llm import paths  # noqa: F401  (a fixture)


@pytest.fixture
def tiny(paths):  # noqa: F811
    """Flags that name the tiny model."""
    target, draft = paths
    tree = ["--steps", "3", "--topk", "2", "--num-draft-tokens", "8"]
    return ["--model", str(target), "--draft", str(draft), "--dtype", "float64", "--max-context", "96", *tree]


def instead(flags, *given):
    """What is given, and the flags, each with one value, that it does not name: none may come twice."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [*(part for pair in pairs if pair[0] not in given for part in pair), *given]


def run(*arguments):
    """Exit status of a command of `espalier`, or of `lab ...`; argparse leaves by SystemExit."""
    words = [str(argument) for argument in arguments]
    try:
        return lab.main(words[1:]) if words[:1] == ["lab"] else cli.start(words)
    except SystemExit as left:
        return left.code


BAD = [
    (["generate", "x", "--page-siz", "3"], "unknown flag --page-siz; did you mean --page-size?"),
    (["generate", "x", "--page-size", "0"], "page_size=0 is not supported"),
    (["generate", "x", "--page-size", "many"], "'many' is not supported; use a whole number"),
    (["generate", "x", "--model", "/no/such/place"], "model='/no/such/place' is not a directory"),
    (["generate", "x", "--model-overrides", "{"], "is not a JSON object, such as '{\"name\": 1}'"),
    (["generate", "x", "--logit-bias", '{"a": 1}'], "is not a JSON object of token ids, such as '{\"27\": 1}'"),
    (["generate", "x", "--logit-bias", '{"5": 1, "05": 2}'], "is not a JSON object of token ids"),
    (["generate", "x", "--logit-bias", '{"5": 1, "5": 2}'], "'5' comes twice in one object"),
    (["generate", "x", "--page-size", "1_6"], "'1_6' is not supported; use a whole number"),
    (["generate", "x", "--temperature", "٠"], "'٠' is not supported; use a number"),
    (["serve", "--port", "٨٠"], "'٨٠' is not supported; use a whole number"),
    (["serve", "--drain-timeout", " 1"], "' 1' is not supported; use a number"),
    (["lab", "round", "--batch", "1,+8"], "use a list of whole numbers, such as 1,8"),
    (["generate", "x", "--steps", "-1"], "steps=-1"),
    (["generate", "x", "--topk", "257"], "topk=257 is not supported; use a whole number, 1 to 256"),
    (["serve", "--port", "http"], "argument --port: 'http' is not supported; use a whole number"),
    (["serve", "--api-key", ""], "--api-key is empty"),
    (["batch", __file__, "out", "--url", "http://x:port"], "use an address such as http://127.0.0.1:8000\n"),
    (["serve", "--host", ""], "--host is empty"),
    (["serve", "--served-model-name", ""], "--served-model-name is empty"),
    (["serve", "--cors-origin", "page.example"], "--cors-origin='page.example' is no origin of a page"),
    (["batch", __file__, "out", "--url", "localhost"], "use an address such as http://127.0.0.1:8000\n"),
    (["generate", "--file", "/no/such/file"], "/no/such/file cannot be read"),
    (["demo", "--prompts", "0"], "--prompts=0"),
    (["demo", "--max-tokens", "0"], "--max-tokens=0 is not supported; use 1 or more"),
    (["lab", "round", "--batch", "4,0"], "--batch=4,0 is not supported; use 1 or more"),
    (["lab", "round", "--page-size", "1,16"], "--page-size=1,16: a model is measured at one"),
    (["lab", "kernels", "--page-size", "0,16"], "--page-size=0,16 is not supported"),
    (["lab", "attention", "--page-size", "0,16"], "--page-size=0,16 is not supported"),
    (["lab", "floor", "--rows", "1,³"], "--rows=1,³ is not supported"),
    (["lab", "grammar", "--suite", "/no/such"], "--suite=/no/such has no *.json files"),
    (["lab", "grammar", "--tokens", "1"], "--tokens=1 is not supported: the first comes of no round"),
    (["lab", "round", "--batch", "a"], "use a list of whole numbers, such as 1,8"),
    (["nonsense"], "unknown command 'nonsense'; use one of demo, generate"),
    ([], "a command is missing; use one of demo, generate"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_one_line_and_status_2(arguments, said, capsys):
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("key", ["secret\n", " secret", "sec\x7fret", "sec\udcffret"])
def test_a_key_that_no_client_can_send_is_refused_and_not_shown(key, monkeypatch):
    with pytest.raises(EspalierError, match=r"^--api-key begins or ends with a space, or has an end of line") as flag:
        api_keys(parse(["serve", "--api-key", "fine", "--api-key", key]))
    monkeypatch.setenv("ESPALIER_API_KEY", key)
    with pytest.raises(EspalierError, match=r"^ESPALIER_API_KEY begins or ends with") as variable:
        api_keys(parse(["serve"]))
    assert "secret" not in f"{flag.value}{variable.value}"
    assert api_keys(parse(["serve", "--api-key", "s\u00e9c ret", "--api-key", "b"])) == ("s\u00e9c ret", "b")


def test_a_wrong_key_leaves_no_output_of_a_batch(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run("batch", __file__, str(out), "--url", "http://127.0.0.1:1", "--api-key", "\udcff") == 2
    assert "--api-key begins or ends with" in capsys.readouterr().err and not out.exists()


def test_version_and_the_package_runs_as_a_module(capsys, monkeypatch):
    assert run("--version") == 0
    said = capsys.readouterr().out
    assert said.startswith("espalier ")
    monkeypatch.setattr(sys, "argv", ["espalier", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("espalier", run_name="__main__")
    assert (left.value.code, capsys.readouterr().out) == (0, said)


@pytest.mark.parametrize("command", [["generate"], ["demo"], ["doctor"], ["lab", "round"]])
def test_every_config_field_is_a_flag(command, capsys):
    assert run(*command, "--help") == 0
    helped = capsys.readouterr().out
    fields = {*EngineConfig.__dataclass_fields__, *SpeculationConfig.__dataclass_fields__}
    fields -= {"speculation"}
    if command == ["generate"]:
        fields |= {f.name for f in PARAMS_WITH_FLAGS}
        assert "(128)" in helped and "more varied (1)" in helped, "the defaults"
    assert [name for name in sorted(fields) if f"--{name.replace('_', '-')}" not in helped] == []


def test_the_help_of_a_switch_names_the_flag_and_no_value(capsys):
    assert run("generate", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--no-speculation: plain decoding" in text and "--include-stop-str-in-output: keep the stop" in text
    assert "true: " not in text and "false: " not in text


def test_a_config_that_names_no_model_is_said(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert run("generate", "x", "--model", tmp_path) == 2
    assert "config.json has neither architectures nor model_type; download the model again" in capsys.readouterr().err


def test_flags_become_settings():
    arguments = ["generate", "x", "--page-size", "auto", "--num-pages", "9", "--no-overlap", "--topk", "2"]
    arguments += [
        "--logit-bias",
        '{"3": -1}',
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-ids",
        "4",
        "--no-speculation",
    ]
    arguments += ["--temperature", "0.5", "--seed", "7", "--model-overrides", '{"rope_theta": 5.0}']
    asked = parse(arguments)
    assert engine_settings(asked) == {
        "page_size": "auto",
        "num_pages": 9,
        "overlap": False,
        "model_overrides": {"rope_theta": 5.0},
        "speculation": SpeculationConfig(topk=2),
    }
    assert sampling_params(asked) == SamplingParams(
        logit_bias={3: -1}, stop=["a", "b"], stop_token_ids=[4], speculation=False, temperature=0.5, seed=7
    )


@pytest.mark.parametrize("command", [["serve", "bundled"], ["batch", "a", "b"]])
def test_plain_decoding_is_a_setting_of_the_engine(command):
    assert "speculation" not in engine_settings(parse(command))
    assert engine_settings(parse([*command, "--no-speculation"]))["speculation"] is None
    with pytest.raises(EspalierError, match="--no-speculation is beside --topk"):
        engine_settings(parse([*command, "--no-speculation", "--topk", "2"]))


def test_generate_writes_text_to_stdout_and_figures_to_stderr(tiny, capsys):
    assert run("generate", "abc", "--max-tokens", "8", "--temperature", "0", *tiny) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"[a-o]{1,8}\n", out)
    assert "8 tokens in" in err
    assert "accept length" in err
    assert "\x1b" not in out + err


def test_a_sample_that_failed_is_the_status_whichever_of_n_it_is(tiny, capsys, monkeypatch):
    fine, failed = Output("a", [0], "length"), Output("", [], "abort", error="its logits are not finite")
    monkeypatch.setattr(LLM, "generate", lambda *_: [replace(fine, choices=[fine, failed])])
    assert run("generate", "abc", "--n", "2", *tiny) == 1
    out, err = capsys.readouterr()
    assert "espalier: its logits are not finite\n" in err
    assert out == "[0] sample 1 of 2\na\n[0] sample 2 of 2\n\n"


def test_generate_gives_json(tiny, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"abc"\n{"prompt": "de"}\n', encoding="utf-8-sig")
    assert run("generate", "--file", prompts, "--json", "--n", "2", "--max-tokens", "4", *tiny) == 0
    outputs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [output["usage"]["prompt_tokens"] for output in outputs] == [3, 2]
    assert all(len(output["choices"]) == 2 for output in outputs)
    assert {"rounds", "drafted", "accepted", "accept_length", "histogram"} <= outputs[0]["speculation"].keys()


def test_generate_says_which_line_of_a_file_is_wrong(capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    for line in ('{"text": "de"}', '{"prompt": 5}', '{"prompt": null}'):
        prompts.write_text(f'"abc"\n\n{line}\n')
        assert run("generate", "--file", prompts) == 2
        assert "line 3: not a JSON string" in capsys.readouterr().err
    prompts.write_text('{"prompt": "de", "max_tokens": 1}')
    assert run("generate", "--file", prompts) == 2
    assert "line 1: 'max_tokens' has no effect there" in capsys.readouterr().err
    prompts.write_text('{"prompt": "de", "prompt": "ab"}')
    assert run("generate", "--file", prompts) == 2
    assert "line 1: 'prompt' comes twice in one object; leave one out" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["/dev/null", "-"])
def test_a_batch_writes_to_a_regular_file(output, capsys, tmp_path):
    lines = tmp_path / "in.jsonl"
    lines.write_text("{}")
    assert run("batch", lines, output) == 2
    assert f"{output} is not a regular file; name another" in capsys.readouterr().err


def test_the_entry_point_imports_no_library():
    """They take a second, in which Ctrl-C would print a traceback."""
    code = "import espalier.cli, sys; print({'numpy', 'torch', 'rich', 'importlib.metadata'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_file_without_a_prompt_is_refused_though_stdin_holds_one(capsys, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert run("generate", "--file", prompts) == 2
    assert "contains no prompt" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-"], []], ids=["named", "piped"])
def test_an_empty_stdin_is_refused(arguments, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run("generate", *arguments) == 2
    assert capsys.readouterr().err.startswith("espalier: stdin is empty; write a prompt")


def test_a_closed_stdin_is_no_prompt(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    for arguments, said in ((["-"], "stdin is closed"), ([], "a prompt is missing")):
        assert run("generate", *arguments) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("say", [print, lambda text: stdout().print(text)], ids=["print", "rich"])
def test_a_full_disk_is_one_line_and_status_1(say, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        monkeypatch.setattr(generate, "_read_prompts", lambda _asked: say("text"))
        monkeypatch.setattr(generate, "sampling_params", lambda _asked: sys.stdout.flush())
        assert run("generate", "x") == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err and err.count("\n") == 1


@pytest.mark.parametrize("asked", [["--help"], ["--version"], ["bench", "--help"], ["serve", "--help"]], ids=" ".join)
def test_help_that_a_full_disk_does_not_take_is_one_line_and_status_1(asked, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert run(*asked) == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err and err.count("\n") == 1


def test_line_breaks_of_unicode_are_part_of_a_prompt(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a\u2028b\x85c"\r\n"d"\n', encoding="utf-8", newline="")
    assert generate._read_prompt_file(prompts) == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize(
    ("encoding", "errors", "remedy"),
    [
        ("utf-8", "strict", "use text in utf-8"),
        ("utf-8", "surrogateescape", "the text from stdin is not valid utf-8; write it in UTF-8"),
        ("ascii", "surrogateescape", "the text from stdin is not valid ascii; set a UTF-8 locale, LANG=C.UTF-8"),
    ],
)
def test_bytes_that_are_no_text_are_refused(encoding, errors, remedy, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding=encoding, errors=errors))
    assert run("generate", "-") == 2
    err = capsys.readouterr().err
    assert "stdin" in err and err.endswith(f"{remedy}\n") and err.count("\n") == 1
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: encoding)
    assert run("generate", "\udcff") == 2
    assert f"a prompt is not valid {encoding}; " in capsys.readouterr().err
    assert run("generate", "a", "--stop", "x", "--stop", "\udcff") == 2
    assert f"--stop is not valid {encoding}; " in capsys.readouterr().err


def test_text_that_the_encoding_has_no_character_for_is_escaped(tiny, monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    monkeypatch.setattr(generate, "_print_stream", lambda *_: print("\u00e9") or 0)
    assert run("generate", "abc", *tiny) == 0
    assert shown.getvalue() == b"\\xe9\n"


def test_an_interrupt_is_one_line_and_status_130(monkeypatch, capsys):
    def press(_asked):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_read_prompts", press)
    assert run("generate", "x") == 130
    assert capsys.readouterr().err == "espalier: interrupted\n"


def test_doctor_shows_machine_and_resolved_configuration_without_loading(tiny, capsys, monkeypatch):
    monkeypatch.setattr("espalier.startup.load.load_target", None)
    assert run("doctor", *tiny) == 0
    out = capsys.readouterr().out
    for said in (
        "torch",
        "threads",
        "num_draft_tokens 8",
        "num_pages",
        "LlamaForCausalLM",
        "that fit at once: 8 of 8",
    ):
        assert said in " ".join(out.split())


def test_both_ways_to_run_a_model_say_the_same(tiny, capsys):
    said = set()
    for model_impl in ("native", "transformers"):
        assert (
            run("generate", "abc", *tiny, "--model-impl", model_impl, "--temperature", "0", "--max-tokens", "16") == 0
        )
        said.add(capsys.readouterr().out)
    assert len(said) == 1


def test_doctor_says_what_runs_the_model(tiny, capsys):
    assert run("doctor", *tiny) == 0
    assert "it runs by Espalier's own layers (native)" in capsys.readouterr().out
    assert run("doctor", *tiny, "--model-impl", "transformers") == 0
    out = capsys.readouterr().out
    assert "model_impl transformers" in " ".join(out.split())
    assert "it runs by transformers; modules that are replaced by ours: 22 Linear, 7 LlamaRMSNorm" in out


def test_doctor_says_what_ranks_hold(tiny, capsys):
    """The model has 4 heads, 2 K/V heads and an MLP of 64."""
    assert run("doctor", *tiny, "--tensor-parallel", "2") == 0
    [held] = re.findall(r"weights of each rank, .* divide these models: (.*)", capsys.readouterr().out)
    assert re.fullmatch(r"1: 0.00 GiB, 2: 0.00 GiB, 4: 0.00 GiB", held)
    assert run("doctor", *tiny) == 0 and "weights of each rank" not in capsys.readouterr().out


def test_doctor_says_that_a_request_of_max_context_does_not_fit(tiny, capsys):
    said = "a request of max_context does not fit: raise num_pages, or lower max_context"
    assert run("doctor", *tiny, "--num-pages", "3") == 0 and said in capsys.readouterr().out
    assert run("doctor", *tiny) == 0 and said not in capsys.readouterr().out


@pytest.fixture
def tiny_heldout(monkeypatch):
    entries = [{"prompt": "abcabc\nabc"[:6], "reference": "defdefdefdef"}, {"prompt": "ddd", "reference": "abcabcabc"}]
    monkeypatch.setattr("espalier.bench.drive.heldout_texts", lambda: entries)
    monkeypatch.setattr(demo, "heldout_texts", lambda: entries)


CHOOSE = ["bench", "choose", "--context", "8", "--tokens", "12", "--repeats", "1"]


@pytest.mark.parametrize("command", [["demo", "--prompts", "1"], CHOOSE])
def test_what_compares_trees_needs_one(command, tiny, tiny_heldout, capsys):
    assert run(*command, *instead(tiny, "--steps", "0", "--topk", "1", "--num-draft-tokens", "1")) == 2
    assert "plain decoding" in capsys.readouterr().err


def test_demo_compares_draws_and_counts(tiny, tiny_heldout, capsys):
    assert run("demo", "--prompts", "2", "--max-tokens", "16", *tiny) == 0
    out = capsys.readouterr().out
    for said in (
        "identical: plain decoding gave the same",
        "came from the draft",
        "root",
        "page",
        "tokens/s",
        "try next",
        "prompt 1 of 2 ",
        "\nabcabc",
        "prompt 2 of 2 ",
        "\nddd",
        ": end of a prompt; tokens that came from the draft",
    ):
        assert said in out
    assert "\x1b" not in out


def test_on_a_terminal_the_demo_shows_prompts_dim_and_draft_tokens_not(tiny, tiny_heldout):
    shown = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=40)
    assert demo.show_demo(parse(["demo", "--prompts", "2", "--max-tokens", "16", *tiny]), shown) == 0
    out = shown.file.getvalue()
    assert "\x1b[2mabcabc\x1b[0m" in out and "\x1b[2mddd\x1b[0m" in out
    assert re.search(r"\x1b\[1;32m[a-o]", out) and "1;2;32m" not in out
    assert re.search("a round +[1-9]+ [█#]", out) and not re.search("(?m)^[█#]", out), "bars fit the width"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_that_waits_is_removed_from_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "12")
    with waiting("loading the model twice"):
        pass
    assert re.sub(r"\x1b\[\d*m", "", sys.stderr.getvalue()) == f"loading the\r{' ' * 11}\r"


@pytest.mark.parametrize(("term", "has"), [("xterm", True), ("dumb", False)])
def test_a_dumb_terminal_has_no_colour(term, has, monkeypatch):
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert has_colour(Console(file=Terminal())) is has


def test_on_a_terminal_lines_break_between_words(monkeypatch):
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    for kind, lines in ((Terminal, ["alpha beta", "gamma delta", "epsilon"]), (io.StringIO, [" ".join(words)])):
        monkeypatch.setattr("sys.stdout", kind())
        monkeypatch.setenv("COLUMNS", "12")
        monkeypatch.setenv("TERM", "xterm")
        stdout(wrap=True).print(" ".join(words))
        assert [line.rstrip() for line in sys.stdout.getvalue().splitlines()] == lines


def test_demo_fails_where_outputs_differ(tiny, tiny_heldout, capsys, monkeypatch):
    complete = demo._complete_prompts

    def spoiled(*arguments):
        plain, tree = complete(*arguments)
        tree.outputs[1].token_ids[3] ^= 1
        return plain, tree

    monkeypatch.setattr(demo, "_complete_prompts", spoiled)
    assert run("demo", "--prompts", "2", "--max-tokens", "16", *tiny) == 1
    out = capsys.readouterr().out
    assert "prompt 2: plain and tree differ from token 3 on" in out
    # The first is plain decoding's own, the likeliest.
    values = [float(value) for value in re.findall(r" (-?\d+\.\d{6})", out)]
    assert len(values) == 2 and values[0] >= values[1]


def test_bench_round_measures_both_in_one_run(tiny, tiny_heldout, capsys, tmp_path):
    file = tmp_path / "figures.json"
    assert (
        run(
            "lab",
            "round",
            "--tokens",
            "8",
            "--context",
            "8",
            "--batch",
            "1,2",
            "--repeats",
            "1",
            "--by-batch",
            '{"2": {"steps": 0}}',
            "--json",
            file,
            *tiny,
        )
        == 0
    )
    cells = json.loads(file.read_text())["cells"]
    assert [cell["identical"] for cell in cells] == [1, 2]
    assert all(cell["round_ms"] > 0 and 0 < cell["outside_forwards"] < 1 for cell in cells)
    assert all(1 <= cell["accept_length"] <= 4 for cell in cells)
    # The table says which tree a batch had, and not only which one is configured.
    assert [cell["tree"]["steps"] == 0 for cell in cells] == [False, True]
    assert re.search(r"steps, topk, nodes .* 0, 1, 1\n.*tree over plain", capsys.readouterr().out, re.DOTALL)


def test_bench_acceptance_runs_every_variant(tiny, tiny_heldout, capsys, tmp_path):
    file = tmp_path / "figures.json"
    assert run("lab", "round", "--acceptance", "--prompts", "2", "--tokens", "12", "--json", file, *tiny) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["acceptance"]}
    assert len(rows) == 7
    for name, row in rows.items():
        assert 1 <= row["accept_length"] <= 6, name
        # Whatever drafts, tokens are the target's own.
        assert row["same_tokens"] in (row["requests"], None), name
    assert rows["eagle3 tree, teacher-forced"]["requests"] == 4


TREE = DraftTree(
    tokens=[1, 2, 3, 4, -1],
    parents=[0, 0, 0, 1, 0],
    depths=[0, 1, 1, 2, 0],
    scores=[0.0, -0.5, -1.5, -0.75, float("-inf")],
    path_rows=[0, 1, 3],
)
DRAWN = """\
b  root  - position 6, page 9 row 2
|-+ c  -0.50  - position 7, page 9 row 3
| `-+ e  -0.75  - position 8, page 4 row 0
`-x d  -1.50
next root: h, picked by the target, at position 9
3 draft tokens verified in one pass, 2 accepted; 3 rows committed, 1 rejected that never were in the cache
"""


def test_a_round_is_drawn_with_what_was_committed_where():
    trace = RoundTrace("r", TREE, prefix_len=6, emitted=[2, 4, 7], pages=[3, 9, 4], page_size=4)
    assert draw_round_tree(trace, lambda token: "abcdefgh"[token], ASCII_SIGNS).plain == DRAWN


def test_columns_are_as_wide_as_what_stands_in_them():
    assert align_table([["a", "1"], ["long", "234"]]) == "  a       1\n  long  234"


@pytest.mark.parametrize("module", ["espalier.cli.main", "espalier.cli.demo", "lab.bench.round"])
def test_an_interrupt_while_modules_load_ends_in_a_line(module, monkeypatch, capsys):
    class Interrupting:
        def find_spec(self, name, *_):
            if name == module:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert run(*(["demo"] if module == "espalier.cli.demo" else ["lab", "round"])) == 130
    assert capsys.readouterr().err == "espalier: interrupted\n"


@pytest.mark.parametrize("in_background", [False, True], ids=["", "a shell's background job ignores SIGINT"])
def test_sigterm_ends_a_command_like_ctrl_c(in_background, monkeypatch, capsys):
    ended = []

    def show(*_):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append("what it started")

    monkeypatch.setattr(demo, "show_demo", show)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN if in_background else signal.default_int_handler)
    try:
        assert (run("demo"), ended) == (130, ["what it started"])
    finally:
        signal.signal(signal.SIGINT, before[0])
    assert capsys.readouterr().err == "espalier: interrupted\n" and signal.getsignal(signal.SIGTERM) == before[1]


def test_doctor_prints_the_support_matrix_without_a_model(capsys):
    assert run("doctor", "--matrix") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in BACKENDS)
    assert "not run on hardware" in said and "pip install -e '.[fa3]'" in said
