"""The first block of a layer, which may be of any kind, and layers of a single block."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from espalier.attention import Pass
from espalier.models.layers.mlp import GatedMLP, MixtureMLP
from espalier.models.layers.norm import AnyNorm, Delta, RMSNorm
from espalier.models.layers.stream import Reader, Stream
from espalier.models.weight_formats.sharded import Unsummed


class Mixer(Reader, Protocol):
    """A block that mixes the rows of a request."""

    def __call__(self, layer: int, rows: Any, s: Stream, p: Pass) -> Tensor | Unsummed:
        """Write what the layer keeps, go on with the rows `p.kept` (`s.keep`), and read.  rows: as `read` gives them.

        layer: its place in the pass.  Returns [kept rows, hidden], or parts of it as RMSNorm.after takes them.
        """
        ...


class Unread:
    """Reads the norm of the stream as it is."""

    @staticmethod
    def read(norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Tensor]:
        return norm.after(delta, x)


@dataclass(eq=False, slots=True)
class BlockLayer:
    """x + block(norm(x)), where the block is a mixer or an MLP, which keeps nothing.

    index: the layer's place in the pass, from 0.
    """

    index: int
    norm: RMSNorm
    mixer: Mixer | None = None
    mlp: GatedMLP | MixtureMLP | None = None

    def __call__(self, s: Stream, p: Pass) -> None:
        if self.mixer is not None:
            s.add(self.mixer(self.index, s.normed(self.norm, self.mixer), s, p))
            return
        mlp, kept = self.mlp, p.kept(self.index)
        assert mlp is not None
        if kept is None:
            s.add(mlp(s.normed(self.norm, mlp), s.live))
            return
        rows = s.normed(self.norm, Unread())[kept]
        s.keep(kept)
        s.add(mlp(mlp.routed(rows), s.live) if isinstance(mlp, MixtureMLP) else mlp(rows))


def of_kept(values: Tensor, layer: int, p: Pass) -> Tensor:
    """The rows of values [N, ...] that the layer computes after its write."""
    kept = p.kept(layer)
    return values if kept is None else values[kept]
