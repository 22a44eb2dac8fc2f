"""`espalier bench round --choose`: every bucket with every candidate, and the table of the fastest."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from espalier.bench import choose
from espalier.bench.choose import Timed
from espalier.cli.console import QUIET, aligned, progress, stdout, write_json
from espalier.cli.flags import sized
from espalier.errors import EspalierError
from espalier.layout import TreeShape
from espalier.llm import LLM
from espalier.startup import tree_policy as trees


def add_flags(parser: ArgumentParser, mode: Any) -> None:
    """mode: the group of what `bench round` can measure."""
    mode.add_argument("--choose", action="store_true", help="the fastest tree at each batch, for --by-batch")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table of --choose there")
    parser.add_argument(
        "--accept-length",
        type=float,
        metavar="X",
        help="of the configured tree, others foretold from it (measured on the model's own text); with --shape: what "
        "the draft is made for at tree 5,8,64 (4)",
    )
    parser.add_argument(
        "--candidates", type=_shape, nargs="+", default=[], metavar="S,K,D", help="steps, topk and num_draft_tokens"
    )


def _shape(text: str) -> TreeShape:
    try:
        steps, topk, num_draft_tokens = map(int, text.split(","))
        return TreeShape(steps, topk, num_draft_tokens)
    except EspalierError as error:
        raise ArgumentTypeError(f"{text!r} is no tree: {error}") from None
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no tree; use steps,topk,num_draft_tokens, such as 5,4,16") from None


def run(asked: Namespace, settings: dict[str, Any]) -> None:
    """Measure, print and write.  Raises EspalierError."""
    if len(asked.context) > 1:
        raise EspalierError(f"--context={asked.context} is not supported with --choose; use one")
    _refuse_idle(settings)
    context, longest = asked.context[0], asked.context[0] + asked.tokens
    llm = LLM(**choose.without_table(sized(settings, {"max_context": longest + 1}, max_context=longest)))
    config, configured = llm.config, llm.engine.layout.tree
    shapes = choose.candidates_of(configured, asked.candidates)
    lengths = (
        None
        if asked.accept_length is None
        else choose.predicted_accept_lengths(asked.accept_length, configured, shapes)
    )
    how = "measured" if lengths is None else f"foretold from {asked.accept_length} of {configured}"
    stdout().print(Text(f"{config.algorithm}, {config.dtype}, context {context}; accept lengths {how}", QUIET))
    runs = choose.Runs.of(llm, context, asked.tokens, asked.repeats)
    with progress("measuring", len(shapes) * len(runs.prompts)) as advance:
        timed = choose.measure(llm.engine, config.graph_batch, runs, shapes, lengths, advance)
    llm.close()
    chosen = choose.table(timed)
    by_batch = {least: asdict(shape) for least, shape in chosen.items()}
    # Kept before it is shown: whoever reads us may have left.
    if asked.out is not None:
        trees.write(asked.out, chosen)
    cells = [one.as_dict() for one in timed]
    write_json(asked.json, {"config": asdict(config), "cells": cells, "by_batch": by_batch})
    stdout().print(Text(_table(timed)))
    if asked.out is not None:
        stdout().print(Text(f"written: {asked.out}; use it by --by-batch {asked.out}", QUIET))


def _refuse_idle(settings: dict[str, Any]) -> None:
    """What an engine takes and what is measured here has no use for."""
    tree = settings.get("speculation")
    if tree is not None and tree.by_batch not in ("auto", {}):
        raise EspalierError("--by-batch is not for --choose, which measures such a table; leave one out")
    if "prefix_cache" in settings:
        raise EspalierError("--prefix-cache is not for --choose, whose prompts enter by it; leave one out")


def _table(timed: list[Timed]) -> str:
    """A line a batch, a column a candidate; the fastest of a line is marked."""
    shapes = list(dict.fromkeys(one.shape for one in timed))
    fastest, of = choose.best(timed), {(one.batch, one.shape): one for one in timed}
    rows = [["batch", *(str(shape) for shape in shapes)]]
    rows.append(["accept length", *(f"{of[next(iter(fastest)), shape].accept_length:.2f}" for shape in shapes)])
    for batch, best in fastest.items():
        cells = [of[batch, shape] for shape in shapes]
        marks = ["*" if one == best else " " for one in cells]
        figures = zip(cells, marks, strict=True)
        rows.append([str(batch), *(f"{c.round_ms:.2f} ms, {c.tokens_per_second:.0f} tokens/s {m}" for c, m in figures)])
    return aligned(rows)
