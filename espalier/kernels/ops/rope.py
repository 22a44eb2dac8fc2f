"""Operations between a layer's projections and attention: norms of heads or latents, RoPE, KV cache writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import DTYPES, MIN_BLOCK_ROWS
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.ops.norm import rms_norm
from espalier.kernels.runtime.op import op
from espalier.kernels.state.kv_scales import KVScales, round_to_fp8

# The most rows that head_product's kernel takes: one tile, so a row's bits do not depend on the number of rows.
MAX_HEAD_ROWS = MIN_BLOCK_ROWS
# The most inputs per head that head_product's kernel takes.
MAX_HEAD_INPUTS = 512


class Rotation(NamedTuple):
    """The cos and sin of RoPE for the positions of N rows.

    cos, sin: [N, rotary], float32 (float64 for float64).  The first half of sin is negated, as `rotate` needs.  Only
    the first `rotary` values of a head are rotated."""

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """The RMS norms that some families apply to each head before RoPE.

    q, k: [size], the weights for Q heads and for K heads.  eps: the eps of all these norms.
    norms_v_heads: whether V heads are normed too, without a weight.
    v_is_k: whether V has no projection of its own.  The V heads are then the K heads before norm and RoPE.
    has_gates: whether the projection has a gate after each Q head, which is neither normed nor rotated."""

    q: Tensor
    k: Tensor
    eps: float
    norms_v_heads: bool = False
    v_is_k: bool = False
    has_gates: bool = False


def num_q_heads(num_heads: int, kv_heads: int, norms: HeadNorms | None) -> int:
    """Returns the number of Q heads, if qkv of rotate_and_store has num_heads heads in all, gates included."""
    q_and_gates = num_heads - kv_heads * (1 if norms is not None and norms.v_is_k else 2)
    return q_and_gates // 2 if norms is not None and norms.has_gates else q_and_gates


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [N, heads, size] with the first `rotary` values of each head rotated, in x's dtype.
    cos, sin: [N, rotary], see Rotation."""
    rotary, cos, sin = cos.shape[-1], cos[:, None], sin[:, None]
    values = x if rotary == x.shape[-1] else x[..., :rotary]
    rotated = torch.addcmul(values * cos, values.roll(rotary // 2, -1), sin).to(x.dtype)
    return rotated if values is x else torch.cat((rotated, x[..., rotary:]), -1)


def write_rows(planes: Sequence[Tensor], cache_rows: Tensor, values: Sequence[Tensor], scales: KVScales | None) -> None:
    """Write each of `values` [N, heads, size] to cache_rows [N] of its plane [R, heads, size].
    scales: the scales of FP8 planes; None for planes in other dtypes."""
    if scales is None:
        for plane, value in zip(planes, values, strict=True):
            plane.index_copy_(0, cache_rows, value)
        return
    for plane, value, scale in zip(planes, values, (scales.k, scales.v), strict=False):
        plane.view(torch.uint8).index_copy_(0, cache_rows, round_to_fp8(value, scale).view(torch.uint8))


def _norm_heads(qk: Tensor, heads: int, norms: HeadNorms | None) -> Tensor:
    """Returns qk [N, Q heads then K heads, size], normed if the model has head norms.  heads: the number of Q heads."""
    if norms is None:
        return qk
    parts = zip((qk[:, :heads], qk[:, heads:]), norms[:2], strict=True)
    return torch.cat([rms_norm.reference(part, weight, norms.eps) for part, weight in parts], 1)


def supports_head_product(x: Tensor) -> bool:
    """Returns whether head_product's kernel supports x [N, heads, in]."""
    return x.is_cuda and 0 < len(x) <= MAX_HEAD_ROWS and x.shape[2] <= MAX_HEAD_INPUTS and x.dtype in DTYPES


@dataclass(frozen=True)
class LatentFormat:
    """The format of a layer's latent rows, whose last `rotary` values are rotated by RoPE.

    norm: [size - rotary], the weight of the RMS norm of the values before the rotated values; None: no norm.  eps: the
    eps of the norm.
    interleaved: whether the input has the values of a rotated pair at 2i and 2i + 1, as with DeepSeek's weights, and
    not at i and i + rotary / 2.  In the result, a pair is always at i and i + rotary / 2."""

    norm: Tensor | None = None
    eps: float = 0.0
    interleaved: bool = False


class LatentDestination(NamedTuple):
    """How new latent rows are rotated, and where they are stored.

    rotation: the RoPE of the latents and of the queries.  rows: [N] int64, the rows of `plane` [R, 1, size] that are
    written.  scales: the scales of an FP8 plane; None for planes in other dtypes."""

    rotation: Rotation
    format: LatentFormat
    rows: Tensor
    plane: Tensor
    scales: KVScales | None = None


def check_latent_sizes(q_rope: Tensor, q: Tensor, latent: Tensor, destination: LatentDestination) -> None:
    """Check the sizes of rotate_and_store_latent's arguments.  Raises EspalierError if they do not agree."""
    rotary, row = destination.rotation.cos.shape[1], destination.plane.shape[1:]
    size = row[1]
    if q_rope.shape[2] != rotary or latent.shape[1:] != row or rotary % 2 or rotary > min(size, q.shape[2]):
        raise EspalierError(
            f"a latent layer needs one latent of {size} values per row, and queries with an even number of rotated "
            f"values, but got latents {list(latent.shape)}, queries {list(q.shape)} with a rotated part "
            f"{list(q_rope.shape)}, and cos and sin for {rotary} values"
        )


def _rotate_values(values: Tensor, rotation: Rotation, latent_format: LatentFormat) -> Tensor:
    """Returns values [N, heads, rotary], rotated."""
    if latent_format.interleaved:
        values = values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(values, *rotation)


@op("espalier.kernels.layers.rope")
def rotate_and_store(
    qkv: Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    cache_rows: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    scales: KVScales | None = None,
) -> Tensor:
    """Norm and rotate the Q and K heads of qkv [N, heads + 2 · kv_heads, size] (all Q, then all K, then all V).

    With HeadNorms.v_is_k, qkv ends with the K heads.  With HeadNorms.has_gates, qkv has a gate after each Q head.  If
    the buffers have no heads, qkv holds only Q heads.  qkv may also be partial sums [splits, N, ...] float32
    (linear_partial_sums), which are first added in order and rounded to the model's dtype.
    norms: None for a model without head norms.
    cache_rows: [N] int64, the rows of k_buffer and v_buffer [R, kv_heads, size] to which K and V are written.
    scales: the scales of FP8 buffers; None for other dtypes.
    Returns q [N, heads, size].  The kernel overwrites qkv, unless qkv has splits or gates.  The reference does not."""
    if qkv.ndim == 4:
        qkv = add_partial_sums.reference(qkv, k_buffer.dtype if scales is None else scales.dtype)
    kv_heads = k_buffer.shape[1]
    heads = num_q_heads(qkv.shape[1], kv_heads, norms)
    if norms is not None and norms.has_gates:
        qkv = torch.cat((qkv[:, : 2 * heads : 2], qkv[:, 2 * heads :]), 1)
    rotated = rotate(_norm_heads(qkv[:, : heads + kv_heads], heads, norms), *rotation)
    v = qkv[:, qkv.shape[1] - kv_heads :]
    if norms is not None and norms.norms_v_heads:
        v = rms_norm.reference(v, v.new_ones(v.shape[2]), norms.eps)
    write_rows((k_buffer, v_buffer), cache_rows, (rotated[:, heads:], v), scales)
    return rotated[:, :heads]


@op("espalier.kernels.layers.latent", condition=supports_head_product)
def head_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write x [N, heads, in] times each head's weight [heads, in, out] to `out` [N, heads, out]."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


@op("espalier.kernels.layers.latent", tensor="q")
def rotate_and_store_latent(q_rope: Tensor, q: Tensor, latent: Tensor, destination: LatentDestination) -> None:
    """Rotate the queries, and norm, rotate and store the latents.

    q_rope: [N, heads, rotary]; the result becomes the last values of q [N, heads, ...].  q_rope may be a view of q.
    latent: [N, 1, size]; the result goes to the rows of `destination`.  Raises EspalierError if sizes do not agree."""
    check_latent_sizes(q_rope, q, latent, destination)
    (rotation, form), rotary = destination[:2], destination.rotation.cos.shape[1]
    rank = latent.shape[2] - rotary
    latent_part = latent[..., :rank]
    if form.norm is not None:
        latent_part = rms_norm.reference(latent_part, form.norm, form.eps)
    row = torch.cat((latent_part, _rotate_values(latent[..., rank:], rotation, form)), -1)
    write_rows((destination.plane,), destination.rows, (row,), destination.scales)
    q[..., q.shape[2] - rotary :] = _rotate_values(q_rope, rotation, form)


@op(
    "espalier.kernels.layers.latent",
    condition=lambda q_inputs, k_up: supports_head_product(q_inputs[..., : k_up.shape[1]]),
)
def write_latents(q_inputs: Tensor, k_up: Tensor, q: Tensor, latent: Tensor, destination: LatentDestination) -> None:
    """Compute the queries q [N, heads, rank + rotary] from q_inputs [N, heads, nope + rotary], and store the latents.

    The first `rank` values of a query are the first `nope` values of q_inputs times k_up [heads, nope, rank].  The
    rotated values and the latents are the same as from rotate_and_store_latent.  A row of destination.plane has
    rank + rotary values.  A GPU needs one launch for few rows, and two launches for more."""
    nope, rank = k_up.shape[1:]
    x, q_rope = q_inputs[..., :nope], q_inputs[..., nope:]
    head_product(x, k_up, q[..., :rank])
    rotate_and_store_latent(q_rope, q, latent, destination)
