"""The contract of attention backends.

Every forward pass (a prompt chunk, a draft level, a verify tree, a draft extend) has queries [B, Q].  They attend to
committed rows in pages and to staged rows [B, R].  A backend must supply attention over the committed rows, with its
log-sum-exp.  Attention over the staged rows (kernels/attention/staged_attention.py) and the merge are then shared
code.  A backend may override `attend` to do both in one kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import Keeps, KeptRows, KVHeads, LatentKV, LayerSpec, RecurrentState
from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import seen_rows
from espalier.kernels.attention.merge import merge
from espalier.kernels.attention.staged_attention import NoPrefix, staged_attention
from espalier.kernels.attention.tree_attention import Staged
from espalier.layout import MAX_PAGE_SIZE


@dataclass(frozen=True)
class Support:
    """What a backend can run.  The support matrix and the error messages are made from it.

    keeps: what layers may keep; page_sizes, head_sizes (of K and V): a range or a list, None for any; largest_latent:
    the largest latent row, None if latent rows are limited by head_sizes too; left_bound: whether the backend supports
    prefixes whose rows below `first` do not exist.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    keeps: tuple[type[Keeps], ...] = (KVHeads,)
    sliding_window: bool = False
    different_v_size: bool = False
    left_bound: bool = True
    page_sizes: Sequence[int] = range(1, MAX_PAGE_SIZE + 1)
    head_sizes: Sequence[int] | None = None
    largest_latent: LatentKV | None = None

    def require(
        self, device: str, dtype: torch.dtype, page_size: int, specs: Sequence[LayerSpec], left_bound: bool = False
    ) -> None:
        """Check, before anything is allocated, that this backend can run the layers.  Raises EspalierError.

        left_bound: whether the prefixes of these layers lack their first rows.
        """
        refusals = [
            (device not in self.devices, f"device={device}", f"devices {', '.join(self.devices)}"),
            (dtype not in self.dtypes, f"dtype={_plain(dtype)}", f"dtypes {', '.join(map(_plain, self.dtypes))}"),
            (page_size not in self.page_sizes, f"page_size={page_size}", f"page_size {plain_sizes(self.page_sizes)}"),
            (left_bound and not self.left_bound, "a prefix whose first rows do not exist", "whole prefixes"),
            *(refusal for spec in specs for refusal in self._refusals(spec)),
        ]
        for unsupported, value, supported in refusals:
            if unsupported:
                raise EspalierError(
                    f"attention={self.name} does not support {value}; it supports {supported}: choose another backend"
                )

    def takes(self, keeps: Keeps) -> bool:
        """Whether the backend supports layers that keep this."""
        if isinstance(keeps, RecurrentState) or not isinstance(keeps, self.keeps):
            return False
        return not self._unsupported_sizes(keeps)

    def _unsupported_sizes(self, keeps: KeptRows) -> list[int]:
        """Those of the sizes of K and V that the backend does not support."""
        sizes, largest = (keeps.k_size, keeps.v_size), self.largest_latent
        if isinstance(keeps, LatentKV) and largest is not None:
            limits = (largest.k_size, largest.v_size)
            return [size for size, limit in zip(sizes, limits, strict=True) if size > limit]
        return [size for size in sizes if self.head_sizes is not None and size not in self.head_sizes]

    def _refusals(self, spec: LayerSpec) -> list[tuple[bool, str, str]]:
        """(is unsupported, the property, what is supported) for each property of a layer."""
        if isinstance(spec.keeps, RecurrentState) or not isinstance(spec.keeps, self.keeps):
            kinds = ", ".join(kind.kind for kind in self.keeps)
            return [(True, f"layers that keep {spec.keeps.kind}", f"layers that keep {kinds}")]
        wrong_sizes = self._unsupported_sizes(spec.keeps)
        is_latent = isinstance(spec.keeps, LatentKV)
        wide = is_latent and self.head_sizes is not None and spec.keeps.k_size > max(self.head_sizes)
        differ = isinstance(spec.keeps, KVHeads) and spec.keeps.k_size != spec.keeps.v_size
        return [
            (bool(spec.window) and not self.sliding_window, "a sliding window", "layers without a window"),
            (wide and bool(spec.window), "a sliding window over wide latent rows", "such layers without a window"),
            (differ and not self.different_v_size, "k and v heads of different sizes", "equal sizes"),
            (bool(wrong_sizes), f"heads of size {max(wrong_sizes, default=0)}", f"sizes {self.plain_heads}"),
        ]

    @property
    def plain_heads(self) -> str:
        """The supported head sizes as text."""
        text, latent = plain_sizes(self.head_sizes), self.largest_latent
        return text if latent is None else f"{text}; latent rows up to {latent.size}, {latent.v_size} of them V"


