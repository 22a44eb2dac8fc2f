"""The round's edges: a batch of none, padding by the dummy slot, a launch larger than its buffers."""

from dataclasses import replace

import pytest
import torch

from espalier.attention import Nodes, Prefix
from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.engine.results import ResultsRing, read_results
from espalier.errors import EspalierError
from espalier.kernels.ops.experts import grouped_experts
from espalier.kernels.ops.state import gather_slots
from espalier.kernels.ops.tree import AcceptedPath
from espalier.request import SamplingParams
from espalier.sampling.logit_processors import SamplingFeatures
from espalier.speculate.round import ModelRunner, commit, decode_round, prefill
from tests.block import FORMS
from tests.harness import Setup, prompts, request
from tests.properties.block_setup import BlockSetup
from tests.properties.layouts import reference_of
from tests.properties.mtp_setup import MTPSetup
from tests.properties.peagle_setup import PEagleSetup
from tests.properties.watch import Watch, run_watched

SETUP = Setup(steps=3, topk=2, num_draft_tokens=8, page_size=3, max_batch=3)
ALL_SAMPLING_FEATURES = SamplingFeatures(sampled=True, filtered=True, penalised=True, biased=True)
NONE = torch.zeros(0, dtype=torch.int64)
EMPTY = LaunchInput(slots=(), sampling_features=SamplingFeatures(), reports_trees=True)
algorithms = pytest.mark.parametrize("algorithm", ["eagle3", "ngram", "none"])


def setup_of(algorithm: str, **change) -> Setup:
    return replace(SETUP if algorithm != "none" else SETUP.plain(), algorithm=algorithm, **change)


def round_of(algorithm: str, **change) -> ModelRunner:
    return setup_of(algorithm, **change).engine().executor.runner


@algorithms
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("needs", [SamplingFeatures(), ALL_SAMPLING_FEATURES], ids=["greedy", "shaped"])
def test_an_empty_batch_is_legal(algorithm, attention, needs):
    r = round_of(algorithm, attention=attention)
    with torch.inference_mode():
        for outcome in (decode_round(r, NONE, needs), prefill(r, NONE, NONE, 16, needs)):
            results = ResultsRing(r.layout, r.target.config.vocab_size, 1, r.pages.device)
            results.write(NONE.new_zeros(1), outcome)
            assert not results.ring.any()
            assert read_results(results.columns, results.ring[0, :0].numpy(), None, EMPTY) == []
    assert not any(buffer.any() for pair in r.pages.layers.values() for buffer in pair)


@pytest.mark.parametrize(
    "setup",
    [
        *(BlockSetup(form=form, steps=3, topk=3, num_draft_tokens=14) for form in FORMS),
        *(MTPSetup(form=form, steps=3) for form in ((1, "chain"), (3, "chain"), (3, "target"))),
        PEagleSetup(steps=3),
    ],
    ids=lambda setup: f"{type(setup).__name__}-{getattr(setup, 'form', '')}",
)
def test_an_empty_batch_is_legal_for_every_kind_of_draft(setup):
    r = setup.engine().executor.runner
    with torch.inference_mode():
        for output in (decode_round(r, NONE, SamplingFeatures()), prefill(r, NONE, NONE, 16, SamplingFeatures())):
            assert output.path.length.shape == (0,)


@algorithms
def test_an_empty_launch_is_legal(algorithm):
    engine = setup_of(algorithm).engine()
    assert engine.executor.launch(LaunchInput(slots=(), sampling_features=SamplingFeatures())).result() == []
    assert engine.step() == [] and not engine.has_work


def test_an_empty_batch_plans_and_commits():
    r = round_of("eagle3")
    slots = gather_slots(r.table, NONE)
    none = torch.zeros(0, 4, dtype=torch.int64)
    r.target(r.cache.begin_pass(Prefix(slots.page_table, NONE), Nodes.chain(none), none))
    commit(r, slots, AcceptedPath(none, NONE, none, NONE), count_tokens=True)


