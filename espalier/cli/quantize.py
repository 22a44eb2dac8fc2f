"""`espalier quantize`: writes a quantised copy of a target, and compares it with the original."""

from argparse import Namespace
from dataclasses import asdict
from time import perf_counter
from typing import Any

from espalier.bench import quantised
from espalier.bench.drive import heldout
from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.llm import prepare
from espalier.models.quantise import QuantiseReport, quantise
from espalier.models.quantisers import GROUP
from espalier.models.weights import shards_of
from espalier.startup.checkpoints import find_target
from espalier.startup.resolve import choose_device
from espalier.terminal.console import print_table, progress, require_writable, write_json

# Tokens generated from each prompt for the accept length.
GENERATED = 64
OWN_TEXT = ", of the original's own text: it has no tokenizer"


def run(args: Namespace) -> int:
    if not 0 <= args.texts <= len(heldout()):
        raise EspalierError(f"--texts={args.texts} is not supported; use 0 to {len(heldout())}")
    if args.draft is not None and not args.texts:
        raise EspalierError("--draft is for the comparison, which --texts 0 leaves out; leave one out")
    require_writable("--json", args.json)
    device = choose_device(EngineConfig(device=args.device))
    path = find_target(args.model)
    settings = {"device": device.type} | ({} if args.draft is None else {"draft": args.draft})
    # The copy may take an hour: what the comparison would refuse is refused now.
    if args.texts:
        prepare(EngineConfig(model=args.model, **settings))
    begin = perf_counter()
    with progress("quantising", len(shards_of(path))) as advance:
        written = quantise(path, args.out, args.to, device, advance)
    seconds = perf_counter() - begin
    results: dict[str, Any] = {"seconds": seconds, **asdict(written)}
    rows = _rows_of(written, seconds)
    if args.texts:
        with progress("comparing", 2) as advance:
            accuracy = quantised.compare(args.model, str(args.out), settings, args.texts, GENERATED, advance)
        results["accuracy"] = asdict(accuracy)
        rows += _rows_of_accuracy(accuracy)
    write_json(args.json, results)
    print_table(rows)
    return 0


def _rows_of(written: QuantiseReport, seconds: float) -> list[list[str]]:
    share = written.written_bytes / max(written.read_bytes, 1)
    rows = [
        ["matrices quantised", str(written.num_matrices)],
        ["size", f"{written.written_bytes / 1e9:.3f} GB, {share:.0%} of the original"],
        ["time", f"{seconds:.1f} s"],
    ]
    if written.dense:
        rows.append(["not quantised", f"{len(written.dense)}: columns no multiple of {GROUP}, as {written.dense[0]}"])
    return rows


def _rows_of_accuracy(accuracy: quantised.Accuracy) -> list[list[str]]:
    before, after = accuracy.perplexity
    rows = [
        ["positions compared", f"{accuracy.positions}{OWN_TEXT if accuracy.is_own_text else ''}"],
        ["same likeliest token", f"{accuracy.agreement:.2%}"],
        ["KL, nats", f"{accuracy.kl:.5f}"],
        ["perplexity", f"{before:.3f} -> {after:.3f}"],
    ]
    if accuracy.accept_length is not None:
        before, after = accuracy.accept_length
        rows.append(["accept length", f"{before:.2f} -> {after:.2f}"])
    return rows
