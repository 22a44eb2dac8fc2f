"""The contract of a target model: a call over the rows of a pass.

A model never sees the KV cache.  Each of its layers writes what it keeps and attends through the pass
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
from espalier.models.layers.stream import Stream


class Layer(Protocol):
    """A layer of a decoder (espalier/models/layers/decoder.py:DecoderLayer).  A family may bring its own."""

    def __call__(self, s: Stream, p: Pass) -> None:
        """Take the stream of the pass's rows through the layer.

        The layer calls `p.write` and `p.attend` once each, and goes on with the rows `p.kept` between them; one that
        keeps a convolution alone has nothing to attend to.  It does not write to the residual that it gets, because it
        may have been captured.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """hidden: [B, Q, H], after the final norm, or [B, 1, H] in a pass with `needed`; inputs: [B, Q, H] each, of the n
    captured layers, in order.  The input of the final norm has the rows of `hidden`."""

    hidden: Tensor
    inputs: tuple[Tensor, ...]

    @property
    def captured(self) -> Tensor | None:
        """[B, Q, n·H]: `inputs`, concatenated."""
        return torch.cat(self.inputs, -1) if self.inputs else None


class CausalLM(Protocol):
    """A loaded target model.  A draft without its own embedding or head uses the target's.

    kv_scales: of each layer's K and V in FP8, where the checkpoint has them.
    """

    config: ModelConfig
    layer_specs: tuple[LayerSpec, ...]
    kv_scales: tuple[KVScales | None, ...]
    capture: tuple[int, ...]
    embed: Embedding
    head: Linear

    def __call__(self, p: Pass) -> ModelOutput:
        """Run over the rows of a pass.  Its positions are below the `position_rows` given at loading."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V] in the model's dtype."""
        ...
