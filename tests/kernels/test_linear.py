"""The linear map of few rows: against float64, bit-equal run by run, and row by row whatever stands beside it."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers.linear import (
    LibraryPlan,
    TritonPlan,
    block_rows,
    candidates,
    linear,
    linear_gated,
    linear_parts,
    linear_parts_triton,
    linear_triton,
)
from espalier.kernels.layers.silu import silu_mul, silu_mul_triton
from espalier.kernels.runtime.launch import SMALLEST_SHARED_MEMORY, Chip

# Triton 3.6's interpreter multiplies the bits of bfloat16 as if they were whole numbers.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
WHOLE = TritonPlan(block_out=64, block_in=64, splits=1, warps=4, stages=2)
SPLIT = TritonPlan(block_out=64, block_in=64, splits=3, warps=4, stages=2)
H200 = Chip(shared_memory=232448, processors=132, capability=(9, 0))
SMALL = Chip(shared_memory=SMALLEST_SHARED_MEMORY, processors=84, capability=(8, 6))


def drawn(rows, num_out, num_in, device, dtype=DTYPE, bias=False, seed=0):
    at = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, num_in, generator=at).to(dtype)
    weight = (torch.randn(num_out, num_in, generator=at) / num_in**0.5).to(dtype)
    added = torch.randn(num_out, generator=at).to(dtype).to(device) if bias else None
    return x.to(device), weight.to(device), added


def drawn_exact(rows, num_out, num_in, device, bias=False):
    """Whole numbers times a power of two: float32 holds every product and sum, so any order gives the same bits.

    A sum takes some 15 bits, so that rounding it to DTYPE shows.  The interpreter multiplies with NumPy's BLAS, whose
    order depends on the CPU and on the place in a tile.
    """
    at = torch.Generator().manual_seed(0)

    def whole(bound, *shape):
        return torch.randint(-bound, bound + 1, shape, generator=at)

    x, weight = whole(64, rows, num_in) * 2.0**-5, whole(64, num_out, num_in) * 2.0**-9
    added = (whole(255, num_out) * 2.0**-7).to(device, DTYPE) if bias else None
    return x.to(device, DTYPE), weight.to(device, DTYPE), added


def assert_is_the_product(out, x, weight, bias):
    """One rounding to out's dtype, and float32 sums in any order (kernels/layers/linear.py)."""
    x, weight = x.double(), weight.double()
    exact = x @ weight.T + (0 if bias is None else bias.double())
    magnitude = x.abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    bound = torch.finfo(out.dtype).eps / 2 * exact.abs() * 1.01 + x.shape[1] * 2.0**-24 * magnitude
    assert ((out.double() - exact).abs() <= bound).all()


