"""The picking kernels give the reference's tokens, whatever each row asks for and whoever shares the launch."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.runtime.launch import Chip, choose_split_size
from espalier.kernels.sampling import pick as kernel_of_pick
from espalier.kernels.sampling.pick import block_sizes, sample_triton
from espalier.sampling.logit_processors import DraftedAncestors
from espalier.sampling.pick import SampledTokens, pick
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
from tests.pairwise import fewer

# The interpreter computes what a `where` leaves out as well.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# What tl.exp may move a cumulative share by; see espalier/kernels/sampling/top_k_top_p.py.
SHARE = 2.0**-19


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, request):
    """Several splits of several blocks, however small the vocabulary, but on the device."""
    if not request.node.get_closest_marker("gpu"):
        sizes = {"MIN_SPLIT_SIZE": 64, "MAX_SPLIT_SIZE": 128, "BLOCK": 32, "UNPROCESSED_BLOCK_BYTES": 64}
        for name, size in sizes.items():
            monkeypatch.setattr(kernel_of_pick, name, size)


def pick_both(logits, slots, first, offsets, above=None, first_above=0, top_p_by=1.0):
    rows = reference_rows(slots)
    rows.top_p[rows.top_p < 1] *= top_p_by
    positions = first[:, None] + offsets
    noise = noise_at(slots, positions, logits.shape[-1], logits.dtype)
    counted = above
    if above is not None and first_above:
        counted = DraftedAncestors(above.tokens.clone(), above.ancestor_bits)
        counted.tokens[:, :first_above] = -1
    expected = pick(logits, rows, ALL_SAMPLING_FEATURES, positions, noise, counted)
    hanging = None if above is None else (above.tokens, above.ancestor_bits)
    return expected, SampledTokens(*sample_triton(logits, kernel_rows(slots), first, offsets, hanging, first_above))


def agree(logits, slots, first, offsets, above=None, first_above=0):
    """Tokens equal, but for those whose cumulative share comes within rounding of top_p."""
    expected, picked = pick_both(logits, slots, first, offsets, above, first_above)
    assert torch.equal(picked.finite, expected.finite)
    wrong = expected.finite & (picked.tokens != expected.tokens)
    if wrong.any() and logits.dtype != torch.float64:
        for factor in (1 - SHARE, 1 + SHARE):
            near, _ = pick_both(logits, slots, first, offsets, above, first_above, factor)
            wrong &= picked.tokens != near.tokens
    assert not wrong.any(), wrong.nonzero()
    assert ((picked.tokens >= 0) & (picked.tokens < logits.shape[-1])).all()
    return picked


def batch_of(vocab, queries, device, seed=0, asked=ASKED):
    slots = slots_of(table_of(asked, vocab, device, seed), range(1, len(asked) + 1))
    first = torch.arange(96, 96 + len(asked), device=device)
    offsets = torch.randint(0, 6, (len(asked), queries), generator=torch.Generator().manual_seed(seed)).to(device)
    return slots, first, offsets


@pytest.mark.parametrize(
    ("vocab", "queries", "dtype"),
    # float16 is read as bfloat16 is, and computed as float32.
    [
        (16, 1, torch.float64),
        pytest.param(150, 1, torch.float32, marks=pytest.mark.full),
        (176, 1, torch.bfloat16),
        *(pytest.param(16, 2, dtype, marks=pytest.mark.full) for dtype in DTYPES),
    ],
)
def test_every_way_to_sample(kernel_device, vocab, queries, dtype):
    slots, first, offsets = batch_of(vocab, queries, kernel_device)
    logits = random_logits(vocab, len(ASKED), queries, vocab, dtype=dtype).to(kernel_device)
    agree(logits, slots, first, offsets, random_above(len(ASKED), queries, 5, vocab, kernel_device), 1)


@pytest.mark.parametrize("first_above", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_node_counts_where_its_bit_stands_and_nowhere_else(kernel_device, first_above):
    nodes, vocab = [0, 1, 5, 63, 64, 69], 80
    slots = slots_of(table_of(({"presence_penalty": 2.0},), vocab, kernel_device), [1])
    slots.table.counts.zero_()
    on_path = torch.zeros(1, len(nodes), 70, dtype=torch.bool)
    logits = torch.zeros(1, len(nodes), vocab)
    for q, node in enumerate(nodes):
        on_path[0, q, node] = True
        logits[0, q, node + 2] = 1.0  # the token of that node
    tokens = torch.arange(2, 72)[None].to(kernel_device)
    offsets = torch.zeros(1, len(nodes), dtype=torch.int64, device=kernel_device)
    above = (tokens, pack_bits(on_path).to(kernel_device))
    picked, _ = sample_triton(logits.to(kernel_device), kernel_rows(slots), slots.root, offsets, above, first_above)
    assert picked[0].tolist() == [2 if first_above else 0, 0, 0, 0, 0, 0]


def test_bans_end_at_their_position(kernel_device):
    slots = slots_of(table_of(({},), 40, kernel_device), [1])
    slots.table.stop_ids[1, :2] = torch.tensor([33, 7])
    logits = torch.zeros(1, 4, 40)
    logits[..., 7], logits[..., 33], logits[..., 12] = 3.0, 2.0, 1.0
    offsets = torch.tensor([[97, 99, 100, 101]], device=kernel_device)
    picked, _ = sample_triton(logits.to(kernel_device), kernel_rows(slots), slots.root, offsets)
    assert picked[0].tolist() == [12, 12, 7, 7]


@pytest.mark.parametrize(
    "spread",
    fewer(["equal", "two values", "one left", "wide", "tiny"], lambda spread: spread in ("two values", "tiny")),
)
def test_rows_that_make_ties_and_rows_that_bisection_does_not_like(kernel_device, spread):
    vocab = 48
    logits = {
        "equal": torch.zeros(vocab),
        "two values": (torch.arange(vocab) % 3 == 0).float(),
        "one left": torch.full((vocab,), -torch.inf).index_fill_(0, torch.tensor([40]), -3.0),
        "wide": torch.sign(random_logits(1, vocab)) * 10 ** (8 * random_logits(2, vocab)).clamp(-30, 30),
        "tiny": 10 ** -(9 * random_logits(3, vocab).abs()).clamp(0, 37),
    }[spread]
    slots, first, offsets = batch_of(vocab, 1, kernel_device)
    agree(logits.to(kernel_device).expand(len(ASKED), 1, vocab), slots, first, offsets)


@pytest.mark.parametrize("turn", fewer(range(3), lambda turn: turn == 0))
def test_a_row_that_is_not_finite_is_told_and_its_mates_go_on(kernel_device, turn):
    vocab = 48
    slots, first, offsets = batch_of(vocab, 1, kernel_device)
    logits = random_logits(5, len(ASKED), 1, vocab).to(kernel_device)
    right = agree(logits, slots, first, offsets)
    for b in range(0, len(ASKED), 2):
        bad = (torch.nan, torch.inf, "nothing left")[(b // 2 + turn) % 3]
        if bad == "nothing left":
            logits[b] = -torch.inf
        else:
            logits[b, 0, [20, 40]] = bad
    picked = agree(logits, slots, first, offsets)
    assert picked.finite[:, 0].tolist() == [False, True] * (len(ASKED) // 2)
    assert torch.equal(picked.tokens[1::2], right.tokens[1::2])


# Of these ids: side by side; in one thread's 16 bytes; of one block; of the same lane, then of a lower one, in a later
# block; of two splits; of the last block, which begins before the end of the one in front; far ends.
PLACES = [(8, 9), (33, 38), (3, 30), (5, 37, 69), (31, 32), (63, 64), (60, 130), (149, 140), (0, 149), (17,), (149,)]


# Plain rows are read in pieces that follow from the dtype; rows that ask for something are float32 or float64 at once.
each_greedy_way = pytest.mark.parametrize(
    ("vocab", "dtype", "shaped"),
    [
        *((176, dtype, False) for dtype in DTYPES if dtype != torch.float16),
        pytest.param(176, torch.float16, False, marks=pytest.mark.full),
        (150, torch.bfloat16, False),
        (150, torch.bfloat16, True),
        (176, torch.float64, True),
        pytest.param(176, torch.bfloat16, True, marks=pytest.mark.full),
        pytest.param(176, torch.float16, True, marks=pytest.mark.full),
        pytest.param(176, torch.float32, True, marks=pytest.mark.full),
    ],
)


def pick_greedy(logits, shaped, device):
    """Tokens and finite [Q] of logits [Q, V]; `shaped`: the way of rows that ask for something, which is nothing."""
    queries, vocab = logits.shape
    slots = slots_of(table_of(({"repetition_penalty": 2.0} if shaped else {},), vocab, device), [1])
    slots.table.counts.zero_()
    slots.table.seen.zero_()
    offsets = torch.zeros(1, queries, dtype=torch.int64, device=device)
    tokens, finite = sample_triton(logits[None].to(device), kernel_rows(slots), slots.root, offsets)
    return tokens[0].tolist(), finite[0].tolist()


@each_greedy_way
def test_of_equals_the_lowest_id_is_picked(kernel_device, vocab, dtype, shaped):
    best = torch.full((len(PLACES), vocab), -1.0, dtype=dtype)
    zeros = best.clone()
    for q, ids in enumerate(PLACES):
        best[q, list(ids)] = 2.5
        # Zeros are equal, whatever their sign: the lowest id's is negative.
        zeros[q, list(ids)] = 0.0
        zeros[q, min(ids)] = -0.0
    for logits in (best, zeros):
        assert pick_greedy(logits, shaped, kernel_device) == ([min(ids) for ids in PLACES], [True] * len(PLACES))


@each_greedy_way
def test_the_lowest_nan_is_picked_whatever_stands_beside_it(kernel_device, vocab, dtype, shaped):
    logits = torch.full((len(PLACES), vocab), -1.0, dtype=dtype)
    logits[:, [0, 16, 100, vocab - 1]] = torch.inf
    for q, ids in enumerate(PLACES):
        logits[q, list(ids)] = torch.nan
        logits[q, max(ids)] = -torch.tensor(torch.nan, dtype=dtype)  # of the other sign
    assert pick_greedy(logits, shaped, kernel_device) == ([min(ids) for ids in PLACES], [False] * len(PLACES))


@pytest.mark.parametrize(
    ("vocab", "shaped"),
    [
        # 72 and 68: of two splits.  Rows of 16 and 72 begin at 16 bytes.
        *((vocab, False) for vocab in (1, 7, 16, 72, 68)),
        *((vocab, True) for vocab in (1, 7, 16, 68)),
        *(pytest.param(vocab, shaped, marks=pytest.mark.full) for vocab in (80, 100) for shaped in (False, True)),
    ],
)
def test_every_id_is_found_and_the_first_where_nothing_is_left(kernel_device, vocab, shaped):
    logits = torch.full((vocab + 1, vocab), -torch.inf, dtype=torch.bfloat16)
    logits[:vocab].fill_diagonal_(-3.0)
    assert pick_greedy(logits, shaped, kernel_device) == ([*range(vocab), 0], [True] * vocab + [False])


def test_rows_that_ask_for_one_thing_get_it(kernel_device):
    asked = ({"bias": 3}, {"stops": 2}, {"presence_penalty": 0.4}, {"bias": 1})
    slots, first, offsets = batch_of(16, 2, kernel_device, asked=asked)
    agree(random_logits(9, len(asked), 2, 16).to(kernel_device), slots, first, offsets)


@pytest.mark.parametrize(("plain", "queries"), [pytest.param(1, 50, marks=pytest.mark.full), (13, 10)])
def test_one_request_far_down_has_filters(kernel_device, plain, queries):
    """So many rows that their filters are looked for in several turns; the first turn finds none."""
    vocab = 16
    asked = (*({},) * plain, {"temperature": 1.0, "top_k": 2})
    slots, first, offsets = batch_of(vocab, queries, kernel_device, asked=asked)
    agree(random_logits(11, plain + 1, queries, vocab).to(kernel_device), slots, first, offsets)


def test_many_rows_are_cut_into_fewer_splits():
    hopper = Chip(227 * 1024, 132, (9, 0))
    assert [choose_split_size(128256, rows, hopper, 2048, 32768) for rows in (1, 25, 64, 512)] == [
        2048,
        2048,
        8192,
        32768,
    ]
    assert [choose_split_size(128256, rows, hopper, 2048, 8192) for rows in (6, 24, 256)] == [2048, 2048, 8192]
    assert choose_split_size(100, 10_000, hopper, 128, 8192) == 128


def test_what_a_thread_reads_at_once_follows_from_where_rows_begin():
    logits = torch.zeros(2, 3, 176, dtype=torch.bfloat16)
    assert block_sizes(logits) == {"BLOCK": 32, "UNPROCESSED_BLOCK": 32, "IDS_PER_THREAD": 8}
    assert block_sizes(logits.double()) == {"BLOCK": 32, "UNPROCESSED_BLOCK": 8, "IDS_PER_THREAD": 2}
    for unaligned in (logits[..., :150], logits.flatten()[1:353].view(1, 2, 176), torch.zeros(1, 2, 180)[..., :176]):
        assert block_sizes(unaligned)["IDS_PER_THREAD"] == 1
    assert block_sizes(logits[..., :7]) == {"BLOCK": 4, "UNPROCESSED_BLOCK": 4, "IDS_PER_THREAD": 1}


def test_the_first_nan_is_named_and_padding_is_greedy(kernel_device):
    slots = slots_of(table_of(ASKED, 48, kernel_device), [0, 0])
    logits = random_logits(6, 2, 1, 48).to(kernel_device)
    logits[0, 0, [47, 41]] = torch.nan
    zeros = torch.zeros(2, 1, dtype=torch.int64, device=kernel_device)
    tokens, finite = sample_triton(logits, kernel_rows(slots), zeros[:, 0], zeros)
    assert tokens[:, 0].tolist() == [41, int(logits[1, 0].argmax())] and finite[:, 0].tolist() == [False, True]


def test_a_row_does_not_depend_on_its_batch(kernel_device):
    vocab, queries = 40, 2
    slots, first, offsets = batch_of(vocab, queries, kernel_device, seed=3)
    logits = random_logits(7, len(ASKED), queries, vocab).to(kernel_device)
    above = random_above(len(ASKED), queries, 5, vocab, kernel_device)
    hanging = (above.tokens, above.ancestor_bits)
    batched, _ = sample_triton(logits, kernel_rows(slots), first, offsets, hanging)
    for b in range(0, len(ASKED), 3):
        own, one = slice(b, b + 1), slots_of(slots.table, [b + 1])
        q = b % queries
        alone, _ = sample_triton(
            logits[own, q : q + 1],
            kernel_rows(one),
            first[own],
            offsets[own, q : q + 1],
            (above.tokens[own], above.ancestor_bits[own, q : q + 1]),
        )
        assert alone[0, 0] == batched[b, q]


def test_logits_may_stand_in_wider_rows(kernel_device):
    slots, first, offsets = batch_of(50, 2, kernel_device, asked=ASKED[1::3])
    wide = random_logits(8, len(offsets), 3, 64).to(kernel_device)
    wide[..., 50:] = torch.nan
    agree(wide[:, 1:, :50], slots, first, offsets)


@pytest.mark.parametrize("batch", [0, 3])
def test_nothing_is_picked_for_nobody(kernel_device, batch):
    slots = slots_of(table_of(ASKED, 20, kernel_device), range(batch))
    queries = 0 if batch else 4
    logits = torch.zeros(batch, queries, 20, device=kernel_device)
    offsets = torch.zeros(batch, queries, dtype=torch.int64, device=kernel_device)
    tokens, finite = sample_triton(logits, kernel_rows(slots), slots.root, offsets)
    assert tokens.shape == finite.shape == (batch, queries)


def test_arguments_of_another_shape_are_refused(kernel_device):
    slots, first, offsets = batch_of(20, 2, kernel_device)
    rows, logits = kernel_rows(slots), torch.zeros(len(ASKED), 2, 20, device=kernel_device)
    with pytest.raises(EspalierError, match="logits needs shape"):
        sample_triton(logits[..., :19], rows, first, offsets)
    with pytest.raises(EspalierError, match="last dimension is dense"):
        sample_triton(logits.transpose(1, 2).contiguous().transpose(1, 2), rows, first, offsets)
    with pytest.raises(EspalierError, match="offsets needs shape"):
        sample_triton(logits, rows, first, offsets[:, :1])
    above = random_above(len(ASKED), 2, 65, 20, kernel_device)
    with pytest.raises(EspalierError, match="a bit for each of 65 tokens"):
        sample_triton(logits, rows, first, offsets, (above.tokens, above.ancestor_bits[..., :1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [32000, 128256, 151936, 262144])
def test_vocabularies_of_real_models(kernel_device, vocab, dtype):
    slots, first, offsets = batch_of(vocab, 3, kernel_device)
    logits = random_logits(vocab, len(ASKED), 3, vocab, dtype=dtype).to(kernel_device)
    agree(logits, slots, first, offsets, random_above(len(ASKED), 3, 129, vocab, kernel_device), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_129_nodes_with_near_ties(kernel_device, asked):
    vocab, nodes = 32000, 129
    slots, first, offsets = batch_of(vocab, nodes, kernel_device, asked=(asked, asked))
    logits = random_logits(9, 2, nodes, vocab, dtype=torch.bfloat16).to(kernel_device)
    top = logits.amax(-1, keepdim=True)
    logits = torch.where(logits > top - 0.5, top, logits)
    agree(logits, slots, first, offsets, random_above(2, nodes, nodes, vocab, kernel_device), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", ["equal", "one left"])
def test_whole_vocabularies_of_ties(kernel_device, spread):
    vocab = 151936
    slots, first, offsets = batch_of(vocab, 1, kernel_device)
    logits = torch.zeros(vocab) if spread == "equal" else torch.full((vocab,), -torch.inf)
    logits[150000] = 0.0
    agree(logits.to(kernel_device).expand(len(ASKED), 1, vocab), slots, first, offsets)


@pytest.mark.gpu
@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize(("vocab", "dtype"), [*((128256, dtype) for dtype in DTYPES), (50257, torch.bfloat16)])
@pytest.mark.parametrize("best", [0.0, 3.0, torch.inf, torch.nan])
def test_whole_vocabularies_of_equals_here_and_there(kernel_device, vocab, dtype, shaped, best):
    generator = torch.Generator().manual_seed(vocab)
    for queries in (1, 64, 300):  # splits of every size
        ids = torch.randint(vocab, (queries, 3), generator=generator)
        ids[::3, 1] = ids[::3, 0] + torch.randint(-9, 9, ids[::3, 0].shape, generator=generator)
        ids = ids.clamp(0, vocab - 1)
        logits = torch.rand(queries, vocab, generator=generator).to(dtype) - 2
        logits.scatter_(1, ids, best)
        found = (ids.amin(1).tolist(), [best < torch.inf] * queries)
        assert pick_greedy(logits, shaped, kernel_device) == found


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements(kernel_device):
    """4096 rows of 600,000: the last row starts past 2**31 elements."""
    vocab, queries = 600_000, 4096
    slots = slots_of(table_of(({},), vocab, kernel_device), [1])
    logits = torch.zeros(1, queries, vocab, dtype=torch.bfloat16, device=kernel_device)
    logits[0, :, 12345] = 1.0
    logits[0, -1, 599_999] = 2.0
    offsets = torch.zeros(1, queries, dtype=torch.int64, device=kernel_device)
    tokens, _ = sample_triton(logits, kernel_rows(slots), slots.root, offsets)
    assert tokens[0, -1] == 599_999 and (tokens[0, :-1] == 12345).all()