def plain_sizes(sizes: Sequence[int] | None) -> str:
    """page_sizes or head_sizes as text."""
    if sizes is None:
        return "any"
    return f"up to {sizes[-1]}" if isinstance(sizes, range) else ", ".join(map(str, sizes))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class CommittedLengths:
    """What the host knows about the committed lengths before a launch.

    at_most: upper bound per request, in batch order, without padding requests (they have no committed rows); exact: the
    bounds are the lengths, as in lock-step, where no round is in flight.
    """

    at_most: tuple[int, ...]
    exact: bool

    @property
    def longest(self) -> int:
        return max(self.at_most, default=0)


@dataclass(frozen=True)
class Prefix:
    """The committed rows of each request of a pass.

    page_table: [B, table_width] int32; length: [B] int64, rows first .. length-1 exist (first is 1 for an EAGLE draft:
    a row needs the feature of the previous token).  planned: the backend's plan, shared by all passes over this prefix.
    Make a new Prefix whenever a length may have changed.
    """

    page_table: Tensor
    length: Tensor
    first: int = 0
    planned: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def holds(self, positions: Tensor) -> Tensor:
        """[B, P] bool: whether a row exists at each position.  Other rows must not be read: pages are not cleared."""
        return (positions >= self.first) & (positions < self.length[:, None])


@dataclass(frozen=True)
class Nodes:
    """The staged rows and the queries of a pass.

    positions: [B, Q], of the queries; row_positions: [B, R], of the staged rows; ancestor_bits: [B, Q, W] int64, the
    staged rows that a query sees (its ancestors and itself), or None for a chain, where each row follows the previous
    one.  The queries are the last Q of the R rows; in a chain Q = R.
    """

    positions: Tensor
    row_positions: Tensor
    ancestor_bits: Tensor | None

    @classmethod
    def chain(cls, positions: Tensor) -> "Nodes":
        """A chain at positions [B, Q]."""
        return cls(positions, positions, None)

    def seen(self, window: int | None) -> Tensor:
        """[B, Q, R] bool: ancestors inside the window.  Every row sees itself, also padding: no softmax is empty."""
        return seen_rows(self.ancestor_bits, self.positions, self.row_positions, window)


class AttentionBackend(Protocol):
    """A backend plans each pass.

    `plan` and the Attention it returns may run inside a captured CUDA graph: they must not read lengths on the host.
    """

    support: Support

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before every launch: eager, capture and replay."""
        ...

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> "Attention":
        """The plan of one pass, used by all of its layers."""
        ...


class Attention:
    """The plan of one pass.  Subclasses implement over_prefix, and may override attend."""

    def __init__(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes):
        self.pages = pages
        self.specs = specs
        self.prefix = prefix
        self.nodes = nodes

    def over_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Attention of q [B, Q, heads, k_size] over the committed rows inside the layer's window.

        Returns out [B, Q, heads, v_size] and lse [B, Q, heads] float32 (float64 for float64), natural log.  An empty
        prefix gives zeros and lse -inf.
        """
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        """Attention of q [B, Q, heads, k_size] over the committed rows and the staged k, v [B, R, kv_heads, size].

        sink: [heads] float32 (float64 for float64), one extra logit per head that joins the softmax and has no value.
        Returns out [B, Q, heads, v_size].
        """
        spec = self.specs[layer]
        staged = Staged(k, v, self.nodes.row_positions, self.nodes.ancestor_bits)
        over_staged = staged_attention(
            q, staged, self.nodes.positions, spec.softmax_scale, spec.window, self._no_prefix
        )
        return merge(self.over_prefix(q, layer), over_staged, sink)

    @cached_property
    def _no_prefix(self) -> NoPrefix:
        return NoPrefix.of(self.nodes.positions.shape[0], self.nodes.positions.device)

    def committed(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [rows, kv_heads, size] of all pages of a layer."""
        return self.specs[layer].rows.read(self.pages.layers[layer])
