"""The kernel for wide latent rows against the float64 reference: pages, staged rows, splits, dtypes, batches."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.triton_config import TritonConfig, choose_triton_latent_config
from espalier.kernels.hopper.config import (
    HopperLatentConfig,
    choose_hopper_latent_config,
    choose_hopper_latent_few_queries_config,
)
from espalier.kernels.ops.attention import AttentionInputs, latent_attention
from espalier.kernels.runtime.launch import Chip, chip
from tests.kernels.attending import (
    Case,
    check_batches,
    check_more_words,
    check_results,
    draw,
    only,
    poison_empty,
    split,
)
from tests.pairwise import fewer


def latent_case(lengths, queries=1, rows=None, page_size=16, heads=4, size=80, v_size=64, **fields) -> Case:
    return Case(lengths, queries, rows, page_size, heads, 1, size, v_size, **fields)


def drawn(case: Case, device: torch.device) -> AttentionInputs:
    """Inputs in which V is the first part of K's rows."""
    inputs = draw(case, device)
    (k, _), (staged_k, _), scales = inputs.pages, inputs.staged, inputs.kv_scales
    return inputs._replace(
        pages=(k, k[..., : case.v_size]),
        staged=(staged_k, staged_k[..., : case.v_size]),
        kv_scales=None if scales is None else replace(scales, v=scales.k),
    )