@algorithms
def test_a_batch_padded_by_the_dummy_slot_is_the_batch(algorithm):
    """Slot 0 before, between and after real ones: every property holds of these, and it is never advanced."""
    # Three requests and four rows of padding, in rounds and in the narrowest prefill pass.
    setup = setup_of(algorithm, max_batch=7, chunk_size=7 * 16)
    watch = Watch(setup.engine(), algorithm, reference_of(setup))
    r = watch.engine.executor.runner
    right = watch._run

    def padded(launch_input: LaunchInput) -> list[RequestResult]:
        rows = right(
            replace(launch_input, slots=between_zeros(launch_input.slots), lengths=between_zeros(launch_input.lengths))
        )
        assert [row.tokens for row in rows[::2]] == [[]] * (len(launch_input.slots) + 1)
        assert [int(value[0]) for value in (r.table.prefix_len, r.table.end, r.table.depth_limit)] == [0, 0, 0]
        return rows[1::2]

    watch._run = padded
    run_watched(
        watch,
        [
            request(i, prompt, SamplingParams(temperature=float(2 * i), max_tokens=12, presence_penalty=0.2 * i))
            for i, prompt in enumerate(prompts(23, [4, 9, 2]))
        ],
    )
    for pair in r.pages.layers.values():
        assert not any(buffer[: setup.page_size].any() for buffer in pair), "padding left a trace in the dummy page"


@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_only_rows_of_requests_go_to_experts(algorithm, monkeypatch):
    """Neither padding of a chunk, nor requests that pad a batch, nor void nodes.  Of a chunk's last layer, the output
    at each request's last token is computed alone."""
    rows_to_experts: list[torch.Tensor] = []

    def recorded(*experts, live_rows, **how):
        rows_to_experts.append(live_rows)
        return grouped_experts(*experts, live_rows=live_rows, **how)

    monkeypatch.setattr("espalier.models.layers.mlp.grouped_experts", recorded)
    engine = setup_of(algorithm, family="qwen3_moe", max_batch=4).engine()
    drawn = [request(i, prompt) for i, prompt in enumerate(prompts(5, [6, 3]))]
    for r in drawn:
        engine.add(r)
    engine.step()
    runner = engine.executor.runner
    slots = torch.tensor([0, drawn[0].slot, 0, drawn[1].slot])
    with torch.inference_mode():
        rows_to_experts.clear()
        tree = decode_round(runner, slots, SamplingFeatures()).tree
        assert rows_to_experts
        for live in rows_to_experts:
            assert torch.equal(live.view(4, -1), (tree.tokens >= 0) & (slots > 0)[:, None])
        assert tree.tokens[0].max() >= 0, "padding is void all the same, and shows nothing"
        rows_to_experts.clear()
        prefill(runner, slots, torch.tensor([0, 2, 0, 5]), 8, SamplingFeatures())
        *of_all_rows, of_last_tokens = rows_to_experts
        assert of_all_rows and of_last_tokens.tolist() == [False, True, False, True]
        for live in of_all_rows:
            assert live.view(4, -1).sum(1).tolist() == [0, 2, 0, 5] and live.view(4, -1)[1, :2].all()


def between_zeros(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*(entry for value in values for entry in (0, value)), 0) if values else ()


def test_more_requests_than_the_buffers_hold_are_refused_before_anything_is_written():
    index = torch.arange(4)
    with torch.inference_mode():
        for algorithm in ("eagle3", "ngram"):
            with pytest.raises(EspalierError, match=r"rounds of 3 requests and this launch has 4.*max_batch"):
                decode_round(round_of(algorithm), index, SamplingFeatures())
        with pytest.raises(EspalierError, match=r"prefill pass holds 32 rows and this launch needs 4 · 16.*chunk_size"):
            prefill(round_of("ngram"), index, index, 16, SamplingFeatures())
