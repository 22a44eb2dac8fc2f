"""RMS norm, alone and after the residual addition, compared to float64 and to the reference."""

import pytest
import torch
import torch.nn.functional as F

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import InputScales, RoundedRows
from espalier.kernels.layers.scaled_product import MAX_KERNEL_ROWS, max_kernel_rows
from espalier.kernels.ops.linear import quantise_rows
from espalier.kernels.ops.norm import add_rms_norm, can_round_norm, rms_norm, rounded_norm
from espalier.kernels.runtime.launch import Chip
from espalier.models.layers.norm import RMSNorm
from tests.pairwise import fewer

EPS = 1e-5
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
SMALL = [(0, 8), (1, 1), (1, 8), (3, 33), (5, 128)]
LARGE = [(1, 4096), (64, 4096), (4096, 4096), (7, 8192), (3, 16384), (2, 12288), (33, 5120)]
shapes = pytest.mark.parametrize(
    "shape", [*SMALL, *(pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE)], ids=str
)


def random_normal(shape, dtype, device, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).to(device)


def assert_close(out: torch.Tensor, exact: torch.Tensor) -> None:
    """The tolerance allows one rounding to the dtype, and any reduction order of the H squares."""
    info = torch.finfo(out.dtype)
    torch.testing.assert_close(out.double(), exact, rtol=4 * info.eps, atol=info.tiny)


@shapes
@dtypes
@pytest.mark.parametrize("scale", fewer([0.0, 1e-3, 1.0, 100.0], lambda scale: scale in (0.0, 1.0)))
def test_norm(shape, dtype, scale, kernel_device):
    x, weight = random_normal(shape, dtype, kernel_device, 1, scale), random_normal(shape[1:], dtype, kernel_device, 2)
    out = rms_norm.triton(x, weight, EPS)
    assert out.dtype == dtype
    assert_close(out, F.rms_norm(x.double(), weight.shape, weight.double(), EPS))
    assert_close(rms_norm.reference(x, weight, EPS), F.rms_norm(x.double(), weight.shape, weight.double(), EPS))


