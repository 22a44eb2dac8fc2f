"""draft_topk: every child's score equals the reference's within the tolerance, and the children are the best ones."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.tree import draft_topk as draft_topk_module
from espalier.kernels.tree.draft_topk import draft_topk_triton
from espalier.sampling.logit_processors import process_logits
from espalier.sampling.pick import scores_with_shared_noise
from tests.kernels.sampled import (
    ALL_SAMPLING_FEATURES,
    ASKED,
    kernel_rows,
    noise_at,
    random_above,
    random_logits,
    reference_rows,
    slots_of,
    table_of,
)
from tests.masks import pack_mask
from tests.pairwise import fewer

# The interpreter evaluates both sides of a `where`, so it warns about values that are not used.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# float32: another reduction order over the vocabulary, tl.exp, and the logarithms of the noise; see
# kernels/tree/draft_topk.py.  float64: the score itself is float32.
TOLERANCE = {torch.float32: 2.0**-16, torch.float64: 2.0**-22}


@pytest.fixture(autouse=True)
def small_splits(monkeypatch, request):
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(draft_topk_module, "MAX_SPLIT_SIZE", 32)


def log_probabilities(logits, d2t, slots, first, offset, above):
    """[B, Q, target vocabulary] by the reference; -inf for tokens that are not in the draft vocabulary."""
    vocab = slots.table.counts.shape[1]
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if d2t is not None:
        exact = exact.new_full((*exact.shape[:-1], vocab), -torch.inf).index_copy_(-1, d2t, exact)
    rows, positions = reference_rows(slots), (first[:, None] + offset).expand(logits.shape[:2])
    noise = noise_at(slots, positions, vocab, logits.dtype)
    return scores_with_shared_noise(process_logits(exact, rows, ALL_SAMPLING_FEATURES, positions, above), rows, noise)


def check(logits, d2t, slots, first, offset, scores, topk, above=None):
    """Asserts that each child has its reference score, that no child occurs twice, and that they are the best ones."""
    above_tensors = None if above is None else (above.tokens, above.ancestor_bits)
    ids, best = draft_topk_triton(logits, d2t, kernel_rows(slots), first, offset, scores, topk, above_tensors)
    logp = log_probabilities(logits, d2t, slots, first, offset, above).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    count = min(topk, logp.shape[-1])
    expected = logp.topk(count).values.clamp(max=0).float() + scores[..., None]
    expected = torch.nn.functional.pad(expected, (0, topk - count), value=-torch.inf)
    allowed = TOLERANCE[torch.promote_types(logits.dtype, torch.float32)] * expected.abs().clamp(min=1)
    scores_of_ids = logp.gather(-1, ids).float().clamp(max=0) + scores[..., None]
    void = expected == -torch.inf
    for reference in (expected, torch.where(void, -torch.inf, scores_of_ids)):
        assert torch.equal(best == -torch.inf, reference == -torch.inf)
        assert ((best - reference).abs() <= allowed)[~void].all()
    assert (ids[void & (scores[..., None] > -torch.inf)] == 0).all()
    in_order = ids.masked_fill(void, -1).sort(-1).values
    assert not ((in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)).any()
    return ids, best


def batch_of(vocab, queries, device, seed=0, asked=ASKED):
    slots = slots_of(table_of(asked, vocab, device, seed), range(1, len(asked) + 1))
    scores = -torch.rand(len(asked), queries, generator=torch.Generator().manual_seed(seed)).to(device)
    return slots, torch.arange(96, 96 + len(asked), device=device), scores


def map_of(draft_vocab, vocab, device, ascending=True):
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(draft_vocab))[:draft_vocab]
    return (ids.sort().values if ascending else ids).to(device)


@pytest.mark.parametrize(
    ("draft_vocab", "vocab", "topk", "dtype"),
    [
        *(pytest.param(0, 16, 3, dtype, marks=pytest.mark.full) for dtype in DTYPES),
        (70, 300, 2, torch.float32),
        (5, 40, 8, torch.bfloat16),
        (0, 70, 6, torch.float64),
    ],
)
def test_all_sampling_parameters(kernel_device, draft_vocab, vocab, topk, dtype):
    slots, first, scores = batch_of(vocab, 2, kernel_device)
    d2t = map_of(draft_vocab, vocab, kernel_device) if draft_vocab else None
    logits = random_logits(vocab, len(ASKED), 2, draft_vocab or vocab, dtype=dtype).to(kernel_device)
    check(logits, d2t, slots, first, 3, scores, topk, random_above(len(ASKED), 2, 6, vocab, kernel_device))


def test_whatever_shapes_the_draw_knows_the_target_ids(kernel_device):
    """Each thing that asks for ids alone, at temperature 0, and nothing at all."""
    asked = ({}, {"bias": 40}, {"stops": 30}, {"repetition_penalty": 1.8}, {"presence_penalty": 2.0})
    slots, first, scores = batch_of(40, 1, kernel_device, asked=asked)
    d2t = map_of(20, 40, kernel_device)
    logits = random_logits(7, len(asked), 1, 20).to(kernel_device)
    check(logits, d2t, slots, first, 0, scores, 6)


@pytest.mark.parametrize(("draft_vocab", "vocab"), [(0, 100), (70, 300)])
def test_a_mask_leaves_the_allowed_target_ids(kernel_device, draft_vocab, vocab):
    queries, topk = 2, 4
    asked = ASKED[1::4]
    slots, first, scores = batch_of(vocab, queries, kernel_device, asked=asked)
    d2t = map_of(draft_vocab, vocab, kernel_device) if draft_vocab else None
    logits = random_logits(3, len(asked), queries, draft_vocab or vocab, dtype=torch.float32).to(kernel_device)
    allowed = torch.rand(len(asked), queries, vocab, generator=torch.Generator().manual_seed(4)).to(kernel_device) < 0.2
    of_draft = allowed if d2t is None else allowed[..., d2t]
    same = (d2t, kernel_rows(slots), first, 0, scores, topk)
    ids, best = draft_topk_triton(logits, *same, mask=pack_mask(allowed))
    expected = draft_topk_triton(logits.masked_fill(~of_draft, -torch.inf), *same)
    assert torch.equal(ids, expected[0]) and torch.equal(best, expected[1])
    assert allowed.gather(2, ids)[best > -torch.inf].all() and (best > -torch.inf).any()


@pytest.mark.parametrize("ascending", [True, False])
def test_ties_go_to_the_lower_draft_index(kernel_device, ascending):
    slots, first, scores = batch_of(200, 1, kernel_device, asked=({}, {"bias": 0}))
    d2t = map_of(100, 200, kernel_device, ascending)
    logits = torch.zeros(2, 1, 100, device=kernel_device)
    logits[1, 0, [95, 20, 60]] = 1.0
    ids, _ = draft_topk_triton(logits, d2t, kernel_rows(slots), first, 0, scores, 5)
    assert ids[0, 0].tolist() == d2t[[0, 1, 2, 3, 4]].tolist()
    assert ids[1, 0].tolist() == d2t[[20, 60, 95, 0, 1]].tolist()


@pytest.mark.parametrize("turn", fewer(range(4), lambda turn: turn == 0))
def test_a_row_that_is_not_finite_has_no_children_and_other_rows_do(kernel_device, turn):
    slots, first, scores = batch_of(60, 1, kernel_device)
    logits = random_logits(2, len(ASKED), 1, 60).to(kernel_device)
    finite_ids, _ = check(logits, None, slots, first, 1, scores, 3)
    spoilt = {
        bad: list(range(2 * ((i + turn) % 4), len(ASKED), 8))
        for i, bad in enumerate(("nan", "inf", "nothing left", "two left"))
    }
    for bad, rows in spoilt.items():
        if bad in ("nothing left", "two left"):
            logits[rows, :, : 60 if bad == "nothing left" else 58] = -torch.inf
        else:
            for row in rows:
                logits[row, 0, [40, 50]] = float(bad)
    ids, best = check(logits, None, slots, first, 1, scores, 3)
    assert torch.equal(ids[1::2], finite_ids[1::2])
    for bad, rows in spoilt.items():
        assert (best[rows, 0] > -torch.inf).sum(-1).max() == (2 if bad == "two left" else 0)


def test_a_void_row_has_void_children(kernel_device):
    slots, first, scores = batch_of(40, 2, kernel_device, asked=ASKED[1::4])
    scores[:, 1] = -torch.inf
    _, best = check(random_logits(3, len(scores), 2, 40).to(kernel_device), None, slots, first, 0, scores, 3)
    assert (best[:, 1] == -torch.inf).all() and (best[:, 0] > -torch.inf).all()


def test_a_row_does_not_depend_on_its_batch(kernel_device):
    vocab, queries = 60, 2
    slots, first, scores = batch_of(vocab, queries, kernel_device, seed=3)
    logits = random_logits(7, len(ASKED), queries, vocab).to(kernel_device)
    above = random_above(len(ASKED), queries, 5, vocab, kernel_device)
    batched = draft_topk_triton(
        logits, None, kernel_rows(slots), first, 2, scores, 4, (above.tokens, above.ancestor_bits)
    )
    for b in range(0, len(ASKED), 3):
        one, rows = slice(b, b + 1), kernel_rows(slots_of(slots.table, [b + 1]))
        q = b % queries
        path = (above.tokens[one], above.ancestor_bits[one, q : q + 1])
        row_logits, row_scores = logits[one, q : q + 1], scores[one, q : q + 1]
        alone = draft_topk_triton(row_logits, None, rows, first[one], 2, row_scores, 4, path)
        assert torch.equal(alone[0][0, 0], batched[0][b, q]) and torch.equal(alone[1][0, 0], batched[1][b, q])


def test_strided_logits(kernel_device):
    slots, first, scores = batch_of(50, 2, kernel_device, asked=ASKED[1::4])
    wide = random_logits(8, len(scores), 3, 64).to(kernel_device)
    wide[..., 50:] = torch.nan
    check(wide[:, 1:, :50], None, slots, first, 0, scores, 3)


def test_an_empty_batch(kernel_device):
    slots = slots_of(table_of(ASKED, 20, kernel_device), [])
    none = torch.zeros(0, 2, device=kernel_device)
    ids, best = draft_topk_triton(none.new_zeros(0, 2, 20), None, kernel_rows(slots), slots.root, 0, none, 3)
    assert ids.shape == best.shape == (0, 2, 3)


def test_wrong_shapes_are_refused(kernel_device):
    slots, first, scores = batch_of(20, 2, kernel_device)
    logits = torch.zeros(len(ASKED), 2, 20, device=kernel_device)
    with pytest.raises(EspalierError, match="logits needs shape"):
        draft_topk_triton(logits[..., :5], None, kernel_rows(slots), first, 0, scores, 3)
    with pytest.raises(EspalierError, match="scores needs shape"):
        draft_topk_triton(logits, None, kernel_rows(slots), first, 0, scores[:, :1], 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("draft_vocab", "vocab", "topk"), [(32000, 128256, 10), (0, 151936, 8), (0, 262144, 32)])
def test_vocabularies_of_real_models(kernel_device, draft_vocab, vocab, topk, dtype):
    slots, first, scores = batch_of(vocab, topk, kernel_device)
    d2t = map_of(draft_vocab, vocab, kernel_device) if draft_vocab else None
    logits = random_logits(vocab, len(ASKED), topk, draft_vocab or vocab, dtype=dtype).to(kernel_device)
    above = random_above(len(ASKED), topk, 3 * topk, vocab, kernel_device)
    check(logits, d2t, slots, first, 3, scores, topk, above)
