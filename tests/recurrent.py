"""A toy hybrid: a model's own layers, some of whose attention is replaced by a block that keeps a state.

Two heads of 4 · 6 values share one key; "delta" corrects what a key reads, "added" does not, "conv" has no heads.
"""

from dataclasses import replace

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import LayerSpec, RecurrentState
from espalier.kernels.ops.recurrence import ShortConv
from espalier.models import CausalLM
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.residual import Residual
from espalier.models.weight_formats import dense_weight

SIZES = {"heads": 2, "k_heads": 1, "k_size": 4, "v_size": 6}
KEEPS = {
    "delta": RecurrentState(taps=4, **SIZES),
    "added": RecurrentState(taps=3, delta=False, units=False, **SIZES),
    "conv": RecurrentState(taps=3, conv_channels=10),
}


class StateBlock:
    """Random weights."""

    sink = None

    def __init__(self, keeps: RecurrentState, hidden: int, seed: int):
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return 1.2 * torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

        self.keeps = keeps
        self.inputs = Linear(dense_weight(drawn(keeps.channels, hidden)))
        self.gates = Linear(dense_weight(drawn(2 * keeps.heads, hidden)))
        self.conv = ShortConv(drawn(keeps.channels, keeps.taps), drawn(keeps.channels), applies_silu=bool(keeps.heads))
        self.out = Linear(dense_weight(drawn(hidden, keeps.heads * keeps.v_size or keeps.channels)))

    def norm_input(self, norm: RMSNorm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        return norm.add_and_norm(delta, x)

    def write(self, layer: int, rows: Tensor, p: Pass) -> Tensor:
        if not self.keeps.heads:
            return p.write(layer, self.inputs(rows), None, self.conv)
        decay, beta = self.gates(rows).sigmoid().chunk(2, 1)
        # A decay of 0.6 to 1, so that tokens long past still show.
        return p.write(layer, self.inputs(rows), torch.stack(((0.6 + 0.4 * decay).log(), beta), 1), self.conv)

    def __call__(self, layer: int, rows: Tensor, s: Residual, p: Pass) -> Tensor:
        """A block without heads has nothing to attend to."""
        q = self.write(layer, rows, p)
        s.keep_rows(p.kept_rows(layer))
        attended = p.attend(layer, q) if self.keeps.heads else q[..., None]
        return self.out.partial_sums(attended.flatten(2).flatten(0, 1))


def make_recurrent(target: CausalLM, kinds: tuple[str | None, ...], seed: int) -> None:
    """Replace attention in place.  kinds: a key of KEEPS for each layer, None for a layer that stays."""
    hidden, specs = target.config.hidden_size, list(target.layer_specs)
    for i, kind in enumerate(kinds):
        if kind is not None:
            target.layers[i].attention = StateBlock(KEEPS[kind], hidden, seed + i)  # type: ignore[attr-defined]
            specs[i] = state(specs[i], kind)
    target.layer_specs = tuple(specs)


def state(spec: LayerSpec, kind: str) -> LayerSpec:
    return replace(spec, heads=KEEPS[kind].heads, cache_spec=KEEPS[kind], window=None)