@shapes
@dtypes
def test_norm_after_an_addition(shape, dtype, kernel_device):
    delta, residual = (random_normal(shape, dtype, kernel_device, seed) for seed in (1, 2))
    weight, residual_before = random_normal(shape[1:], dtype, kernel_device, 3), residual.clone()
    total, out = add_rms_norm.triton(delta, residual, weight, EPS)
    expected, _ = add_rms_norm.reference(delta, residual, weight, EPS)
    if kernel_device.type == "cuda" or dtype != torch.bfloat16:
        assert torch.equal(total, expected), "a sum of two is rounded once"
    else:  # A GPU rounds to bfloat16; Triton's interpreter truncates.
        torch.testing.assert_close(total, expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert_close(out, F.rms_norm(total.double(), weight.shape, weight.double(), EPS))
    assert torch.equal(residual, residual_before)


@shapes
@pytest.mark.parametrize("half", [True, False], ids=["half", "float64"])
@pytest.mark.parametrize("parts", fewer([1, 2, 5], lambda parts: parts != 2))
@pytest.mark.parametrize("make", [add_rms_norm.triton, add_rms_norm.reference])
def test_partial_sums_are_added_in_order_and_rounded_first(shape, half, parts, make, kernel_device):
    dtype = torch.float64 if not half else torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    delta = random_normal((parts, *shape), torch.promote_types(dtype, torch.float32), kernel_device, 1)
    residual, weight = random_normal(shape, dtype, kernel_device, 2), random_normal(shape[1:], dtype, kernel_device, 3)
    total = delta[0].clone()
    for part in delta[1:]:
        total += part
    for out, expected in zip(
        make(delta, residual, weight, EPS), make(total.to(dtype), residual, weight, EPS), strict=True
    ):
        assert torch.equal(out, expected)


def test_parts_of_many_rows_are_far_apart(tmp_path, kernel_device):
    """The last part begins 2^31 numbers behind the first.  The file has no blocks but those that are written."""
    if kernel_device.type == "cuda":
        pytest.skip("takes 8 GiB of a GPU's memory")
    far = torch.from_file(str(tmp_path / "parts"), shared=True, size=2**31 + 64)
    parts = far.as_strided((3, 1, 8), (2**30, 8, 1))
    parts.copy_(random_normal((3, 1, 8), torch.float32, kernel_device))
    residual, weight = (torch.ones(shape, dtype=torch.float16) for shape in ((1, 8), (8,)))
    total, _ = add_rms_norm.triton(parts, residual, weight, EPS)
    assert torch.equal(total, add_rms_norm.reference(parts.contiguous(), residual, weight, EPS)[0])


def test_strided_rows_and_any_batch_shape(kernel_device):
    wide, weight = (
        random_normal((6, 80), torch.float32, kernel_device),
        random_normal((32,), torch.float32, kernel_device, 1),
    )
    x = wide[:, 16:48]
    assert_close(rms_norm.triton(x, weight, EPS), F.rms_norm(x.double(), (32,), weight.double(), EPS))
    assert rms_norm.triton(x.unflatten(0, (2, 3)), weight, EPS).shape == (2, 3, 32)
    delta, columns = wide[:, :32], wide.t()[:32].t()
    assert torch.equal(add_rms_norm.triton(delta, columns.contiguous(), weight, EPS)[0], delta + columns)


def test_a_row_is_the_same_in_any_batch(kernel_device):
    x, weight = (
        random_normal((9, 96), torch.bfloat16, kernel_device),
        random_normal((96,), torch.bfloat16, kernel_device, 1),
    )
    batched = rms_norm.triton(x, weight, EPS)
    assert all(torch.equal(rms_norm.triton(x[i : i + 1], weight, EPS), batched[i : i + 1]) for i in range(9))


def test_wrong_shapes_and_dtypes_are_refused(kernel_device):
    x = torch.zeros(2, 8, device=kernel_device)
    with pytest.raises(EspalierError, match="rms_norm: weight needs shape"):
        rms_norm.triton(x, torch.zeros(7, device=kernel_device), EPS)
    with pytest.raises(EspalierError, match="delta needs shape"):
        add_rms_norm.triton(x[:1], x, torch.zeros(8, device=kernel_device), EPS)
    with pytest.raises(EspalierError, match="delta's partial sums needs shape"):
        add_rms_norm.triton(torch.zeros(2, 2, 7, device=kernel_device), x, torch.zeros(8, device=kernel_device), EPS)
    with pytest.raises(EspalierError, match="delta's partial sums needs shape"):
        add_rms_norm.triton(x.half()[None], x, torch.zeros(8, device=kernel_device), EPS)
    with pytest.raises(EspalierError, match="delta needs shape"):
        add_rms_norm.triton(x.double(), x, torch.zeros(8, device=kernel_device), EPS)


def test_strided_weight(kernel_device):
    x, wide = (
        random_normal((3, 16), torch.float64, kernel_device),
        random_normal((16, 2), torch.float64, kernel_device, 1),
    )
    assert_close(rms_norm.triton(x, wide[:, 1], EPS), F.rms_norm(x, (16,), wide[:, 1].contiguous(), EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_layer_equals_the_reference(dtype):
    """The layer precomputes constants; the reference computes them at every call.  The bits are the same."""
    cpu = torch.device("cpu")
    x, delta = random_normal((5, 24), dtype, cpu, 1), random_normal((5, 24), dtype, cpu, 2)
    weight = random_normal((24,), dtype, cpu, 3)
    layer = RMSNorm(weight, EPS)
    assert torch.equal(layer(x), rms_norm.reference(x, weight, EPS))
    for out, expected in zip(layer.add_and_norm(delta, x), add_rms_norm.reference(delta, x, weight, EPS), strict=True):
        assert torch.equal(out, expected)
    assert layer.add_and_norm(None, x)[0] is x


@pytest.mark.parametrize("make", [add_rms_norm.triton, add_rms_norm.reference])
def test_the_norm_is_of_the_rounded_sum(make, kernel_device):
    """The norm of the unrounded sum would differ in about half of the values, by 1 ulp.  No tolerance would show that,
    so the test counts the values that differ."""
    delta, residual = (random_normal((8, 128), torch.float16, kernel_device, seed) for seed in (1, 2))
    weight = random_normal((128,), torch.float16, kernel_device, 3)
    total, out = make(delta, residual, weight, EPS)
    exact = F.rms_norm(total.double(), (128,), weight.double(), EPS).to(torch.float16)
    # float32 arithmetic moves about one value in thousands across a rounding boundary.
    assert (out != exact).sum() <= out.numel() // 100


@pytest.mark.parametrize(
    ("size", "group", "static"), [(200, None, False), (512, 128, False), (200, 64, True), (200, 200, False)]
)
def test_a_norm_is_rounded_as_by_a_launch_of_its_own(size, group, static, kernel_device):
    """To the bit: the norm of a sum of parts, of a sum, and alone; a row of zeros among them."""
    residual, weight = (random_normal(shape, torch.float16, kernel_device, 1) for shape in ((3, size), (size,)))
    residual[1] = 0
    inputs = InputScales(group, torch.full((1,), 0.01, device=kernel_device) if static else None)
    parts = random_normal((2, 3, size), torch.float32, kernel_device, 3)
    parts[:, 1] = 0
    for delta in (parts, residual * 2, None):
        if delta is None:
            total, norm = residual, rms_norm.triton(residual, weight, EPS)
        else:
            total, norm = add_rms_norm.triton(delta, residual, weight, EPS)
        values, scales = quantise_rows.triton(norm, inputs)
        for return_norm in (False, True):
            own_total, own_norm, rounded = rounded_norm.triton(delta, residual, weight, EPS, inputs, return_norm)
            assert torch.equal(own_total, total) and torch.equal(rounded.scales, scales)
            assert torch.equal(own_norm, norm) if return_norm else own_norm is None
            assert torch.equal(rounded.values.view(torch.uint8), values.view(torch.uint8))
            assert rounded.dtype == torch.float16 and len(rounded) == 3


def test_groups_that_no_norm_rounds(kernel_device):
    """Groups of other sizes take a launch of their own; so do rows on a CPU, and more of them than our kernel takes."""
    x, weight = random_normal((2, 96), torch.float16, kernel_device), torch.ones(96, device=kernel_device).half()
    assert (
        not can_round_norm(96, InputScales(48))
        and can_round_norm(96, InputScales(96))
        and can_round_norm(96, InputScales())
    )
    with pytest.raises(EspalierError, match="groups of a power of two, not 48"):
        rounded_norm.triton(None, x, weight, EPS, InputScales(48))
    norm = RMSNorm(weight, EPS)
    assert isinstance(norm.add_and_round(None, x, InputScales(48))[1], torch.Tensor)
    given = norm.add_and_round(None, x, InputScales())[1]
    assert isinstance(given, RoundedRows if x.is_cuda else torch.Tensor)
    many = x.repeat(MAX_KERNEL_ROWS, 1)
    assert isinstance(norm.add_and_round(None, many, InputScales())[1], torch.Tensor)
    hopper, ada = Chip(232448, 132, (9, 0)), Chip(101376, 142, (8, 9))
    assert max_kernel_rows(InputScales(128), hopper) < max_kernel_rows(InputScales(), hopper) == MAX_KERNEL_ROWS
    # There the library does not take scales of blocks.
    assert max_kernel_rows(InputScales(128), ada) == MAX_KERNEL_ROWS
