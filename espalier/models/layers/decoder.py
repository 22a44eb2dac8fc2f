"""The decoder that every family here is: embedding, layers of attention and gated MLP, final norm, head.

Rows of a batch are kept flat, [B·Q, hidden]: two-dimensional linears are the cheapest, and only `attend` tells
requests apart.
"""

import torch
from torch import Tensor

from espalier.cache.layer_spec import LayerSpec
from espalier.kernels.layers.rope import RopeAndNorm
from espalier.models.base import Attend, ModelOutput
from espalier.models.config import ModelConfig
from espalier.models.layers.attention import Attention
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.rope import RopeTables


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)).

    What a block adds travels beside x until the norm after it, which adds it in the same pass over the row.
    """

    __slots__ = ("attention_norm", "attention", "mlp_norm", "mlp")

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, normed: Tensor, rope_and_norm: RopeAndNorm, attend: Attend, layer: int, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """x [B·Q, H], left as it was since it may have been captured, and attention_norm of it -> the same stream and
        what the MLP adds to it."""
        x, normed = self.mlp_norm.after(self.attention(normed, rope_and_norm, attend, layer, shape), x)
        return x, self.mlp(normed)


class Decoder:
    """A CausalLM (espalier/models/base.py) made of `DecoderLayer`s."""

    def __init__(
        self,
        config: ModelConfig,
        geometry: tuple[LayerSpec, ...],
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
        entered = self.embed(tokens, positions, self.rope)
        rope_and_norm = RopeAndNorm(entered.cos, entered.sin)
        x, added = entered.x, None
        kept: dict[int, Tensor] = {}
        for layer, block in enumerate(self.layers):
            x, normed = block.attention_norm.after(added, x)
            if layer in self.capture:
                kept[layer] = x
            x, added = block(x, normed, rope_and_norm, attend, layer, shape)
        x, normed = self.norm.after(added, x)
        kept[len(self.layers)] = x
        captured = torch.cat([kept[i] for i in self.capture], dim=-1).unflatten(0, shape) if self.capture else None
        return ModelOutput(hidden=normed.unflatten(0, shape), captured=captured)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
