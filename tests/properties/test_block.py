"""Block drafts through every property: DFlash, JetSpec's causal block, the edges of DSpark, speculators' windows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from espalier.config import EngineConfig
from espalier.layout import TreeShape, max_draft_tokens
from espalier.request import Request
from espalier.startup import load
from tests.block import FORMS, KINDS, block_directories
from tests.harness import Ran, prompts, request, run
from tests.pairwise import fewer, fewest_params, pairwise, rows_of
from tests.properties import scenarios
from tests.properties.block_setup import BlockSetup, block_reference_of
from tests.properties.scenarios import asked
from tests.properties.watch import Watch, run_watched

# The product that the issue names.
PRODUCT: dict[str, Sequence[Any]] = {
    "form": FORMS,
    "steps": (2, 5, 8, 15),
    "nodes": (6, 33, 256),
    "page_size": (1, 16, 64, 256),
    "family": ("llama", "deepseek_v3"),
}
AROUND: dict[str, Sequence[Any]] = {"topk": (2, 4, 8), "overlap": (False, True), "attention": ("sdpa", "reference")}
STYLES = (
    {"temperature": 0.0},
    {"temperature": 6.0},
    {"temperature": 1.2, "presence_penalty": 0.4, "min_tokens": 5, "stop_token_ids": [1]},
    {"temperature": 3.0},
)


def watched(setup: BlockSetup) -> Watch:
    return Watch(setup.engine(), "block", block_reference_of(setup))


def too_many_nodes(cell: Mapping[str, Any]) -> bool:
    """Whether no tree has them.  What a part of a cell leaves open can still be chosen."""
    steps, topk = cell.get("steps", max(PRODUCT["steps"])), cell.get("topk", max(AROUND["topk"]))
    return cell.get("nodes", 1) > max_draft_tokens(steps, topk)


def cell_setup(cell: Mapping[str, Any]) -> tuple[BlockSetup, list[Request]]:
    """Prompts of one and of two tokens, and one that a page's end cuts."""
    fields = dict(cell)
    nodes = fields.pop("nodes")
    lengths, max_tokens = [max(min(cell["page_size"], 64) - 4, 5), 1, 2, 21], 6
    setup = BlockSetup(
        **fields,
        spare=cell["steps"] % 2,
        num_draft_tokens=nodes,
        max_batch=3,
        max_context=max(lengths) + max_tokens,
        chunk_size=16,
    )
    requests = [asked(i, prompt, max_tokens=max_tokens, **STYLES[i]) for i, prompt in enumerate(prompts(7, lengths))]
    return setup, requests


# Few and many levels, one row a page and many; the last cell has as many nodes as a tree may have.  Fifteen levels are
# in the whole product.
ARRAY = {"steps": (2, 8), "nodes": (6, 31), "page_size": (1, 64), "topk": (2, 8)}
WIDEST = {"form": "dspark", "steps": 8, "nodes": 256, "page_size": 16, "family": "deepseek_v3", "topk": 8}
CELLS = [*pairwise({**PRODUCT, **AROUND, **ARRAY}, too_many_nodes), WIDEST]


# Pairs of sizes, and of what is around, meet in test_layouts.py.
@pytest.mark.parametrize("cell", fewest_params(CELLS))
def test_every_property_holds(cell):
    setup, requests = cell_setup(cell)
    run_watched(watched(setup), requests)


# The whole product, with the smallest topk that gives so many nodes.
WHOLE = [{"topk": 8 if too_many_nodes({**cell, "topk": 4}) else 4, **cell} for cell in rows_of(PRODUCT)]


@pytest.mark.full
@pytest.mark.parametrize(
    "cell", [cell for cell in WHOLE if not too_many_nodes(cell)], ids=lambda cell: "-".join(map(str, cell.values()))
)
def test_every_property_holds_in_the_whole_product(cell):
    setup, requests = cell_setup(cell)
    run_watched(watched(setup), requests)


