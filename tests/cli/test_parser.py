"""What is mistyped, and what another engine calls otherwise, is answered with the right name."""

import pytest

from espalier import other_engines
from espalier.cli import parser
from espalier.cli.main import BENCH_COMMANDS, COMMANDS, parse
from espalier.cli.parser import MOVED_COMMANDS
from espalier.config import EngineConfig, SpeculationConfig
from espalier.request import SamplingParams
from espalier.terminal.flags import flag_of
from lab.__main__ import COMMANDS as LAB
from tests.cli.test_cli import run

FIELDS = {cls.__name__: set(cls.__dataclass_fields__) for cls in (EngineConfig, SpeculationConfig, SamplingParams)}
SAID = [
    ("genrate x", "espalier: unknown command 'genrate'; did you mean generate?"),
    ("chat x", "espalier: unknown command 'chat'; use generate --chat"),
    ("bench loads", "espalier bench: unknown command 'loads'; did you mean load?"),
    ("bench", "espalier bench: a command is missing; use one of load, choose"),
    ("serve --prot 3", "espalier serve: unknown flag --prot; did you mean --port?"),
    ("generate x --temperture=1", "unknown flag --temperture; did you mean --temperature?"),
    ("--port 3 serve", "espalier: unknown flag --port; it is a flag of espalier serve"),
    ("serve --temperature 1", "unknown flag --temperature; it is a flag of espalier generate"),
    ("generate x --served-model-name y", "it is a flag of espalier serve"),
    ("serve a b", "espalier serve: unknown argument 'b'"),
    ("generate --file a --file b", "espalier generate: --file is given twice; leave one out"),
    ("generate x --file=a --file=a", "espalier generate: --file is given twice; leave one out"),
    ("generate --overlap --no-overlap", "espalier generate: --overlap and --no-overlap are both given; leave one out"),
    ("generate --no-overlap --overlap", "espalier generate: --no-overlap and --overlap are both given; leave one out"),
    ("generate --no-overlap x --no-overlap", "espalier generate: --no-overlap is given twice; leave one out"),
    ("generate --overlap --overlap", "espalier generate: --overlap is given twice; leave one out"),
    ("bench choose --out a --candidates 1,1,2 --out b", "espalier bench choose: --out is given twice"),
    ("serve --max-model-len 4096", "unknown flag --max-model-len; use --max-context"),
    ("serve --max-model-len=4096", "unknown flag --max-model-len; use --max-context"),
    ("serve --context-length 4096", "use --max-context"),
    ("serve --gpu-memory-utilization 0.9", "the KV cache takes a share of the free memory"),
    ("serve --mem-fraction-static 0.9", "the KV cache takes a share of the free memory"),
    ("serve --tensor-parallel-size 2", "unknown flag --tensor-parallel-size; use --tensor-parallel"),
    ("serve -tp 2", "unknown flag -tp; use --tensor-parallel"),
    ("serve -pp 2", "several GPUs share a model by tensor_parallel alone; leave it out"),
    ("serve --data-parallel-size 2", "unknown flag --data-parallel-size; use --replicas"),
    ("generate x --dp 2", "unknown flag --dp; use espalier serve --replicas"),
    ("serve --model x", "unknown flag --model; write the model after the command, without a flag"),
    ("serve --model-path x", "unknown flag --model-path; write the model after the command, without a flag"),
    ("serve --speculative-num-steps 2", "use --steps"),
    ("serve --speculative-eagle-topk 2", "use --topk"),
    ("serve --speculative-num-draft-tokens 2", "use --num-draft-tokens"),
    ("serve --speculative-config {}", "use --draft, --steps, --topk and --num-draft-tokens"),
    ("serve --disable-radix-cache", "use --no-prefix-cache"),
    ("serve --enforce-eager", "use --graph-batch 0"),
    ("serve --allowed-origins x", "use --cors-origin"),
    ("serve --tool-call-parser hermes", "use --tool-format"),
    ("serve --reasoning-parser qwen3", "use --reasoning-format"),
    ("serve --enable-auto-tool-choice", "tool calls and reasoning need no switch; leave it out"),
    ("bench serve --dtype x", "it is now `espalier bench load --url URL`"),
    *(
        (f"{prog.removeprefix('espalier ')} {name}", f"it is now in the clone's laboratory: run `python -m lab {to}`")
        for prog, names in MOVED_COMMANDS.items()
        for name, to in names.items()
    ),
    ("bench round --choose", "; to choose trees, `espalier bench choose`"),
]


@pytest.mark.parametrize(("line", "said"), SAID, ids=[line for line, _ in SAID])
def test_the_right_name_is_said(line, said, capsys):
    assert run(*line.split()) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    "line", ["", *COMMANDS, *(f"bench {name}" for name in BENCH_COMMANDS), "lab", *(f"lab {name}" for name in LAB)]
)
def test_help_fits_eighty_columns(line, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*line.split(), "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines.index("") <= 4, "the usage is short"
    assert not [each for each in lines if each.endswith("-")], "a name stays whole"


def test_commands_and_what_they_do_stand_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run("bench", "--help") == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")}
    assert [
        name for name, command in BENCH_COMMANDS.items() if not shown[name].endswith(f"  {command.help_text}")
    ] == []


def test_a_list_grows_and_a_switch_may_come_twice():
    args = parse(["generate", "x", "--stop", "a", "--stop", "b", "--json", "--json"])
    assert getattr(args, "SamplingParams.stop") == ["a", "b"] and args.json


@pytest.mark.parametrize("ours", other_engines.OTHER_ENGINE_NAMES)
def test_a_counterpart_is_a_setting_and_a_flag(ours, capsys):
    owner, _, setting = ours.partition("=")[0].partition(".")
    for theirs in other_engines.OTHER_ENGINE_NAMES[ours].split():
        assert not any(theirs in fields for fields in FIELDS.values()), "a name of its own"
        if owner != "serve":
            assert setting in FIELDS[owner]
            assert setting in other_engines.keyword_advice(theirs, FIELDS[owner])
        if setting not in ("speculation", "grammar"):  # several flags, and none
            run("serve" if owner == "serve" else "generate", flag_of(theirs))
            assert f"use {flag_of(setting)}" in capsys.readouterr().err.replace("--no-", "--")


def test_a_name_stands_once():
    names = " ".join([*other_engines.OTHER_ENGINE_NAMES.values(), *other_engines.UNSUPPORTED_SETTINGS.values()]).split()
    assert sorted(set(names)) == sorted(names)


def test_what_others_call_a_command_is_one():
    assert {near.split()[0] for near in parser.GUESSED_COMMANDS.values()} <= {*COMMANDS, "--help", "--version"}
