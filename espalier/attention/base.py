"""The one attention: new nodes hanging off a committed prefix.

Every forward pass (a prompt chunk, a draft level, a verify tree, a draft extend) is queries [B, Q] over staged rows [B,
R] and over a prefix in pages.  A backend supplies the part over the prefix with its log-sum-exp; the part among the
nodes (kernels/attention/among_nodes.py) and the merge are the same for all of them, and a backend may override `attend`
where it can fuse.
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
from espalier.kernels.attention.among_nodes import NoPrefix, among_nodes
from espalier.kernels.attention.ancestor_bits import seen_rows
from espalier.kernels.attention.merge import merge
from espalier.kernels.attention.tree_attention import Staged
from espalier.layout import MAX_PAGE_SIZE


@dataclass(frozen=True)
class Support:
    """What a backend can run: the row of the support matrix, and what refusals are made from.

    keeps: kinds of layers; page_sizes, head_sizes: a range or those there are, of K and of V alike, None for any;
    largest_latent: the largest latent row, None where head_sizes holds for it too; left_bound: whether rows below a
    prefix's `first` may not exist.
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
        """Refuse by name, before anything is allocated, what this backend cannot run.  Raises EspalierError.

        left_bound: whether the first rows of these layers do not exist.
        """
        refuse = [
            (device not in self.devices, f"device={device}", f"devices {', '.join(self.devices)}"),
            (dtype not in self.dtypes, f"dtype={_plain(dtype)}", f"dtypes {', '.join(map(_plain, self.dtypes))}"),
            (page_size not in self.page_sizes, f"page_size={page_size}", f"page_size {plain_sizes(self.page_sizes)}"),
            (left_bound and not self.left_bound, "a prefix whose first rows do not exist", "whole prefixes"),
            *(refusal for spec in specs for refusal in self._refusals(spec)),
        ]
        for wrong, value, supported in refuse:
            if wrong:
                raise EspalierError(
                    f"attention={self.name} does not support {value}; it supports {supported}: choose another backend"
                )

    def takes(self, keeps: Keeps) -> bool:
        """Whether layers may keep this."""
        if isinstance(keeps, RecurrentState) or not isinstance(keeps, self.keeps):
            return False
        return not self._beyond(keeps)

    def _beyond(self, keeps: KeptRows) -> list[int]:
        """Sizes of K and V that are not supported."""
        sizes, largest = (keeps.k_size, keeps.v_size), self.largest_latent
        if isinstance(keeps, LatentKV) and largest is not None:
            pairs = zip(sizes, (largest.k_size, largest.v_size), strict=True)
            return [size for size, bound in pairs if size > bound]
        return [size for size in sizes if self.head_sizes is not None and size not in self.head_sizes]

    def _refusals(self, spec: LayerSpec) -> list[tuple[bool, str, str]]:
        """(whether it is wrong, what, what is supported) of one layer."""
        if isinstance(spec.keeps, RecurrentState) or not isinstance(spec.keeps, self.keeps):
            kinds = ", ".join(kind.kind for kind in self.keeps)
            return [(True, f"layers that keep {spec.keeps.kind}", f"layers that keep {kinds}")]
        beyond = self._beyond(spec.keeps)
        wide = (
            isinstance(spec.keeps, LatentKV) and self.head_sizes is not None and spec.keeps.size > max(self.head_sizes)
        )
        differ = isinstance(spec.keeps, KVHeads) and spec.keeps.k_size != spec.keeps.v_size
        return [
            (bool(spec.window) and not self.sliding_window, "a sliding window", "layers without a window"),
            (wide and bool(spec.window), "a sliding window over wide latent rows", "such layers without a window"),
            (differ and not self.different_v_size, "k and v heads of different sizes", "equal sizes"),
            (bool(beyond), f"heads of size {max(beyond, default=0)}", f"sizes {self.plain_heads}"),
        ]

    @property
    def plain_heads(self) -> str:
        """Head sizes in words."""
        words, latent = plain_sizes(self.head_sizes), self.largest_latent
        return words if latent is None else f"{words}; latent rows up to {latent.size}, {latent.v_size} of them V"


