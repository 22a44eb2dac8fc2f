"""The kernels of chosen rows equal their references: rows of an indexer, scores over pages, selections with ties."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.ops import selection
from espalier.kernels.ops.rope import Rotation
from espalier.kernels.ops.selection import (
    MAX_TOPK,
    SCORE_GROUP_SIZE,
    IndexerInputs,
    IndexerKeys,
    IndexerNorm,
    IndexerQueries,
    IndexerScores,
    index_scores,
    mark_top_rows,
    max_group_scores,
    rotate_and_store_index,
    select_rows,
)
from espalier.kernels.runtime.launch import Chip, next_power_of_2
from tests.pairwise import in_turn_params

# Relative to the largest value: products of the dtype's values, summed in float32.
SCORE_TOLERANCE = 1e-5


def random_table(batch: int, columns: int, generator: torch.Generator) -> Tensor:
    """Pages of a pool that has one more, none of them twice."""
    return (1 + torch.randperm(batch * columns, generator=generator)).view(batch, columns).int()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "heads", "size", "rotary"), [(3, 5, 12, 8), (1, 33, 128, 64), (0, 4, 16, 16)])
def test_rows_of_an_indexer(kernel_device, count, heads, size, rotary, dtype, interleaved):
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(kernel_device, of)

    norm = IndexerNorm(drawn(size), drawn(size), 1e-6)
    rotation = Rotation(drawn(count, rotary, of=torch.float32), drawn(count, rotary, of=torch.float32))
    rows = torch.tensor([4, 2, 7][:count], dtype=torch.int64, device=kernel_device)
    # The key is a part of a wider product.
    wide = drawn(count, size + 5)
    made, planes = [], []
    for write in (rotate_and_store_index.reference, rotate_and_store_index.triton):
        q = torch.randn(count, heads, size, generator=torch.Generator().manual_seed(4)).to(kernel_device, dtype)
        plane = torch.zeros(9, 1, size, dtype=dtype, device=kernel_device)
        made.append(write(IndexerInputs(q, wide[:, 5:], torch.empty(0), norm, rotation, interleaved), rows, plane))
        planes.append(plane)
    limit = {"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(made[1], made[0], **limit)
    torch.testing.assert_close(planes[1], planes[0], **limit)


SHAPES = [
    # (page_size, columns, lengths, first, queries, staged rows, heads, size)
    (1, 7, [5, 0, 7], 0, 3, 3, 4, 12),
    (16, 20, [300, 129], 1, 5, 9, 33, 128),
    (64, 3, [150], 1, 2, 130, 16, 16),
    (256, 1, [256, 1], 0, 66, 66, 2, 16),
]


# The interpreter's products have no bfloat16.
@pytest.mark.parametrize(("shape", "dtype"), in_turn_params(SHAPES, [torch.float32, torch.float16]))
def test_scores(kernel_device, shape, dtype):
    page_size, columns, lengths, first, queries, staged, heads, size = shape
    generator, batch = torch.Generator().manual_seed(5), len(lengths)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(kernel_device, dtype)

    length = torch.tensor(lengths, device=kernel_device)
    table = random_table(batch, columns, generator).to(kernel_device)
    plane = drawn((batch * columns + 1) * page_size, 1, size)
    keys = IndexerKeys(plane, table, length, page_size, first, drawn(batch, staged, 1, size))
    asking = IndexerQueries(drawn(batch, queries, heads, size), drawn(batch, queries, heads).float())
    bits = pack_bits(torch.rand(batch, queries, staged, generator=generator) < 0.6).to(kernel_device)
    (expected, _), (made, groups) = index_scores.reference(asking, keys, bits), index_scores.triton(asking, keys, bits)
    capacity = columns * page_size
    column = torch.arange(capacity + staged, device=kernel_device)
    defined = (column < length[:, None]) | (column >= capacity)
    for scores, exact, kept in zip(made, expected, defined, strict=True):
        assert torch.equal(scores[:, kept] == -torch.inf, exact[:, kept] == -torch.inf)
        limit = SCORE_TOLERANCE * exact[exact.isfinite()].abs().max().item()
        torch.testing.assert_close(scores[:, kept], exact[:, kept], rtol=0, atol=limit)
    highest = max_group_scores(made.masked_fill(~defined[:, None], -torch.inf), capacity)
    first = torch.arange(-(-capacity // SCORE_GROUP_SIZE), device=kernel_device) * SCORE_GROUP_SIZE
    is_group = torch.nn.functional.pad(first < length[:, None], (0, groups.shape[2] - len(first)), value=True)
    for have, exact, kept in zip(groups, highest, is_group, strict=True):
        assert torch.equal(have[:, kept], exact[:, kept])


def test_a_score_has_the_same_bits_alone_and_together(kernel_device):
    """Whatever queries a program holds, in whatever batch: plain decoding chooses the rows that a tree chooses."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(kernel_device, torch.float16)

    length = torch.tensor([500, 130], device=kernel_device)
    table = random_table(2, 32, generator).to(kernel_device)
    keys = IndexerKeys(drawn(65 * 16, 1, 128), table, length, 16, 0, drawn(2, 9, 1, 128))
    asking = IndexerQueries(drawn(2, 9, 64, 128), drawn(2, 9, 64).float())
    bits = torch.full((2, 9, 1), 2**9 - 1, device=kernel_device)
    whole = index_scores.triton(asking, keys, bits).row_scores
    for request, some in ((0, slice(0, 1)), (0, slice(5, 8)), (1, slice(8, 9)), (slice(0, 2), slice(1, 3))):
        batch = slice(request, request + 1) if isinstance(request, int) else request
        of_batch = keys.page_table[batch], keys.length[batch], keys.page_size, keys.first_position, keys.staged[batch]
        part = IndexerQueries(*(values[batch, some] for values in asking))
        made = index_scores.triton(part, IndexerKeys(keys.committed, *of_batch), bits[batch, some]).row_scores
        for have, want, rows in zip(made, whole[batch, some], keys.length[batch].tolist(), strict=True):
            seen = list(range(rows)) + list(range(512, 521))
            assert torch.equal(have[:, seen], want[:, seen])


