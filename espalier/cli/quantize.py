"""`espalier quantize`: writes a quantised copy of a target or a draft, and compares it with the original."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.text import Text

from espalier.bench import quantised
from espalier.bench.drive import heldout_texts
from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.llm import prepare_engine
from espalier.models.draft import draft_verifier
from espalier.models.quantisers import GROUP_SIZES, QuantiseReport, quantise
from espalier.models.weight_files import safetensors_files
from espalier.speculate.drafters.registry import is_draft
from espalier.startup.checkpoints import find_target
from espalier.startup.resolve import choose_device
from espalier.terminal.console import DIM_STYLE, print_table, progress, require_writable, stderr, write_json

# Number of tokens generated from each prompt to measure the accept length.
GENERATED_TOKENS = 64
GENERATED_TEXT_NOTE = ", in text that the original model generated, because it has no tokenizer"

TableRows = list[list[str]]
Compare = Callable[[Callable[[], None]], tuple[dict[str, Any], TableRows]]


@dataclass(frozen=True)
class Comparison:
    """A comparison of a quantised copy with its original.  texts_description: says in a message which texts are used.

    compare(advance): compares the models, and calls advance() after each of num_steps steps.  Returns (results for
    --json, rows of the table)."""

    compare: Compare
    num_steps: int
    texts_description: str


def run(args: Namespace) -> int:
    if not 0 <= args.texts <= len(heldout_texts()):
        raise EspalierError(f"--texts={args.texts} is not supported; use 0 to {len(heldout_texts())}")
    for flag, value in (("--draft", args.draft), ("--target", args.target)):
        if value is not None and not args.texts:
            raise EspalierError(f"{flag} is for the comparison, which --texts 0 leaves out; leave one out")
    require_writable("--json", args.json)
    if args.json is not None and args.json.resolve() == args.out.resolve():
        raise EspalierError(
            "--json and --out name one path, which becomes the model's directory; name another for --json"
        )
    device = choose_device(EngineConfig(device=args.device))
    settings = {"device": device.type}
    path = find_target(args.model)
    copies_draft = is_draft(path, is_expected=args.target is not None)
    # Check the comparison's settings first, because the copy may take an hour.
    compare = _comparison_of_draft(args, path, settings) if copies_draft else _comparison_of_target(args, settings)
    begin = perf_counter()
    with progress("quantising", len(safetensors_files(path))) as advance:
        report = quantise(path, args.out, args.to, device, advance, copies_draft)
    seconds = perf_counter() - begin
    results: dict[str, Any] = {"seconds": seconds, **asdict(report)}
    rows = _rows_of_report(report, seconds)
    if compare is not None:
        figures, comparison_rows = _run_comparison(compare, args.out)
        results |= figures
        rows += comparison_rows
    write_json(args.json, results)
    print_table(rows)
    return 0


def _run_comparison(compare: Comparison, out: Path) -> tuple[dict[str, Any], TableRows]:
    """Returns the comparison's results.  If it fails or is interrupted, a message says that the copy is complete."""
    status = f"{out} is whole"
    stderr().print(
        Text(
            f"{status}; comparing it with the original on {compare.texts_description} (--texts 0 leaves this out)",
            DIM_STYLE,
        )
    )
    try:
        with progress("comparing", compare.num_steps) as advance:
            return compare.compare(advance)
    except KeyboardInterrupt:
        stderr().print(f"espalier: the comparison is left out; {status}")
        raise
    except EspalierError as error:
        raise EspalierError(f"{status}, but the comparison failed: {error}") from None


def _comparison_of_target(args: Namespace, settings: dict[str, Any]) -> Comparison | None:
    """Returns the comparison of a target and its copy, with --draft; None for --texts 0.  Raises EspalierError."""
    if args.target is not None:
        raise EspalierError(f"--target is for a draft, and {args.model} is a target; leave it out")
    if not args.texts:
        return None
    settings = settings | ({} if args.draft is None else {"draft": args.draft})
    _require_runnable(EngineConfig(model=args.model, **settings))

    def compare(advance: Callable[[], None]) -> tuple[dict[str, Any], TableRows]:
        """Compares logits of the model and its copy.  advance: called after each text of each model."""
        accuracy = quantised.compare_accuracy(
            args.model, str(args.out), settings, args.texts, GENERATED_TOKENS, advance
        )
        return {"accuracy": asdict(accuracy)}, _rows_of_accuracy(accuracy)

    return Comparison(compare, 2 * args.texts, f"{args.texts} texts")


def _comparison_of_draft(args: Namespace, path: Path, settings: dict[str, Any]) -> Comparison | None:
    """Returns the comparison of accept lengths with a draft and with its copy; None for --texts 0.  Raises
    EspalierError."""
    if args.draft is not None:
        raise EspalierError(f"--draft is for a target, and {args.model} is a draft; give its target with --target")
    if not args.texts:
        return None
    target = args.target or draft_verifier(path)
    if target is None:
        raise EspalierError(
            f"{args.model} is a draft that does not name its target (speculators_config.verifier); give --target, or "
            "--texts 0 to compare nothing"
        )
    find_target(target, "target")
    _require_runnable(EngineConfig(model=target, draft=str(path), **settings))

    def compare(advance: Callable[[], None]) -> tuple[dict[str, Any], TableRows]:
        """Compares accept lengths of the draft and its copy.  advance: called after each of the two."""
        drafts = str(path), str(args.out)
        lengths = quantised.accept_lengths(target, drafts, settings, args.texts, GENERATED_TOKENS, advance)
        return {"accuracy": {"accept_length": lengths}}, [_accept_length_row(lengths)]

    return Comparison(compare, 2, f"{args.texts} prompts")


def _require_runnable(config: EngineConfig) -> None:
    """Check, without loading weights, that an engine can run the comparison.  Raises EspalierError."""
    try:
        prepare_engine(config)
    except EspalierError as error:
        raise EspalierError(f"no comparison with the original: {error}; --texts 0 leaves it out") from None


def _rows_of_report(report: QuantiseReport, seconds: float) -> TableRows:
    share = report.written_bytes / max(report.read_bytes, 1)
    rows = [
        ["matrices quantised", str(report.num_matrices)],
        ["size", f"{report.written_bytes / 1e9:.3f} GB, {share:.0%} of the original"],
        ["time", f"{seconds:.1f} s"],
    ]
    for group, count in report.num_matrices_by_small_group_size.items():
        rows.append([f"in groups of {group}", f"{count}: {GROUP_SIZES[0]} does not divide their columns"])
    if report.dense_names:
        rows.append(
            [
                "not quantised",
                f"{len(report.dense_names)}: columns no multiple of {GROUP_SIZES[-1]}, as {report.dense_names[0]}",
            ]
        )
    return rows


def _rows_of_accuracy(accuracy: quantised.Accuracy) -> TableRows:
    before, after = accuracy.perplexity
    rows = [
        ["positions compared", f"{accuracy.positions}{GENERATED_TEXT_NOTE if accuracy.is_own_text else ''}"],
        ["same likeliest token", f"{accuracy.agreement:.2%}"],
        ["KL over the vocabulary, nats", f"{accuracy.kl:.5f}"],
        ["perplexity", f"{before:.3f} -> {after:.3f}"],
    ]
    return rows if accuracy.accept_length is None else [*rows, _accept_length_row(accuracy.accept_length)]


def _accept_length_row(accept_lengths: tuple[float, float]) -> list[str]:
    before, after = accept_lengths
    return ["accept length", f"{before:.2f} -> {after:.2f}"]
