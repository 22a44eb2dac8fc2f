"""The flags of `espalier bench` and `espalier doctor`, a function for each command.  The module needs no PyTorch."""

import json
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, plain_number, whole_number, without_duplicate_keys
from espalier.layout import TreeShape
from espalier.terminal.flags import add_engine_flags, add_json_flag, add_key_flag, flag_of, whole_numbers

# The default (smallest, largest) number of tokens of a prompt, and of an output.
INPUT_BOUNDS, OUTPUT_BOUNDS = (16, 128), (16, 64)
DEFAULT_REQUESTS = 8
# The values of --arrivals, and of --endpoint.
POISSON, FIXED, BURSTS = "poisson", "fixed", "bursts"
CHAT, COMPLETIONS = "chat", "completions"
# Flags of `bench load` that need a --url.
SERVER_FLAGS = ("endpoint", "token_ids", "ttft_limit", "itl_limit", "timeout", "extra_body", "api_key", "plot")
# Flags for random prompts, which are refused together with --dataset, and flags that need --dataset.
RANDOM_PROMPT_FLAGS = ("requests", "input", "token_ids", "prefixes", "prefix_length", "turns")
DATASET_FLAGS = ("limit", "sample_seed", "thinking", "temperature")
# The weight formats of --shapes (espalier/models/quantisers.py) for a target, and for a draft, which has no experts.
SHAPE_WEIGHTS = ("fp8", "fp8-block", "int4", "nvfp4", "mxfp4")
DRAFT_WEIGHTS = SHAPE_WEIGHTS[:4]
# The values of --tune.
LINEARS, EXPERTS = "linears", "experts"


def load(parser: ArgumentParser) -> None:
    """Adds the flags of `espalier bench load`."""
    add_json_flag(parser)
    add_load_flags(parser)
    servers = parser.add_argument_group("running servers, in place of an engine (lengths are words, not tokens)")
    add_server_flags(servers)
    add_engine_flags(parser)


def add_load_flags(parser: ArgumentParser, requests: str = "8", inputs: str = "16,128", outputs: str = "16,64") -> None:
    """Adds the flags of a load.  requests, inputs, outputs: defaults of three of the flags, for their help texts."""
    add = parser.add_argument
    add("--requests", type=int, metavar="N", help=f"requests, or conversations ({requests}; of a server 64)")
    add("--input", type=parse_bounds, metavar="N,N", help=f"shortest and longest prompt ({inputs}; of a server 16,64)")
    add("--output", type=parse_bounds, metavar="N,N", help=f"tokens of the shortest and longest output ({outputs})")
    add("--prefixes", type=int, metavar="N", help="prompts begin with one of N shared texts (0)")
    add("--prefix-length", type=int, metavar="N", help="length of a shared text (64)")
    add("--turns", type=int, metavar="N", help="turns of a conversation; each sends all that was said before (1)")
    add("--think", type=float, metavar="S", help="seconds from an answer to the next turn (1)")
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument("--concurrency", type=int, metavar="N", help="requests at once, constantly (all at once)")
    arrivals.add_argument(
        "--rate", type=_parse_rates, metavar="X,X", help="arrivals a second; several are measured one after another"
    )
    add(
        "--arrivals",
        choices=(POISSON, FIXED, BURSTS),
        help="with --rate: random, evenly spaced, or many at once (poisson)",
    )
    add("--burst", type=int, metavar="N", help="arrivals at once, with --arrivals bursts (8)")
    add("--markdown", type=Path, metavar="FILE", help="write the tables there as well")
    _add_dataset_flags(parser)


def refuse_unused_load_flags(args: Namespace) -> None:
    """Raises EspalierError for a flag of `add_load_flags` without the flag that it needs."""
    needs = (
        ("think", "--turns", args.turns or args.dataset),
        ("prefix_length", "--prefixes", args.prefixes),
        ("arrivals", "--rate", args.rate or (args.url and not args.concurrency)),
        ("burst", f"--arrivals {BURSTS}", args.arrivals == BURSTS),
    )
    for name, needed, is_used in needs:
        if getattr(args, name) is not None and not is_used:
            raise EspalierError(f"{flag_of(name)} needs {needed}; add that, or leave {flag_of(name)} out")


def _add_dataset_flags(parser: ArgumentParser) -> None:
    """Add the flags of a load with prompts from a file."""
    add = parser.add_argument_group("prompts of a file, in place of drawn ones").add_argument
    add(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="SPEED-Bench's, ShareGPT's, or JSON lines with messages or a prompt; answers end where the model ends "
        "them, or at --output (256,256)",
    )
    add("--limit", type=int, metavar="N", help="N of its conversations, evenly from its categories (all)")
    add("--sample-seed", type=int, metavar="N", help="another choice of --limit, of lengths and of samples (0)")
    add(
        "--thinking",
        action=BooleanOptionalAction,
        default=None,
        help="set the chat template's switch of reasoning (as the template has it)",
    )
    add("--temperature", type=float, nargs="+", metavar="X", help="several are measured one after another (0)")