def test_what_a_program_holds_fits_the_chip():
    """Of two-byte values: in float32 there are no tensor cores, which read shared memory."""
    from espalier.kernels.attention.index_scores import BLOCK_N, _plan_shared_memory

    for room, queries, heads, size in product((99, 163, 227), (1, 5, 2048), (4, 64), (12, 128, 256)):
        on = Chip(1024 * room, 132, (9, 0))
        plan = _plan_shared_memory(on, queries, heads, size, 2)
        num_rows = plan.num_queries * plan.block_heads + plan.num_stages * BLOCK_N
        assert num_rows * 2 * next_power_of_2(size) < on.shared_memory
    # DeepSeek-V3.2 on Hopper: two programs fit.
    assert _plan_shared_memory(on, 16, 64, 128, 2) == (4, 64, 3)


def test_the_reference_scores_in_chunks_of_queries(monkeypatch):
    generator = torch.Generator().manual_seed(6)
    asking = IndexerQueries(torch.randn(2, 5, 3, 8, generator=generator), torch.randn(2, 5, 3, generator=generator))
    keys = torch.randn(2, 9, 8, generator=generator)
    whole = selection.score_keys(asking, keys)
    monkeypatch.setattr(selection, "MAX_REFERENCE_PRODUCTS", 1)
    torch.testing.assert_close(selection.score_keys(asking, keys), whole)


def in_plain_words(scores: Tensor, topk: int) -> list[int]:
    """The columns with the topk highest (score, column)."""
    ranked = sorted((score, column) for column, score in enumerate(scores.tolist()) if score > -torch.inf)
    return sorted(column for _, column in ranked[-topk:])


# Scores of every sign; few, equal ones, with both zeros; equal but for a bit; far below the highest; in few groups.
DRAWN: dict[str, Any] = {
    "spread": lambda *shape, generator: torch.randn(shape, generator=generator) * 1e3,
    "equal": lambda *shape, generator: (
        torch.randint(-1, 2, shape, generator=generator)
        * torch.tensor([-1.0, 1.0])[torch.randint(0, 2, shape, generator=generator)]
    ),
    "close": lambda *shape, generator: 1 + torch.randint(0, 40, shape, generator=generator) * 2.0**-23,
    "wide": lambda *shape, generator: (
        torch.exp2(torch.rand(shape, generator=generator) * 200 - 100)
        * (torch.randint(0, 8, shape, generator=generator) - 0.5).sign()
    ),
    "few": lambda *shape, generator: torch.randn(shape, generator=generator).masked_fill(
        torch.arange(shape[-1]) < 9 * shape[-1] // 10, -torch.inf
    ),
}