SMALL = BlockSetup(steps=3, topk=3, num_draft_tokens=14, page_size=2, max_batch=3, max_context=64, chunk_size=16)
# A file of each kind: the array above loads the others too.
some_forms = pytest.mark.parametrize("form", fewer(FORMS, lambda form: form in ("dspark", "speculators", "dflash2")))
# How rows are entered and put back does not depend on the form: with edges, and in `make test-full` without.
two_forms = pytest.mark.parametrize("form", fewer(["dflash", "dspark"], lambda form: form == "dspark"))


@pytest.mark.parametrize(
    ("page_size", "family", "form"),
    fewer([(1, "llama", "dspark"), (3, "deepseek_v3", "dflash")], lambda *cell: cell[0] == 1),
)
def test_a_prefix_hit_of_every_length_is_entered_again(page_size, family, form):
    fields = {"page_size": page_size, "family": family, "form": form, "overlap": page_size == 3}
    scenarios.hit_every_length(watched, replace(SMALL, **fields))


@two_forms
@pytest.mark.parametrize("chunk_size", [16, 64], ids=["chunks", "pieces"])
def test_a_prompt_is_cut_behind_every_hit(chunk_size, form):
    scenarios.cut_behind_hits(watched, replace(SMALL, form=form), chunk_size)


@two_forms
def test_log_probabilities_of_a_cached_prompt_compute_rows_again(form):
    scenarios.ask_of_cached_prompts(watched, replace(SMALL, form=form))


# That pages and requests are put back is the engine's: test_disturbed.py and test_states.py have it.
@pytest.mark.full
def test_pages_without_draft_rows_serve_no_draft():
    scenarios.opt_out(watched, SMALL)


@pytest.mark.full
@pytest.mark.parametrize("form", ["dflash", "dspark"])
def test_preempted_requests_are_as_if_undisturbed(form):
    scenarios.preempt(watched, replace(SMALL, form=form))


@pytest.mark.parametrize("form", fewer(FORMS, lambda form: form in ("dspark", "dflash2")))
def test_a_tree_a_batch(form):
    """Fewer steps than the block proposes, and none."""
    scenarios.tree_a_batch(watched, replace(SMALL, form=form), TreeShape(2, 2, 5))


@some_forms
def test_from_config_to_text(form):
    """Found, sized, loaded and run by what the directory declares; on = off, greedy."""
    target, draft = block_directories("llama", form, 5)
    config = EngineConfig(model=target, draft=draft, device="cpu", dtype="float64", max_context=64, num_pages=40)
    found = load.find_checkpoint(config)
    resolved = load.resolve_config(config, found)
    steps = 5 if form in KINDS else 4
    algorithm = "dflash2" if form == "dflash2" else "block"
    layout = resolved.layout
    assert (resolved.algorithm, layout.num_recomputed_tokens, layout.block_rows, layout.steps) == (
        algorithm,
        0,
        5,
        steps,
    )
    engine, _ = load.build_engine(resolved, found, None)
    ran, plain = ([request(i, prompt) for i, prompt in enumerate(prompts(3, [5, 9]))] for _ in range(2))
    assert run(engine, ran).stats.accepted > 0
    expected = run(BlockSetup(form=form, steps=3).plain().engine(), plain).tokens
    assert [r.output for r in ran] == expected


# Where paths are selected by edges: what else a form has is not of the scores.
@pytest.mark.parametrize(
    "form",
    fewer(FORMS, lambda form: form == "dflash2"),
)
def test_scores_coupled_to_the_targets_noise_are_accepted_more_and_change_no_token(form):
    """At temperature 1: each depth of a block has the noise of its position."""

    def ran(coupled: bool, setup: BlockSetup) -> Ran:
        engine = setup.engine()
        engine.executor.runner = replace(engine.executor.runner, shares_noise=coupled)
        requests = [asked(i, prompt, temperature=1.0, max_tokens=24) for i, prompt in enumerate(prompts(3, [5] * 12))]
        return run(engine, requests)

    setup = replace(SMALL, form=form, steps=5, topk=4, num_draft_tokens=16, max_batch=12)
    coupled, alone, plain = ran(True, setup), ran(False, setup), ran(True, setup.plain())
    assert coupled.tokens == alone.tokens == plain.tokens
    # The noise of a token decides more than a random draft does.
    assert coupled.stats.accept_length - 1 > 1.5 * (alone.stats.accept_length - 1)
