"""A mistyped path of a model is refused by every command that takes one, before PyTorch is imported."""

import subprocess
import sys
from argparse import _SubParsersAction
from collections.abc import Iterator

from espalier.cli.main import COMMANDS
from espalier.cli.parser import Parser
from lab import __main__ as lab

# What a command needs besides the model.  The path follows the last word.
LINES = {
    "demo": "demo --model",
    "generate": "generate x --model",
    "serve": "serve",
    "batch": "batch in out --model",
    "quantize": "quantize --to fp8 --out out",
    "doctor": "doctor --model",
    "lab round": "lab round --model",
    "lab defaults": "lab defaults --model",
    "lab generate": "lab generate --model",
    "lab prefill": "lab prefill --model",
    "bench load": "bench load --model",
    "lab loading": "lab loading",
    "lab grammar": "lab grammar --model",
    "bench choose": "bench choose --model",
    "lab load": "lab load --model",
    "lab choose": "lab choose --model",
    "lab serve": "lab serve --model",
    "lab server": "lab server --shape llama-3.1-8b",
}
# An import of PyTorch fails in this process.
PROCESS = """
import sys
sys.modules["torch"] = None
from espalier.cli import start
from lab.__main__ import main
for line in sys.argv[1:]:
    first, *others = words = [*line.split(), "/no/such"]
    print(main(others) if first == "lab" else start(words), file=sys.stderr)
"""


def commands_with_a_model(parser: Parser, name: str = "") -> Iterator[str]:
    for command, child in parser.commands().items():
        yield from commands_with_a_model(child, f"{name} {command}".strip())
    if any(not isinstance(a, _SubParsersAction) and a.dest in ("model", "EngineConfig.model") for a in parser._actions):
        yield name


def test_a_mistyped_path_is_refused_before_pytorch_is_imported():
    parser = Parser()
    parser.add_commands("command", "command", COMMANDS)
    found = [*commands_with_a_model(parser), *(f"lab {name}" for name in commands_with_a_model(lab.make_parser()))]
    assert sorted(found) == sorted(LINES)
    # `lab defaults` runs a model as it is, without a draft.
    drafts = [line.replace("--model", "--draft") for line in LINES.values() if "--model" in line]
    drafts.remove("lab defaults --draft")
    ran = subprocess.run([sys.executable, "-c", PROCESS, *LINES.values(), *drafts], capture_output=True, text=True)
    said = ran.stderr.splitlines()
    assert ran.stdout == "" and said[1::2] == ["2"] * (len(LINES) + len(drafts))
    for what, lines in (("model", said[: 2 * len(LINES) : 2]), ("draft", said[2 * len(LINES) :: 2])):
        assert {line.partition(";")[0] for line in lines} == {f"espalier: {what}='/no/such' is not a directory"}
