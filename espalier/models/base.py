"""What the engine knows of a model: a call over rows that hang off whatever `attend` lets them see.

A model never sees a cache.  `attend(layer, qkv, turn)` gets a layer's projections [B, Q, heads + 2 · kv_heads, size],
queries before keys before values, norms and rotates them as `turn` says, keeps keys and values where they belong, and
returns [B, Q, heads, size].  The projections are its own from then on.  On a GPU they may come as [parts, B, Q, ...]
float32, still to be summed (kernels/rope.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from espalier.cache.geometry import LayerGeometry
from espalier.kernels.rope import Turn
from espalier.models.config import ModelConfig
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear

Attend = Callable[[int, Tensor, Turn], Tensor]


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
        """tokens, positions int64 [B, Q]; ids below vocab, one below 0 (a void node) running as its request's
        first; positions below the `position_rows` of loading."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] in the model's dtype."""
        ...