def run(
    inputs: AttentionInputs, max_splits: int, staged: bool = True, **arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    return latent_attention.triton(split(inputs if staged else inputs._replace(staged=None), max_splits), **arguments)


def check(case: Case, device: torch.device, staged: bool = True, **arguments) -> None:
    inputs = drawn(case, device)
    check_results(case, inputs, run(inputs, case.max_splits, staged, **arguments), staged)


# No bfloat16: Triton's interpreter multiplies its bits as integers.
SMALL = [
    latent_case((5,)),
    latent_case((0,)),
    latent_case((0, 17, 1, 3), queries=3, rows=3, page_size=1),
    latent_case((0, 17, 1, 300), queries=2, rows=6, page_size=3, first=3, heads=6),
    latent_case((130, 20), queries=5, heads=16, dtype=torch.float16),
    latent_case((140, 0), queries=2, rows=70, page_size=64, heads=16, size=144, v_size=128, dtype=torch.float16),
    latent_case((200, 40, 6), queries=3, rows=4, page_size=48, size=50, v_size=37),
    latent_case((1, 0), queries=2, rows=2, max_splits=1),
    latent_case((260,), heads=16, size=144, v_size=128, max_splits=1),
    latent_case((0, 17, 1, 300), queries=2, rows=6, page_size=3, first=3, heads=6, fp8=True),
    latent_case((130, 20), queries=5, heads=16, dtype=torch.float16, fp8=True),
]


@pytest.mark.parametrize("case", fewer(SMALL, lambda case: case not in (SMALL[0], SMALL[9])), ids=str)
def test_small_shapes(kernel_device, case):
    check(case, kernel_device)


@pytest.mark.parametrize(
    "case", fewer([*SMALL[:6], SMALL[-2]], lambda case: case in (SMALL[1], SMALL[4], SMALL[-2])), ids=str
)
def test_committed_rows_alone(kernel_device, case):
    check(case, kernel_device, staged=False)


@pytest.mark.parametrize(
    "config",
    fewer([TritonConfig(64, 64, 64, 8, 2), TritonConfig(32, 32, 32, 4, 2)], lambda config: config.block_m == 64),
    ids=str,
)
def test_the_tiles_of_a_large_chip(kernel_device, config):
    check(latent_case((200, 3), queries=5, rows=70, heads=16), kernel_device, config=config)


def test_a_wide_chunk_starts_with_its_longest_tiles(kernel_device):
    check(latent_case((40, 0), queries=40, heads=4), kernel_device, config=TritonConfig(16, 16, 16, 4, 1))


def test_an_empty_batch_is_legal(kernel_device):
    out, lse = run(drawn(latent_case((), queries=3), kernel_device), 4)
    assert out.shape == (0, 3, 4, 64) and lse.shape == (0, 3, 4)


@pytest.mark.parametrize("case", fewer([SMALL[3], SMALL[4]], lambda case: case is SMALL[3]), ids=str)
def test_bits_do_not_depend_on_the_batch(kernel_device, case):
    check_batches(case, drawn(case, kernel_device), run)


def test_rows_may_have_more_words_than_they_need(kernel_device):
    check_more_words(drawn(latent_case((5, 3), queries=2, rows=2), kernel_device), run)


def test_arguments_are_checked(kernel_device):
    inputs = drawn(latent_case((5, 3), queries=2, rows=2), kernel_device)
    with pytest.raises(EspalierError, match="float64"):
        run(inputs._replace(q=inputs.q.double()), 4)
    with pytest.raises(EspalierError, match="page table needs shape"):
        run(inputs._replace(prefix=replace(inputs.prefix, page_table=inputs.prefix.page_table[:1])), 4)
    with pytest.raises(EspalierError, match="ancestor bits needs shape"):
        wide = drawn(latent_case((5, 3), queries=2, rows=70), kernel_device)
        run(wide._replace(nodes=replace(wide.nodes, ancestor_bits=wide.nodes.ancestor_bits[:, :, :1])), 4)
    with pytest.raises(EspalierError, match="V to be the first part of K"):
        run(inputs._replace(pages=(inputs.pages[0], inputs.pages[1].clone())), 4)


@pytest.mark.parametrize("shared_memory", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_choices_fit_the_chip(shared_memory, dtype):
    on = Chip(shared_memory, 80, (9, 0) if shared_memory > 200 * 1024 else (8, 6))
    for packed, row in product((1, 16, 32, 64, 8192), (80, 576)):
        config = choose_triton_latent_config(on, packed, 64, row * dtype.itemsize, dtype)
        shared_bytes = config.shared_bytes(on, row * dtype.itemsize, 0)
        assert shared_bytes * config.programs_per_processor <= shared_memory, (packed, row, config)
        assert 128 % config.block_n == 0 and 64 % config.block_r == 0


def test_the_hopper_kernel_is_chosen_where_it_fits():
    config = choose_hopper_latent_config(Chip(227 * 1024, 132, (9, 0)))
    assert config is not None and config.shared_bytes <= 227 * 1024
    assert choose_hopper_latent_config(Chip(227 * 1024, 132, (10, 0))) is None
    assert choose_hopper_latent_config(Chip(163 * 1024, 132, (9, 0))) is None
    of_fp8 = choose_hopper_latent_config(Chip(227 * 1024, 132, (9, 0)), is_fp8=True)
    assert of_fp8 is not None and of_fp8.raw_stages and of_fp8.shared_bytes <= 227 * 1024


def test_the_kernel_for_one_node_is_chosen_for_one_node_of_up_to_16_heads():
    hopper, blackwell = Chip(227 * 1024, 132, (9, 0)), Chip(227 * 1024, 148, (10, 0))
    config = choose_hopper_latent_few_queries_config(hopper, 1, 16)
    assert config is not None and config.shared_bytes <= 227 * 1024
    assert choose_hopper_latent_few_queries_config(hopper, 2, 8) is None
    assert choose_hopper_latent_few_queries_config(hopper, 1, 17) is None
    assert choose_hopper_latent_few_queries_config(blackwell, 1, 16) is None


def test_the_hopper_kernel_refuses_other_shapes(kernel_device):
    with pytest.raises(EspalierError, match="rows of 512 \\+ 64 values"):
        run(drawn(latent_case((5,)), kernel_device), 4, config=HopperLatentConfig(4))


GRID = [
    latent_case(lengths, queries, rows, page_size, heads, 576, 512, dtype=dtype, max_splits=32)
    for lengths, page_size, (queries, rows), heads, dtype in product(
        [(1,), (0, 127, 128, 129, 1000, 4096)],
        [1, 16, 48, 64, 512],
        [(1, None), (8, 40), (16, 16), (129, 129)],
        [16, 128],
        [torch.bfloat16, torch.float32],
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(kernel_device, case):
    check(case, kernel_device)


HOPPER = [
    latent_case((0, 1, 31, 32, 63, 64, 65, 130, 700), queries, rows, page_size, heads, 576, 512, dtype=dtype, **fields)
    for (queries, rows), page_size, heads, dtype, fields in [
        ((1, None), 64, 16, torch.bfloat16, {}),
        ((8, 40), 16, 16, torch.bfloat16, {"first": 1}),
        ((5, None), 1, 20, torch.float16, {"max_splits": 8}),
        ((129, 129), 48, 16, torch.bfloat16, {"max_splits": 3}),
        ((64, 64), 512, 128, torch.bfloat16, {"max_splits": 1}),
        ((300, None), 32, 7, torch.float16, {"first": 40, "max_splits": 2}),
    ]
]
HOPPER += [replace(case, fp8=True) for case in HOPPER]


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_the_hopper_kernel_with_any_number_of_stages(kernel_device, monkeypatch, case, staged):
    """The same bits with any number of stages, and within tolerance of the reference."""
    inputs = drawn(case, kernel_device)
    if choose_hopper_latent_config(chip(inputs.q)) is None:
        pytest.skip("needs a Hopper GPU with enough shared memory")
    poison_empty(monkeypatch)
    first, *others = map(HopperLatentConfig, *(((2, 2, 2), (4, 2, 3)) if case.fp8 else ((4, 2, 3),)))
    check(case, kernel_device, staged, config=first)
    out, lse = run(inputs, case.max_splits, staged, config=first)
    for config in others:
        again, again_lse = run(inputs, case.max_splits, staged, config=config)
        assert torch.equal(again, out) and torch.equal(again_lse, lse), config


FEW = [
    latent_case((0, 1, 63, 64, 65, 130, 0, 4097), 1, rows, page_size, heads, 576, 512, dtype=dtype, **fields)
    for rows, page_size, heads, dtype, fields in [
        (None, 64, 16, torch.bfloat16, {}),
        (40, 16, 16, torch.bfloat16, {"first": 1}),
        (None, 1, 12, torch.float16, {"max_splits": 8}),
        (70, 512, 1, torch.bfloat16, {"max_splits": 1}),
        (None, 48, 7, torch.float16, {"first": 40, "max_splits": 2}),
    ]
]


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_hopper_kernel_for_one_node(kernel_device, monkeypatch, case, staged):
    inputs = drawn(case, kernel_device)
    config = choose_hopper_latent_few_queries_config(chip(inputs.q), 1, case.heads)
    if config is None:
        pytest.skip("needs a Hopper GPU with enough shared memory")
    poison_empty(monkeypatch)
    check(case, kernel_device, staged, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 8])
def test_bits_do_not_depend_on_the_batch_at_size(kernel_device, queries):
    lengths = tuple(torch.randint(0, 5000, (24,), generator=torch.Generator().manual_seed(0)).tolist())
    inputs = drawn(latent_case(lengths, queries, 8, 16, 16, 576, 512, dtype=torch.bfloat16), kernel_device)
    out, _ = run(inputs, 32)
    for seed in range(3):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))[: 1 + 9 * seed].tolist()
        assert torch.equal(run(only(inputs, order), 32)[0], out[order])


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 64, 512])
@pytest.mark.parametrize(
    ("queries", "heads", "max_splits"), [(1, 16, 128), (1, 128, 64), (8, 128, 8), (16, 16, 32), (129, 16, 3)]
)
def test_beyond_64k(kernel_device, queries, heads, max_splits, page_size):
    case = latent_case((66000, 5), queries, queries, page_size, heads, 576, 512, dtype=torch.bfloat16)
    check(replace(case, max_splits=max_splits), kernel_device)
