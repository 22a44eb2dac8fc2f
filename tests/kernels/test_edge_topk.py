"""edge_topk: a depth's candidates equal the reference's, and the next rows are exactly those that follow from them."""

import math
from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.drafts import Candidates
from espalier.kernels.tree import edge_topk as edge_topk_module
from espalier.kernels.tree.edge_factors import edge_factors_triton
from espalier.kernels.tree.edge_topk import edge_topk_triton
from espalier.kernels.tree.edges import DepthRows, FactorProjection, LowRankEdges, choose_next_rows
from espalier.sampling.mask import DraftGuide
from espalier.speculate.sampler import make_sampler
from tests.kernels.sampled import ALL_SAMPLING_FEATURES, ASKED, kernel_rows, slots_of, table_of
from tests.kernels.treeing import drawn_scores, poisoned, random, same
from tests.masks import pack_mask
from tests.pairwise import in_turn_params

# The interpreter evaluates both sides of a `where`, so it warns about values that are not used.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

CPU = torch.device("cpu")
# float16 on a CPU: Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# As draft_topk's.
TOLERANCE = 2.0**-16
STEPS, DEPTH = 3, 1


@pytest.fixture(autouse=True)
def small_splits(monkeypatch, request):
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(edge_topk_module, "MAX_SPLIT_SIZE", 32)


