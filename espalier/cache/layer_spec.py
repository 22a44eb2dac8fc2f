"""What a layer keeps between passes, declared: pools, staging, commit, memory and prefix re-entry follow from it.

A layer of attention keeps rows, one a token, in pages; a recurrent layer keeps one state a slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import Tensor

from espalier.errors import EspalierError

# (heads, size) of a row of a plane.
RowShape = tuple[int, int]


@dataclass(frozen=True)
class KVHeads:
    """K and V of each KV head, a plane each; their sizes may differ."""

    kind: ClassVar[str] = "K and V heads"
    reenters_anywhere: ClassVar[bool] = True

    kv_heads: int
    k_size: int
    v_size: int

    @property
    def planes(self) -> Mapping[str, RowShape]:
        return {"k": (self.kv_heads, self.k_size), "v": (self.kv_heads, self.v_size)}

    @property
    def values_per_token(self) -> int:
        return _values(self.planes)

    def read(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """K and V [..., kv_heads, size] of the planes."""
        k, v = planes
        return k, v


@dataclass(frozen=True)
class LatentKV:
    """One latent row a token, [1, size], that all heads share: read whole as K, and its first v_size values as V."""

    kind: ClassVar[str] = "a latent row"
    reenters_anywhere: ClassVar[bool] = True
    kv_heads: ClassVar[int] = 1

    size: int
    v_size: int

    @property
    def k_size(self) -> int:
        return self.size

    @property
    def planes(self) -> Mapping[str, RowShape]:
        return {"latent": (1, self.size)}

    @property
    def values_per_token(self) -> int:
        return _values(self.planes)

    def read(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """K and V [..., 1, size] of the plane: views of the same memory."""
        [latent] = planes
        return latent, latent[..., : self.v_size]


@dataclass(frozen=True)
class RecurrentState:
    """A state of fixed size a slot, and nothing in pages.

    state: shapes of one slot's state, by name.  left: shapes, by name, of what a node leaves for the commit: its own
    state, or the small inputs from which the commit makes it.  A prefix can be re-entered only where a state was saved.
    """

    kind: ClassVar[str] = "a recurrent state"
    reenters_anywhere: ClassVar[bool] = False
    planes: ClassVar[Mapping[str, RowShape]] = {}
    values_per_token: ClassVar[int] = 0

    state: tuple[tuple[str, tuple[int, ...]], ...]
    left: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def values_per_slot(self) -> int:
        return sum(prod(shape) for _, shape in self.state)

    @property
    def values_per_node(self) -> int:
        """Values that one node leaves for the commit."""
        return sum(prod(shape) for _, shape in self.left)


KeptRows = KVHeads | LatentKV
Keeps = KVHeads | LatentKV | RecurrentState


@dataclass(frozen=True)
class LayerSpec:
    """One layer.  heads: of queries; keeps: see above.

    window: a query at position p sees positions > p - window; None sees all.
    scale: multiplies q·k; None means k_size ** -0.5.
    """

    heads: int
    keeps: Keeps
    window: int | None = None
    scale: float | None = None

    @property
    def rows(self) -> KeptRows:
        """What a layer of attention keeps.  Raises EspalierError for a recurrent layer, which has no rows."""
        if isinstance(self.keeps, RecurrentState):
            raise EspalierError("a recurrent layer keeps no rows that attention could read; use a layer of attention")
        return self.keeps

    @property
    def softmax_scale(self) -> float:
        return self.rows.k_size**-0.5 if self.scale is None else self.scale

    @property
    def values_per_token(self) -> int:
        """Values that one token takes in pages."""
        return self.keeps.values_per_token


def groups_of(specs: Sequence[LayerSpec], layers: Sequence[int]) -> dict[Keeps, tuple[int, ...]]:
    """`layers`, grouped by what they keep, in order of appearance: a group shares its buffers and its backend."""
    groups: dict[Keeps, tuple[int, ...]] = {}
    for layer in layers:
        keeps = specs[layer].keeps
        groups[keeps] = (*groups.get(keeps, ()), layer)
    return groups


def _values(planes: Mapping[str, RowShape]) -> int:
    return sum(heads * size for heads, size in planes.values())
