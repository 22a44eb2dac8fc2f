"""A layer whose first block may be of any kind: attention with a gate, a recurrence, a short convolution."""

from typing import Any, Protocol

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import Rows
from espalier.models.layers.attention import Attention
from espalier.models.layers.experts import MixtureMLP
from espalier.models.layers.latent_attention import LatentAttention
from espalier.models.layers.mlp import GatedMLP
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


class AttentionMixer:
    """Plain attention as a Mixer."""

    __slots__ = ("attention",)

    def __init__(self, attention: Attention | LatentAttention) -> None:
        self.attention = attention

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.attention.read(norm, delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor | Unsummed:
        """As Mixer."""
        q = self.attention.write(layer, rows, p)
        s.keep(p.kept(layer))
        return self.attention.project(p.attend(layer, q, self.attention.sink))


class MixerLayer:
    """x + mixer(norm(x)), then x + mlp(norm(x)).

    index: the layer's place in the pass, from 0.  scale: factor of both blocks' outputs.
    """

    __slots__ = ("index", "mixer_norm", "mixer", "mlp_norm", "mlp", "scale")

    def __init__(
        self,
        index: int,
        mixer_norm: RMSNorm,
        mixer: Mixer,
        mlp_norm: RMSNorm,
        mlp: GatedMLP | MixtureMLP,
        scale: float = 1.0,
    ) -> None:
        self.index = index
        self.mixer_norm = mixer_norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.scale = scale

    def __call__(self, s: Stream, p: Pass) -> None:
        s.add(self.mixer(self.index, s.normed(self.mixer_norm, self.mixer), s, p), None, self.scale)
        s.add(self.mlp(s.normed(self.mlp_norm, self.mlp), s.live), None, self.scale)


class Unread:
    """Reads the norm of the stream as it is."""

    @staticmethod
    def read(norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Tensor]:
        return norm.after(delta, x)


class BlockLayer:
    """x + block(norm(x)), where the block is a mixer or an MLP, which keeps nothing.

    index: the layer's place in the pass, from 0.
    """

    __slots__ = ("index", "norm", "mixer", "mlp")

    def __init__(
        self, index: int, norm: RMSNorm, mixer: Mixer | None = None, mlp: GatedMLP | MixtureMLP | None = None
    ) -> None:
        self.index = index
        self.norm = norm
        self.mixer = mixer
        self.mlp = mlp

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
