"""A mistyped path of a model is refused by every command that takes one, before PyTorch is imported."""

import subprocess
import sys
from argparse import _SubParsersAction
from collections.abc import Iterator

from espalier.cli.main import COMMANDS
from espalier.cli.parser import Parser

# What a command needs besides the model.  The path follows the last word.
LINES = {
    "demo": "demo --model",
    "generate": "generate x --model",
    "serve": "serve",
    "batch": "batch in out --model",
    "quantize": "quantize --to fp8 --out out",
    "doctor": "doctor --model",
    "bench round": "bench round --model",
    "bench generate": "bench generate --model",
    "bench prefill": "bench prefill --model",
    "bench throughput": "bench throughput --model",
    "bench latency": "bench latency --model",
    "bench loading": "bench loading",
    "bench grammar": "bench grammar --model",
    "bench serve": "bench serve --model",
}
# An import of PyTorch fails in this process.
PROCESS = """
import sys
sys.modules["torch"] = None
from espalier.cli import start
for line in sys.argv[1:]:
    print(start([*line.split(), "/no/such"]), file=sys.stderr)
"""


def commands_with_a_model(parser: Parser, name: str = "") -> Iterator[str]:
    for command, child in parser.commands().items():
        yield from commands_with_a_model(child, f"{name} {command}".strip())
    if any(not isinstance(a, _SubParsersAction) and a.dest in ("model", "EngineConfig.model") for a in parser._actions):
        yield name


def test_a_mistyped_path_is_refused_before_pytorch_is_imported():
    parser = Parser()
    parser.add_commands("command", "command", COMMANDS)
    assert sorted(commands_with_a_model(parser)) == sorted(LINES)
    drafts = [line.replace("--model", "--draft") for line in LINES.values() if "--model" in line]
    ran = subprocess.run([sys.executable, "-c", PROCESS, *LINES.values(), *drafts], capture_output=True, text=True)
    said = ran.stderr.splitlines()
    assert ran.stdout == "" and said[1::2] == ["2"] * (len(LINES) + len(drafts))
    for what, lines in (("model", said[: 2 * len(LINES) : 2]), ("draft", said[2 * len(LINES) :: 2])):
        assert {line.partition(";")[0] for line in lines} == {f"espalier: {what}='/no/such' is not a directory"}
