"""rotate_and_store_latent equals float64 arithmetic: it norms the latent, rotates the RoPE part, stores one row."""

import math

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.ops.rope import (
    LatentDestination,
    LatentFormat,
    Rotation,
    head_product,
    rotate_and_store_latent,
    write_latents,
)
from espalier.kernels.state.kv_scales import KVScales
from tests.oracles.fp8_cache import nearest
from tests.pairwise import pairwise_params, product_params

# rows, heads, values of a query before its rotated part, of the latent before its rotated part, rotated values
SHAPES = [(5, 3, 6, 6, 4), (1, 20, 7, 12, 6), (4, 16, 0, 9, 2)]
LARGE = [(1, 128, 512, 512, 64), (64, 16, 128, 512, 64), (300, 40, 512, 512, 64)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7}


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotated(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [N, heads, rotary] in float64, pair by pair."""
    out, half = x.clone(), x.shape[2] // 2
    for i in range(half):
        at = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        a, b = (x[:, :, place] for place in at)
        c, s = angle[:, i].cos()[:, None], angle[:, i].sin()[:, None]
        out[:, :, i], out[:, :, half + i] = a * c - b * s, b * c + a * s
    return out


# In place, interleaved, normed, and the dtype.
WAYS = ([False, True], [False, True], [False, True], [torch.float64, torch.float32, torch.bfloat16])


@pytest.mark.parametrize(
    ("shape", "in_place", "interleaved", "normed", "dtype"),
    [*pairwise_params(SHAPES, *WAYS), *product_params(LARGE, *WAYS, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("make", [rotate_and_store_latent.triton, rotate_and_store_latent.reference])
def test_equals_float64(kernel_device, make, shape, in_place, interleaved, normed, dtype):
    count, heads, before, rank, rotary = shape
    # Slices of larger tensors, as in a layer.
    raw = normal(count, heads + 1, before + rotary, seed=1).to(kernel_device, dtype)[:, :heads]
    latent = normal(count, 1, rank + rotary, seed=2).to(kernel_device, dtype)
    angle, norm = normal(count, rotary // 2, seed=3), 1 + 0.2 * normal(rank, seed=4)
    exact = torch.promote_types(dtype, torch.float32)
    cos, sin = (
        torch.cat(pair, 1).to(kernel_device, exact) for pair in ((angle.cos(),) * 2, (-angle.sin(), angle.sin()))
    )
    weight = norm.to(kernel_device, dtype) if normed else None
    plane = torch.full((2 * count, 1, rank + rotary), torch.nan, dtype=dtype, device=kernel_device)
    # Every second number of a tensor, as one level of a chain is a column of the batch's rows.
    rows = torch.randperm(2 * count, generator=torch.Generator().manual_seed(5))[::2]
    on_device = rows.repeat_interleave(2).to(kernel_device)[::2]
    q = raw.clone() if in_place else torch.full((count, heads, before + rotary + 3), 7.0).to(kernel_device, dtype)
    q_rope = (q if in_place else raw)[..., before:]
    expected = rotated(q_rope.double().cpu(), angle, interleaved)
    left = q[..., : q.shape[2] - rotary].clone()
    to = LatentDestination(Rotation(cos, sin), LatentFormat(weight, 1e-6, interleaved), on_device, plane)
    make(q_rope, q, latent, to)

    within = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(q[..., q.shape[2] - rotary :].double().cpu(), expected, **within)
    assert torch.equal(q[..., : q.shape[2] - rotary], left), "only the last values are rotated"
    content = latent.double().cpu()[..., :rank]
    if weight is not None:
        content = content / (content.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double().cpu()
    stored = torch.cat((content, rotated(latent.double().cpu()[..., rank:], angle, interleaved)), -1)
    torch.testing.assert_close(plane[rows.to(kernel_device)].double().cpu(), stored, **within)
    others = torch.ones(2 * count, dtype=torch.bool).index_fill(0, rows, False)
    assert plane.cpu()[others].isnan().all(), "other rows must not be written"


def test_one_pair_by_hand():
    q, latent, plane = torch.tensor([[[9.0, 1, 2]]]), torch.tensor([[[3.0, 4, 1, 0]]]), torch.zeros(3, 1, 4)
    cos, sin = torch.full((1, 2), math.cos(0.5)), math.sin(0.5) * torch.tensor([[-1.0, 1.0]])
    turn = Rotation(cos, sin), LatentFormat(torch.ones(2))
    rotate_and_store_latent(q[..., 1:], q, latent, LatentDestination(*turn, torch.tensor([2]), plane))
    c, s, length = math.cos(0.5), math.sin(0.5), math.sqrt(12.5)
    assert q.flatten().tolist() == pytest.approx([9, c - 2 * s, 2 * c + s])
    assert plane[2, 0].tolist() == pytest.approx([3 / length, 4 / length, c, s])


def test_wrong_sizes_are_refused():
    turn = Rotation(torch.ones(2, 4), torch.ones(2, 4)), LatentFormat()
    rows, plane = torch.arange(2), torch.zeros(5, 1, 10)
    q, latent = torch.zeros(2, 3, 10), torch.zeros(2, 1, 10)
    for *tensors, turned in (
        (q[..., 7:], q, latent, turn),
        (q[..., 6:], q[..., :3], latent, turn),
        (q[..., 6:], q, latent[..., 1:], turn),
        (q[..., 7:], q, latent, (Rotation(*torch.ones(2, 2, 3)), LatentFormat())),
    ):
        with pytest.raises(EspalierError, match="a latent layer needs one latent of 10 values"):
            rotate_and_store_latent(*tensors, LatentDestination(*turned, rows, plane))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)], ids=str)
@pytest.mark.parametrize("make", [rotate_and_store_latent.triton, rotate_and_store_latent.reference])
def test_an_fp8_row_is_nearest_to_its_values_over_the_scale(kernel_device, make, shape, normed):
    count, heads, before, rank, rotary = shape
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    latent = normal(count, 1, rank + rotary, seed=2).to(kernel_device, dtype)
    angle, norm = normal(count, rotary // 2, seed=3), 1 + 0.2 * normal(rank, seed=4)
    cos, sin = (
        torch.cat(pair, 1).to(kernel_device).float() for pair in ((angle.cos(),) * 2, (-angle.sin(), angle.sin()))
    )
    turn = Rotation(cos, sin), LatentFormat(norm.to(kernel_device, dtype) if normed else None, 1e-6)
    one_scale = torch.tensor([0.013], device=kernel_device)
    planes = []
    for of_fp8 in (False, True):
        q = normal(count, heads, before + rotary, seed=1).to(kernel_device, dtype)
        plane = torch.zeros(count, 1, rank + rotary, device=kernel_device).to(FP8 if of_fp8 else dtype)
        scales = KVScales(one_scale, one_scale, dtype) if of_fp8 else None
        rows = torch.arange(count, device=kernel_device)
        make(q[..., before:], q, latent, LatentDestination(*turn, rows, plane, scales))
        planes.append(plane.float())
    assert torch.equal(planes[1], nearest((planes[0] / one_scale).cpu()).to(kernel_device))


# rows, heads, nope, rank, rotated values
QUERIES = [(1, 3, 6, 12, 4), (16, 20, 33, 70, 6)]
LARGE_QUERIES = [(1, 16, 128, 512, 64), (16, 128, 128, 512, 64)]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shape", [*QUERIES, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE_QUERIES)], ids=str)
def test_one_launch_leaves_the_bits_of_two(kernel_device, shape, fp8):
    count, heads, nope, rank, rotary = shape
    # float16 on a CPU: Triton's interpreter does not multiply bfloat16.
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    raw = normal(count, heads, nope + rotary, seed=1).to(kernel_device, dtype)
    k_up = (normal(heads, nope + 3, rank, seed=2) * nope**-0.5).to(kernel_device, dtype)[:, :nope]
    latent = normal(count, 1, rank + rotary, seed=3).to(kernel_device, dtype)
    angle = normal(count, rotary // 2, seed=4)
    cos, sin = (
        torch.cat(pair, 1).to(kernel_device).float() for pair in ((angle.cos(),) * 2, (-angle.sin(), angle.sin()))
    )
    turn = Rotation(cos, sin), LatentFormat(torch.ones(rank).to(kernel_device, dtype), 1e-6, interleaved=True)
    one_scale = torch.tensor([0.013], device=kernel_device)
    scales = KVScales(one_scale, one_scale, dtype) if fp8 else None
    rows = torch.randperm(2 * count, generator=torch.Generator().manual_seed(5))[:count].to(kernel_device)
    made = []
    for in_one in (False, True):
        q = torch.full((count, heads, rank + rotary), torch.nan).to(kernel_device, dtype)
        plane = torch.full((2 * count, 1, rank + rotary), 7.0, device=kernel_device).to(FP8 if fp8 else dtype)
        if in_one:
            write_latents.triton(raw, k_up, q, latent, LatentDestination(*turn, rows, plane, scales))
        else:
            head_product.triton(raw[..., :nope], k_up, q[..., :rank])
            rotate_and_store_latent.triton(raw[..., nope:], q, latent, LatentDestination(*turn, rows, plane, scales))
        made.append((q, plane.view(torch.uint8)))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
