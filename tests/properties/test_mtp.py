"""Multi-token prediction layers through every property: one layer, three in a chain, three that read the target."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from espalier.config import EngineConfig
from espalier.engine.launch_input import LaunchInput
from espalier.layout import TreeShape, max_draft_tokens
from espalier.request import Request, SamplingParams
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.startup import load
from tests.harness import prompts, request, run
from tests.mtp import mtp_directories
from tests.pairwise import pairwise, rows_of
from tests.properties.mtp_setup import MTPSetup, mtp_reference_of
from tests.properties.watch import INCREMENTAL, PROPERTIES, PROPOSAL, Watch, run_watched

# Modules and form.
FORMS = ((1, "chain"), (3, "chain"), (3, "target"))
# The product that the issue names; llama's draft is a head in the speculators format, deepseek_v3's is its own.
PRODUCT: dict[str, Sequence[Any]] = {
    "form": FORMS,
    "topk": (1, 2, 4),
    "steps": (2, 3, 5),
    "page_size": (1, 16, 64, 256),
    "family": ("llama", "deepseek_v3"),
}
AROUND: dict[str, Sequence[Any]] = {"overlap": (False, True), "attention": ("sdpa", "reference")}


def watched(setup: MTPSetup) -> Watch:
    return Watch(setup.engine(), "mtp", mtp_reference_of(setup))


def asked(index: int, prompt: list[int], **style: Any) -> Request:
    return request(index, prompt, SamplingParams(**{"temperature": 3.0, "max_tokens": 8, **style}))


def cell_setup(cell: Mapping[str, Any]) -> tuple[MTPSetup, list[Request]]:
    """Prompts of one and of two tokens, shorter than three modules, and one that a page's end cuts."""
    count = min(cell["page_size"], 64)
    lengths, max_tokens = [max(count - 4, 5), 1, 2, 21], 8
    nodes = min(max_draft_tokens(cell["steps"], cell["topk"]), 24)
    setup = MTPSetup(
        **cell,
        num_draft_tokens=(2 + nodes) // 2 + 1,
        max_batch=3,
        max_context=max(lengths) + max_tokens,
        chunk_size=16,
    )
    styles = ({"temperature": 0.0}, {"temperature": 6.0}, {"temperature": 1.2}, {"temperature": 3.0})
    requests = [asked(i, prompt, max_tokens=max_tokens, **styles[i]) for i, prompt in enumerate(prompts(7, lengths))]
    return setup, requests


CELLS = pairwise({**PRODUCT, **AROUND}, lambda cell: False)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())))
def test_every_property_holds(cell):
    setup, requests = cell_setup(cell)
    run_watched(watched(setup), requests)


@pytest.mark.full
@pytest.mark.parametrize("cell", list(rows_of(PRODUCT)), ids=lambda cell: "-".join(map(str, cell.values())))
def test_every_property_holds_in_the_whole_product(cell):
    setup, requests = cell_setup(cell)
    run_watched(watched(setup), requests)


# (request, cached tokens, new tokens).
CUT = ((0, 0, 34), (1, 20, 30), (2, 23, 18), (3, 26, 48))
SMALL = MTPSetup(steps=3, topk=2, num_draft_tokens=9, page_size=2, max_batch=3, max_context=64, chunk_size=16)
every_form = pytest.mark.parametrize("form", FORMS, ids=str)
# One layer has no feeds: it enters rows like an EAGLE-3 draft.
both_of_three = pytest.mark.parametrize("form", FORMS[1:], ids=str)


@pytest.mark.parametrize(("page_size", "family", "form"), [(1, "llama", FORMS[2]), (3, "deepseek_v3", FORMS[1])])
def test_a_prefix_hit_of_every_length_is_entered_again(page_size, family, form):
    watch = watched(replace(SMALL, page_size=page_size, family=family, form=form, overlap=page_size == 3))
    trunk = prompts(29, [11])[0]
    branches = [[*trunk[:kept], (trunk[kept] + 1) % 16, *trunk[kept + 1 :]] for kept in range(len(trunk))]
    requests = [asked(i, prompt) for i, prompt in enumerate([trunk, *branches, trunk, trunk[:4], trunk[:2]])]
    run_watched(watch, requests[:1], last=False)
    run_watched(watch, requests[1:])
    assert sum(r.cached_tokens for r in requests) >= 9


