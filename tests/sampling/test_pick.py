"""Picking a token: the oracle's, with the exact law, whatever shares the batch."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.engine.launch_input import sampling_features_of
from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.request import Request
from espalier.sampling.logit_processors import DraftedAncestors, SamplingFeatures, SlotSamplingParams
from espalier.sampling.pick import SampledTokens, apply_filters, gumbel, logprobs, pick, scores_with_shared_noise
from tests.oracles.plain_sampling import plain_law, plain_pick
from tests.sampling.batch import chi_square_z, request, rows_of

VOCAB = 12
ALL_SAMPLING_FEATURES = SamplingFeatures(sampled=True, filtered=True, penalised=True, biased=True)

tokens = st.integers(0, VOCAB - 1)
requests = st.builds(
    request,
    prompt=st.lists(tokens, min_size=1, max_size=5),
    output=st.lists(tokens, max_size=6),
    seed=st.integers(0, 2**63 - 1),
    stop_ids=st.sets(tokens, max_size=3),
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.8, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=4),
    min_tokens=st.sampled_from([0, 3, 8]),
)


def draw(
    logits: torch.Tensor,
    batch: list[Request],
    needs: SamplingFeatures | None = None,
    rows: SlotSamplingParams | None = None,
) -> SampledTokens:
    """One pick a request: logits [B, V]."""
    positions = torch.tensor([[r.num_tokens] for r in batch])
    rows = rows or rows_of(batch, logits.shape[-1])
    needs = needs or sampling_features_of(batch)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    noise = gumbel(rows.seed, positions, logits.shape[-1], dtype) if needs.sampled else None
    return pick(logits[:, None], rows, needs, positions, noise)


def random_logits(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return 3 * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@given(st.lists(requests, min_size=1, max_size=4), st.integers(0, 2**32))
def test_pick_is_the_oracles(batch, seed):
    logits = random_logits(seed, len(batch), VOCAB)
    expected = [plain_pick(row, r, r.tokens) for row, r in zip(logits, batch, strict=True)]
    for needs in (sampling_features_of(batch), ALL_SAMPLING_FEATURES):
        picked = draw(logits, batch, needs)
        assert picked.tokens[:, 0].tolist() == expected
        assert picked.finite.all()


LAWS = [
    {},
    {"temperature": 0.4},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.25},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "logit_bias": {2: 1.0}},
]


@pytest.mark.parametrize("params", LAWS, ids=str)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_follow_the_exact_law(params, over):
    many, prompt = 20_000, [3, 5]
    logits = random_logits(7, VOCAB) / 2
    one = request(prompt, [3], **params)
    law = torch.tensor([plain_law(logits, one, one.tokens).get(t, 0.0) for t in range(VOCAB)])
    counter = torch.arange(many)
    seeds, positions = (counter, counter * 0 + 3) if over == "seeds" else (counter[:1], counter)
    noise = gumbel(seeds, positions.view(len(seeds), -1), VOCAB, torch.float64).view(1, many, VOCAB)
    drawn = pick(
        logits.expand(1, many, -1), rows_of([one], VOCAB), sampling_features_of([one]), positions[None], noise
    ).tokens
    counts = torch.bincount(drawn.flatten(), minlength=VOCAB)
    assert counts[law == 0].sum() == 0
    assert chi_square_z(counts[law > 0], law[law > 0] * many) < 4


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(requests, min_size=2, max_size=4), st.integers(0, 2**32))
def test_a_row_does_not_depend_on_its_batch(batch, seed):
    """To the bit, in float32, before the argmax hides what differs."""
    logits = random_logits(seed, len(batch), 3, 101, dtype=torch.float32)
    for i, r in enumerate(batch):
        alone = rows_of([r], 101)
        assert torch.equal(apply_filters(logits[i : i + 1], alone)[0], apply_filters(logits, rows_of(batch, 101))[i])
        noise = random_logits(seed + 1, len(batch), 3, 101, dtype=torch.float32)
        scores = scores_with_shared_noise(logits, rows_of(batch, 101), noise)
        assert torch.equal(scores_with_shared_noise(logits[i : i + 1], alone, noise[i : i + 1])[0], scores[i])
        mine = draw(logits[i : i + 1, 0], [r])
        assert mine.tokens[0] == draw(logits[:, 0], batch).tokens[i]


def kept_ids(logits: list[float], **params) -> list[int]:
    left = apply_filters(torch.tensor([[logits]]), rows_of([request(**params)], len(logits)))
    return torch.nonzero(left[0, 0] > -torch.inf)[:, 0].tolist()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 1}, [1]),
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 0.51}, [1, 2, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 1.0}, [1, 2, 4, 5]),
        ({"top_k": 2, "top_p": 0.6}, [1, 2]),
        ({"top_k": 3, "top_p": 0.34}, [1, 2]),
        ({}, [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_equals_at_the_cut_keep_the_lower_id(params, kept):
    assert kept_ids([-60.0, 1.0, 1.0, -60.0, 1.0, 1.0], **params) == kept


def test_min_p_counts_from_the_likeliest_and_after_top_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert kept_ids(logits, min_p=0.29) == [0, 1, 2]
    assert kept_ids(logits, min_p=0.31) == [0, 1]
    assert kept_ids(logits, min_p=0.11, top_p=0.7) == [0, 1]


@pytest.mark.parametrize("needs", [SamplingFeatures(), ALL_SAMPLING_FEATURES], ids=["off", "everything"])
@pytest.mark.parametrize("vocab", [5, 64, 6144])
def test_greedy_ties_go_to_the_lower_id(needs, vocab):
    logits = torch.zeros(2, vocab)
    logits[1, [vocab // 2, vocab - 1]] = 1.0
    batch = [request(temperature=0.0, top_k=2, top_p=0.1, min_p=1.0)] * 2
    assert draw(logits, batch, needs).tokens[:, 0].tolist() == [0, vocab // 2]


@pytest.mark.parametrize("bad", [torch.nan, "nothing left"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("with_rows", [True, False])
def test_a_row_that_is_not_finite_is_told_and_its_mates_go_on(bad, temperature, filters, with_rows):
    batch = [request(temperature=temperature, seed=s, **filters) for s in range(3)]
    logits = random_logits(1, 3, VOCAB)
    right = draw(logits, batch)
    if bad == "nothing left":
        logits[1] = -torch.inf
    else:
        logits[1, 7] = bad
    if with_rows:
        picked = draw(logits, batch)
    else:
        picked = pick(logits[:, None], None, SamplingFeatures(), torch.zeros(3, 1), None)
    assert picked.finite[:, 0].tolist() == [True, False, True]
    if with_rows:
        assert picked.tokens[[0, 2]].tolist() == right.tokens[[0, 2]].tolist()
    assert ((picked.tokens >= 0) & (picked.tokens < VOCAB)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_no_line_reads_the_device(dtype):
    """Shapes alone suffice: tensors without contents refuse an item, a host sync or a shape made of data."""
    batch = [request(temperature=t, logit_bias={1: 2.0}) for t in (0.0, 1.0)]
    real = rows_of(batch, VOCAB)
    rows = SlotSamplingParams(*(getattr(real, f.name).to("meta") for f in fields(real)))
    logits = torch.empty(2, 5, VOCAB, dtype=dtype, device="meta")
    positions = torch.empty(2, 5, dtype=torch.int64, device="meta")
    wide = torch.promote_types(dtype, torch.float32)
    noise = gumbel(rows.seed, positions, VOCAB, wide)
    extra, on_path = positions[:, :4], torch.empty(2, 5, 4, dtype=torch.bool, device="meta")
    picked = pick(logits, rows, ALL_SAMPLING_FEATURES, positions, noise, DraftedAncestors(extra, pack_bits(on_path)))
    assert picked.tokens.shape == picked.finite.shape == (2, 5)
    assert picked.tokens.dtype == torch.int64
    assert scores_with_shared_noise(logits.to(wide), rows, noise).dtype == wide


def test_coupled_scores_know_the_noise_where_there_is_a_temperature():
    batch = [request(temperature=0.0), request(temperature=0.5)]
    logits, noise = random_logits(3, 2, 2, VOCAB), random_logits(4, 2, 2, VOCAB)
    logits[:, :, 5] = -torch.inf
    scores = scores_with_shared_noise(logits, rows_of(batch, VOCAB), noise)
    assert torch.equal(scores[0], torch.log_softmax(logits[0], -1))
    assert torch.equal(scores[1], torch.log_softmax(logits[1] / 0.5 + noise[1], -1))
    assert (scores[:, :, 5] == -torch.inf).all()


def test_the_best_coupled_child_is_the_token_that_is_drawn():
    batch = [request(temperature=t, seed=9) for t in (0.0, 0.3, 1.0)]
    logits, positions = random_logits(5, 3, 8, VOCAB), torch.arange(8).expand(3, 8)
    rows = rows_of(batch, VOCAB)
    noise = gumbel(rows.seed, positions, VOCAB, torch.float64)
    drawn = pick(logits, rows, sampling_features_of(batch), positions, noise).tokens
    assert torch.equal(scores_with_shared_noise(logits, rows, noise).argmax(-1), drawn)


@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_logprobs_are_of_the_raw_logits(count):
    logits = random_logits(6, 2, 3, VOCAB).bfloat16()
    chosen = torch.tensor([[0, 5, 11], [3, 3, 2]])
    exact = torch.log_softmax(logits.float(), -1)
    reported = logprobs(logits, chosen, count)
    assert torch.equal(reported.chosen, exact.gather(-1, chosen[..., None])[..., 0])
    assert reported.ids.shape[-1] == min(count, VOCAB)
    assert torch.equal(reported.values, exact.sort(-1, descending=True).values[..., :count])
    assert torch.equal(exact.gather(-1, reported.ids), reported.values)
    assert torch.equal(reported.tokens, chosen)
    places = exact.sort(-1, descending=True).values == reported.chosen[..., None]
    assert torch.equal(places.int().argmax(-1) + 1, reported.ranks), "equals have the rank of the first of them"
