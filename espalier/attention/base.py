"""The one attention: new nodes hanging off a committed prefix.

Every forward pass (a prompt chunk, a draft level, a verify tree, a draft extend) is queries [B, Q] over staged rows [B,
R] and over a prefix in pages.  A backend supplies the part over the prefix with its log-sum-exp; the part among the
nodes is kernels/ancestors.py for all of them; `Attention.attend` merges the two, and a backend may override it where it
can fuse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.cache.geometry import LayerGeometry
from espalier.cache.kv import Pages
from espalier.errors import EspalierError
from espalier.kernels.ancestors import among_nodes, unpack
from espalier.kernels.merge import merge


@dataclass(frozen=True)
class Support:
    """What a backend can run: the row of the support matrix, and what refusals are made from."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    sliding_window: bool
    different_v_size: bool
    max_page_size: int
    max_head_size: int | None = None

    def require(self, device: str, dtype: torch.dtype, page_size: int, geometry: Sequence[LayerGeometry]) -> None:
        """Refuse by name, before anything is allocated, what this backend cannot run.  Raises EspalierError."""
        refuse = [
            (device not in self.devices, f"device={device}", f"devices {', '.join(self.devices)}"),
            (dtype not in self.dtypes, f"dtype={_plain(dtype)}", f"dtypes {', '.join(map(_plain, self.dtypes))}"),
            (page_size > self.max_page_size, f"page_size={page_size}", f"page_size up to {self.max_page_size}"),
            (
                not self.sliding_window and any(g.window for g in geometry),
                "a sliding window",
                "layers without a window",
            ),
            (
                not self.different_v_size and any(g.k_size != g.v_size for g in geometry),
                "k and v heads of different sizes",
                "equal sizes",
            ),
            (
                self.max_head_size is not None and any(max(g.k_size, g.v_size) > self.max_head_size for g in geometry),
                f"heads of size {max((max(g.k_size, g.v_size) for g in geometry), default=0)}",
                f"sizes up to {self.max_head_size}",
            ),
        ]
        for wrong, value, supported in refuse:
            if wrong:
                raise EspalierError(
                    f"attention={self.name} does not support {value}; it supports {supported}: choose another backend"
                )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Prefix:
    """Committed rows that a pass hangs from.

    page_table: [B, table_width]; length: [B], rows first .. length-1 exist (the draft's first row is 1 for EAGLE: a row
    needs the feature of the token before); first: int.  planned: what a backend made of these for every pass that hangs
    from them; a prefix is made anew wherever a length may have changed.
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

    positions: [B, Q] page positions of the queries; row_positions: [B, R] of the staged rows; words: [B, Q, W] int64,
    the staged rows that are a query's ancestors or itself, or None for a chain, each row following the one before it.
    The queries are the last Q of the R rows; those of a chain are all of them.
    """

    positions: Tensor
    row_positions: Tensor
    words: Tensor | None

    @classmethod
    def chain(cls, positions: Tensor) -> "Nodes":
        """Rows [B, Q] each of which follows the one before it."""
        return cls(positions, positions, None)

    def mask(self) -> Tensor:
        """[B, Q, R] bool: the words' bits, or those that a chain would have."""
        rows = self.row_positions.shape[1]
        if self.words is not None:
            return unpack(self.words, rows)
        order = torch.arange(rows, device=self.positions.device)
        return (order <= order[:, None]).expand(self.positions.shape[0], -1, -1)

    def seen(self, window: int | None) -> Tensor:
        """[B, Q, R]: ancestors inside the window.  Every row, padding too, sees itself: no softmax is empty."""
        if window is None:
            return self.mask()
        return self.mask() & (self.positions[:, :, None] - self.row_positions[:, None, :] < window)


class Backend(Protocol):
    """Where attention over committed pages comes from."""

    support: Support

    def plan(self, pages: Pages, geometry: Sequence[LayerGeometry], prefix: Prefix, nodes: Nodes) -> "Attention":
        """Metadata of one pass, made once and used by all of its layers."""
        ...


class Attention:
    """One pass, planned.  Subclasses supply over_prefix, and attend where they can fuse."""

    def __init__(self, pages: Pages, geometry: Sequence[LayerGeometry], prefix: Prefix, nodes: Nodes):
        self.pages = pages
        self.geometry = geometry
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
        g = self.geometry[layer]
        return merge(self.over_prefix(q, layer), among_nodes(q, k, v, self.nodes.seen(g.window), g.softmax_scale))