@pytest.mark.parametrize(("drawn", "topk"), in_turn_params(list(DRAWN), [5, 100, 1]))
def test_selections(kernel_device, topk, drawn, monkeypatch):
    """Groups and rows in several chunks, and lengths around topk; what lies past a length is never chosen."""
    monkeypatch.setattr("espalier.kernels.attention.select_rows.SCORES_PER_CHUNK", 512)
    for page_size, columns, staged in ((1, 70, 1), (16, 13, 70), (256, 17, 66)):
        generator, capacity = torch.Generator().manual_seed(topk), page_size * columns
        length = torch.tensor([0, min(topk, capacity), capacity // 2 + 1, capacity], device=kernel_device)
        scores = DRAWN[drawn](4, 2, capacity + staged, generator=generator)
        scores[torch.rand(scores.shape, generator=generator) < 0.2] = -torch.inf
        scores = scores.to(kernel_device)
        table = random_table(4, columns, generator).to(kernel_device)
        past = torch.arange(capacity + staged, device=kernel_device) >= length[:, None]
        past[:, capacity:] = False
        groups = max_group_scores(scores.masked_fill(past[:, None], -torch.inf), capacity)
        made = select_rows.triton(IndexerScores(scores, groups), length, table, page_size, topk)
        expected = select_rows.reference(IndexerScores(scores, groups), length, table, page_size, topk)
        assert torch.equal(made.counts, expected.counts) and torch.equal(made.bits, expected.bits)
        for request, query in product(range(4), range(2)):
            count = int(made.counts[request, query])
            assert made.rows[request, query, :count].tolist() == expected.rows[request, query, :count].tolist()
            assert not made.rows[request, query, count:].any()
            seen = scores[request, query].clone()
            seen[int(length[request]) : capacity] = -torch.inf
            if length[request] + staged > topk:
                chosen = [c for c in in_plain_words(seen, topk) if c < capacity]
                rows = [int(table[request, c // page_size]) * page_size + c % page_size for c in chosen]
                assert made.rows[request, query, :count].tolist() == rows
            else:
                assert count == 0


def test_a_threshold_at_the_end_of_its_bin(kernel_device):
    """With lower scores behind it, which the search must not count."""
    distance = [0, 1, 2, 3, 4, 95, 95, 95, 95]
    bits = torch.full((14 * 8,), 0x3F000000, dtype=torch.int32)
    bits[0] = highest = 0x41800000
    for group, below in enumerate(distance, 1):
        # The first search ends at a bin of 2^22 patterns, the second at bins of 2^20, 2^15, 2^10, 2^5 and 1.
        bits[8 * group] = highest - 7 * 2**22 - below
        bits[8 * group + 1] = highest - 7 * 2**22 - 200 - group
    rows = bits.view(torch.float32).to(kernel_device)[None, None]
    scores = IndexerScores(torch.cat((rows, rows[..., :1] - 16), -1), torch.empty(0))
    scores = scores._replace(group_scores=max_group_scores(scores.row_scores, 14 * 8))
    length, table = torch.tensor([14 * 8], device=kernel_device), torch.tensor([[0]], device=kernel_device).int()
    made = select_rows.triton(scores, length, table, 14 * 8, 8)
    assert made.rows[0, 0].tolist() == [0, 8, 16, 24, 32, 40, 64, 72]


def test_of_equal_scores_the_last_are_taken():
    scores = torch.tensor([[2.0, 1.0, 1.0, -torch.inf, 1.0, 0.0]])
    assert mark_top_rows(scores, 3)[0].nonzero().flatten().tolist() == [0, 2, 4]
    assert mark_top_rows(scores, 5)[0].nonzero().flatten().tolist() == [0, 1, 2, 4, 5]
    assert mark_top_rows(torch.tensor([[0.0, -0.0, 0.0]]), 2)[0].tolist() == [False, True, True]


def test_what_the_kernels_do_not_take_is_refused():
    length, table = torch.tensor([3]), torch.ones(1, 1, dtype=torch.int32)
    scores = IndexerScores(torch.zeros(1, 1, 65), torch.zeros(1, 1, 9))
    with pytest.raises(EspalierError, match=f"select {MAX_TOPK} rows at most, and {MAX_TOPK + 1} are asked for"):
        select_rows.triton(scores, length, table, 64, MAX_TOPK + 1)
    with pytest.raises(EspalierError, match="length needs shape"):
        select_rows.triton(scores, length[:0], table, 64, 4)
