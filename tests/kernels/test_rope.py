"""rotate_and_store (head norms, RoPE, K and V rows) equals float64 arithmetic; its bits do not depend on the tiling."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.ops.rope import HeadNorms, Rotation, rotate_and_store
from espalier.kernels.runtime import launch
from espalier.kernels.state.kv_scales import KVScales
from tests.oracles.fp8_cache import nearest
from tests.pairwise import fewer, in_turn_params, pairwise_params, product_params

# rows, heads, kv_heads, size
SMALL = [(0, 4, 2, 8), (1, 1, 1, 2), (3, 4, 2, 8), (5, 6, 2, 10), (2, 3, 3, 64), (3, 4, 0, 8)]
LARGE = [(1, 32, 8, 128), (64, 32, 8, 128), (2048, 32, 8, 128), (300, 40, 8, 128), (33, 16, 1, 256), (9, 28, 4, 96)]
# How heads are normed: not at all, Q and K, V too, or V made from K; and which share of them is rotated: 2 is a half.
NORMED = [None, (False, False), (True, False), (True, True)]
WAYS = NORMED, [1, 2]
# Of (shape, second or first of two forms of the input, *WAYS): each value, for what every way to norm does alike.
FEW = [
    (SMALL[0], 0, None, 1),
    (SMALL[1], 1, (False, False), 2),
    (SMALL[2], 1, (True, True), 1),
    (SMALL[3], 0, (True, False), 2),
    (SMALL[4], 1, None, 2),
    (SMALL[5], 0, (False, False), 1),
]
each_way = pytest.mark.parametrize("make", [rotate_and_store.triton, rotate_and_store.reference])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def few_of(parts):
    usual = [(shape, parts[form], *way) for shape, form, *way in FEW]
    return fewer(product_params(SMALL, parts, *WAYS), lambda *cell: cell in usual)


def random_normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_turn(
    rows: int,
    size: int,
    normed: tuple[bool, bool] | None,
    dtype: torch.dtype,
    device: torch.device,
    rotary: int | None = None,
) -> tuple[Rotation, HeadNorms | None]:
    exact = torch.promote_types(dtype, torch.float32)
    angle = 50 * random_normal(rows, (rotary or size) // 2, seed=1)
    cos, sin = angle.cos(), angle.sin()
    cos, sin = (torch.cat(pair, 1).to(exact).to(device) for pair in ((cos, cos), (-sin, sin)))
    norms = ((1 + 0.2 * random_normal(size, seed=seed)).to(dtype).to(device) for seed in (2, 3))
    return Rotation(cos, sin), None if normed is None else HeadNorms(*norms, 1e-6, *normed)


def num_heads(heads: int, kv_heads: int, normed: tuple[bool, bool] | None) -> int:
    """Of a qkv."""
    return heads + kv_heads * (1 if normed and normed[1] else 2)


def in_float64(qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None, kv_heads: int) -> list[torch.Tensor]:
    """q, k, v in float64.  The norms' results are rounded to the dtype, as separate norm layers would round them."""
    v_is_k = norms is not None and norms.v_is_k
    heads = qkv.shape[1] - (1 if v_is_k else 2) * kv_heads
    x = qkv.double()
    heads_of = [x[:, :heads], x[:, heads : heads + kv_heads], x[:, x.shape[1] - kv_heads :]]
    if norms is not None and norms.norms_v_heads:
        heads_of[2] = heads_of[2] / (heads_of[2].pow(2).mean(-1, keepdim=True) + norms.eps).sqrt()
    rotary = rotation.cos.shape[1]
    for i in range(2):
        x = heads_of[i]
        if norms is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + norms.eps).sqrt() * norms[i].double()
            x = x.to(qkv.dtype).double()
        cos, sin = rotation.cos.double()[:, None], rotation.sin.double()[:, None]
        values, rest = x[..., :rotary], x[..., rotary:]
        heads_of[i] = torch.cat((values * cos + values.roll(rotary // 2, -1) * sin, rest), -1)
    return heads_of


@pytest.mark.parametrize(
    ("shape", "dtype", "normed", "share"),
    [*pairwise_params(SMALL, DTYPES, *WAYS), *product_params(LARGE, DTYPES, *WAYS, marks=pytest.mark.gpu)],
)
@each_way
def test_heads_are_rotated_and_rows_stored(shape, dtype, normed, make, share, kernel_device):
    rows, heads, kv_heads, size = shape
    qkv = random_normal(rows, num_heads(heads, kv_heads, normed), size, seed=4).to(dtype).to(kernel_device)
    # partial: for example 6 of the 10 values of a head are rotated.
    rotary = size if share == 1 else -(-size // 4) * 2
    turn = random_turn(rows, size, normed, dtype, kernel_device, rotary)
    expected = in_float64(qkv, *turn, kv_heads)
    stored_rows = torch.randperm(2 * rows + 3, generator=torch.Generator().manual_seed(5))[:rows].to(kernel_device)
    k_buffer, v_buffer = (
        torch.full((2 * rows + 3, kv_heads, size), torch.nan, dtype=dtype, device=kernel_device) for _ in range(2)
    )
    q = make(qkv, *turn, stored_rows, k_buffer, v_buffer)
    # One rounding.  With norms two, and the first may go the other way than in float64.
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": (32 if normed else 4) * torch.finfo(dtype).eps}
    for value, exact in zip((q, k_buffer[stored_rows], v_buffer[stored_rows]), expected, strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), exact, **tolerance)
    for buffer in (k_buffer, v_buffer):
        others = torch.ones(len(buffer), dtype=torch.bool, device=kernel_device)
        others[stored_rows] = False
        assert buffer[others].isnan().all(), "other rows must not be written"


@pytest.mark.parametrize(
    ("shape", "parts", "normed", "share"),
    [*few_of([1, 4]), *product_params(LARGE, [1, 4], *WAYS, marks=pytest.mark.gpu)],
)
@each_way
def test_partial_sums_are_added_in_order_and_rounded_first(shape, normed, parts, make, share, kernel_device):
    rows, heads, kv_heads, size = shape
    rotary = size if share == 1 else -(-size // 4) * 2
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    qkv = random_normal(parts, rows, num_heads(heads, kv_heads, normed), size, seed=4).float().to(kernel_device)
    qkv_before, turn = qkv.clone(), random_turn(rows, size, normed, dtype, kernel_device, rotary)
    total = qkv[0].clone()
    for part in qkv[1:]:
        total += part
    stored_rows = torch.arange(rows, device=kernel_device)
    buffers = torch.full((2, 2, rows, kv_heads, size), torch.nan, dtype=dtype, device=kernel_device)
    q = make(qkv, *turn, stored_rows, *buffers[0])
    expected = make(total.to(dtype), *turn, stored_rows, *buffers[1])
    assert torch.equal(qkv, qkv_before) and torch.equal(*buffers)
    assert q.dtype == dtype and torch.equal(q, expected)


@pytest.mark.parametrize("parts", [1, 3])
@each_way
def test_gates_between_heads_are_skipped(parts, make, kernel_device):
    rows, heads, kv_heads, size, rotary = 3, 5, 2, 10, 6
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    qkv = random_normal(parts, rows, heads + 2 * kv_heads, size, seed=4).to(kernel_device)
    qkv = qkv[0].to(dtype) if parts == 1 else qkv.float()
    q, others = qkv[..., :heads, :], qkv[..., heads:, :]
    with_gates = torch.cat((torch.stack((q, q * torch.nan), -2).flatten(-3, -2), others), -2)
    rotation, norms = random_turn(rows, size, (False, False), dtype, kernel_device, rotary)
    buffers = torch.full((2, 2, rows, kv_heads, size), torch.nan, dtype=dtype, device=kernel_device)
    stored_rows = torch.arange(rows, device=kernel_device).flip(0)
    given = with_gates.clone()
    found = make(with_gates, rotation, norms._replace(has_gates=True), stored_rows, *buffers[0])
    assert torch.equal(found, make(qkv.clone(), rotation, norms, stored_rows, *buffers[1]))
    assert torch.equal(*buffers) and torch.equal(given.nan_to_num(), with_gates.nan_to_num())


@pytest.mark.parametrize(
    ("shape", "parts", "normed", "share"),
    [*few_of([None, 3]), *product_params(LARGE, [None, 3], *WAYS, marks=pytest.mark.gpu)],
)
@each_way
def test_fp8_rows_are_nearest_to_values_over_scales(shape, parts, normed, share, make, kernel_device):
    """Of values in the model's dtype; with a scale for each head.  Queries stay as they are."""
    rows, heads, kv_heads, size = shape
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    rotary = size if share == 1 else -(-size // 4) * 2
    qkv = random_normal(parts or 1, rows, num_heads(heads, kv_heads, normed), size, seed=4)
    qkv = qkv.to(torch.float32 if parts else dtype)
    turn = random_turn(rows, size, normed, dtype, kernel_device, rotary)
    k_scale, v_scale = (0.01 + 0.03 * torch.rand(kv_heads, generator=torch.Generator().manual_seed(s)) for s in (6, 7))
    scales = KVScales(k_scale.to(kernel_device), v_scale.to(kernel_device), dtype)
    stored_rows = torch.arange(rows, device=kernel_device).flip(0)
    results = []
    for of_fp8 in (False, True):
        buffers = torch.full((2, rows + 1, kv_heads, size), torch.nan, device=kernel_device).to(
            FP8 if of_fp8 else dtype
        )
        copy = qkv.to(kernel_device, copy=True)
        q = make(copy if parts else copy[0], *turn, stored_rows, *buffers, *((scales,) if of_fp8 else ()))
        results.append((q, *(buffer.float() for buffer in buffers)))
    assert results[1][0].dtype == dtype and torch.equal(results[0][0], results[1][0])
    for plain, stored, scale in zip(results[0][1:], results[1][1:], (scales.k, scales.v), strict=True):
        quotient = plain[:rows] / scale[:, None]
        assert torch.equal(stored[:rows], nearest(quotient.cpu()).to(kernel_device)) and stored[rows].isnan().all()


@each_way
def test_what_fp8_cannot_hold(make, kernel_device):
    """Values past the largest are the largest; what is not finite is NaN."""
    values = torch.tensor([449.0, -1e9, torch.inf, -torch.inf, torch.nan, 2.0**-11, 2.0**-10, 3 * 2.0**-11])
    qkv = values.expand(1, 3, 8).contiguous().to(kernel_device)
    k, v = (torch.zeros(1, 1, 8, device=kernel_device).to(FP8) for _ in range(2))
    zeros = torch.zeros(1, 2, device=kernel_device)
    scales = KVScales.ones(1, torch.float32, kernel_device)
    make(qkv, Rotation(zeros, zeros), None, torch.tensor([0], device=kernel_device), k, v, scales)
    expected = torch.tensor([448.0, -448.0, torch.nan, torch.nan, torch.nan, 0.0, 0.0, 2.0**-9])
    torch.testing.assert_close(v[0, 0].float().cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "normed"),
    [*in_turn_params(SMALL, NORMED[:3]), *product_params(LARGE, NORMED[:3], marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("parts", [pytest.param(None, marks=pytest.mark.full), 2])
def test_a_rows_bits_do_not_depend_on_how_many_heads_share_a_program(shape, normed, parts, kernel_device, monkeypatch):
    rows, heads, kv_heads, size = shape
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    qkv = random_normal(parts or 1, rows, heads + 2 * kv_heads, size, seed=8).to(torch.float32 if parts else dtype)
    turn = random_turn(rows, size, normed, dtype, kernel_device)
    stored_rows = torch.arange(rows, device=kernel_device)
    results = []
    # 0: every grid counts as is_oversubscribed; 2**30: none does.
    for programs_per_sm in (0, 2**30):
        monkeypatch.setattr(launch, "MAX_PROGRAMS_PER_PROCESSOR", programs_per_sm)
        buffers = torch.zeros(2, rows, kv_heads, size, dtype=dtype, device=kernel_device)
        copy = qkv.to(kernel_device, copy=True)
        out = rotate_and_store.triton(copy if parts else copy[0], *turn, stored_rows, *buffers)
        results.append([out, buffers])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_strided_views_are_read_and_written_in_place(kernel_device):
    wide = random_normal(3, 2, 6, 8, seed=7).to(kernel_device)
    qkv, turn = wide[:, 1], random_turn(3, 8, None, torch.float64, kernel_device)
    expected = in_float64(qkv, *turn, 1)
    buffers = torch.zeros(5, 2, 2, 8, dtype=torch.float64, device=kernel_device)
    stored_rows = torch.tensor([4, 1, 2], device=kernel_device)
    other = wide[:, 0].clone()
    q = rotate_and_store.triton(qkv, *turn, stored_rows, buffers[:, 0, :1], buffers[:, 1, 1:])
    for value, exact in zip((q, buffers[stored_rows, 0, :1], buffers[stored_rows, 1, 1:]), expected, strict=True):
        torch.testing.assert_close(value, exact)
    assert torch.equal(wide[:, 0], other) and not buffers[:, 0, 1].any() and not buffers[:, 1, 0].any()


def test_wrong_shapes_and_dtypes_are_refused(kernel_device):
    qkv, turn = (
        torch.zeros(3, 4, 8, device=kernel_device),
        random_turn(3, 8, None, torch.float32, kernel_device),
    )
    buffer, rows = torch.zeros(5, 1, 8, device=kernel_device), torch.arange(3, device=kernel_device)
    for wrong in (
        (qkv[:2], *turn, rows, buffer, buffer),
        (qkv, *turn, rows[:2], buffer, buffer),
        (qkv, *turn, rows.int(), buffer, buffer),
        (qkv, *turn, rows, buffer[..., :4], buffer),
        (qkv, *turn, rows, buffer, buffer.double()),
        (qkv.double(), *turn, rows, buffer.double(), buffer.double()),
        (qkv[:, None], *turn, rows, buffer, buffer),
        (qkv.half()[None], *turn, rows, buffer, buffer),
    ):
        with pytest.raises(EspalierError, match="needs shape"):
            rotate_and_store.triton(*wrong)


def test_a_strided_last_dimension_is_refused(kernel_device):
    qkv, turn = (
        torch.zeros(3, 4, 8, device=kernel_device),
        random_turn(3, 8, (False, False), torch.float32, kernel_device),
    )
    buffer, rows = torch.zeros(5, 1, 8, device=kernel_device), torch.arange(3, device=kernel_device)
    strided = torch.zeros(5, 1, 16, device=kernel_device)[..., ::2]
    for wrong in (
        (torch.zeros(3, 4, 16, device=kernel_device)[..., ::2], *turn, rows, buffer, buffer),
        (torch.zeros(2, 3, 4, 16, device=kernel_device)[..., ::2], *turn, rows, buffer, buffer),
        (qkv, *turn, rows, strided, buffer),
        (qkv, *turn, rows, buffer, strided),
        (qkv, turn[0]._replace(cos=turn[0].cos.t().contiguous().t()), turn[1], rows, buffer, buffer),
        (qkv, turn[0], turn[1]._replace(k=torch.ones(16, device=kernel_device)[::2]), rows, buffer, buffer),
    ):
        with pytest.raises(EspalierError, match="not contiguous in its last dimension"):
            rotate_and_store.triton(*wrong)


def test_wrong_numbers_of_heads_and_rotated_values_are_refused(kernel_device):
    rows = torch.arange(3, device=kernel_device)
    for heads, size in ((4, 7), (1, 8)):
        rotation, _ = random_turn(3, size + size % 2, None, torch.float32, kernel_device)
        rotation = Rotation(rotation.cos[:, :size], rotation.sin[:, :size])
        buffer = torch.zeros(5, 1, size, device=kernel_device)
        qkv = torch.zeros(3, heads, size, device=kernel_device)
        with pytest.raises(EspalierError, match="needs K and V of each KV head"):
            rotate_and_store.triton(qkv, rotation, None, rows, buffer, buffer)