@both_of_three
@pytest.mark.parametrize("chunk_size", [16, 64], ids=["chunks", "pieces"])
def test_a_prompt_is_cut_behind_every_hit(chunk_size, form):
    """Passes of sixteen rows cut prompts into chunks.  Wider ones run several pieces of a prompt, each fed by the piece
    before it."""
    watch = watched(replace(SMALL, form=form, page_size=1, max_batch=2, max_context=96, chunk_size=chunk_size))
    trunk = prompts(37, [40])[0]
    requests = [asked(i, [*trunk[:kept], *prompts(i, [new])[0]], max_tokens=4) for i, kept, new in CUT]
    run_watched(watch, [asked(9, trunk, max_tokens=2)], last=False)
    executor = watch.engine.executor
    with patch.object(executor, "launch", wraps=executor.launch) as launch:
        run_watched(watch, requests)
    assert any(call.args[0].pieces for call in launch.call_args_list) is (chunk_size == 64)


@both_of_three
def test_log_probabilities_of_a_cached_prompt_compute_rows_again(form):
    watch = watched(replace(SMALL, form=form, page_size=1))
    trunk = prompts(43, [25])[0]
    run_watched(watch, [asked(0, trunk)], last=False)
    # Until it is past them, a slot's shared pages hold rows that it has not decided again.
    watch.properties -= {INCREMENTAL}
    run_watched(watch, [asked(1, [*trunk[:22], 3, 5], prompt_logprobs=1), asked(2, trunk, prompt_logprobs=0)])


@every_form
def test_one_request_in_a_bucket_of_eight(form):
    """Seven rows of padding go to no expert and change nothing; neither does a launch of no requests."""
    setup = replace(SMALL, family="deepseek_v3", form=form, max_batch=8, chunk_size=128)
    engine = setup.engine()
    right = engine.executor.run

    def padded(launch_input):
        dummies = 7
        lengths = (*launch_input.lengths, *(0,) * dummies) if launch_input.is_prefill else ()
        return right(replace(launch_input, slots=(*launch_input.slots, *(0,) * dummies), lengths=lengths))[:-dummies]

    for width in (0, 16):
        assert right(LaunchInput(slots=(), needs=SamplingNeeds(), width=width)) == []
    engine.executor.run = padded
    watch = Watch(engine, "mtp", mtp_reference_of(setup), PROPERTIES)
    run_watched(watch, [asked(0, prompts(41, [2])[0], max_tokens=14)])


@both_of_three
def test_preempted_requests_are_as_if_undisturbed(form):
    watch = watched(replace(SMALL, form=form, num_pages=26, max_context=40, overlap=True))
    style = {"max_tokens": 20, "presence_penalty": 0.6}
    run_watched(watch, [asked(i, prompt, **style) for i, prompt in enumerate(prompts(31, [5, 19, 7, 12]))])
    assert watch.engine.scheduler.num_preempted > 0


@every_form
def test_a_tree_a_batch(form):
    """Steps below, at and beyond the modules, and none."""
    trees = ((2, TreeShape(2, 2, 5)), (3, TreeShape(0, 1, 1)))
    watch = watched(replace(SMALL, form=form, steps=5, num_draft_tokens=14, trees=trees))
    # The brute-force tree knows one shape; what is proposed in the others, the tokens and the rows show.
    watch.properties -= {PROPOSAL}
    run_watched(watch, [asked(i, p, max_tokens=6 + 5 * i) for i, p in enumerate(prompts(5, [4, 1, 5]))])


ONE = ("deepseek_v3_dense", "glm4_moe_lite", "mistral", "qwen3_moe")
FAMILIES = [
    *((family, FORMS[0]) for family in ONE),
    *((family, form) for family in ("glm4_moe", "mimo") for form in FORMS),
]


@pytest.mark.parametrize(("family", "form"), FAMILIES)
def test_other_families(family, form):
    window = 5 if family == "mistral" else None
    run_watched(
        watched(replace(SMALL, family=family, window=window, form=form)),
        [asked(i, prompt) for i, prompt in enumerate(prompts(3, [9, 2]))],
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo"])
def test_a_target_brings_its_own_layers(family):
    """From config.json to text: found, sized, loaded and run by what the directory declares."""
    target, _ = mtp_directories(family, 3)
    config = EngineConfig(model=target, device="cpu", dtype="float64", max_context=64, num_pages=40)
    found = load.find(config)
    resolved = load.resolve_config(config, found)
    assert (resolved.algorithm, resolved.reentry, len(found.spec.layers)) == ("mtp", 3, 3)
    assert load._weights_of(found) == load._weights_of(replace(found, draft_path=None, draft=None))
    engine, _ = load.build_engine(resolved, found, None)
    ran, plain = ([request(i, prompt) for i, prompt in enumerate(prompts(3, [5, 9]))] for _ in range(2))
    assert run(engine, ran).stats.accepted > 0
    expected = run(MTPSetup(family=family, form=(3, "chain")).plain().engine(), plain).tokens
    assert [r.output for r in ran] == expected
