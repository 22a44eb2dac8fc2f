"""The decoder that every family here is: embedding, layers of attention and gated MLP, final norm, head.

Rows of a batch are kept flat, [B·Q, hidden]: two-dimensional linears are the cheapest, and only `attend` tells
requests apart.
"""

import torch
from torch import Tensor

from espalier.cache.geometry import LayerGeometry
from espalier.models.base import Attend, ModelOutput
from espalier.models.config import ModelConfig
from espalier.models.layers.attention import Attention
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.rope import RopeTables


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    __slots__ = ("attention_norm", "attention", "mlp_norm", "mlp")

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, layer: int, shape: tuple[int, int]
    ) -> Tensor:
        """x [B·Q, H] is left as it was: it may have been captured."""
        x = self.attention(self.attention_norm(x), x, rope, attend, layer, shape)
        return self.mlp(self.mlp_norm(x), x)


class Decoder:
    """A CausalLM (espalier/models/base.py) made of `DecoderLayer`s."""

    def __init__(
        self,
        config: ModelConfig,
        geometry: tuple[LayerGeometry, ...],
        capture: tuple[int, ...],
        rope: RopeTables,
        embed: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.config = config
        self.geometry = geometry
        self.capture = capture
        self.rope = rope
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> ModelOutput:
        shape = (tokens.shape[0], tokens.shape[1])
        rope = self.rope.at(positions)
        x = self.embed(tokens.reshape(-1))
        kept: dict[int, Tensor] = {}
        for layer, block in enumerate(self.layers):
            if layer in self.capture:
                kept[layer] = x
            x = block(x, rope, attend, layer, shape)
        kept[len(self.layers)] = x
        captured = torch.cat([kept[i] for i in self.capture], dim=-1).unflatten(0, shape) if self.capture else None
        return ModelOutput(hidden=self.norm(x).unflatten(0, shape), captured=captured)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
