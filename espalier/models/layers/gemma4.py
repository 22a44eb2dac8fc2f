"""The layer of Gemma 4: experts beside a dense MLP, an input of its own for each layer, and a factor of its output."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.ops.drafts import DraftHidden
from espalier.kernels.ops.norm import takes_router
from espalier.models.layers.attention import Attention
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP, MixtureMLP, RoutedRows, router_logits
from espalier.models.layers.norm import AnyNorm, Delta, Normed, RMSNorm
from espalier.models.layers.stream import Stream
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.sharded import Unsummed


class PerLayerEmbedding(Embedding):
    """A token embedding that gives each layer an input of P values beside the stream (E2B, E4B).

    table: [vocab, layers · P]; table_scale: of its values.  project: an embedding [H] -> [layers · P], normed for each
    layer by `norm` and added.
    """

    __slots__ = ("table", "table_scale", "project", "norm")

    def __init__(self, own: Embedding, table: Tensor, table_scale: float, project: Linear, norm: RMSNorm) -> None:
        super().__init__(own.weight, own.scale, None, own.shape[0], own.shards)
        self.table = table
        self.table_scale = table_scale
        self.project = project
        self.norm = norm

    def __call__(self, p: Pass, rope: RopeTables, beside: DraftHidden | None = None) -> Stream:
        s = super().__call__(p, rope, beside)
        size = self.norm.weight.shape[0]
        # Nothing reads the values of void rows.
        of_tokens = F.embedding(p.tokens.flatten().clamp(min=0), self.table).unflatten(1, (-1, size))
        of_rows = self.norm(self.project(s.x).unflatten(1, (-1, size)))
        s.beside = torch.add(of_rows, of_tokens, alpha=self.table_scale)
        return s


@dataclass(eq=False, slots=True)
class LayerInput:
    """A layer's use of its own input: norm(project(activation(gate(x)) · input))."""

    gate: Linear
    project: Linear
    norm: RMSNorm

    def __call__(self, x: Tensor, given: Tensor) -> Tensor | Unsummed:
        """x [N, H], given [N, P] -> [N, H] before the norm, or parts of it."""
        return self.project.for_stream(F.gelu(self.gate(x), approximate="tanh") * given)


class BesideRows(NamedTuple):
    """The rows of the dense MLP and of the experts beside it."""

    of_mlp: Tensor
    routed: RoutedRows


@dataclass(eq=False, slots=True)
class BesideMLP:
    """Routed experts that read the stream beside the dense MLP, through norms of their own.

    router_norm: its weight includes the router's scale.  mlp_norm: of the dense MLP's output; norm, after: of the
    experts' input and output.
    """

    mlp: GatedMLP
    mixture: MixtureMLP
    router_norm: RMSNorm
    mlp_norm: RMSNorm
    norm: RMSNorm
    after: RMSNorm

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, BesideRows]:
        """As espalier/models/layers/stream.py:Reader.  delta: of an attention whose output is normed.

        For a few rows the router is in the launch of the norms.
        """
        assert isinstance(delta, Normed) and isinstance(norm, RMSNorm)
        router = self.mixture.router if takes_router(x) else None
        total, (of_mlp, rows, last) = delta.added(x, (norm, self.norm, self.router_norm), router)
        logits = router_logits(last, self.mixture.router) if router is None else last
        return total, BesideRows(of_mlp, RoutedRows(rows, rows, logits))

    def __call__(self, rows: BesideRows, live: Tensor | None) -> tuple[tuple[Tensor | Unsummed, RMSNorm], ...]:
        """Both blocks' outputs, and their norms."""
        return (self.mlp(rows.of_mlp), self.mlp_norm), (self.mixture(rows.routed, live), self.after)


@dataclass(eq=False, slots=True)
class Gemma4Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), then what the layer's own input adds; all times scale.

    index: the layer's place in the pass.  own_input: or None.
    post_mlp_norm: its weight includes the scale, unless there is `own_input`, whose norm then does.
    """

    index: int
    attention_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP | BesideMLP
    post_mlp_norm: RMSNorm
    own_input: LayerInput | None
    scale: float

    def __call__(self, s: Stream, p: Pass) -> None:
        attended = self.attention(self.index, s.normed(self.attention_norm, self.attention), s, p)
        s.add(attended, self.post_attention_norm)
        rows = s.normed(self.mlp_norm, self.mlp)
        scale = self.scale if self.own_input is None else 1.0
        if isinstance(self.mlp, BesideMLP):
            out = Normed(*self.mlp(rows, s.live), norm=self.post_mlp_norm, scale=scale)
        else:
            out = Normed((self.mlp(rows, s.live), self.post_mlp_norm), scale=scale)
        if self.own_input is not None:
            assert s.beside is not None
            s.x, _ = out.added(s.x, ())
            out = Normed((self.own_input(s.x, s.beside[:, self.index]), self.own_input.norm), scale=self.scale)
        s.add(out)
