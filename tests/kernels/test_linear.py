"""The linear layer for few rows: close to float64, deterministic, and no row's bits depend on the other rows."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import LibraryPlan, TritonPlan, block_rows, candidate_plans
from espalier.kernels.ops.activation import gated_activation
from espalier.kernels.ops.linear import linear, linear_gated, linear_partial_sums, write_parts
from espalier.kernels.runtime.launch import SMALLEST_GPU_SHARED_MEMORY, Chip
from tests.pairwise import in_turn_params

# float16 on a CPU: Triton 3.6's interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
WHOLE = TritonPlan(block_out=64, block_in=64, splits=1, warps=4, stages=2)
SPLIT = TritonPlan(block_out=64, block_in=64, splits=3, warps=4, stages=2)
H200 = Chip(shared_memory=232448, processors=132, capability=(9, 0))
SMALL = Chip(shared_memory=SMALLEST_GPU_SHARED_MEMORY, processors=84, capability=(8, 6))


def random_inputs(rows, num_out, num_in, device, dtype=DTYPE, bias=False, seed=0):
    """x [rows, num_in], weight [num_out, num_in], and bias [num_out] or None."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, num_in, generator=generator).to(dtype)
    weight = (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).to(dtype)
    bias_tensor = torch.randn(num_out, generator=generator).to(dtype).to(device) if bias else None
    return x.to(device), weight.to(device), bias_tensor


def drawn_exact(rows, num_out, num_in, device, bias=False):
    """Integers times a power of two: float32 holds every product and sum exactly, so any order gives the same bits.

    A sum has about 15 bits, so a missing rounding to DTYPE shows.  The interpreter multiplies with NumPy's BLAS, whose
    reduction order depends on the CPU and on the position in a tile.
    """
    generator = torch.Generator().manual_seed(0)

    def integers(bound, *shape):
        return torch.randint(-bound, bound + 1, shape, generator=generator)

    x, weight = integers(64, rows, num_in) * 2.0**-5, integers(64, num_out, num_in) * 2.0**-9
    bias_tensor = (integers(255, num_out) * 2.0**-7).to(device, DTYPE) if bias else None
    return x.to(device, DTYPE), weight.to(device, DTYPE), bias_tensor


def assert_is_the_product(out, x, weight, bias):
    """Asserts the tolerance of kernels/layers/linear.py: one rounding to out's dtype, float32 sums in any order."""
    x, weight = x.double(), weight.double()
    exact = x @ weight.T + (0 if bias is None else bias.double())
    magnitude = x.abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    bound = torch.finfo(out.dtype).eps / 2 * exact.abs() * 1.01 + x.shape[1] * 2.0**-24 * magnitude
    assert ((out.double() - exact).abs() <= bound).all()


def poisoned(monkeypatch):
    """Tensor.new_empty returns tensors full of NaN."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))


@pytest.mark.parametrize("plan", [WHOLE, SPLIT])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "num_out", "num_in"), [(1, 64, 192), (3, 70, 200), (17, 130, 136), (5, 1, 64)])
def test_any_shape(kernel_device, monkeypatch, plan, bias, rows, num_out, num_in):
    x, weight, bias_tensor = random_inputs(rows, num_out, num_in, kernel_device, bias=bias)
    poisoned(monkeypatch)
    assert_is_the_product(linear.triton(x, weight, bias_tensor, plan), x, weight, bias_tensor)


def test_more_splits_than_tiles(kernel_device):
    x, weight, _ = random_inputs(2, 64, 100, kernel_device)
    assert_is_the_product(linear.triton(x, weight, None, SPLIT), x, weight, None)


def test_float16(kernel_device):
    x, weight, bias = random_inputs(4, 64, 128, kernel_device, torch.float16, bias=True)
    assert_is_the_product(linear.triton(x, weight, bias, SPLIT), x, weight, bias)


@pytest.mark.parametrize("bias", [False, True])
def test_partial_sums_add_up_to_linear(kernel_device, monkeypatch, bias):
    x, weight, bias_tensor = random_inputs(3, 70, 200, kernel_device, bias=bias)
    poisoned(monkeypatch)
    first, second, third = parts = linear_partial_sums.triton(x, weight, bias_tensor, SPLIT)
    assert parts.dtype == torch.float32
    assert torch.equal((first + second + third).to(DTYPE), linear.triton(x, weight, bias_tensor, SPLIT))
    assert torch.equal(
        linear_partial_sums.triton(x, weight, bias_tensor, WHOLE), linear.triton(x, weight, bias_tensor, WHOLE)
    )


@pytest.mark.parametrize("plan", [WHOLE, SPLIT])
def test_parts_are_written_into_the_tail_of_others(kernel_device, plan):
    """In float32: rounded once added, they are `linear`."""
    x, weight, bias = random_inputs(3, 70, 200, kernel_device, bias=True)
    parts = torch.full((2 + plan.splits, 3, 70), 7.0, device=kernel_device)
    write_parts.triton(x, weight, bias, plan, parts[2:])
    assert (parts[:2] == 7).all() and torch.equal(
        parts[2:].cumsum(0)[-1].to(DTYPE), linear.triton(x, weight, bias, plan)
    )
    for wrong in (parts[1:], parts[2:].double(), parts[2:].transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(EspalierError, match="parts"):
            write_parts.triton(x, weight, bias, plan, wrong)


@pytest.mark.parametrize(
    ("plan", "bias"),
    in_turn_params(
        [WHOLE, SPLIT, TritonPlan(16, 64, 1, 4, 2), TritonPlan(128, 64, 1, 4, 2), None],
        [False, True],
    ),
)
@pytest.mark.parametrize(
    ("rows", "size", "num_in"), [(1, 64, 192), (3, 35, 200), (17, 130, 136), (5, 1, 64), (0, 8, 64)]
)
def test_gated_is_the_activation_of_linear(kernel_device, monkeypatch, plan, bias, rows, size, num_in):
    """Bit for bit, with the activation in the kernel's epilogue or in a kernel of its own.  All sums are exact."""
    x, weight, bias_tensor = drawn_exact(rows, 2 * size, num_in, kernel_device, bias=bias)
    gate_up = linear.triton(x, weight, bias_tensor, plan)
    poisoned(monkeypatch)
    out = linear_gated.triton(x, weight, bias_tensor, plan)
    assert out.shape == (rows, size) and torch.equal(out, gated_activation.triton(gate_up))


