"""A layer whose first block may be of any kind: attention with a gate, a recurrence, a short convolution."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import Rows
from espalier.models.layers.attention import Attention
from espalier.models.layers.experts import MixtureMLP
from espalier.models.layers.latent_attention import LatentAttention
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.norm import AnyNorm, RMSNorm
from espalier.models.layers.stream import Reader, Stream


class Mixer(Reader, Protocol):
    """A block that mixes the rows of a request."""

    def __call__(self, layer: int, rows: Any, s: Stream, p: Pass) -> Tensor:
        """Write what the layer keeps, go on with the rows `p.kept` (`s.keep`), and read.  rows: as `read` gives them.

        layer: its place in the pass.  Returns [kept rows, hidden], or parts of it as RMSNorm.after takes them.
        """
        ...


@dataclass(eq=False, slots=True)
class AttentionMixer:
    """Plain attention as a Mixer."""

    attention: Attention | LatentAttention

    def read(self, norm: AnyNorm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.attention.read(norm, delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor:
        """As Mixer."""
        q = self.attention.write(layer, rows, p)
        s.keep(p.kept(layer))
        return self.attention.project(p.attend(layer, q, self.attention.sink))


@dataclass(eq=False, slots=True)
class MixerLayer:
    """x + mixer(norm(x)), then x + mlp(norm(x)).

    index: the layer's place in the pass, from 0.  scale: factor of both blocks' outputs.
    """

    index: int
    mixer_norm: RMSNorm
    mixer: Mixer
    mlp_norm: RMSNorm
    mlp: GatedMLP | MixtureMLP
    scale: float = 1.0

    def __call__(self, s: Stream, p: Pass) -> None:
        s.add(self.mixer(self.index, s.normed(self.mixer_norm, self.mixer), s, p), None, self.scale)
        s.add(self.mlp(s.normed(self.mlp_norm, self.mlp), s.live), None, self.scale)


class Unread:
    """Reads the norm of the stream as it is."""

    @staticmethod
    def read(norm: AnyNorm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
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
    """Of values [N, ...], those of the rows that the layer computes after its write."""
    kept = p.kept(layer)
    return values if kept is None else values[kept]
