"""Commit copies bytes: every layer, the rows that are named, and nothing else."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.state import commit_rows
from espalier.kernels.runtime import launch

both = pytest.mark.parametrize("make", [commit_rows.triton, commit_rows.reference])
# layers, staged rows, page rows, kv_heads, k_size, v_size, rows copied
SMALL = [(1, 4, 5, 1, 2, 2, 0), (1, 4, 5, 1, 2, 2, 1), (3, 8, 40, 2, 4, 6, 7), (2, 5, 9, 1, 33, 3, 4)]
LARGE = [(32, 1024, 4096, 8, 128, 128, 384), (61, 256, 1000, 1, 576, 512, 100), (2, 64, 600, 32, 128, 128, 64)]


def stacks(layers, rows, heads, sizes, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(layers, rows, heads, size, generator=generator, dtype=torch.float32).to(dtype).to(device)
        for size in sizes
    )


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SMALL, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)], ids=str)
def test_rows_of_all_layers_arrive(make, shape, dtype, kernel_device):
    layers, staged_rows, page_rows, heads, k_size, v_size, count = shape
    staged = stacks(layers, staged_rows, heads, (k_size, v_size), dtype, kernel_device, 1)
    committed = stacks(layers, page_rows, heads, (k_size, v_size), dtype, kernel_device, 2)
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(0, staged_rows, (count,), generator=generator).to(kernel_device)
    rows = torch.randperm(page_rows - 1, generator=generator)[:count].to(kernel_device) + 1
    rows[1::3] = 0
    expected = [value.clone() for value in committed]
    for src, dst in zip(staged, expected, strict=True):
        dst[:, rows[rows > 0]] = src[:, source[rows > 0]]
    make(staged, committed, source, rows)
    assert all(torch.equal(a, b) for a, b in zip(committed, expected, strict=True))


@pytest.mark.parametrize("layers", [1, 5, 8])
def test_a_program_for_several_layers(layers, kernel_device, monkeypatch):
    """As where programs crowd the chip; the last has fewer layers than the others, or none to spare."""
    monkeypatch.setattr(launch, "MAX_PROGRAMS_PER_PROCESSOR", 0)
    test_rows_of_all_layers_arrive(commit_rows.triton, (layers, 6, 9, 2, 4, 6, 5), torch.float32, kernel_device)


@both
@pytest.mark.parametrize("sizes", [(24,), (4, 6, 3)], ids=["one", "three"])
def test_any_number_of_planes(make, sizes, kernel_device):
    staged = stacks(2, 6, 1, sizes, torch.float32, kernel_device, 1)
    committed = stacks(2, 9, 1, sizes, torch.float32, kernel_device, 2)
    expected = [value.clone() for value in committed]
    for src, dst in zip(staged, expected, strict=True):
        dst[:, 7], dst[:, 2] = src[:, 1], src[:, 5]
    source, rows = (torch.tensor(at, device=kernel_device) for at in ([1, 0, 5], [7, 0, 2]))
    make(staged, committed, source, rows)
    assert all(torch.equal(a, b) for a, b in zip(committed, expected, strict=True))


@both
def test_not_a_number_does_not_reach_the_dummys_row(make, kernel_device):
    staged, committed = (torch.full((2, 3, 1, 4), torch.nan, device=kernel_device) for _ in range(2))
    committed[:, 0] = 0
    rows = torch.tensor([0, 2, 0], device=kernel_device)
    make((staged, staged), (committed, committed.clone()), torch.arange(3, device=kernel_device), rows)
    assert not committed[:, 0].any() and committed[:, 1:].isnan().all()


@pytest.mark.gpu
def test_offsets_beyond_32_bits(kernel_device):
    """Layers whose pages hold more than 2**31 values: 18 GB of them."""
    heads, size, rows = 8, 128, 2_200_000
    committed = tuple(torch.zeros(2, rows, heads, size, dtype=torch.bfloat16, device=kernel_device) for _ in range(2))
    staged = stacks(2, 8, heads, (size, size), torch.bfloat16, kernel_device, 4)
    places = torch.tensor([1, rows - 1, rows // 2, 2_097_153], device=kernel_device)
    commit_rows.triton(staged, committed, torch.tensor([0, 3, 5, 7], device=kernel_device), places)
    for src, dst in zip(staged, committed, strict=True):
        assert torch.equal(dst[:, places], src[:, [0, 3, 5, 7]])
        dst[:, places] = 0
        assert not any(part.any() for part in dst.view(2, 100, -1).unbind(1))


def test_what_does_not_fit_is_refused(kernel_device):
    staged, committed = torch.zeros(2, 3, 1, 4, device=kernel_device), torch.zeros(2, 9, 1, 4, device=kernel_device)
    rows = torch.ones(2, dtype=torch.int64, device=kernel_device)
    for wrong in (
        ((staged[:1], staged), (committed, committed), rows, rows),
        ((staged, staged.double()), (committed, committed), rows, rows),
        ((staged, staged), (committed, committed[..., :2]), rows, rows),
        ((staged, staged), (committed, committed), rows, rows[:1]),
        ((staged, staged), (committed, committed), rows, rows.int()),
        ((staged, staged), (committed, committed), rows.int(), rows),
    ):
        with pytest.raises(EspalierError, match="needs shape"):
            commit_rows(*wrong)


def test_rows_in_pieces_are_refused(kernel_device):
    staged, committed = torch.zeros(2, 3, 2, 4, device=kernel_device), torch.zeros(2, 2, 9, 4, device=kernel_device)
    rows = torch.ones(1, dtype=torch.int64, device=kernel_device)
    with pytest.raises(EspalierError, match="contiguous"):
        commit_rows.triton((staged, staged), (committed.transpose(1, 2),) * 2, rows, rows)