def random_edges(batch, columns, vocab, rank, dtype=torch.float32, own_ids=False, seed=0, kind="vanilla"):
    """kind: of the Markov head, as in config.json."""
    generator = random(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    shape = (batch, STEPS, columns)
    ids = None
    if own_ids:
        ids = torch.rand((*shape[:2], vocab), generator=generator).argsort(-1)[..., :columns].sort(-1).values
    after, projection = drawn(*(shape if own_ids else shape[2:]), rank), None
    if kind != "vanilla":
        parts, inputs = (3, 2) if kind == "rnn" else (1, 1)
        weight = drawn(parts * rank, inputs * rank) / (inputs * rank) ** 0.5
        projection = FactorProjection(drawn(batch, STEPS, parts * rank), weight, kind == "rnn")
    return LowRankEdges(4 * drawn(*shape), drawn(vocab, rank), after, ids, projection)


def random_rows(batch, rows, vocab, seed=0, states_of=None):
    """Some rows have no path to them, some no token.  states_of: edges; with states behind the rows if recurrent."""
    generator = random(seed)
    tokens = torch.randint(-1, vocab, (batch, rows), generator=generator)
    scores = -torch.rand(batch, rows, generator=generator)
    given = DepthRows(tokens, scores.masked_fill(torch.rand(batch, rows, generator=generator) < 0.2, -torch.inf))
    if states_of is None or not states_of.is_recurrent:
        return given
    before = states_of.token_factors
    states = torch.rand(batch, rows + 2, before.shape[1], generator=generator).to(before.dtype) - 0.5
    return given._replace(parents=torch.randint(rows + 2, (batch, rows), generator=generator), states=states)


def moved(value, device, dtype=None):
    """The value with its tensors on the device, floats as `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype=dtype if value.is_floating_point() else None)
    if isinstance(value, LowRankEdges | FactorProjection):
        return type(value)(**{name: moved(each, device, dtype) for name, each in vars(value).items()})
    return type(value)(*(moved(each, device, dtype) for each in value)) if isinstance(value, tuple) else value


def places(batch, rows, topk, device):
    """Where the candidates of a depth are written: a part of those of all depths."""
    root = torch.zeros(batch, dtype=torch.int64, device=device)
    return Candidates.empty(root, STEPS, topk).at_depth(DEPTH, rows)


def by_kernel(edges, rows, d2t, slots, first, topk, mask=None, only=None, coupled=True):
    """(candidates, next rows) on the device of the slots, from tensors on the CPU."""
    device = first.device
    out = places(*rows.tokens.shape, topk, device)
    given = (moved(edges, device), DEPTH, moved(rows, device))
    d2t = None if d2t is None else d2t.to(device)
    with poisoned():
        factors = None if edges.projection is None else edge_factors_triton(*given)
        made = edge_topk_triton(*given, factors, d2t, kernel_rows(slots), first, out, coupled, mask, only)
    return moved(out, CPU), moved(made, CPU)


def by_reference(edges, rows, d2t, asked, vocab, topk, guide=None, coupled=True):
    slots = slots_of(table_of(asked, vocab, CPU), range(1, len(asked) + 1))
    first, exact = first_of(asked, CPU), torch.promote_types(edges.base_logits.dtype, torch.float32)
    sampler = make_sampler(slots, ALL_SAMPLING_FEATURES, first, STEPS + 1, vocab, exact)
    sampler = replace(sampler, guide=guide, shares_noise=coupled)
    out = places(*rows.tokens.shape, topk, CPU)
    return out, sampler.next_depth(moved(edges, CPU, exact), d2t, DEPTH, moved(rows, CPU, exact), out)


def first_of(asked, device):
    return torch.arange(98, 98 + len(asked), device=device)


def check(device, asked, rows, topk, columns, vocab, rank, dtype=torch.float32, own_ids=False, mapped=False, **how):
    """Asserts that candidates and scores are the reference's, and that the next rows follow from the scores.  Returns
    the candidates.  Factors are near 1, so the float32 sum of rank products is off by rank² · 2⁻²⁴ at most; children
    whose scores are nearer than that may change places."""
    kind = how.pop("kind", "vanilla")
    edges = random_edges(len(asked), columns, vocab, rank, dtype, own_ids, kind=kind)
    given = random_rows(len(asked), rows, vocab, states_of=edges)
    d2t = torch.randperm(vocab, generator=random(5))[:columns].sort().values if mapped else None
    slots = slots_of(table_of(asked, vocab, device), range(1, len(asked) + 1))
    guide = how.pop("guide", None)
    only, mask = (
        (None, None) if guide is None else (x.to(device) for x in guide.allowed_children(DEPTH + 1, None, None))
    )
    made, next_rows = by_kernel(edges, given, d2t, slots, first_of(asked, device), topk, mask, only, **how)
    expected, follows = by_reference(edges, given, d2t, asked, vocab, topk, guide, **how)
    tolerance = TOLERANCE + (0 if dtype == torch.float64 else rank**2 * 2.0**-24)
    differ = made.tokens != expected.tokens
    assert not (differ & ~have_near_ties(expected.scores, tolerance)).any() and differ.float().mean() < 0.01
    found = expected.scores > -torch.inf
    assert torch.equal(made.scores > -torch.inf, found) and found.any()
    error = (made.scores - expected.scores)[found].abs() / expected.scores[found].abs().clamp(min=1)
    assert error.max() <= tolerance
    follow = places(len(asked), rows, topk, CPU)
    same(next_rows._replace(states=None), choose_next_rows(made.tokens, made.scores, given, follow, edges.is_recurrent))
    same(made, follow)
    if edges.is_recurrent:
        torch.testing.assert_close(next_rows.states, follows.states, rtol=0, atol=8 * torch.finfo(dtype).eps)
    return made


def have_near_ties(scores, tolerance):
    """Whether a child's score [.., K], best first, is near a neighbour's.  The last one's next neighbour is unknown."""
    near = scores.diff(dim=-1).abs() <= 2 * tolerance * scores[..., 1:].abs().clamp(min=1)
    beside = torch.zeros_like(scores, dtype=torch.bool)
    beside[..., 1:] |= near
    beside[..., :-1] |= near
    beside[..., -1] = True
    return beside


FEW = ASKED[::4]


@pytest.mark.parametrize(("dtype", "kind"), in_turn_params([torch.float32, torch.float64], ["rnn", "gated"]))
def test_factors_of_more_than_a_token(kernel_device, dtype, kind):
    check(kernel_device, FEW, 3, 3, 70, 70, 40, dtype, kind=kind)


@pytest.mark.parametrize(
    ("dtype", "kind", "rows_and_rank"),
    in_turn_params([HALF, torch.float32, torch.float64], ["gated", "rnn"], [(1, 16), (3, 40), (40, 70), (2, 300)]),
)
def test_factors_and_states(kernel_device, dtype, kind, rows_and_rank):
    rows, rank = rows_and_rank
    edges = random_edges(2, 20, 70, rank, dtype, kind=kind)
    given, exact = random_rows(2, rows, 70, states_of=edges), torch.promote_types(dtype, torch.float32)
    with poisoned():
        made = edge_factors_triton(moved(edges, kernel_device), DEPTH, moved(given, kernel_device))
    expected = moved(edges, CPU, exact).factors(DEPTH, moved(given, CPU, exact))
    largest = edges.token_factors.abs().max().item()
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.cpu().to(exact), theirs, rtol=0, atol=8 * largest * torch.finfo(dtype).eps)