def poisoned(monkeypatch):
    """What new_empty hands out is not a number until it is written."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))


@pytest.mark.parametrize("choice", [WHOLE, SPLIT])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "num_out", "num_in"), [(1, 64, 192), (3, 70, 200), (17, 130, 136), (5, 1, 64)])
def test_any_shape(kernel_device, monkeypatch, choice, bias, rows, num_out, num_in):
    x, weight, added = drawn(rows, num_out, num_in, kernel_device, bias=bias)
    poisoned(monkeypatch)
    assert_is_the_product(linear_triton(x, weight, added, choice), x, weight, added)


def test_more_parts_than_steps(kernel_device):
    x, weight, _ = drawn(2, 64, 100, kernel_device)
    assert_is_the_product(linear_triton(x, weight, None, SPLIT), x, weight, None)


def test_float16(kernel_device):
    x, weight, bias = drawn(4, 64, 128, kernel_device, torch.float16, bias=True)
    assert_is_the_product(linear_triton(x, weight, bias, SPLIT), x, weight, bias)


@pytest.mark.parametrize("bias", [False, True])
def test_parts_add_up_to_the_whole(kernel_device, monkeypatch, bias):
    x, weight, added = drawn(3, 70, 200, kernel_device, bias=bias)
    poisoned(monkeypatch)
    first, second, third = parts = linear_parts_triton(x, weight, added, SPLIT)
    assert parts.dtype == torch.float32
    assert torch.equal((first + second + third).to(DTYPE), linear_triton(x, weight, added, SPLIT))
    assert torch.equal(linear_parts_triton(x, weight, added, WHOLE), linear_triton(x, weight, added, WHOLE))


@pytest.mark.parametrize("choice", [WHOLE, SPLIT, TritonPlan(16, 64, 1, 4, 2), TritonPlan(128, 64, 1, 4, 2), None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "size", "num_in"), [(1, 64, 192), (3, 35, 200), (17, 130, 136), (5, 1, 64), (0, 8, 64)]
)
def test_gated_is_the_gate_of_the_whole(kernel_device, monkeypatch, choice, bias, rows, size, num_in):
    """To the bit, whether the kernel goes on to it or not."""
    x, weight, added = drawn_exact(rows, 2 * size, num_in, kernel_device, bias=bias)
    gate_up = linear(x, weight, added, choice)
    poisoned(monkeypatch)
    out = linear_gated(x, weight, added, choice)
    # DraftHidden the interpreter, which runs what is launched by name, a CPU has PyTorch's own, which rounds twice.
    gate = silu_mul_triton if choice is not None and choice.splits == 1 else silu_mul
    assert out.shape == (rows, size) and torch.equal(out, gate(gate_up))


@pytest.mark.parametrize(("rows", "choice"), [(100, TritonPlan(128, 64, 1, 8, 3)), (200, TritonPlan(64, 64, 1, 4, 2))])
def test_gated_at_many_rows(kernel_device, rows, choice):
    x, weight, _ = drawn_exact(rows, 272, 136, kernel_device)
    assert torch.equal(linear_gated(x, weight, None, choice), silu_mul_triton(linear(x, weight, None, choice)))


@pytest.mark.parametrize("choice", [WHOLE, SPLIT])
def test_a_gate_without_its_up_is_refused(kernel_device, choice):
    x, weight, _ = drawn(3, 7, 64, kernel_device)
    with pytest.raises(EspalierError, match="even number"):
        linear_gated(x, weight, None, choice)


@pytest.mark.parametrize("choice", [WHOLE, SPLIT])
def test_rows_of_a_wider_tensor(kernel_device, choice):
    wide, weight, _ = drawn(8, 64, 256, kernel_device)
    x, weight = wide[::2, 64:192], weight[:, 128:]
    assert_is_the_product(linear_triton(x, weight, None, choice), x, weight, None)


@pytest.mark.parametrize("choice", [WHOLE, SPLIT])
def test_a_row_does_not_see_the_others(kernel_device, choice):
    """Whatever stands beside it, even what is not a number, and however many: within a block of rows, to the bit."""
    x, weight, _ = drawn(16, 64, 192, kernel_device)
    alone = linear_triton(x[3:4], weight, None, choice)
    x[5] = torch.nan
    assert torch.equal(linear_triton(x, weight, None, choice)[3:4], alone)
    assert torch.equal(linear_triton(x[3:8], weight, None, choice)[:1], alone)


@pytest.mark.parametrize(("rows", "num_out"), [(0, 64), (2, 0)])
def test_nothing_to_do(kernel_device, rows, num_out):
    x, weight, _ = drawn(rows, num_out, 64, kernel_device)
    for make in (linear_triton, linear_parts_triton):
        assert make(x, weight, None, SPLIT).shape == (rows, num_out)


def test_without_a_choice_it_is_pytorchs():
    x, weight, bias = drawn(3, 8, 16, "cpu", bias=True)
    assert torch.equal(linear(x, weight, bias, None), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, w, b: (x.float(), w.float(), None), "two bytes"),
        (lambda x, w, b: (x.repeat(100, 1), w, b), "up to 256"),
        (lambda x, w, b: (x, w[:, :-1], b), "weight needs shape"),
        (lambda x, w, b: (x, w.double(), b), "weight needs shape"),
        (lambda x, w, b: (x, w, b[:-1]), "bias needs shape"),
        (lambda x, w, b: (x, w.T.contiguous().T, b), "transposed"),
        (lambda x, w, b: (x.T.contiguous().T, w, b), "transposed"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    with pytest.raises(EspalierError, match=said):
        linear_triton(*change(*drawn(3, 64, 64, "cpu", bias=True)), WHOLE)


def test_a_choice_for_a_larger_chip_is_refused():
    with pytest.raises(EspalierError, match="doctor --tune"):
        linear_triton(*drawn(3, 64, 64, "cpu"), TritonPlan(128, 256, 1, 4, 4))


@pytest.mark.parametrize("on", [H200, SMALL])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128, 256])
@pytest.mark.parametrize("shape", [(6144, 4096), (128256, 4096), (2048, 8192), (72, 40)])
def test_candidates_fit_the_chip(on, rows, shape):
    found = candidates(rows, *shape, on)
    assert found or shape == (72, 40) or (on, rows) == (SMALL, 256)
    for choice in found:
        assert isinstance(choice, LibraryPlan) or choice.shared_memory(rows) <= on.shared_memory


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("way", [LibraryPlan(2, 1), LibraryPlan(3, 1), LibraryPlan(1, 2), LibraryPlan(1, 4)])
def test_the_library_in_pieces_and_in_parts(kernel_device, monkeypatch, way, bias):
    """Rows and weight of wider tensors; pieces that do not come out even; parts that add up to the whole."""
    wide, weight, added = drawn(10, 70, 256, kernel_device, bias=bias)
    x, weight = wide[::2, 64:192], weight[:, 128:]
    poisoned(monkeypatch)
    out, made = linear(x, weight, added, way), linear_parts(x, weight, added, way)
    assert out.dtype == DTYPE
    assert_is_the_product(out, x, weight, added)
    if way.splits == 1:
        assert torch.equal(made, out)
    else:
        assert made.shape == (way.splits, 5, 70) and made.dtype == torch.float32
        total = made[0].clone()
        for part in made[1:]:
            total += part
        assert torch.equal(total.to(DTYPE), out)


@pytest.mark.parametrize("way", [LibraryPlan(2, 1), LibraryPlan(1, 2)])
@pytest.mark.parametrize(("rows", "num_out"), [(0, 64), (2, 0)])
def test_nothing_to_do_for_the_library(kernel_device, way, rows, num_out):
    x, weight, _ = drawn(rows, num_out, 64, kernel_device)
    assert linear_parts(x, weight, None, way).shape == (rows, num_out)


def test_the_library_is_asked_for_less_only_where_its_tiles_come_out_even():
    ways = {way for way in candidates(65, 768, 512, H200) if isinstance(way, LibraryPlan)}
    assert ways == {LibraryPlan(2, 1), LibraryPlan(3, 1), LibraryPlan(1, 2), LibraryPlan(1, 4)}
    assert not any(isinstance(way, LibraryPlan) for way in candidates(64, 768, 512, H200))


def test_one_to_sixteen_rows_are_one_computation():
    assert {block_rows(rows) for rows in range(1, 17)} == {16}
    assert [block_rows(rows) for rows in (17, 64, 65, 256)] == [32, 64, 128, 256]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 32, 64, 129, 256])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (5000, 1000)])
def test_every_candidate(kernel_device, monkeypatch, rows, shape):
    """Right, and the same bits twice, at every candidate's first two of each tile."""
    x, weight, _ = drawn(rows, *shape, kernel_device)
    poisoned(monkeypatch)
    exact, seen = linear(x.double(), weight.double(), None, None), {}
    for choice in candidates(rows, *shape, H200):
        tile = choice if isinstance(choice, LibraryPlan) else (choice.block_out, choice.block_in, choice.warps)
        seen[tile] = seen.get(tile, 0) + 1
        if seen[tile] > 2:
            continue
        out = linear(x, weight, None, choice)
        # Against the whole, in norm: a bound by element needs the products' magnitudes, which the small shapes check.
        assert (out.double() - exact).norm() <= 4e-3 * exact.norm(), choice
        assert torch.equal(out, linear(x, weight, None, choice)), choice


@pytest.mark.gpu
@pytest.mark.parametrize("way", [LibraryPlan(2, 1), LibraryPlan(1, 2)])
@pytest.mark.parametrize("rows", [96, 256])
def test_of_the_library_a_row_does_not_see_the_others(kernel_device, way, rows):
    x, weight, _ = drawn(rows, 4096, 4096, kernel_device)
    expected = linear(x, weight, None, way)[3]
    x[4:] = torch.nan
    assert torch.equal(linear(x, weight, None, way)[3], expected)


@pytest.mark.gpu
def test_a_captured_chain_waits_for_what_it_reads(kernel_device):
    """Kernels that are launched early must still see what those before them wrote, in each replay."""
    x, first, _ = drawn(8, 4096, 4096, kernel_device)
    second = drawn(8, 4096, 4096, kernel_device, seed=1)[1]
    buffer = torch.empty_like(x)

    def body():
        y = linear_triton(buffer, first, None, WHOLE)
        return linear_triton(linear_triton(y.add_(1), second, None, SPLIT), first, None, SPLIT)

    body()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    for seed in range(20):
        buffer.copy_(drawn(8, 1, 4096, kernel_device, seed=seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, body()), seed
