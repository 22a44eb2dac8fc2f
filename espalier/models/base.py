"""The interface of a target model, which computes the rows of a pass.

A model never sees the KV cache.  Its layers write their K and V (or states) and attend through the pass
(espalier/attention/forward.py).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import LayerSpec
from espalier.kernels.state.kv_scales import KVScales
from espalier.models.config import ModelConfig
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.residual import Residual


class Layer(Protocol):
    """A layer of a decoder (espalier/models/layers/decoder.py:DecoderLayer).  A family may have its own layer class."""

    def __call__(self, s: Residual, p: Pass) -> None:
        """Runs the layer on the residual stream of the pass's rows.
        The layer calls `p.write` once, drops all rows except `p.kept_rows`, then calls `p.attend` once.  A layer with
        only a convolution does not call `p.attend`; a layer with only an MLP calls neither.  A layer may not modify the
        residual tensor in place, because the tensor may be a captured input."""
        ...


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The output of a target over the rows of a pass.
    hidden: [B, Q, H], the hidden states after the final norm; [B, 1, H] in a pass that computes one
    row of each request (`needed_row`).
    captured_inputs: the inputs of the n captured layers, [B, Q, H] each, in order.  If the input of the final norm is
    captured, this input has as many rows as `hidden`."""

    hidden: Tensor
    captured_inputs: tuple[Tensor, ...]

    @property
    def captured(self) -> Tensor | None:
        """[B, Q, n·H]: `captured_inputs`, concatenated."""
        return torch.cat(self.captured_inputs, -1) if self.captured_inputs else None


class CausalLM(Protocol):
    """A loaded target model.  A draft that has no embedding or head uses the embedding or the head of its target.
    kv_scales: the FP8 scales of each layer's K and V; None for a layer whose scales the checkpoint does not have.
    captured_layers: the indices of the layers whose inputs each pass returns."""

    config: ModelConfig
    layer_specs: tuple[LayerSpec, ...]
    kv_scales: tuple[KVScales | None, ...]
    captured_layers: tuple[int, ...]
    embed: Embedding
    head: Linear

    def __call__(self, p: Pass) -> ModelOutput:
        """Computes the hidden states of a pass.  Positions must be below `position_rows` of load_target."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V] in the model's dtype."""
        ...
