"""Declares the data that a layer keeps between passes.  The sizes of all cache tensors follow from this declaration.

A layer keeps either one row per token, in pages, or one recurrent state per slot (cache/states.py).  The rows of a
layer have one or more planes, such as K and V: each plane is a tensor of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.rope import (
    HeadNorms,
    LatentDestination,
    LatentFormat,
    Rotation,
    rotate_and_store,
    write_latents,
    write_rows,
)
from espalier.kernels.ops.selection import IndexerInputs, IndexerQueries, rotate_and_store_index
from espalier.kernels.ops.states import ConvColumns, ordered_conv_columns
from espalier.kernels.state.kv_scales import KVScales
from espalier.shards import Shards

# (number of heads, values per head) of one token's row in a plane.
RowShape = tuple[int, int]
# The name of the plane of index keys, which are never stored in FP8.
INDEX_PLANE = "index"


class RotatedHeads(NamedTuple):
    """q [N, heads, k_size], k and v [N, kv_heads, size] of N new tokens, after head norms and RoPE."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class KVHeads:
    """K and V of each KV head, in two planes.  The sizes of K and V may differ.
    dtype: the dtype of the planes; None for the model's dtype.  num_read_planes: how many planes attention reads."""

    kind: ClassVar[str] = "K and V heads"  # the words for this data in error texts
    num_read_planes: ClassVar[int] = 2

    kv_heads: int
    k_size: int
    v_size: int
    dtype: torch.dtype | None = None

    @property
    def planes(self) -> Mapping[str, RowShape]:
        return {"k": (self.kv_heads, self.k_size), "v": (self.kv_heads, self.v_size)}

    @property
    def values_per_token(self) -> int:
        return _num_values(self.planes)

    def read(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the layer's planes: K [..., kv_heads, k_size] and V [..., kv_heads, v_size]."""
        k, v = planes
        return k, v

    def write(
        self,
        rows: Tensor,
        planes: Sequence[Tensor],
        scales: KVScales | None,
        qkv: Tensor | RotatedHeads,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Norm and rotate the heads of N new tokens, and write K and V to rows `rows` [N] of the planes.

        qkv: [N, heads + 2 · kv_heads, size], in the order q, k, v, or partial sums [splits, N, ...] of such a tensor
        (rotate_and_store).  qkv may be overwritten.  RotatedHeads are written as they are.
        rotation, norms, scales (of FP8 planes): see rotate_and_store.  Returns q [N, heads, k_size]."""
        if isinstance(qkv, RotatedHeads):
            write_rows(planes, rows, (qkv.k, qkv.v), scales)
            return qkv.q
        assert rotation is not None
        k, v = planes
        return rotate_and_store(qkv, rotation, norms, rows, k, v, scales)


@dataclass(frozen=True)
class LatentKV:
    """One latent row [1, size] for each token, shared by all heads (MLA).  K is the whole row, V its first v_size
    values.  dtype: the dtype of the latent plane; None for the model's dtype.
    index_size: the number of values of the index key that the layer also keeps, in the model's dtype; 0 if it keeps no
    index key.  A query attends to the rows whose index keys have the highest scores (kernels/ops/selection.py)."""

    kind: ClassVar[str] = "a latent row"  # the words for this data in error texts
    kv_heads: ClassVar[int] = 1
    num_read_planes: ClassVar[int] = 1

    size: int
    v_size: int
    dtype: torch.dtype | None = None
    index_size: int = 0

    @property
    def k_size(self) -> int:
        return self.size

    @property
    def planes(self) -> Mapping[str, RowShape]:
        index = {INDEX_PLANE: (1, self.index_size)} if self.index_size else {}
        return {"latent": (1, self.size), **index}

    @property
    def values_per_token(self) -> int:
        return _num_values(self.planes)

    def read(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns K [..., 1, size] and V [..., 1, v_size], which are views of the same plane."""
        latent = planes[0]
        return latent, latent[..., : self.v_size]

    def write(
        self,
        rows: Tensor,
        planes: Sequence[Tensor],
        scales: KVScales | None,
        q: Tensor,
        latent: Tensor,
        rotation: Rotation,
        form: LatentFormat,
        k_up: Tensor,
    ) -> Tensor:
        """Norm and rotate N new latents, and write them to rows `rows` [N] of the plane.  Returns queries
        [N, heads, size].

        q: [N, heads, nope + rope]: `nope` values that RoPE does not rotate, then `rope` values that it rotates.
        latent: [N, 1, size].  k_up: [heads, nope, v_size].  A head's key would be k_up · latent, followed by the
        rotated part.  Instead of computing keys, this multiplies the queries by k_up."""
        # Both parts of a query are written to one tensor, so that no further copy is needed to join the parts.
        out = q.new_empty(*q.shape[:2], self.size)
        write_latents(q, k_up, out, latent, LatentDestination(rotation, form, rows, planes[0], scales))
        return out

    def write_index(self, rows: Tensor, planes: Sequence[Tensor], index: IndexerInputs) -> IndexerQueries:
        """Norm and rotate new index keys, and write them to rows `rows` [N] of the plane INDEX_PLANE.  Returns the
        index queries."""
        return IndexerQueries(rotate_and_store_index(index, rows, planes[1]), index.weights)


@dataclass(frozen=True)
class RecurrentState:
    """A recurrent state [k_size, v_size] for each head, and the last taps - 1 input rows of a short convolution.
    The convolution's channels are q [k_heads · k_size], k [k_heads · k_size] and v [heads · v_size], in this order.
    taps: the width of the convolution's kernel: how many input rows an output row reads; 1 for no convolution.
    heads: the number of heads, each with a state; 0 for a layer that has only a convolution, of conv_channels channels.
    delta: whether a new row's value replaces the value that its key reads from the state (the delta rule).  If false,
    the new value is added.  units: whether q and k are scaled to unit length, and q is divided by √k_size."""

    # A layer with a state keeps no rows, so the fields that describe rows are empty.
    kind: ClassVar[str] = "a state"  # the words for this data in error texts
    dtype: ClassVar[None] = None
    planes: ClassVar[Mapping[str, RowShape]] = {}
    values_per_token: ClassVar[int] = 0

    taps: int
    heads: int = 0
    k_heads: int = 0
    k_size: int = 0
    v_size: int = 0
    delta: bool = True
    units: bool = True
    conv_channels: int = 0

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def channels(self) -> int:
        return self.conv_channels or 2 * self.k_heads * self.k_size + self.heads * self.v_size

    @property
    def columns(self) -> ConvColumns:
        """The columns of q, k and v in an input row, if q, k and v follow one another in this order."""
        return ordered_conv_columns(self.heads, self.k_heads, self.k_size, self.v_size, self.channels, self.units)


CacheSpec = KVHeads | LatentKV | RecurrentState
# The `cache_spec` of a layer that only has an MLP.  Such a layer keeps no rows and no state.
NO_MIXING = RecurrentState(taps=1)


@dataclass(frozen=True)
class LayerSpec:
    """The attention or recurrence of one layer.
    heads: the number of query heads.  cache_spec: the data that the layer keeps between passes.
    window: a query at position p attends to positions > p - window; None for all positions.
    scale: the factor of q·k; None for k_size ** -0.5.
    softcap: a logit s of attention (scale included) becomes softcap · tanh(s / softcap); None for no cap.
    shares_with: an earlier layer with the same `cache_spec`.  This layer reads that layer's rows and keeps none.
    topk: a query attends to the topk rows with the highest index scores; None for all rows.  The scores come from this
    layer's index keys, or from the last earlier layer with index keys.
    v_is_k: whether V is computed from K's projection."""

    heads: int
    cache_spec: CacheSpec
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    shares_with: int | None = None
    topk: int | None = None
    v_is_k: bool = False

    def __post_init__(self) -> None:
        if self.shares_with is not None and not isinstance(self.cache_spec, KVHeads):
            raise EspalierError(
                f"a layer that keeps {self.cache_spec.kind} cannot read the rows of layer {self.shares_with}"
            )

    @cached_property
    def row_spec(self) -> KVHeads | LatentKV:
        """`cache_spec` of a layer that keeps rows.  Fails for a layer that keeps a recurrent state."""
        assert not isinstance(self.cache_spec, RecurrentState), "a layer that keeps a state has no rows to attend to"
        return self.cache_spec

    @property
    def projected_heads(self) -> int:
        """The number of heads of the layer's qkv projection."""
        num_kv_projections = 0 if self.shares_with is not None else 1 if self.v_is_k else 2
        return self.heads + num_kv_projections * self.row_spec.kv_heads

    @cached_property
    def softmax_scale(self) -> float:
        return self.cache_spec.k_size**-0.5 if self.scale is None else self.scale

    @property
    def values_per_token(self) -> int:
        """The number of values that one token takes in the pages of this layer."""
        return self.cache_spec.values_per_token if self.shares_with is None else 0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns the bytes that one token takes in the pages of this layer.  dtype: the model's dtype."""
        planes = {} if self.shares_with is not None else self.cache_spec.planes
        return sum(
            _num_values({name: row}) * plane_dtype(self.cache_spec, name, dtype).itemsize
            for name, row in planes.items()
        )


def group_layers(specs: Sequence[LayerSpec], layers: Sequence[int]) -> dict[CacheSpec, tuple[int, ...]]:
    """Groups layers by `cache_spec`.  The layers of a group share buffers and an attention backend."""
    groups: dict[CacheSpec, tuple[int, ...]] = {}
    for layer in layers:
        cache_spec = specs[layer].cache_spec
        groups[cache_spec] = (*groups.get(cache_spec, ()), layer)
    return groups


def with_row_dtype(specs: Sequence[LayerSpec], dtype: torch.dtype | None) -> tuple[LayerSpec, ...]:
    """Returns the specs, with the dtype of all rows set to `dtype` (None for the model's dtype).  The specs of layers
    with recurrent states are not changed."""
    return tuple(
        spec
        if isinstance(spec.cache_spec, RecurrentState)
        else replace(spec, cache_spec=replace(spec.cache_spec, dtype=dtype))
        for spec in specs
    )


def layers_with_rows(specs: Sequence[LayerSpec], layers: Sequence[int]) -> list[int]:
    """Returns the layers, among `layers`, that keep rows.  These layers need an attention backend."""
    return [layer for layer in layers if not isinstance(specs[layer].cache_spec, RecurrentState)]


def specs_of_rank(specs: Sequence[LayerSpec], shards: Shards) -> tuple[LayerSpec, ...]:
    """Returns the specs of one rank.  A rank has a part of the heads, but keeps whole latent rows.

    Raises EspalierError if several ranks would have to divide a recurrent state."""

    def spec_of_rank(cache_spec: CacheSpec) -> CacheSpec:
        if isinstance(cache_spec, KVHeads):
            return replace(cache_spec, kv_heads=len(shards.kv_heads_part(cache_spec.kv_heads)))
        if shards.count > 1 and not isinstance(cache_spec, LatentKV):
            raise EspalierError(
                f"tensor_parallel={shards.count} is not supported for layers that keep {cache_spec.kind}; use 1"
            )
        return cache_spec

    return tuple(
        replace(spec, heads=len(shards.heads_part(spec.heads)), cache_spec=spec_of_rank(spec.cache_spec))
        for spec in specs
    )


def plane_dtype(cache_spec: CacheSpec, plane: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a layer's plane `plane`.  dtype: the model's dtype."""
    return dtype if plane == INDEX_PLANE else cache_spec.dtype or dtype


def _num_values(planes: Mapping[str, RowShape]) -> int:
    """Returns the number of values of one row.  planes: (heads, head size) of each tensor of a row."""
    return sum(heads * size for heads, size in planes.values())
