"""Layers that attend to chosen rows through every property: whole and shared selections, under EAGLE-3 and MTP.

The oracle (tests/oracles/dense.py) sorts all rows by (score, position); the watch holds index keys as it holds K."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from espalier.layout import TreeShape
from espalier.request import Request
from tests.harness import Setup, prompts
from tests.pairwise import fewest_params, pairwise, rows_of
from tests.properties import scenarios
from tests.properties.layouts import reference_of
from tests.properties.mtp_setup import MTPSetup, mtp_reference_of
from tests.properties.scenarios import asked
from tests.properties.watch import Watch, run_watched

# The second shares selections; with EAGLE-3, its draft is latent.
FAMILIES = ("deepseek_v32", "glm_moe_dsa")
# (steps, topk, nodes)
TREES = ((2, 1, 3), (3, 4, 24), (8, 4, 65), (2, 8, 17))
PRODUCT: dict[str, Sequence[Any]] = {
    "family": FAMILIES,
    "chosen": (1, 4, 8),
    "algorithm": ("eagle3", "mtp"),
    "tree": TREES,
    "page_size": (1, 16, 64, 256),
}
AROUND: dict[str, Sequence[Any]] = {"overlap": (False, True), "attention": ("sdpa", "reference")}
STYLES = ({"temperature": 0.0}, {"temperature": 6.0}, {"temperature": 1.2})


def watched(setup: Setup) -> Watch:
    reference = mtp_reference_of(setup) if isinstance(setup, MTPSetup) else reference_of(setup)
    return Watch(setup.engine(), setup.algorithm, reference)


def cell_setup(cell: Mapping[str, Any]) -> tuple[Setup, list[Request]]:
    """Texts on both sides of the number of rows that are chosen, and one that a page's end cuts."""
    steps, topk, nodes = cell["tree"]
    lengths, max_tokens = [max(min(cell["page_size"], 64) - 4, 5), 1, 21], 7
    around = {name: cell[name] for name in ("algorithm", "page_size", "overlap", "attention") if name in cell}
    sizes = {"steps": steps, "topk": topk, "num_draft_tokens": nodes, "max_batch": 3, "chunk_size": 16}
    kind = MTPSetup if cell["algorithm"] == "mtp" else Setup
    family, context = f"{cell['family']}_topk{cell['chosen']}", max(lengths) + max_tokens
    setup = kind(**around, **sizes, family=family, max_context=context)
    return setup, [asked(i, prompt, max_tokens=max_tokens, **STYLES[i]) for i, prompt in enumerate(prompts(7, lengths))]


# One row a page and many, all rows chosen and few; the trees between are in the whole product.
ARRAY = {"chosen": (1, 8), "tree": (TREES[0], TREES[2]), "page_size": (1, 64)}
CELLS = pairwise({**PRODUCT, **AROUND, **ARRAY}, lambda cell: False)


# Pairs of sizes, and of what is around, meet in test_layouts.py.
@pytest.mark.parametrize("cell", fewest_params(CELLS))
def test_every_property_holds(cell):
    setup, requests = cell_setup(cell)
    run_watched(watched(setup), requests)


@pytest.mark.full
@pytest.mark.parametrize("cell", list(rows_of(PRODUCT)), ids=lambda cell: "-".join(map(str, cell.values())))
def test_every_property_holds_in_the_whole_product(cell):
    setup, requests = cell_setup(cell)
    run_watched(watched(setup), requests)


SMALL = Setup(
    steps=3, topk=2, num_draft_tokens=9, page_size=2, max_batch=3, max_context=64, chunk_size=16, family="glm_moe_dsa"
)


@pytest.mark.full
def test_a_prefix_hit_of_every_length():
    scenarios.hit_every_length(watched, replace(SMALL, page_size=3))


@pytest.mark.parametrize("chunk_size", [16, pytest.param(64, marks=pytest.mark.full)], ids=["chunks", "pieces"])
def test_a_prompt_is_cut_behind_every_hit(chunk_size):
    scenarios.cut_behind_hits(watched, SMALL, chunk_size)


@pytest.mark.full
def test_preempted_requests():
    scenarios.preempt(watched, SMALL)


def test_a_tree_a_batch():
    scenarios.tree_a_batch(watched, SMALL, TreeShape(2, 2, 5))
