"""A toy family of latent layers: a model's own layers with their attention replaced.

A token keeps one row of 24 values, of which 16 are V and the other 8 are rotated.
"""

from dataclasses import replace

import torch
from torch import Tensor

from espalier.attention.staged import LatentProjections
from espalier.cache.layer_spec import LatentKV, LayerSpec
from espalier.kernels.layers.latent import LatentRopeAndNorm
from espalier.kernels.layers.rope import RopeAndNorm
from espalier.models import CausalLM, DraftModel
from espalier.models.base import Attend
from espalier.models.layers.linear import Linear
from espalier.models.weight_formats import dense_weight

KEEPS = LatentKV(size=24, v_size=16)
EPS = 1e-6


class LatentAttention:
    """Random weights: every head reads the same latent row."""

    def __init__(self, columns: int, hidden: int, heads: int, seed: int):
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, size: int) -> Linear:
            weight = 1.2 * torch.randn(rows, size, generator=generator, dtype=torch.float64) / size**0.5
            return Linear(dense_weight(weight))

        self.heads = heads
        self.q = drawn(heads * KEEPS.size, columns)
        self.latent = drawn(KEEPS.size, columns)
        self.out = drawn(hidden, heads * KEEPS.v_size)
        self.norm = 1 + 0.2 * torch.randn(KEEPS.v_size, generator=generator, dtype=torch.float64)

    def __call__(self, x: Tensor, turn: RopeAndNorm, attend: Attend, layer: int, shape: tuple[int, int]) -> Tensor:
        q, latent = (part(x).view(*shape, -1, KEEPS.size) for part in (self.q, self.latent))
        own = LatentRopeAndNorm(turn.cos, turn.sin, self.norm, EPS)
        return self.out.in_parts(attend(layer, LatentProjections(q, latent, own)).flatten(2).flatten(0, 1))


def latent(spec: LayerSpec) -> LayerSpec:
    return replace(spec, keeps=KEEPS)


def make_latent(target: CausalLM, draft: DraftModel | None, keeps: str, seed: int) -> None:
    """Replace attention in place.  keeps: "latent", in every layer of both models; "mixed", in the target's second."""
    hidden = target.config.hidden_size
    chosen = [1] if keeps == "mixed" else range(len(target.layer_specs))
    for layer in chosen:
        block = LatentAttention(hidden, hidden, target.layer_specs[layer].heads, seed + layer)
        target.layers[layer].attention = block  # type: ignore[attr-defined]
    target.layer_specs = tuple(latent(spec) if i in chosen else spec for i, spec in enumerate(target.layer_specs))
    if draft is not None and keeps == "latent":
        draft.attention = LatentAttention(2 * hidden, hidden, draft.layer_specs[0].heads, seed + 100)  # type: ignore[attr-defined]
        draft.layer_specs = (latent(draft.layer_specs[0]),)
