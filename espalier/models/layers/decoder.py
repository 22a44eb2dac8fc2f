"""The decoder of all families: embedding, layers of attention and MLP (gated, or a mixture), final norm, head.

Rows of a batch are flat, [B·Q, hidden]: two-dimensional matrix products are cheapest, and only `attend` needs to know
which row belongs to which request.
"""

from functools import partial

import torch
from torch import Tensor

from espalier.cache.layer_spec import LayerSpec
from espalier.kernels.layers.quantised import InputScales, Rows
from espalier.kernels.ops.rope import RopeAndNorm
from espalier.kernels.state.kv_scales import KVScales
from espalier.models.base import Attend, ModelOutput
from espalier.models.config import ModelConfig
from espalier.models.layers.attention import Attention
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.experts import MixtureMLP
from espalier.models.layers.latent_attention import LatentAttention
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.rope import RopeTables


def rounding_of(block: object) -> InputScales | None:
    """How `block.reads`, the one layer that reads the block's input, rounds it.

    None for a block without `reads`, such as one of another family's own file: it takes the norm as a tensor.
    """
    reads: Linear | None = getattr(block, "reads", None)
    return None if reads is None else reads.rounding


def needed_rows(x: Tensor, shape: tuple[int, int], needed: Tensor) -> Tensor:
    """Of x [B·Q, ...], the row `needed` [B] of each request: [B, ...].  shape: (B, Q)."""
    return x[torch.arange(shape[0], device=x.device) * shape[1] + needed]


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)).

    The output of a block is not added to x at once: the next norm adds it, in the same pass over the row.
    attention_rounding, mlp_rounding: how the norms round for the blocks that the layer is made with.  What replaces a
    block later takes the same inputs.
    """

    __slots__ = ("attention_norm", "attention", "mlp_norm", "mlp", "attention_rounding", "mlp_rounding")

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention | LatentAttention,
        mlp_norm: RMSNorm,
        mlp: GatedMLP | MixtureMLP,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.attention_rounding, self.mlp_rounding = rounding_of(attention), rounding_of(mlp)

    def __call__(
        self,
        x: Tensor,
        normed: Rows,
        rope_and_norm: RopeAndNorm,
        attend: Attend,
        layer: int,
        shape: tuple[int, int],
        live: Tensor | None = None,
        needed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [B·Q, H] and normed = attention_norm(x) -> (x after attention, the MLP's output to be added to it).

        live: [B·Q] bool, the rows that go to experts; None: all.
        needed: [B], of each request's Q rows the one that is returned; None: all are.
        Does not write to the x that it gets, because x may have been captured.
        """
        if needed is not None:
            attend, x = partial(attend, needed=needed), needed_rows(x, shape, needed)
            live = None if live is None else needed_rows(live, shape, needed)
        delta = self.attention(normed, rope_and_norm, attend, layer, shape)
        if isinstance(self.mlp, MixtureMLP):
            return self.mlp.after(self.mlp_norm, delta, x, live)
        x, normed = self.mlp_norm.rounded_after(delta, x, self.mlp_rounding)
        return x, self.mlp(normed, live)


class Decoder:
    """A CausalLM (espalier/models/base.py) made of `DecoderLayer`s."""

    def __init__(
        self,
        config: ModelConfig,
        layer_specs: tuple[LayerSpec, ...],
        capture: tuple[int, ...],
        rope: RopeTables,
        embed: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        kv_scales: tuple[KVScales | None, ...],
    ) -> None:
        self.config = config
        self.layer_specs = layer_specs
        self.capture = capture
        self.rope = rope
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head
        self.kv_scales = kv_scales

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, needed: Tensor | None = None) -> ModelOutput:
        shape = (tokens.shape[0], tokens.shape[1])
        rows = self.embed(tokens, positions, self.rope)
        rope_and_norm = RopeAndNorm(rows.cos, rows.sin)
        # Nothing reads the output of void nodes and of padding, so they go to no expert.
        live = None if self.config.experts is None else rows.live
        x, delta = rows.x, None
        inputs: dict[int, Tensor] = {}
        # What is captured is read at every row.
        of_last = None if len(self.layers) in self.capture else needed
        for layer, block in enumerate(self.layers):
            x, normed = block.attention_norm.rounded_after(delta, x, block.attention_rounding)
            if layer in self.capture:
                inputs[layer] = x
            of_layer = of_last if block is self.layers[-1] else None
            x, delta = block(x, normed, rope_and_norm, attend, layer, shape, live, of_layer)
        x, hidden = self.norm.after(delta, x)
        inputs[len(self.layers)] = x
        captured = tuple(inputs[i].unflatten(0, shape) for i in self.capture)
        if needed is not None:
            hidden = needed_rows(hidden, shape, needed) if of_last is None else hidden
            shape = (shape[0], 1)
        return ModelOutput(hidden=hidden.unflatten(0, shape), inputs=captured)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