def test_the_state_before_the_first_depth_is_zero(kernel_device):
    edges, roots = random_edges(2, 70, 70, 16, kind="rnn"), DepthRows.for_roots(torch.tensor([3, 5]))
    with poisoned():
        made = edge_factors_triton(moved(edges, kernel_device), 0, moved(roots, kernel_device))
    for ours, theirs in zip(made, edges.factors(0, roots), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize(("dtype", "mapped"), in_turn_params([HALF, torch.float32, torch.float64], [False, True]))
def test_all_sampling_parameters(kernel_device, dtype, mapped):
    check(kernel_device, ASKED, 3, 3, 70, 90 if mapped else 70, 16, dtype, mapped=mapped)


# (rows, topk, columns, rank): one row, tiles that are not full, several tiles, a rank that no block divides, more
# candidates than columns.
SIZES = [(1, 4, 90, 16), (5, 5, 33, 40), (17, 17, 90, 16), (4, 4, 64, 80), (1, 1, 40, 5), (3, 6, 4, 16)]


@pytest.mark.parametrize(("size", "dtype"), in_turn_params(SIZES, [HALF, torch.float32]))
def test_sizes(kernel_device, size, dtype):
    rows, topk, columns, rank = size
    check(kernel_device, FEW, rows, topk, columns, columns, rank, dtype)


@pytest.mark.parametrize("coupled", [False, True])
def test_columns_of_the_requests_own(kernel_device, coupled):
    made = check(kernel_device, ASKED, 3, 3, 6, 50, 16, own_ids=True, coupled=coupled)
    edges = random_edges(len(ASKED), 6, 50, 16, own_ids=True)
    found = made.scores > -torch.inf
    assert ((made.tokens[..., None] == edges.ids[:, DEPTH, None, None]).any(-1) | ~found).all()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_grammar_says_which_tokens_may_come(kernel_device, mapped):
    vocab = 90
    allowed = torch.rand(len(FEW), vocab, generator=random(3)) < 0.4
    forced = torch.full((len(FEW), STEPS), -1)
    forced[0, : DEPTH + 1] = 7
    guide = DraftGuide(forced, pack_mask(allowed), torch.full((len(FEW),), DEPTH + 1))
    made = check(kernel_device, FEW, 3, 3, 60 if mapped else vocab, vocab, 16, mapped=mapped, guide=guide)
    assert (made.tokens[0] == 7).all() and made.scores[0, 0].tolist() == [0.0, -math.inf, -math.inf]
    found = made.scores[1:] > -torch.inf
    assert allowed[1:].gather(1, made.tokens[1:].flatten(1))[found.flatten(1)].all()


def plain(batch, columns, rank=16):
    """Edges that add nothing to equal logits."""
    return LowRankEdges(torch.zeros(batch, STEPS, columns), torch.zeros(columns, rank), torch.zeros(columns, rank))


def launched(device, asked, edges, rows, topk):
    slots = slots_of(table_of(asked, len(edges.token_factors), device), range(1, len(asked) + 1))
    return by_kernel(edges, rows, None, slots, first_of(asked, device), topk)


def test_ties_go_to_the_lower_column(kernel_device):
    edges, rows = plain(1, 100), DepthRows(torch.tensor([[3, 4]]), torch.zeros(1, 2))
    made, next_rows = launched(kernel_device, ({},), edges, rows, 4)
    assert made.tokens[0].tolist() == [[0, 1, 2, 3]] * 2 and next_rows.tokens.tolist() == [[0, 1, 2, 3]]
    edges.base_logits[0, DEPTH, [95, 20, 60]] = 1.0
    assert launched(kernel_device, ({},), edges, rows, 4)[0].tokens[0].tolist() == [[20, 60, 95, 0]] * 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_children_and_other_rows_do(kernel_device, bad):
    edges, rows = plain(2, 70), DepthRows(torch.tensor([[3, 4], [4, 4]]), torch.zeros(2, 2))
    edges.token_factors[3, 5], edges.column_factors[40, 5] = bad, 1.0
    made, next_rows = launched(kernel_device, ({}, {"temperature": 1.0}), edges, rows, 3)
    assert (made.scores > -torch.inf).all(2).tolist() == [[False, True], [True, True]]
    assert made.tokens[0].tolist() == [[0, 0, 0], [0, 1, 2]] and next_rows.tokens[0].tolist() == [0, 1, 2]


def test_depths_that_take_the_columns_in_reverse_give_the_same(kernel_device):
    edges, rows = random_edges(5, 200, 200, 16, HALF), random_rows(5, 3, 200)
    edges.base_logits[:, 1] = edges.base_logits[:, 0]
    made = []
    for depth in (0, 1):
        slots = kernel_rows(slots_of(table_of(({},) * 5, 200, kernel_device), range(1, 6)))
        out = places(5, 3, 3, kernel_device)
        on_device = moved(edges, kernel_device), depth, moved(rows, kernel_device), None, None
        with poisoned():
            made.append((out, edge_topk_triton(*on_device, slots, first_of(range(5), kernel_device), out)))
    for forward, backward in zip(*made, strict=True):
        same(forward, moved(backward, "cpu"))


def test_a_request_does_not_depend_on_its_batch(kernel_device):
    edges, rows = random_edges(len(ASKED), 70, 70, 16, HALF), random_rows(len(ASKED), 3, 70)
    together = launched(kernel_device, ASKED, edges, rows, 3)
    table = table_of(ASKED, 70, kernel_device)
    for b in range(0, len(ASKED), 3):
        one = slice(b, b + 1)
        of_one = LowRankEdges(edges.base_logits[one], edges.token_factors, edges.column_factors)
        first = first_of(ASKED, kernel_device)[one]
        alone = by_kernel(of_one, DepthRows(*(x[one] for x in rows[:2])), None, slots_of(table, [b + 1]), first, 3)
        for ours, of_all in zip(alone, together, strict=True):
            same(ours, type(of_all)(*(x if x is None else x[one] for x in of_all)))


def test_an_empty_batch(kernel_device):
    made, next_rows = launched(
        kernel_device, (), plain(0, 20), DepthRows(torch.zeros(0, 2).long(), torch.zeros(0, 2)), 3
    )
    assert made.tokens.shape == (0, 2, 3) and next_rows.tokens.shape == (0, 3)


def test_wrong_shapes_are_refused(kernel_device):
    rows = DepthRows(torch.zeros(1, 2).long(), torch.zeros(1, 2))
    edges = plain(1, 20)
    for field, cut in (("base_logits", edges.base_logits[..., :5]), ("token_factors", edges.token_factors[:, :5])):
        with pytest.raises(EspalierError, match=r"(logits|token_factors) needs shape"):
            launched(kernel_device, ({},), LowRankEdges(**{**vars(edges), field: cut}), rows, 3)
    with pytest.raises(EspalierError, match="scores needs shape"):
        launched(kernel_device, ({},), edges, rows._replace(scores=rows.scores[:, :1]), 3)
    with pytest.raises(EspalierError, match="must be dense"):
        transposed = LowRankEdges(edges.base_logits, edges.token_factors, torch.zeros(16, 20).T)
        launched(kernel_device, ({},), transposed, rows, 3)


# The rows of the next depth, in plain torch


def rows_by_sets(tokens, scores, row_scores):
    """(tokens, scores, rows) of one request."""
    topk = len(tokens[0])
    flat = [(row, place) for row in range(len(tokens)) for place in range(topk)]
    total = {at: row_scores[at[0]] + scores[at[0]][at[1]] for at in flat}
    total = {at: -math.inf if math.isnan(score) else score for at, score in total.items()}
    kept: list[int] = []
    best: list[float] = []
    for at in sorted(flat, key=lambda at: (-total[at], at)):
        token = tokens[at[0]][at[1]]
        if token not in kept and total[at] > -math.inf and len(kept) < topk:
            kept.append(token)
            best.append(total[at])
    rows = [
        [kept.index(t) if t in kept and total[r, p] > -math.inf else -1 for p, t in enumerate(of_row)]
        for r, of_row in enumerate(tokens)
    ]
    missing = topk - len(kept)
    return kept + [0] * missing, best + [-math.inf] * missing, rows


@pytest.mark.parametrize("batch,rows,topk", [(0, 1, 2), (2, 1, 4), (2, 4, 4), (1, 3, 5), (3, 8, 8)])
def test_rows_are_the_best_distinct_tokens(batch, rows, topk):
    for seed in range(6):
        generator = random(seed)
        tokens = torch.rand((batch, rows, topk + 3), generator=generator).argsort(-1)[..., :topk]
        scores = drawn_scores((batch, rows, topk), generator, seed % 2 > 0)
        given = DepthRows(torch.zeros(batch, rows).long(), drawn_scores((batch, rows), generator))
        out = places(batch, rows, topk, CPU)
        made = choose_next_rows(tokens, scores, given, out)
        for b in range(batch):
            expected = rows_by_sets(tokens[b].tolist(), scores[b].tolist(), given.scores[b].tolist())
            assert (made.tokens[b].tolist(), made.scores[b].tolist(), out.next_rows[b].tolist()) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32000, 128256])
@pytest.mark.parametrize(("rows", "rank", "dtype"), [(1, 64, torch.float16), (8, 256, torch.bfloat16)])
def test_vocabularies_of_real_models(kernel_device, columns, rows, rank, dtype):
    check(kernel_device, ASKED, rows, 8, columns, 128256, rank, dtype, mapped=columns < 128256)
