"""Drafts of the bundled model beside each other: `python -m scripts.compare_drafts --draft eagle3 --draft block=DIR`.

Each draft with each of its trees continues the same held-out prompts, one at a time, in an engine for one request.  The
drafts and their trees take turns.  A table has the accept length, by depth too, and tokens a second from each prompt's
first token on.  With `--draft plain` too, the tokens of a tree are compared with plain decoding's.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path
from statistics import median

from espalier import LLM, SamplingParams, SpeculationConfig
from espalier.bench.drive import heldout
from espalier.stats import SpeculationStats
from espalier.terminal.console import print_table, write_json

PLAIN = (0, 1, 1)
HEADER = ("draft", "steps, topk, nodes", "accept length", "tokens/s", "same tokens", "accepted by depth")
# (steps, topk, num_draft_tokens), with a chain first.
TREES = {
    "eagle3": ((5, 1, 6), (5, 4, 8), (5, 4, 16), (6, 8, 32), (6, 8, 64)),
    "mtp": ((3, 1, 4), (5, 4, 8), (5, 4, 16), (5, 8, 32), (5, 8, 64)),
    "block": ((8, 1, 9), (8, 8, 8), (8, 8, 16), (8, 8, 32), (8, 8, 64)),
    "ngram": ((5, 1, 6), (8, 1, 9)),
    "plain": (PLAIN,),
}


@dataclass
class Row:
    """One draft with one tree.  seconds: of each turn, without the first tokens; texts: token ids of the last turn."""

    name: str
    tree: tuple[int, int, int]
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(text) - 1 for text in self.texts) / median(self.seconds)


def engine_of(name: str, draft: str | None, tree: tuple[int, int, int], settings: dict[str, object]) -> LLM:
    steps, topk, nodes = tree
    if name == "plain":
        return LLM("bundled", speculation=None, **settings)
    speculation = SpeculationConfig(name, steps=steps, topk=topk, num_draft_tokens=nodes)
    return LLM("bundled", draft=draft, speculation=speculation, **settings)


def measure(llm: LLM, row: Row, prompts: Sequence[str], params: SamplingParams) -> None:
    """One turn: the prompts one after another."""
    row.texts, row.stats, seconds = [], SpeculationStats(), 0.0
    for prompt in prompts:
        arrived: list[float] = []
        [output] = llm.generate(prompt, params, lambda _: arrived.append(time.perf_counter()))  # noqa: B023
        seconds += arrived[-1] - arrived[0]
        row.texts.append(output.token_ids)
        row.stats.merge(output.speculation)
    row.seconds.append(seconds)


def drafts_of(given: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(algorithm, directory or None for the bundled one) of each --draft."""
    for text in given:
        name, _, directory = text.partition("=")
        if name not in TREES:
            raise SystemExit(f"--draft {text}: use {', '.join(TREES)}, or one of them and =DIRECTORY")
        if directory and not (Path(directory) / "config.json").exists():
            raise SystemExit(f"--draft {text}: {directory} holds no config.json; give a draft's directory")
        yield name, directory or None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.compare_drafts", description=__doc__)
    parser.add_argument(
        "--draft", action="append", required=True, help="eagle3, mtp, block, ngram or plain; or one=DIR"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="of weights and of K and V; tokens of trees and of plain decoding agree in float32 [auto]",
    )
    parser.add_argument("--threads", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3, help="times that each tree is measured; the median counts [3]")
    parser.add_argument("--temperature", type=float, action="append", help="may repeat [0 and 1]")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = {"device": arguments.device, "dtype": arguments.dtype, "threads": arguments.threads}
    settings |= {"max_batch": 1, "max_context": 1024, "num_pages": 512, "page_size": 16}
    prompts = [entry["prompt"] for entry in heldout()[: arguments.prompts]]
    trees = [(name, place, tree) for name, place in drafts_of(arguments.draft) for tree in TREES[name]]
    engines = [engine_of(name, place, tree, settings) for name, place, tree in trees]
    found: list[tuple[float, Row]] = []
    for temperature in arguments.temperature or [0.0, 1.0]:
        rows = [Row(name, tree) for name, _, tree in trees]
        params = SamplingParams(temperature=temperature, max_tokens=arguments.tokens, seed=1)
        for turn in range(arguments.turns + 1):
            for llm, row in zip(engines, rows, strict=True):
                measure(llm, row, prompts, params)
                row.seconds = row.seconds[1:] if turn == 0 else row.seconds
        show(temperature, rows)
        found += [(temperature, row) for row in rows]
        write_json(arguments.json, {"rows": [figures(at, row) for at, row in found]})


def figures(temperature: float, row: Row) -> dict[str, object]:
    what = {"temperature": temperature, "draft": row.name, "tree": row.tree, "seconds": row.seconds}
    return what | {"tokens_per_second": row.tokens_per_second, "accept": row.stats.as_dict()}


def show(temperature: float, rows: Sequence[Row]) -> None:
    """Prints a table of one temperature."""
    plain = next((row.texts for row in rows if row.name == "plain"), None)
    lines = []
    for row in rows:
        by_depth = " ".join(f"{taken / max(1, tried):.2f}" for tried, taken in row.stats.acceptance_by_depth)
        equal = "" if plain is None else f"{sum(map(eq, row.texts, plain))} of {len(plain)}"
        tree = "plain" if row.name == "plain" else ", ".join(map(str, row.tree))
        lines.append(
            [
                *(row.name, tree, f"{row.stats.accept_length:.2f}", f"{row.tokens_per_second:.0f}"),
                *(equal, by_depth),
            ]
        )
    print(f"temperature {temperature:g}")
    print_table([HEADER, *lines])


if __name__ == "__main__":
    main()