@pytest.mark.parametrize(("rows", "plan"), [(100, TritonPlan(128, 64, 1, 8, 3)), (200, TritonPlan(64, 64, 1, 4, 2))])
def test_gated_at_many_rows(kernel_device, rows, plan):
    x, weight, _ = drawn_exact(rows, 272, 136, kernel_device)
    assert torch.equal(
        linear_gated.triton(x, weight, None, plan), gated_activation.triton(linear.triton(x, weight, None, plan))
    )


@pytest.mark.parametrize("plan", [WHOLE, SPLIT])
def test_gated_refuses_an_odd_number_of_outputs(kernel_device, plan):
    x, weight, _ = random_inputs(3, 7, 64, kernel_device)
    with pytest.raises(EspalierError, match="even number"):
        linear_gated.triton(x, weight, None, plan)


@pytest.mark.parametrize("plan", [WHOLE, SPLIT])
def test_strided_rows(kernel_device, plan):
    wide, weight, _ = random_inputs(8, 64, 256, kernel_device)
    x, weight = wide[::2, 64:192], weight[:, 128:]
    assert_is_the_product(linear.triton(x, weight, None, plan), x, weight, None)


@pytest.mark.parametrize("plan", [WHOLE, SPLIT])
def test_a_rows_bits_do_not_depend_on_other_rows(kernel_device, plan):
    """Neither on their number, within one block of rows, nor on their values, NaN included."""
    x, weight, _ = random_inputs(16, 64, 192, kernel_device)
    alone = linear.triton(x[3:4], weight, None, plan)
    x[5] = torch.nan
    assert torch.equal(linear.triton(x, weight, None, plan)[3:4], alone)
    assert torch.equal(linear.triton(x[3:8], weight, None, plan)[:1], alone)


@pytest.mark.parametrize(("rows", "num_out"), [(0, 64), (2, 0)])
def test_empty_inputs(kernel_device, rows, num_out):
    x, weight, _ = random_inputs(rows, num_out, 64, kernel_device)
    for make in (linear.triton, linear_partial_sums.triton):
        assert make(x, weight, None, SPLIT).shape == (rows, num_out)


def test_no_plan_is_f_linear():
    x, weight, bias = random_inputs(3, 8, 16, "cpu", bias=True)
    assert torch.equal(linear(x, weight, bias, None), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, b: (x.float(), w.float(), None), "bfloat16 or float16"),
        (lambda x, w, b: (x.repeat(100, 1), w, b), "at most 256"),
        (lambda x, w, b: (x, w[:, :-1], b), "weight needs shape"),
        (lambda x, w, b: (x, w.double(), b), "weight needs shape"),
        (lambda x, w, b: (x, w, b[:-1]), "bias needs shape"),
        (lambda x, w, b: (x, w.T.contiguous().T, b), "transposed"),
        (lambda x, w, b: (x.T.contiguous().T, w, b), "transposed"),
    ],
)
def test_wrong_inputs_are_refused(change, message):
    with pytest.raises(EspalierError, match=message):
        linear.triton(*change(*random_inputs(3, 64, 64, "cpu", bias=True)), WHOLE)


def test_a_plan_for_a_larger_chip_is_refused():
    with pytest.raises(EspalierError, match="doctor --tune"):
        linear.triton(*random_inputs(3, 64, 64, "cpu"), TritonPlan(128, 256, 1, 4, 4))


