"""`python -m lab sources`: a draft with other sources, compared with the draft and each source alone.

The bundled model runs.  All engines are loaded at once and take turns at every prompt, each time in another order, so
a busy machine slows them equally.  On a CPU the seconds are processor time, which does not depend on other processes.
"choosing" is the share of the time in which nodes are scored, merged, shared out and counted.
"""

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import torch

from espalier.bench.drive import heldout_texts
from espalier.config import SpeculationConfig
from espalier.engine.guesses import GuessSources
from espalier.llm import LLM
from espalier.request import SamplingParams
from espalier.speculate.drafters.path_merging import PathMergingDrafter
from espalier.speculate.tree import Tree
from espalier.stats import SpeculationStats
from espalier.terminal.console import print_table, progress, write_json
from lab.bench.flags import SOURCE_TEXTS

SOURCE_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"steps": 0},
    "ngram": {"algorithm": "ngram"},
    "eagle3": {"sources": "none"},
    "eagle3 + text": {"sources": "text"},
    "eagle3 + text + index": {"sources": "text,index"},
    "ngram + index": {"algorithm": "ngram", "sources": "index"},
}
# Functions of a round that serve the other sources and calibrated scores.
TIMED_FUNCTIONS = (
    (PathMergingDrafter, "_merge_paths"),
    (PathMergingDrafter, "_tree_of_guesses"),
    (Tree, "best_nodes"),
    (GuessSources, "ask_sources"),
    (GuessSources, "launch_fields"),
    (GuessSources, "count_correct_guesses"),
)
NUM_EDITS = 10
PROSE_CHARACTERS = 600


@dataclass
class VariantTotal:
    """Sums over the prompts of one variant.  choosing_seconds: the seconds in TIMED_FUNCTIONS."""

    seconds: float
    choosing_seconds: float
    num_tokens: int
    stats: SpeculationStats


def clock_seconds() -> float:
    return perf_counter() if torch.cuda.is_available() else process_time()


def run(args: Namespace) -> None:
    makers = dict(zip(SOURCE_TEXTS, (code_prompts, prose_prompts, edited_file_prompts), strict=True))
    asked = [(name, temperature) for name in args.texts for temperature in args.temperature]
    rows = []
    with progress("measuring", len(asked)) as advance:
        for name, temperature in asked:
            params = SamplingParams(temperature=temperature, max_tokens=args.tokens, ignore_eos=True, seed=1)
            rows += measure_variants(makers[name](args.prompts), params, {"text": name, "temperature": temperature})
            advance()
    write_json(args.json, {"sources": rows})
    print_table([[*rows[0]], *([str(value) for value in row.values()] for row in rows)])


def measure_variants(prompts: Sequence[str], params: SamplingParams, about: dict[str, Any]) -> list[dict[str, Any]]:
    totals, num_equal = {name: VariantTotal(0.0, 0.0, 0, SpeculationStats()) for name in SOURCE_VARIANTS}, 0
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_llm_of_variant(variant)) for name, variant in SOURCE_VARIANTS.items()}
        spent = stack.enter_context(time_functions(TIMED_FUNCTIONS))
        for llm in engines.values():
            llm.generate("warm", SamplingParams(max_tokens=8))
        for i, prompt in enumerate(prompts):
            said, order = set(), deque(engines.items())
            order.rotate(i)
            for name, llm in order:
                begun, before = clock_seconds(), sum(spent)
                [output] = llm.generate(prompt, params)
                totals[name].seconds += clock_seconds() - begun
                totals[name].choosing_seconds += sum(spent) - before
                totals[name].num_tokens += len(output.token_ids)
                totals[name].stats.merge(output.speculation)
                said.add(tuple(output.token_ids))
            num_equal += len(said) == 1
            # On a GPU, a product's rounding may depend on how many rows the tree has.
            assert len(said) == 1 or torch.cuda.is_available(), "tokens do not depend on who drafts"
    rates = {name: total.num_tokens / total.seconds for name, total in totals.items()}
    return [
        {
            **about,
            "drafts": name,
            "tokens/s": round(rate, 1),
            "of eagle3": round(rate / rates["eagle3"], 3),
            "of ngram": round(rate / rates["ngram"], 3),
            "choosing": round(totals[name].choosing_seconds / totals[name].seconds, 4),
            "accept length": round(totals[name].stats.accept_length, 2),
            "texts equal": f"{num_equal}/{len(prompts)}",
        }
        for name, rate in rates.items()
    ]


@contextmanager
def time_functions(functions: Sequence[tuple[type, str]]) -> Iterator[list[float]]:
    """Record the seconds of each call of these functions.  None of them calls another."""
    spent: list[float] = []

    def watched(right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = clock_seconds()
            made = right(*args)
            spent.append(clock_seconds() - begun)
            return made

        return call

    with ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(patch.object(owner, name, watched(getattr(owner, name))))
        yield spent


def _llm_of_variant(variant: dict[str, Any]) -> LLM:
    speculation = None if variant == {"steps": 0} else SpeculationConfig(**variant)
    drafts: dict[str, Any] = {} if variant.get("algorithm") == "ngram" or speculation is None else {"draft": "bundled"}
    threads = {} if torch.cuda.is_available() else {"threads": 1}
    return LLM("bundled", **drafts, **threads, speculation=speculation)


def code_prompts(count: int) -> list[str]:
    return [entry["prompt"] for entry in heldout_texts()[:count]]


def prose_prompts(count: int) -> list[str]:
    pages = [page.read_text() for page in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))]
    return [page[2000 : 2000 + PROSE_CHARACTERS] for page in pages if len(page) > 2 * PROSE_CHARACTERS][:count]


def edited_file_prompts(count: int) -> list[str]:
    """Returns versions of edited files, as an agent's loop sends them: after each edit the file is a prompt."""
    files = [entry["prompt"] + entry["reference"] for entry in heldout_texts()[: max(1, count // 4)]]
    return [edit for text in files for edit in _edited_versions(text)]


def _edited_versions(text: str) -> Iterator[str]:
    lines = text.splitlines()
    for edit in range(NUM_EDITS):
        lines[edit % len(lines)] += f"  # {edit}"
        yield "\n".join(lines) + "\n"
