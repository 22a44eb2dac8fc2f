"""Drafts of a model beside each other: `python -m scripts.compare_drafts --draft plain --draft block=DIR`.

Each draft with each of its trees continues the same prompts, one at a time, in an engine for one request.  The drafts
and their trees take turns.  A table has the accept length of each kind of prompt, and tokens a second from each
prompt's first token on.  With `--draft plain` too, speed and tokens are compared with plain decoding's.  `--read`
prints one table of the JSON files of several runs, such as one for each GPU.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any

from espalier import LLM, SamplingParams, SpeculationConfig
from espalier.bench.drive import heldout_texts
from espalier.bench.report import check_plot_path, save_plot
from espalier.stats import SpeculationStats
from espalier.terminal.console import print_table, write_json

Tree = tuple[int, int, int]
PLAIN = (0, 1, 1)
# (steps, topk, num_draft_tokens), with a chain first.
TREES: dict[str, tuple[Tree, ...]] = {
    "plain": (PLAIN,),
    "eagle3": ((5, 1, 6), (5, 4, 8), (5, 4, 16), (6, 8, 32), (6, 8, 64)),
    "mtp": ((3, 1, 4), (5, 4, 8), (5, 4, 16), (5, 8, 32), (5, 8, 64)),
    "block": ((8, 1, 9), (8, 8, 8), (8, 8, 16), (8, 8, 32), (8, 8, 64)),
    "ngram": ((5, 1, 6), (8, 1, 9)),
}
# Prompts that each engine continues before it is timed.
WARM_UP = 2


@dataclass
class Row:
    """One draft with one tree.  seconds: of each turn, without the first tokens; texts: token ids of the last turn;
    stats: by the kind of prompt."""

    name: str
    tree: Tree
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    stats: dict[str, SpeculationStats] = field(default_factory=dict)

    def figures(self, temperature: float, plain: "Row | None") -> dict[str, Any]:
        total = SpeculationStats()
        for stats in self.stats.values():
            total.merge(stats)
        rate = sum(len(text) - 1 for text in self.texts) / median(self.seconds)
        what = {"temperature": temperature, "draft": self.name, "tree": self.tree, "seconds": self.seconds}
        what |= {"tokens_per_second": rate, "accept_length": total.accept_length, "accept": total.as_dict()}
        what["accept_length_by_kind"] = {kind: stats.accept_length for kind, stats in self.stats.items()}
        if plain is not None:
            what["plain_tokens_per_second"] = sum(len(text) - 1 for text in plain.texts) / median(plain.seconds)
            what["same_texts"] = f"{sum(map(eq, self.texts, plain.texts))} of {len(plain.texts)}"
        return what


def make_engine(model: str, name: str, draft: str | None, tree: Tree, settings: dict[str, object]) -> LLM:
    steps, topk, nodes = tree
    if name == "plain":
        return LLM(model, speculation=None, **settings)
    speculation = SpeculationConfig(name, steps=steps, topk=topk, num_draft_tokens=nodes, by_batch={}, sources="none")
    return LLM(model, draft=draft, speculation=speculation, **settings)


def measure(llm: LLM, row: Row, prompts: Sequence[tuple[str, Any]], params: SamplingParams) -> None:
    """One turn: the prompts one after another."""
    row.texts, row.stats, seconds = [], {}, 0.0
    for kind, prompt in prompts:
        arrived: list[float] = []
        tokens = prompt if isinstance(prompt, str) else llm.chat_prompt(prompt)
        [output] = llm.generate([tokens], params, lambda _: arrived.append(time.perf_counter()))  # noqa: B023
        seconds += arrived[-1] - arrived[0]
        row.texts.append(output.token_ids)
        row.stats.setdefault(kind, SpeculationStats()).merge(output.speculation)
    row.seconds.append(seconds)


def read_prompts(path: Path | None) -> list[tuple[str, Any]]:
    """(kind, text or messages) of each line; by default of the bundled prompts."""
    lines = heldout_texts() if path is None else map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(line.get("kind", "code"), line.get("messages") or line["prompt"]) for line in lines]


def drafts_of(given: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(algorithm, directory or None for the bundled one) of each --draft."""
    for text in given:
        name, _, directory = text.partition("=")
        if name not in TREES:
            raise SystemExit(f"--draft {text}: use {', '.join(TREES)}, or one of them and =DIRECTORY")
        if directory and not (Path(directory) / "config.json").exists():
            raise SystemExit(f"--draft {text}: {directory} holds no config.json; give a draft's directory")
        yield name, directory or None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.compare_drafts", description=__doc__)
    parser.add_argument("--model", default="bundled", help="the target [bundled]")
    parser.add_argument(
        "--draft", action="append", default=[], help="plain, eagle3, mtp, block or ngram; or one=DIR, may repeat"
    )
    parser.add_argument("--data", type=Path, help='JSON lines with "messages" or "prompt", and "kind"')
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="of weights and of K and V; tokens of trees and of plain decoding agree in float32 [auto]",
    )
    parser.add_argument("--threads", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--prompts", type=int, help="how many of the prompts, at even distances [all]")
    parser.add_argument("--most-nodes", type=int, default=64, help="leave out trees with more [64]")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3, help="times that each tree is measured; the median counts [3]")
    parser.add_argument("--temperature", type=float, action="append", help="may repeat [0 and 1]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="a file for the tables")
    parser.add_argument("--plot", type=Path, help="a picture, .svg or .png, of accept length and speed by nodes")
    parser.add_argument("--read", type=Path, nargs="+", help="JSON files of runs, in place of a run")
    return parser


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    settings = {"device": arguments.device, "dtype": arguments.dtype, "threads": arguments.threads}
    settings |= {"max_batch": 1, "max_context": 1024, "num_pages": 512, "page_size": 16}
    prompts = read_prompts(arguments.data)
    count = min(arguments.prompts or len(prompts), len(prompts))
    prompts = [prompts[i * len(prompts) // count] for i in range(count)]
    trees = [(name, place, tree) for name, place in drafts_of(arguments.draft) for tree in TREES[name]]
    trees = [each for each in trees if each[2][2] <= arguments.most_nodes]
    engines = [make_engine(arguments.model, name, place, tree, settings) for name, place, tree in trees]
    found: list[dict[str, Any]] = []
    for temperature in arguments.temperature or [0.0, 1.0]:
        rows = [Row(name, tree) for name, _, tree in trees]
        params = SamplingParams(temperature=temperature, max_tokens=arguments.tokens, seed=1)
        for turn in range(arguments.turns + 1):
            for llm, row in zip(engines, rows, strict=True):
                measure(llm, row, prompts if turn else prompts[:WARM_UP], params)
                row.seconds = row.seconds if turn else []
        plain = next((row for row in rows if row.name == "plain"), None)
        found += [row.figures(temperature, plain) for row in rows]
        write_json(arguments.json, {"rows": found})
    return found


def tables(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    """(title, rows with a header) for each temperature."""
    kinds = list(dict.fromkeys(kind for row in found for kind in row["accept_length_by_kind"]))
    for temperature in dict.fromkeys(row["temperature"] for row in found):
        rows = [["draft", "steps, topk, nodes", *kinds, "all", "tokens/s", "× plain", "same texts"]]
        for row in (row for row in found if row["temperature"] == temperature):
            plain, rate = row.get("plain_tokens_per_second"), row["tokens_per_second"]
            by_kind = [f"{row['accept_length_by_kind'].get(kind, 0):.2f}" for kind in kinds]
            figures = [f"{row['accept_length']:.2f}", f"{rate:.0f}", f"{rate / plain:.2f}" if plain else ""]
            tree = "" if row["draft"] == "plain" else ", ".join(map(str, row["tree"]))
            rows.append([row["draft"], tree, *by_kind, *figures, row.get("same_texts", "")])
        yield f"temperature {temperature:g}", rows


def markdown(title: str, rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"**{title}**", "", lines[0], "| --- " * len(rows[0]) + "|", *lines[1:], ""])


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Accept length and speed over plain decoding's, where it was measured, by nodes; a column for each temperature.

    Lines are of trees, triangles of chains.
    """
    from matplotlib.figure import Figure

    temperatures, names = (list(dict.fromkeys(row[field] for row in found)) for field in ("temperature", "draft"))
    figure = Figure(figsize=(5.0 * len(temperatures), 6.0), layout="constrained")
    for column, temperature in zip(figure.subplots(2, len(temperatures), squeeze=False).T, temperatures, strict=True):
        column[0].set_title(f"temperature {temperature:g}")
        for colour, name in enumerate(name for name in names if name != "plain"):
            own = [row for row in found if (row["temperature"], row["draft"]) == (temperature, name)]
            for style in ("^", "o-"):
                chosen = [row for row in own if (row["tree"][1] == 1) == (style == "^")]
                nodes = [row["tree"][2] for row in chosen]
                speeds = [row["tokens_per_second"] / row.get("plain_tokens_per_second", float("nan")) for row in chosen]
                for axis, values in zip(column, ([row["accept_length"] for row in chosen], speeds), strict=True):
                    axis.plot(nodes, values, style, color=f"C{colour}", label=name if style == "o-" else None)
        for axis, label in zip(column, ("accept length", "tokens/s over plain decoding's"), strict=True):
            axis.set(xlabel="nodes", ylabel=label, ylim=(0, None))
        column[0].legend()
    save_plot(figure, path)


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    if bool(arguments.draft) == bool(arguments.read):
        parser.error("give one --draft or several, or --read")
    check_plot_path(arguments.plot)
    read = [row for path in arguments.read or () for row in json.loads(path.read_text())["rows"]]
    written, found = [], read or run(arguments)
    for title, rows in tables(found):
        print(title)
        print_table(rows)
        written.append(markdown(title, rows))
    if arguments.plot:
        plot(found, arguments.plot)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(written), encoding="utf-8")


if __name__ == "__main__":
    main()