@pytest.mark.parametrize("gpu", [H200, SMALL])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128, 256])
@pytest.mark.parametrize("shape", [(6144, 4096), (128256, 4096), (2048, 8192), (72, 40)])
def test_candidates_fit_the_chip(gpu, rows, shape):
    plans = candidate_plans(rows, *shape, gpu)
    assert plans or shape == (72, 40) or (gpu, rows) == (SMALL, 256)
    for plan in plans:
        assert isinstance(plan, LibraryPlan) or plan.shared_memory(rows) <= gpu.shared_memory


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("plan", [LibraryPlan(2, 1), LibraryPlan(3, 1), LibraryPlan(1, 2), LibraryPlan(1, 4)])
def test_library_plans(kernel_device, monkeypatch, plan, bias):
    """With strided x and weight, and with pieces of unequal size."""
    wide, weight, bias_tensor = random_inputs(10, 70, 256, kernel_device, bias=bias)
    x, weight = wide[::2, 64:192], weight[:, 128:]
    poisoned(monkeypatch)
    out, parts = linear.triton(x, weight, bias_tensor, plan), linear_partial_sums.triton(x, weight, bias_tensor, plan)
    assert out.dtype == DTYPE
    assert_is_the_product(out, x, weight, bias_tensor)
    if plan.splits == 1:
        assert torch.equal(parts, out)
    else:
        assert parts.shape == (plan.splits, 5, 70) and parts.dtype == torch.float32
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        assert torch.equal(total.to(DTYPE), out)


@pytest.mark.parametrize("plan", [LibraryPlan(2, 1), LibraryPlan(1, 2)])
@pytest.mark.parametrize(("rows", "num_out"), [(0, 64), (2, 0)])
def test_library_plans_with_empty_inputs(kernel_device, plan, rows, num_out):
    x, weight, _ = random_inputs(rows, num_out, 64, kernel_device)
    assert linear_partial_sums.triton(x, weight, None, plan).shape == (rows, num_out)


def test_library_candidates_divide_into_whole_tiles():
    plans = {plan for plan in candidate_plans(65, 768, 512, H200) if isinstance(plan, LibraryPlan)}
    assert plans == {LibraryPlan(2, 1), LibraryPlan(3, 1), LibraryPlan(1, 2), LibraryPlan(1, 4)}
    assert not any(isinstance(plan, LibraryPlan) for plan in candidate_plans(64, 768, 512, H200))


def test_one_to_sixteen_rows_use_the_same_block():
    assert {block_rows(rows) for rows in range(1, 17)} == {16}
    assert [block_rows(rows) for rows in (17, 64, 65, 256)] == [32, 64, 128, 256]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 32, 64, 129, 256])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (5000, 1000)])
def test_every_candidate(kernel_device, monkeypatch, rows, shape):
    """Close to float64 and deterministic, for the first two candidates of each tile size."""
    x, weight, _ = random_inputs(rows, *shape, kernel_device)
    poisoned(monkeypatch)
    exact, seen = linear(x.double(), weight.double(), None, None), {}
    for plan in candidate_plans(rows, *shape, H200):
        tile = plan if isinstance(plan, LibraryPlan) else (plan.block_out, plan.block_in, plan.warps)
        seen[tile] = seen.get(tile, 0) + 1
        if seen[tile] > 2:
            continue
        out = linear.triton(x, weight, None, plan)
        # Compare norms: a bound per element needs the products' magnitudes; the tests of small shapes check that.
        assert (out.double() - exact).norm() <= 4e-3 * exact.norm(), plan
        assert torch.equal(out, linear.triton(x, weight, None, plan)), plan


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [LibraryPlan(2, 1), LibraryPlan(1, 2)])
@pytest.mark.parametrize("rows", [96, 256])
def test_library_rows_do_not_depend_on_other_rows(kernel_device, plan, rows):
    x, weight, _ = random_inputs(rows, 4096, 4096, kernel_device)
    expected = linear.triton(x, weight, None, plan)[3]
    x[4:] = torch.nan
    assert torch.equal(linear.triton(x, weight, None, plan)[3], expected)


@pytest.mark.gpu
def test_pdl_in_a_cuda_graph_waits_for_inputs(kernel_device):
    """Kernels launched with PDL must see their predecessors' writes, in every replay."""
    x, first, _ = random_inputs(8, 4096, 4096, kernel_device)
    second = random_inputs(8, 4096, 4096, kernel_device, seed=1)[1]
    buffer = torch.empty_like(x)

    def body():
        y = linear.triton(buffer, first, None, WHOLE)
        return linear.triton(linear.triton(y.add_(1), second, None, SPLIT), first, None, SPLIT)

    body()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    for seed in range(20):
        buffer.copy_(random_inputs(8, 1, 4096, kernel_device, seed=seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, body()), seed