def add_server_flags(group: Any) -> None:
    """Add --url and the flags in SERVER_FLAGS.  group: argparse's group of flags."""
    add = group.add_argument
    add("--url", action="append", metavar="X", help="a running server, any with OpenAI's API; may be repeated")
    add("--endpoint", choices=(CHAT, COMPLETIONS), help="endpoint that is called (chat; with --token-ids completions)")
    add("--token-ids", type=int, metavar="N", help="prompts are random token ids below N, so lengths are tokens")
    add("--ttft-limit", type=float, metavar="MS", help="for goodput: the first token comes within MS")
    add(
        "--itl-limit",
        type=float,
        metavar="MS",
        help="for goodput: each later token takes at most MS, on a request's average",
    )
    add(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds after which a request without a whole answer has failed (600)",
    )
    add(
        "--extra-body",
        type=_parse_json_object,
        metavar="JSON",
        help='further fields of every request, such as {"ignore_eos": true}',
    )
    add_key_flag(group, "bearer token")
    add("--plot", type=Path, metavar="FILE", help="draw the times and the goodput by rate: .png, .svg or .pdf")


def choose(parser: ArgumentParser) -> None:
    """Adds the flags of `espalier bench choose`."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table of trees there")
    parser.add_argument(
        "--candidates",
        type=parse_tree_shape,
        nargs="+",
        default=[],
        metavar="S,K,D",
        help="steps, topk and num_draft_tokens of the trees to compare (the configured tree and smaller ones)",
    )
    parser.add_argument("--batch", type=whole_numbers, metavar="N,N", help="batch sizes (all)")
    parser.add_argument("--context", type=int, metavar="N", help="prompt length (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions; medians are shown (5)")
    parser.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="its prompts in turn, those of up to --context tokens, in place of Python code; formats as of bench load, "
        "or token_ids",
    )
    add_json_flag(parser)
    add_engine_flags(parser)


def doctor(parser: ArgumentParser) -> None:
    """Adds the flags of `espalier doctor`."""
    tuning = parser.add_argument_group("linear layers and experts")
    tuning.add_argument(
        "--tune",
        nargs="?",
        choices=(LINEARS, EXPERTS),
        const=LINEARS,
        help="measure which kernels are fastest on this GPU, for those of the model or of --shapes (linears)",
    )
    tuning.add_argument("--shapes", metavar="X,X", help="named shapes instead of a model, such as llama-3.1-8b")
    tuning.add_argument(
        "--weights", choices=SHAPE_WEIGHTS, help="of --tune --shapes: format of the target's matrices (dense)"
    )
    tuning.add_argument(
        "--draft-weights",
        choices=DRAFT_WEIGHTS,
        help="of --tune --shapes: format of the draft's matrices; without --weights only the draft is measured (dense)",
    )
    tuning.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="of --tune linears: measure for about N seconds, the likely best first (until all are measured)",
    )
    tuning.add_argument(
        "--choices",
        type=Path,
        metavar="FILE",
        help="write the fastest ones there ($ESPALIER_CHOICES, or ~/.config/espalier/choices.json)",
    )
    parser.add_argument("--matrix", action="store_true", help="print what each attention backend can run, and end")
    add_engine_flags(parser)


def parse_tree_shape(text: str) -> TreeShape:
    """Parses the value S,K,D of a flag; the argparse type."""
    try:
        steps, topk, num_draft_tokens = map(whole_number, text.split(","))
        return TreeShape(steps, topk, num_draft_tokens)
    except EspalierError as error:
        raise ArgumentTypeError(f"{text!r} is no tree: {error}") from None
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no tree; use steps,topk,num_draft_tokens, such as 5,4,16") from None


def parse_bounds(text: str) -> tuple[int, int]:
    """Parses the value SHORTEST,LONGEST of a flag; the argparse type."""
    low, high = (whole_number(part) for part in text.split(","))
    if not 1 <= low <= high:
        raise ValueError
    return low, high


parse_bounds.__name__ = "pair of whole numbers, the smaller first, such as 16,64"


def _parse_rates(text: str) -> list[float]:
    return [plain_number(part) for part in text.split(",")]


_parse_rates.__name__ = "list of numbers, such as 1,2,4"


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=without_duplicate_keys)
    except EspalierError as error:
        raise ArgumentTypeError(str(error)) from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text!r} is not a JSON object, such as '{{\"ignore_eos\": true}}'")
    return value