def plain_sizes(sizes: Sequence[int] | None) -> str:
    """page_sizes or head_sizes in words."""
    if sizes is None:
        return "any"
    return f"up to {sizes[-1]}" if isinstance(sizes, range) else ", ".join(map(str, sizes))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class CommittedLengths:
    """What the host knows of a launch's committed rows before it.  at_most: for each request in order, padding, which
    has none, left out; exact: these are the lengths themselves, as in lock-step, where nothing is in flight."""

    at_most: tuple[int, ...]
    exact: bool

    @property
    def longest(self) -> int:
        return max(self.at_most, default=0)


@dataclass(frozen=True)
class Prefix:
    """Committed rows that a pass hangs from.

    page_table: [B, table_width] int32; length: [B] int64, rows first .. length-1 exist (the draft's first row is 1 for
    EAGLE: a row needs the feature of the token before).  planned: what a backend made of these for every pass that
    hangs from them; a prefix is made anew wherever a length may have changed.
    """

    page_table: Tensor
    length: Tensor
    first: int = 0
    planned: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def holds(self, positions: Tensor) -> Tensor:
        """Whether rows exist at positions [B, P].  No other row is read: pages come as their last owner left them."""
        return (positions >= self.first) & (positions < self.length[:, None])


@dataclass(frozen=True)
class Nodes:
    """The new rows of a pass.

    positions: [B, Q] page positions of the queries; row_positions: [B, R] of the staged rows; ancestor_bits: [B, Q, W]
    int64, the staged rows that are a query's ancestors or itself, or None for a chain, each row following the one
    before it. The queries are the last Q of the R rows; those of a chain are all of them.
    """

    positions: Tensor
    row_positions: Tensor
    ancestor_bits: Tensor | None

    @classmethod
    def chain(cls, positions: Tensor) -> "Nodes":
        """Rows [B, Q] each of which follows the one before it."""
        return cls(positions, positions, None)

    def seen(self, window: int | None) -> Tensor:
        """[B, Q, R] bool: ancestors inside the window.  Every row, padding too, sees itself: no softmax is empty."""
        return seen_rows(self.ancestor_bits, self.positions, self.row_positions, window)


class AttentionBackend(Protocol):
    """Where attention over committed pages comes from.  `plan` and what it returns run in the body of a round, which a
    CUDA graph may have captured: there no length is read on the host."""

    support: Support

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before every launch: before eager ones, captures and replays alike."""
        ...

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> "Attention":
        """Metadata of one pass, made once and used by all of its layers."""
        ...


class Attention:
    """One pass, planned.  Subclasses supply over_prefix, and attend where they can fuse."""

    def __init__(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes):
        self.pages = pages
        self.specs = specs
        self.prefix = prefix
        self.nodes = nodes

    def over_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Attention of q [B, Q, heads, k_size] over committed rows [lower, length), lower by the layer's window.

        Returns out [B, Q, heads, v_size] and lse [B, Q, heads] float32 (float64 for float64), natural log; an empty
        prefix gives zeros and -inf.
        """
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, Q, heads, k_size] over the prefix and over staged k, v [B, R, kv_heads, size].

        Returns [B, Q, heads, v_size].
        """
        spec = self.specs[layer]
        staged = Staged(k, v, self.nodes.row_positions, self.nodes.ancestor_bits)
        among = among_nodes(q, staged, self.nodes.positions, spec.softmax_scale, spec.window, self._no_prefix)
        return merge(self.over_prefix(q, layer), among)

    @cached_property
    def _no_prefix(self) -> NoPrefix:
        return NoPrefix.of(self.nodes.positions.shape[0], self.nodes.positions.device)

    def committed(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [rows, kv_heads, size] of a layer's pages."""
        return self.specs[layer].rows.read(self.pages.layers[layer])
