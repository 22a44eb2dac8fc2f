"""What the engine knows of a model: a call over rows that hang off whatever `attend` lets them see.

A model never sees a cache.  Each layer calls `attend(layer, projections)` once, with its projections in the form of
what it keeps (attention/staged.py), and gets [B, Q, heads, v_size]; the projections may be overwritten.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from espalier.attention.staged import Projections
from espalier.cache.layer_spec import LayerSpec
from espalier.models.config import ModelConfig
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear

Attend = Callable[[int, Projections], Tensor]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """hidden [B, Q, H], after the final norm; captured [B, Q, n·H], inputs of the captured layers in order."""

    hidden: Tensor
    captured: Tensor | None


class CausalLM(Protocol):
    """A target model, loaded.  A draft that brings no embedding or head of its own uses these."""

    config: ModelConfig
    geometry: tuple[LayerSpec, ...]
    capture: tuple[int, ...]
    embed: Embedding
    head: Linear

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> ModelOutput:
        """tokens, positions int64 [B, Q]; ids below vocab, one below 0 (a void node) running as its request's
        first; positions below the `position_rows` of loading."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] in the model's dtype."""
        ...
