"""A toy family of latent layers: a model's own layers with their attention replaced.

A token keeps one row of 24 values, of which 16 are V and the other 8 are rotated.  A head's key has 12 values that are
not rotated, and its value has 10.
"""

from dataclasses import replace

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import LatentKV, LayerSpec
from espalier.kernels.ops.rope import LatentFormat
from espalier.kernels.state.kv_scales import KVScales
from espalier.models import CausalLM, DraftModel
from espalier.models.layers.attention import AttentionBlock
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.weight_formats import dense_weight

KEEPS = LatentKV(size=24, v_size=16)
NOPE, VALUE = 12, 10
EPS = 1e-6


class LatentAttention(AttentionBlock):
    """Random weights: every head reads the same latent row."""

    def __init__(self, columns: int, hidden: int, heads: int, seed: int, rope: RopeTables):
        self.rope = rope
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return 1.2 * torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

        def linear(rows: int, size: int) -> Linear:
            return Linear(dense_weight(drawn(rows, size)))

        self.heads = heads
        self.q = linear(heads * (NOPE + KEEPS.size - KEEPS.v_size), columns)
        self.latent = linear(KEEPS.size, columns)
        self.k_up, self.v_up = drawn(heads, NOPE, KEEPS.v_size), drawn(heads, VALUE, KEEPS.v_size)
        self.out = linear(hidden, heads * VALUE)
        self.norm = 1 + 0.2 * torch.randn(KEEPS.v_size, generator=generator, dtype=torch.float64)

    def norm_input(self, norm: RMSNorm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        return norm.add_and_norm(delta, x)

    def write_kv(self, layer: int, rows: Tensor, p: Pass) -> Tensor:
        q, latent = self.q(rows).unflatten(1, (self.heads, -1)), self.latent(rows)[:, None]
        return p.write(layer, q, latent, p.rotation(self.rope), LatentFormat(self.norm, EPS), self.k_up)

    def project(self, attended: Tensor) -> Tensor:
        values = torch.einsum("bqhr,hvr->bqhv", attended, self.v_up)
        return self.out.partial_sums(values.flatten(2).flatten(0, 1))


def latent(spec: LayerSpec) -> LayerSpec:
    return replace(spec, cache_spec=KEEPS)


def make_latent(target: CausalLM, draft: DraftModel | None, keeps: str, seed: int) -> None:
    """Replace attention in place.  keeps: "latent", in every layer of both models; "mixed", in the target's second."""
    hidden = target.config.hidden_size
    chosen = [1] if keeps == "mixed" else range(len(target.layer_specs))
    for layer in chosen:
        replaced = target.layers[layer]  # type: ignore[attr-defined]
        heads = target.layer_specs[layer].heads
        replaced.attention = LatentAttention(hidden, hidden, heads, seed + layer, replaced.attention.rope)
    target.kv_scales = tuple(
        KVScales(scales.k[:1], scales.k[:1], scales.dtype) if scales is not None and i in chosen else scales
        for i, scales in enumerate(target.kv_scales)
    )
    target.layer_specs = tuple(latent(spec) if i in chosen else spec for i, spec in enumerate(target.layer_specs))
    if draft is not None and keeps == "latent":
        [first] = draft.layers  # type: ignore[attr-defined]
        heads = draft.layer_specs[0].heads
        first.attention = LatentAttention(2 * hidden, hidden, heads, seed + 100, first.attention.rope)
        draft.layer_specs = (latent(draft.layer_specs[0]),)
