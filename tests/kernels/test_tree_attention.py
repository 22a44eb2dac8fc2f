"""The Triton attention kernel against the float64 reference: pages, staged rows, windows, dtypes, batches."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.choose import choose_attention_config
from espalier.kernels.attention.triton_config import TritonConfig, choose_triton_config
from espalier.kernels.ops.attention import AttentionInputs, Nodes, Prefix
from espalier.kernels.ops.selection import KVSplitPolicy, kv_splits
from espalier.kernels.runtime.launch import Chip
from tests.kernels.attending import Case, check, check_batches, check_more_words, draw, expected, only, run
from tests.pairwise import fewer, in_turn_params

# bfloat16 only beside FP8 rows, with which it becomes float16: Triton's interpreter multiplies its bits as integers.
SMALL = [
    Case((5,)),
    Case((0,)),
    Case((0, 17, 1, 3), queries=3, rows=3, page_size=1),
    Case((0, 17, 1, 300), queries=2, rows=6, page_size=3, first=1, heads=6, kv_heads=2),
    Case((130, 256), queries=5, page_size=16, dtype=torch.float16),
    Case((140, 0), queries=2, rows=70, page_size=64, dtype=torch.float16, heads=3, kv_heads=1, k_size=5, v_size=7),
    Case((200, 40, 6), queries=3, rows=4, page_size=48, window=33),
    Case((200, 40, 6), queries=20, page_size=16, window=7, first=3),
    Case((300,), queries=2, rows=2, sink=True, max_splits=2),
    Case((1, 0), queries=2, rows=2, sink=True, max_splits=1),
    Case((700, 40, 0, 6), queries=3, rows=6, heads=6, page_size=16, window=5, sink=True),
    Case((700, 40), queries=20, heads=6, page_size=3, window=300, first=1, sink=True, dtype=torch.float16),
    Case((260,), queries=1, k_size=16, v_size=32, max_splits=1),
    Case((0, 17, 1, 300), queries=2, rows=6, page_size=3, first=1, heads=6, kv_heads=2, fp8=True),
    Case((130, 256), queries=5, page_size=16, dtype=torch.float16, fp8=True),
    Case((130, 0, 256), queries=5, rows=6, page_size=16, dtype=torch.bfloat16, fp8=True),
    Case((700, 40, 0, 6), queries=3, rows=6, heads=6, k_size=5, v_size=7, window=300, sink=True, fp8=True),
    # Large scores: the tanh bends them.
    Case((70, 0, 6), queries=3, rows=6, first=1, page_size=3, softcap=1.5, scale=1.0),
    Case((300, 4), queries=3, page_size=16, dtype=torch.float16, softcap=2.0, scale=0.7, sink=True, window=40),
    Case(
        (140, 0), queries=2, rows=5, page_size=8, dtype=torch.bfloat16, fp8=True, softcap=3.0, scale=1.0, max_splits=2
    ),
    Case((40, 3), queries=2, rows=4, page_size=16, k_size=512, v_size=512),
    Case((70, 0), queries=2, rows=4, k_size=320, v_size=512, dtype=torch.float16, softcap=5.0, scale=0.2, window=60),
    Case((70, 0), queries=3, k_size=512, v_size=400, dtype=torch.bfloat16, fp8=True, max_splits=2),
]


# What distinguishes these five, others have too, but each with something else.
@pytest.mark.parametrize("case", fewer(SMALL, lambda case: SMALL.index(case) not in (1, 4, 10, 13, 14)), ids=str)
def test_small_shapes(kernel_device, case):
    check(case, kernel_device)


@pytest.mark.parametrize(
    "case",
    fewer(
        [*SMALL[:8], replace(SMALL[3], sink=True), *SMALL[16:20]],
        lambda case: case in (SMALL[1], SMALL[7], SMALL[16], SMALL[18]) or (case.sink and case.first),
    ),
    ids=str,
)
def test_committed_rows_alone(kernel_device, case):
    """Without staged rows; an empty request gives zeros and lse -inf."""
    check(case, kernel_device, staged=False)


def test_an_empty_batch_is_legal(kernel_device):
    out, lse = run(draw(Case((), queries=3), kernel_device), 4)
    assert out.shape == (0, 3, 4, 8) and lse.shape == (0, 3, 4)


def test_a_wide_chunk_starts_with_its_longest_tiles(kernel_device):
    check(Case((40, 0), queries=70, heads=8, kv_heads=2), kernel_device, config=TritonConfig(32, 16, 16, 4, 1, 1))


def test_tiles_can_divide_the_heads_of_a_query(kernel_device):
    check(Case((40, 3), queries=3, rows=5, heads=24, kv_heads=1), kernel_device)


@pytest.mark.parametrize(
    ("rows", "max_splits"),
    in_turn_params([(torch.float16, False), (torch.bfloat16, True), (torch.float32, False)], [4, 1]),
)
def test_many_rows_of_little_weight_count(kernel_device, rows, max_splits):
    """Each row but one has less weight than float16 can say, if the largest weight is one."""
    dtype, fp8 = rows
    inputs = draw(Case((600,), page_size=16, dtype=dtype, fp8=fp8), kernel_device)
    (k, v), scales = inputs.pages, inputs.kv_scales
    position = torch.arange(600, device=kernel_device)
    row = inputs.prefix.page_table[0, position // 16] * 16 + position % 16
    k[row], v[row] = torch.tensor(0.0).to(k), torch.tensor(112.0).to(v)
    # The other scores are lower by 18, and e^-18 is less than 2^-25.
    k[row[0]], v[row[0]] = torch.tensor(4.0).to(k), torch.tensor(0.0).to(v)
    scales = scales and replace(scales, k=torch.ones_like(scales.k))
    inputs = inputs._replace(q=torch.full_like(inputs.q, 0.5625), kv_scales=scales, scale=1.0)
    out, lse = run(inputs, max_splits, staged=False)
    exact_out, exact_lse = expected(inputs, staged=False)
    assert 1e-4 < exact_out.min() <= exact_out.max() < 2e-3
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-2, atol=0)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [65280.0, 65536.0, -torch.inf])
def test_a_query_beyond_float16_fails_alone(kernel_device, value):
    """All keys make its scores negative: infinite ones would look like rows that are not seen, and give zeros."""
    inputs = draw(Case((40, 9), page_size=16, dtype=torch.bfloat16, fp8=True), kernel_device)
    k, q = inputs.pages[0], inputs.q.clone()
    k[:] = torch.tensor(-1.0 if value > 0 else 1.0).to(k)
    q[0, 0, 1, 0] = value
    out, _ = run(inputs._replace(q=q), 4, staged=False)
    assert (out[0, 0].isnan().any(1) == torch.tensor([False, value != 65280.0, False, False], device=out.device)).all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(
    "case", [SMALL[6], SMALL[19], *(pytest.param(SMALL[i], marks=pytest.mark.full) for i in (3, 4, 14))], ids=str
)
def test_bits_do_not_depend_on_the_batch(kernel_device, case):
    check_batches(case, draw(case, kernel_device), run)


def test_rows_may_have_more_words_than_they_need(kernel_device):
    check_more_words(draw(Case((5, 3), queries=2, rows=2), kernel_device), run)


def test_arguments_are_checked(kernel_device):
    inputs = draw(Case((5, 3), queries=2, rows=2), kernel_device)
    with pytest.raises(EspalierError, match="float64"):
        run(inputs._replace(q=inputs.q.double()), 4)
    with pytest.raises(EspalierError, match="page table needs shape"):
        run(inputs._replace(prefix=replace(inputs.prefix, page_table=inputs.prefix.page_table[:1])), 4)
    with pytest.raises(EspalierError, match="ancestor bits needs shape"):
        wide = draw(Case((5, 3), queries=2, rows=70), kernel_device)
        run(wide._replace(nodes=replace(wide.nodes, ancestor_bits=wide.nodes.ancestor_bits[:, :, :1])), 4)
    with pytest.raises(EspalierError, match="contiguous last dimension"):
        v = inputs.pages[1].transpose(1, 2).contiguous().transpose(1, 2)
        run(inputs._replace(pages=(inputs.pages[0], v)), 4)


@pytest.mark.parametrize("shared_memory", [99 * 1024, 163 * 1024, 227 * 1024])
def test_choices_fit_the_chip(shared_memory):
    on = Chip(shared_memory, 80, (9, 0) if shared_memory > 200 * 1024 else (8, 6))
    for packed, size, dtype in product(
        (1, 16, 32, 64, 8192), (8, 64, 96, 128, 256, 512), (torch.bfloat16, torch.float32)
    ):
        config = choose_triton_config(on, packed, 64, size, size, dtype)
        row = max(16, 1 << (size - 1).bit_length()) * dtype.itemsize
        assert (
            config.shared_bytes(on, row, row) * config.programs_per_processor <= shared_memory or dtype == torch.float32
        ), (packed, size, config)
        assert 128 % config.block_n == 0 and 64 % config.block_r == 0


def test_fp8_rows_take_a_stage_more_and_as_many_programs():
    """Two stages have no copy in flight while a step computes; three of FP8 rows fit four times."""
    on = Chip(227 * 1024, 132, (9, 0))
    found = [choose_triton_config(on, 4, 1, 128, 128, torch.bfloat16, one_wave=True, fp8=fp8) for fp8 in (False, True)]
    assert [(config.num_stages, config.programs_per_processor) for config in found] == [(2, 4), (3, 4)]
    # Of a block of 64 rows: queries in bfloat16, weights, and two steps of K and V.
    assert found[1].shared_bytes(on, 128, 128, 256) == 16 * (256 + 2 * 64) + 2 * 64 * 256


GRID = [
    Case(lengths, queries, rows, page_size, 32, 8, 128, 128, dtype=dtype, max_splits=32)
    for lengths, page_size, (queries, rows), dtype in product(
        [(1,), (0, 127, 128, 129, 255, 1000, 4096)],
        [1, 16, 48, 64, 256, 512],
        [(1, None), (5, None), (8, 40), (64, 64), (129, 129), (130, None)],
        [torch.bfloat16, torch.float32],
    )
]
GRID += [
    Case((3, 700, 0, 2100), queries, rows, 16, heads, kv_heads, k, v, window, 1, dtype, 8)
    for (heads, kv_heads, k, v), window, (queries, rows), dtype in product(
        [
            (8, 8, 64, 64),
            (14, 2, 64, 64),
            (71, 1, 64, 64),
            (16, 2, 256, 256),
            (16, 2, 512, 512),
            (16, 16, 192, 128),
            (6, 2, 96, 80),
        ],
        [None, 1, 100],
        [(1, None), (8, 24), (63, 64), (200, None)],
        [torch.float16],
    )
]
GRID += [replace(case, softcap=20.0, scale=0.3) for case in GRID[::7]]
GRID += [replace(case, fp8=True) for case in GRID[::5] if case.dtype != torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(kernel_device, case):
    check(case, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("queries", [1, 8])
def test_beyond_64k(kernel_device, page_size, queries):
    case = Case((66000, 131073, 5), queries, queries, page_size, 8, 2, 128, 128, dtype=torch.bfloat16, max_splits=32)
    check(case, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 2048])
@pytest.mark.parametrize("window", [None, 300])
def test_prompt_chunks(kernel_device, width, window):
    case = Case((0, 1000), width, None, 16, 8, 2, 128, 128, window, 0, torch.bfloat16, 1)
    check(case, kernel_device)


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_batch_at_size(kernel_device):
    lengths = tuple(torch.randint(0, 5000, (40,), generator=torch.Generator().manual_seed(0)).tolist())
    case = Case(lengths, 8, 8, 16, 32, 8, 128, 128, dtype=torch.bfloat16, max_splits=32)
    inputs = draw(case, kernel_device)
    out, _ = run(inputs, 32)
    for seed in range(5):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[: 1 + 9 * seed].tolist()
        assert torch.equal(run(only(inputs, order), 32)[0], out[order])


@pytest.mark.gpu
def test_pools_beyond_two_to_the_31_elements(kernel_device):
    """Reads the last pages of a pool with more than 2^31 elements."""
    page_size, rows = 16, (1 << 31) // (8 * 128) + 4096
    case = Case((100,), 2, 2, page_size, 8, 8, 128, 128, dtype=torch.bfloat16)
    inputs = draw(case, kernel_device)
    prefix = inputs.prefix
    shift = rows // page_size - 1 - int(prefix.page_table.max())
    pages = tuple(torch.empty(rows, 8, 128, dtype=torch.bfloat16, device=kernel_device) for _ in range(2))
    for pool, rows_of in zip(pages, inputs.pages, strict=True):
        pool[shift * page_size :][: len(rows_of)] = rows_of
    far = inputs._replace(pages=pages, prefix=replace(prefix, page_table=prefix.page_table + shift))
    assert torch.equal(run(far, 4)[0], run(inputs, 4)[0])


def test_a_padded_batch_has_the_blocks_of_the_batch():
    """40 requests of 6 KV heads would fill a GPU in one wave of 256 programs, and the 48 of their bucket would not."""
    configs = []
    for batch in (40, 48):
        q = torch.empty(batch, 1, 12, 16, dtype=torch.bfloat16)
        pages = torch.empty(8, 6, 16, dtype=torch.bfloat16)
        length = torch.zeros(batch, dtype=torch.int64)
        prefix = Prefix(torch.zeros(batch, 1, dtype=torch.int32), length)
        splits = kv_splits.reference(length, 0, KVSplitPolicy.choose(batch, 1, 6, 2, 8192, 16))
        nodes = Nodes.chain(torch.zeros(batch, 1, dtype=torch.int64))
        configs.append(choose_attention_config(AttentionInputs(q, (pages, pages), 8, prefix, nodes, splits, 1.0)))
    assert configs[0] == configs[1]
