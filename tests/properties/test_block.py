"""Block drafts through every property: DFlash, JetSpec's causal block, DSpark's edges, and speculators' windows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from espalier.config import EngineConfig
from espalier.layout import TreeShape, max_draft_tokens
from espalier.request import Request, SamplingParams
from espalier.startup import load
from tests.block import FORMS, block_directories
from tests.harness import Ran, prompts, request, run
from tests.pairwise import pairwise, rows_of
from tests.properties.block_setup import BlockSetup, block_reference_of
from tests.properties.watch import INCREMENTAL, PROPOSAL, Watch, run_watched

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


def asked(index: int, prompt: list[int], **style: Any) -> Request:
    return request(index, prompt, SamplingParams(**{"temperature": 3.0, "max_tokens": 8, **style}))


def too_many_nodes(cell: Mapping[str, Any]) -> bool:
    """Whether no tree has them.  What a part of a cell leaves open can still be chosen."""
    steps, topk = cell.get("steps", max(PRODUCT["steps"])), cell.get("topk", max(AROUND["topk"]))
    return cell.get("nodes", 1) > max_draft_tokens(steps, topk)


def cell_setup(cell: Mapping[str, Any]) -> tuple[BlockSetup, list[Request]]:
    """Prompts of one and of two tokens, and one that a page's end cuts."""
    fields = dict(cell)
    nodes = fields.pop("nodes")
    lengths, max_tokens = [max(min(cell["page_size"], 64) - 4, 5), 1, 2, 21], 8
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


CELLS = pairwise({**PRODUCT, **AROUND}, too_many_nodes)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())))
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


# (request, cached tokens, new tokens).
CUT = ((0, 0, 34), (1, 20, 30), (2, 23, 18), (3, 26, 48))
SMALL = BlockSetup(steps=3, topk=3, num_draft_tokens=14, page_size=2, max_batch=3, max_context=64, chunk_size=16)
every_form = pytest.mark.parametrize("form", FORMS)
# How rows are entered and put back does not depend on the form: without and with edges.
two_forms = pytest.mark.parametrize("form", ["dflash", "dspark"])


@pytest.mark.parametrize(("page_size", "family", "form"), [(1, "llama", "dspark"), (3, "deepseek_v3", "dflash")])
def test_a_prefix_hit_of_every_length_is_entered_again(page_size, family, form):
    watch = watched(replace(SMALL, page_size=page_size, family=family, form=form, overlap=page_size == 3))
    trunk = prompts(29, [11])[0]
    branches = [[*trunk[:kept], (trunk[kept] + 1) % 16, *trunk[kept + 1 :]] for kept in range(len(trunk))]
    requests = [asked(i, prompt) for i, prompt in enumerate([trunk, *branches, trunk, trunk[:4], trunk[:2]])]
    run_watched(watch, requests[:1], last=False)
    run_watched(watch, requests[1:])
    assert sum(r.cached_tokens for r in requests) >= 9


@two_forms
@pytest.mark.parametrize("chunk_size", [16, 64], ids=["chunks", "pieces"])
def test_a_prompt_is_cut_behind_every_hit(chunk_size, form):
    """Passes of sixteen rows cut prompts into chunks; wider ones run several pieces of a prompt."""
    watch = watched(replace(SMALL, form=form, page_size=1, max_batch=2, max_context=96, chunk_size=chunk_size))
    trunk = prompts(37, [40])[0]
    requests = [asked(i, [*trunk[:kept], *prompts(i, [new])[0]], max_tokens=4) for i, kept, new in CUT]
    run_watched(watch, [asked(9, trunk, max_tokens=2)], last=False)
    executor = watch.engine.executor
    with patch.object(executor, "launch", wraps=executor.launch) as launch:
        run_watched(watch, requests)
    assert any(call.args[0].pieces for call in launch.call_args_list) is (chunk_size == 64)


@two_forms
def test_log_probabilities_of_a_cached_prompt_compute_rows_again(form):
    watch = watched(replace(SMALL, form=form, page_size=1))
    trunk = prompts(43, [25])[0]
    run_watched(watch, [asked(0, trunk)], last=False)
    # Until it is past them, a slot's shared pages hold rows that it has not decided again.
    watch.properties -= {INCREMENTAL}
    run_watched(watch, [asked(1, [*trunk[:22], 3, 5], prompt_logprobs=1), asked(2, trunk, prompt_logprobs=0)])


@two_forms
def test_preempted_requests_are_as_if_undisturbed(form):
    watch = watched(replace(SMALL, form=form, num_pages=26, max_context=40, overlap=True))
    style = {"max_tokens": 20, "presence_penalty": 0.6}
    run_watched(watch, [asked(i, prompt, **style) for i, prompt in enumerate(prompts(31, [5, 19, 7, 12]))])
    assert watch.engine.scheduler.num_preempted > 0


@every_form
def test_a_tree_a_batch(form):
    """Fewer steps than the block proposes, and none."""
    trees = ((2, TreeShape(2, 2, 5)), (3, TreeShape(0, 1, 1)))
    watch = watched(replace(SMALL, form=form, steps=5, num_draft_tokens=14, trees=trees))
    # The brute-force tree knows one shape; what is proposed in the others, the tokens and the rows show.
    watch.properties -= {PROPOSAL}
    run_watched(watch, [asked(i, p, max_tokens=6 + 5 * i) for i, p in enumerate(prompts(5, [4, 1, 5]))])


@every_form
def test_from_config_to_text(form):
    """Found, sized, loaded and run by what the directory declares; on = off, greedy."""
    target, draft = block_directories("llama", form, 5)
    config = EngineConfig(model=target, draft=draft, device="cpu", dtype="float64", max_context=64, num_pages=40)
    found = load.find(config)
    resolved = load.resolve_config(config, found)
    steps = 5 if form in ("dspark", "speculators") else 4
    algorithm = "dflash2" if form == "dflash2" else "block"
    assert (resolved.algorithm, resolved.reentry, resolved.block_rows, resolved.steps) == (algorithm, 0, 5, steps)
    engine, _ = load.build_engine(resolved, found, None)
    ran, plain = ([request(i, prompt) for i, prompt in enumerate(prompts(3, [5, 9]))] for _ in range(2))
    assert run(engine, ran).stats.accepted > 0
    expected = run(BlockSetup(form=form, steps=3).plain().engine(), plain).tokens
    assert [r.output for r in ran] == expected


# Without edges, with edges, and where paths are selected: what else a form has is not of the scores.
@pytest.mark.parametrize(
    "form",
    [form if form in ("dflash", "dspark", "dflash2") else pytest.param(form, marks=pytest.mark.full) for form in FORMS],
)
def test_scores_coupled_to_the_targets_noise_are_accepted_more_and_change_no_token(form):
    """At temperature 1: each depth of a block has the noise of its position."""

    def ran(coupled: bool, setup: BlockSetup) -> Ran:
        engine = setup.engine()
        engine.executor.runner = replace(engine.executor.runner, coupled_scores=coupled)
        requests = [asked(i, prompt, temperature=1.0, max_tokens=40) for i, prompt in enumerate(prompts(3, [5] * 12))]
        return run(engine, requests)

    setup = replace(SMALL, form=form, steps=5, topk=4, num_draft_tokens=16, max_batch=12)
    coupled, alone, plain = ran(True, setup), ran(False, setup), ran(True, setup.plain())
    assert coupled.tokens == alone.tokens == plain.tokens
    # The noise of a token decides more than a random draft does.
    assert coupled.stats.accept_length - 1 > 1.5 * (alone.stats.accept_length - 1)
