"""Multi-token prediction layers through every property: one layer, three in a chain, three that read the target."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from espalier.config import EngineConfig
from espalier.engine.launch_input import LaunchInput
from espalier.layout import TreeShape, max_draft_tokens
from espalier.models.weight_files import count_weights_in
from espalier.request import Request
from espalier.sampling.logit_processors import SamplingFeatures
from espalier.startup import load
from tests.harness import prompts, request, run
from tests.mtp import mtp_directories
from tests.pairwise import fewer, fewest_params, in_turn_params, pairwise, rows_of
from tests.properties import scenarios
from tests.properties.mtp_setup import MTPSetup, mtp_reference_of
from tests.properties.scenarios import asked
from tests.properties.watch import PROPERTIES, Watch, run_watched

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


def cell_setup(cell: Mapping[str, Any]) -> tuple[MTPSetup, list[Request]]:
    """Prompts of one and of two tokens, shorter than three modules, and one that a page's end cuts."""
    count = min(cell["page_size"], 64)
    lengths, max_tokens = [max(count - 4, 5), 1, 2, 21], 6
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


# Steps below and beyond the modules; of the sizes the least and one that is many.
CELLS = pairwise({**PRODUCT, **AROUND, "topk": (1, 4), "steps": (2, 5), "page_size": (1, 64)}, lambda cell: False)


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


SMALL = MTPSetup(steps=3, topk=2, num_draft_tokens=9, page_size=2, max_batch=3, max_context=64, chunk_size=16)
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


@pytest.mark.parametrize(
    ("page_size", "family", "form"),
    fewer([(1, "llama", FORMS[2]), (3, "deepseek_v3", FORMS[1])], lambda *cell: cell[0] == 1),
)
def test_a_prefix_hit_of_every_length_is_entered_again(page_size, family, form):
    fields = {"page_size": page_size, "family": family, "form": form, "overlap": page_size == 3}
    scenarios.hit_every_length(watched, replace(SMALL, **fields))


@pytest.mark.parametrize(("chunk_size", "form"), in_turn_params([16, 64], FORMS[1:]))
def test_a_prompt_is_cut_behind_every_hit(chunk_size, form):
    scenarios.cut_behind_hits(watched, replace(SMALL, form=form), chunk_size)


@pytest.mark.parametrize(("chunk_and_length", "form"), in_turn_params([(16, 25), (64, 45)], FORMS[1:]))
def test_log_probabilities_of_a_cached_prompt_compute_rows_again(chunk_and_length, form):
    chunk_size, length = chunk_and_length
    family = "deepseek_v3" if chunk_size > 16 else SMALL.family
    setup = replace(SMALL, form=form, chunk_size=chunk_size, family=family)
    scenarios.ask_of_cached_prompts(watched, setup, length)


@pytest.mark.parametrize(
    "form", [FORMS[1], *(pytest.param(form, marks=pytest.mark.full) for form in (FORMS[0], FORMS[2]))], ids=str
)
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
        assert right(LaunchInput(slots=(), sampling_features=SamplingFeatures(), width=width)) == []
    engine.executor.run = padded
    watch = Watch(engine, "mtp", mtp_reference_of(setup), PROPERTIES)
    run_watched(watch, [asked(0, prompts(41, [2])[0], max_tokens=14)])


# That pages and requests are put back is the engine's: test_disturbed.py and test_states.py have it.
@pytest.mark.full
def test_pages_without_draft_rows_serve_no_draft():
    scenarios.opt_out(watched, replace(SMALL, form=FORMS[1]))


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS[1:], ids=str)
def test_preempted_requests_are_as_if_undisturbed(form):
    scenarios.preempt(watched, replace(SMALL, form=form))


@every_form
def test_a_tree_a_batch(form):
    """Steps below, at and beyond the modules, and none."""
    scenarios.tree_a_batch(watched, replace(SMALL, form=form), TreeShape(2, 2, 5))


ONE = ("deepseek_v3_dense", "glm4_moe_lite", "mistral", "qwen3_moe")
SOME = [("glm4_moe", FORMS[1]), ("mimo", FORMS[2])]
FAMILIES = [
    *((family, FORMS[0]) for family in ONE),
    *((family, form) for family in ("glm4_moe", "mimo") for form in FORMS),
]


@pytest.mark.parametrize(
    ("family", "form"),
    # The forms differ in what feeds a module, families in how a layer is read.
    [pytest.param(*each, marks=() if each in SOME or each[0] in ONE else pytest.mark.full) for each in FAMILIES],
)
def test_other_families(family, form):
    window = 5 if family == "mistral" else None
    run_watched(
        watched(replace(SMALL, family=family, window=window, form=form)),
        [asked(i, prompt) for i, prompt in enumerate(prompts(3, [9, 2]))],
    )


@pytest.mark.parametrize("family", fewer(["deepseek_v3", "mimo", "qwen3_5"], lambda family: family != "mimo"))
def test_a_target_brings_its_own_layers(family):
    """From config.json to text: found, sized, loaded and run by what the directory declares."""
    target, _ = mtp_directories(family, 3)
    config = EngineConfig(model=target, device="cpu", dtype="float64", max_context=64, num_pages=40)
    found = load.find_checkpoint(config)
    resolved = load.resolve_config(config, found)
    assert (resolved.algorithm, resolved.layout.num_recomputed_tokens, len(found.spec.layer_specs)) == ("mtp", 3, 3)
    # Its layers are counted once, and only as the draft.
    assert load.count_weights(found) == count_weights_in(found.target_path, found.target.formats)
    assert (
        load.count_weights(found).num_cast_values
        > load.count_weights(replace(found, draft_path=None, draft=None)).num_cast_values
    )
    engine, _ = load.build_engine(resolved, found, None)
    ran, plain = ([request(i, prompt) for i, prompt in enumerate(prompts(3, [5, 9]))] for _ in range(2))
    assert run(engine, ran).stats.accepted > 0
    expected = run(MTPSetup(family=family, form=(3, "chain")).plain().engine(), plain).tokens
    assert [r.output for r in ran] == expected
