"""P-EAGLE heads through every property: extended as EAGLE's, proposing as a block draft."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from espalier.config import EngineConfig
from espalier.layout import TreeShape, max_draft_tokens
from espalier.request import Request
from espalier.startup import load
from tests.harness import prompts, request, run
from tests.pairwise import fewer, rows_of
from tests.peagle import peagle_directories
from tests.properties import scenarios
from tests.properties.peagle_setup import PEagleSetup, peagle_reference_of
from tests.properties.scenarios import asked
from tests.properties.test_block import PRODUCT, STYLES
from tests.properties.watch import Watch, run_watched

# Every value of the product that the issue names once.
CELLS: Sequence[dict[str, Any]] = (
    {"steps": 2, "nodes": 6, "page_size": 16, "family": "deepseek_v3", "overlap": True},
    {"steps": 5, "nodes": 33, "page_size": 1, "family": "llama", "attention": "reference"},
    {"steps": 8, "nodes": 256, "page_size": 64, "family": "llama", "topk": 8},
    {"steps": 15, "nodes": 33, "page_size": 256, "family": "deepseek_v3", "overlap": True},
)
SMALL = PEagleSetup(steps=3, topk=3, num_draft_tokens=14, page_size=2, max_batch=3, max_context=64, chunk_size=16)


def watched(setup: PEagleSetup) -> Watch:
    return Watch(setup.engine(), "peagle", peagle_reference_of(setup))


def run_cell(cell: Mapping[str, Any]) -> None:
    """Prompts of one and of two tokens, and one that a page's end cuts."""
    fields = {"topk": 4, **cell}
    nodes = fields.pop("nodes")
    lengths, max_tokens = [max(min(cell["page_size"], 64) - 4, 5), 1, 2, 21], 8
    most = max_draft_tokens(fields["steps"], fields["topk"])
    sizes = {"max_batch": 3, "max_context": max(lengths) + max_tokens, "chunk_size": 16}
    setup = PEagleSetup(**fields, **sizes, num_draft_tokens=min(nodes, most))
    requests = [asked(i, prompt, max_tokens=max_tokens, **STYLES[i]) for i, prompt in enumerate(prompts(7, lengths))]
    run_watched(watched(setup), requests)


@pytest.mark.parametrize(
    "cell", fewer(CELLS, lambda cell: cell["steps"] != 8), ids=lambda cell: "-".join(map(str, cell.values()))
)
def test_every_property_holds(cell):
    run_cell(cell)


@pytest.mark.full
@pytest.mark.parametrize(
    "cell",
    list(rows_of({name: values for name, values in PRODUCT.items() if name != "form"})),
    ids=lambda cell: "-".join(map(str, cell.values())),
)
def test_every_property_holds_in_the_whole_product(cell):
    run_cell(cell)


def cut(trunk: list[int], kept: int, index: int) -> Request:
    return asked(index, [*trunk[:kept], *prompts(index, [9])[0]], max_tokens=4)


def test_prefix_hits_are_entered_again():
    watch = watched(replace(SMALL, page_size=3, overlap=True, max_context=96))
    trunk = prompts(37, [40])[0]
    run_watched(watch, [asked(9, trunk, max_tokens=2)], last=False)
    requests = [cut(trunk, kept, i) for i, kept in enumerate((0, 1, 3, 20, 31, 40))]
    run_watched(watch, requests)
    assert sum(r.cached_tokens for r in requests) >= 80


# That pages and requests are put back is the engine's: test_disturbed.py and test_states.py have it.
@pytest.mark.full
def test_pages_without_draft_rows_serve_no_draft():
    scenarios.opt_out(watched, SMALL)


@pytest.mark.full
def test_preempted_requests_are_as_if_undisturbed():
    scenarios.preempt(watched, SMALL)


def test_a_tree_a_batch():
    """Fewer steps, one step, and none."""
    scenarios.tree_a_batch(watched, SMALL, TreeShape(1, 2, 3))


def test_from_config_to_text():
    """Found, sized, loaded and run by what the directory declares; on = off, greedy."""
    target, draft = peagle_directories("llama")
    config = EngineConfig(model=target, draft=draft, device="cpu", dtype="float64", max_context=64, num_pages=40)
    found = load.find_checkpoint(config)
    resolved = load.resolve_config(config, found)
    layout = resolved.layout
    assert (resolved.algorithm, layout.num_recomputed_tokens, layout.block_rows, layout.steps) == ("peagle", 1, 15, 15)
    engine, _ = load.build_engine(resolved, found, None)
    ran, plain = ([request(i, prompt) for i, prompt in enumerate(prompts(3, [5, 9]))] for _ in range(2))
    assert run(engine, ran).stats.accepted > 0
    expected = run(replace(SMALL).plain().engine(), plain).tokens
    assert [r.output for r in ran] == expected
