"""What the engine knows of a model: a call over rows that hang off whatever `attend` lets them see.

A model never sees a cache.  `attend(layer, q, k, v)` gets q [B, Q, heads, k_size], k [B, Q, kv_heads, k_size] and v
[B, Q, kv_heads, v_size], already rotated, stages k and v, and returns [B, Q, heads, v_size].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from espalier.cache.geometry import LayerGeometry
from espalier.models.config import ModelConfig
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """hidden [B, Q, H], after the final norm; captured [B, Q, n·H], inputs of the captured layers in order."""

    hidden: Tensor
    captured: Tensor | None


class CausalLM(Protocol):
    """A target model, loaded.  A draft that brings no embedding or head of its own uses these."""

    config: ModelConfig
    geometry: tuple[LayerGeometry, ...]
    capture: tuple[int, ...]
    embed: Embedding
    head: Linear

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> ModelOutput:
        """tokens, positions int64 [B, Q]; ids in 0 .. vocab-1, positions below the `position_rows` of loading."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] in the model's dtype."""
        ...
