"""`espalier`: parses the command line, runs the command, and reports every error in one line."""

import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType

from espalier import __version__
from espalier.cli import interrupted
from espalier.cli.parser import BAD_INPUT_STATUS, Command, Parser
from espalier.errors import EspalierError
from espalier.terminal.flags import add_engine_flags

FAILED_STATUS = 1
COMMANDS = MappingProxyType(
    {
        "demo": Command(
            "complete held-out prompts, plain and by tree, and draw a round",
            flags="espalier.cli.main:add_demo_flags",
            run_module="espalier.cli.demo",
        ),
        "generate": Command(
            "complete prompts, from the command line, a file or stdin",
            flags="espalier.cli.generate",
            run_module="espalier.cli.generate",
        ),
        "serve": Command(
            "run an OpenAI-compatible server", flags="espalier.cli.serve", run_module="espalier.cli.serve"
        ),
        "batch": Command(
            "answer a file of requests in OpenAI's batch format",
            flags="espalier.cli.batch",
            run_module="espalier.cli.batch",
        ),
        "quantize": Command(
            "write an FP8 or 4-bit copy of a model",
            flags="espalier.cli.main:add_quantize_flags",
            run_module="espalier.cli.quantize",
        ),
        # This entry is only for the help text.  cli.start passes the arguments of `train` to the trainer's own parser.
        "train": Command(
            "train a draft for a model, or choose and train one (auto)",
            flags="espalier.train.command:add_commands",
            run_module=None,
        ),
        "bench": Command(
            "measure loads and servers, choose trees", flags="espalier.cli.main:add_bench_commands", run_module=None
        ),
        "doctor": Command(
            "show the machine, the versions and the resolved configuration",
            flags="espalier.bench.flags:doctor",
            run_module="espalier.cli.doctor",
        ),
    }
)

BENCH_COMMANDS = MappingProxyType(
    {
        "load": Command(
            "tokens a second and waits under a mixed load",
            flags="espalier.bench.flags:load",
            run_module="espalier.bench.load_report",
        ),
        "choose": Command(
            "the fastest tree at each batch, for --by-batch",
            flags="espalier.bench.flags:choose",
            run_module="espalier.bench.choose",
        ),
    }
)


def make_parser() -> Parser:
    parser = Parser(prog="espalier", description="Lossless tree speculation.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"espalier {__version__}")
    parser.add_commands("command", "command", COMMANDS)
    return parser


def parse(arguments: Sequence[str] | None) -> Namespace:
    return make_parser().parse(arguments)


def add_demo_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="number of prompts (3)")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="output tokens for each (96)")
    add_engine_flags(parser)


def add_quantize_flags(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="a target or a draft: a directory, a Hugging Face id, or 'bundled' (a target)")
    parser.add_argument("--to", required=True, choices=("fp8", "int4"), help="the format of the copy")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="an empty or new directory")
    parser.add_argument("--device", default="auto", help="device to compute on: auto, cpu or cuda (auto)")
    parser.add_argument("--draft", metavar="DIR", help="of a target: also compare accept lengths with this draft")
    parser.add_argument(
        "--target",
        metavar="DIR",
        help="of a draft: compare accept lengths with this target (the target that the draft names)",
    )
    parser.add_argument(
        "--texts",
        type=int,
        default=32,
        metavar="N",
        help="compare with the original on N held-out texts, or without a tokenizer on texts that the original "
        "generates; 0: do not compare (32)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")


def add_bench_commands(parser: Parser) -> None:
    parser.add_commands("measured", "what", BENCH_COMMANDS)


def main(arguments: Sequence[str] | None = None, make_parser: Callable[[], Parser] = make_parser) -> int:
    """Run one command.  Returns the exit status.  0: success.  1: a check or the system failed.  2: bad input, with one
    line on stderr.  130: interrupted by Ctrl-C or SIGTERM."""
    try:
        status = _run_command(make_parser().parse(arguments))  # parse imports the module of the flags
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except EspalierError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return BAD_INPUT_STATUS
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:  # the reader of stdout, such as `head`, has exited
        _discard_stdout()
        return 0
    except OSError as error:
        logging.getLogger("espalier").info("traceback:", exc_info=True)
        print(f"espalier: {error}", file=sys.stderr)
        _discard_stdout()
        return FAILED_STATUS


def _run_command(args: Namespace) -> int:
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s", stream=sys.stderr
    )
    if isinstance(sys.stdout, TextIOWrapper):
        # Generated text may have characters that stdout's encoding lacks.  They are printed as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return args.run(args)


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that Python's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
