"""The decoder of all families: embedding, layers, final norm and lm_head.

The rows of a batch form one matrix [B·Q, hidden], because two-dimensional matrix products are fastest.  Only attention
needs to know which row belongs to which request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import LayerSpec
from espalier.kernels.state.kv_scales import KVScales
from espalier.models.base import Layer, ModelOutput
from espalier.models.config import ModelConfig
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.mlp import GatedMLP, MixtureMLP
from espalier.models.layers.norm import AnyNorm, BlockOutput, RMSNorm
from espalier.models.layers.residual import NormReader, Residual
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.sharded import UnsummedOutput


class Mixer(NormReader, Protocol):
    """A block that mixes the rows of a request, such as attention or a recurrence."""

    def __call__(self, layer: int, rows: Any, /, s: Residual, p: Pass) -> Tensor | UnsummedOutput:
        """Writes rows to the cache, drops all rows of `s` except `p.kept_rows`, then attends or reads states.
        layer: the layer's index in the pass.  rows: the result of norm_input.
        Returns the output [kept rows, hidden], or partial sums of the output, which the next norm adds."""
        ...


class PlainNormReader:
    """A NormReader that reads the normed rows as a plain tensor, without quantisation."""

    @staticmethod
    def norm_input(norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (residual + delta, the norm of that sum).  delta: the previous block's output."""
        return norm.add_and_norm(delta, residual)


@dataclass(eq=False, slots=True)
class SingleBlockLayer:
    """A layer of one block: x + block(norm(x)).  The block is a mixer or an MLP.
    index: the layer's index in the pass, from 0."""

    index: int
    norm: RMSNorm
    mixer: Mixer | None = None
    mlp: GatedMLP | MixtureMLP | None = None

    def __call__(self, s: Residual, p: Pass) -> None:
        """Adds the block's output to the residual `s`.  With a mixer, also writes to the cache of the pass `p`."""
        if self.mixer is not None:
            s.add(self.mixer(self.index, s.add_and_norm(self.norm, self.mixer), s, p))
            return
        mlp, kept = self.mlp, p.kept_rows(self.index)
        assert mlp is not None
        if kept is None:
            s.add(mlp(s.add_and_norm(self.norm, mlp), s.live))
            return
        rows = s.add_and_norm(self.norm, PlainNormReader)[kept]
        s.keep_rows(kept)
        s.add(mlp(mlp.route_rows(rows), s.live) if isinstance(mlp, MixtureMLP) else mlp(rows))


def select_kept_rows(values: Tensor, layer: int, p: Pass) -> Tensor:
    """Returns the rows of values [..., N, columns] that the layer keeps after its write (Pass.kept_rows)."""
    kept = p.kept_rows(layer)
    return values if kept is None else values[..., kept, :]


@dataclass(eq=False, slots=True)
class DecoderLayer:
    """A layer of two blocks: x + scale · attention(norm(x)), then x + scale · mlp(norm(x)).
    index: the layer's index in the pass, from 0.
    attention: an attention block, or another mixer such as a recurrence or a short convolution.
    attention_norm: None for the first layer of a draft head, because the embedding computes the layer's normed input.
    post_attention_norm, post_mlp_norm: the norm of a block's output, applied before the residual addition; None if
    there is no such norm.
    residual_scale: the factor of a block's output."""

    index: int
    attention_norm: AnyNorm | None
    attention: Mixer
    mlp_norm: AnyNorm
    mlp: GatedMLP | MixtureMLP
    post_attention_norm: RMSNorm | None = None
    post_mlp_norm: RMSNorm | None = None
    residual_scale: float = 1.0

    def __call__(self, s: Residual, p: Pass) -> None:
        """Adds the outputs of both blocks to the residual `s`.  The attention also writes to the cache of `p`."""
        mixed = self.attention(self.index, s.add_and_norm(self.attention_norm, self.attention), s, p)
        s.add(mixed, self.post_attention_norm, self.residual_scale)
        s.add(self.mlp(s.add_and_norm(self.mlp_norm, self.mlp), s.live), self.post_mlp_norm, self.residual_scale)


@dataclass(eq=False)
class Decoder:
    """The CausalLM of all families (espalier/models/base.py).  layers: DecoderLayers, or the family's own layers.
    captured_layers: the layers whose inputs a draft reads, by index; len(layers) stands for the last layer's output."""

    config: ModelConfig
    layer_specs: tuple[LayerSpec, ...]
    captured_layers: tuple[int, ...]
    rope: RopeTables
    embed: Embedding
    layers: Sequence[Layer]
    norm: RMSNorm
    head: Linear
    kv_scales: tuple[KVScales | None, ...]

    def __call__(self, p: Pass) -> ModelOutput:
        """Returns the hidden states of a pass, and the inputs of the captured layers."""
        s = self.embed(p, self.rope)
        for i, layer in enumerate(self.layers):
            if i in self.captured_layers:
                s.capture_input(i)
            layer(s, p)
        x, hidden = s.final_norm(self.norm, p.out_shape)
        inputs = {i: rows.unflatten(0, p.tokens.shape) for i, rows in s.captured_inputs.items()} | {len(self.layers): x}
        return ModelOutput(hidden=hidden, captured_inputs=tuple(inputs[i] for i in self.captured_layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [..., V].  hidden: [..., H], the result of the final norm."""
        return cap_logits(self.head(hidden), self.config.logit_cap, self.config.logit_scale)


def cap_logits(logits: Tensor, cap: float | None, scale: float = 1.0) -> Tensor:
    """Returns the logits times `scale`, soft-capped to ±cap; a cap of None has no effect."""
    logits = logits if scale == 1 else logits * scale
    return logits if cap is None else torch.tanh(logits / cap) * cap
