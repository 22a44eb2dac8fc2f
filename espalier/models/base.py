"""The contract of a target model: a call over new rows, in which each layer calls `attend` once.

A model never sees the KV cache.  A layer calls `attend(layer, projections)` and gets the heads' values
[B, Q, heads, size].  The type of the projections follows from the data that the layer keeps (attention/staged.py);
`attend` may overwrite them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from espalier.attention.staged import Projections
from espalier.cache.layer_spec import LayerSpec
from espalier.kernels.state.kv_scales import KVScales
from espalier.models.config import ModelConfig
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear


class Attend(Protocol):
    def __call__(self, layer: int, projections: Projections, needed: Tensor | None = None) -> Tensor:
        """The heads' values [B, Q, heads, size].  needed: [B] int64, one of each request's Q rows; then [B, 1, ...]."""
        ...


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """hidden: [B, Q, H], after the final norm, or [B, 1, H] in a call with `needed`; inputs: [B, Q, H] each, of the n
    captured layers, in order."""

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

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, needed: Tensor | None = None) -> ModelOutput:
        """Run over new rows.  tokens, positions: int64 [B, Q].

        needed: [B] int64, of each request's Q rows the one whose `hidden` is read; None: all are.  Every layer gives
        `attend` the projections of all rows.

        A row with a negative token (a void node, padding) runs with the token of its request's first row, or with token
        0 if that is negative too; it goes to no expert.  Positions are below the `position_rows` given at loading.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V] in the model's dtype."""
        ...
