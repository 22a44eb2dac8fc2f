"""The gated delta rule as a block (Yang et al. 2025, arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.norm import rms_norm
from espalier.kernels.ops.recurrence import ShortConv
from espalier.models.layers.linear import Linear
from espalier.models.layers.mixer import of_kept
from espalier.models.layers.norm import AnyNorm, RMSNorm
from espalier.models.layers.stream import Stream


@dataclass(eq=False, slots=True)
class DeltaNet:
    """qkvz, ba: stacked projections of q, k, v and z, and of b and a: each whole, or in turn for each head of k.

    is_grouped: whether they are in turn.  A_log, dt_bias: [heads], float32 at least: the decay is
    exp(-exp(A_log) · softplus(a + dt_bias)), and beta is sigmoid(b).  norm: of each head's output, gated by silu(z).
    """

    keeps: RecurrentState
    qkvz: Linear
    ba: Linear
    is_grouped: bool
    conv: ShortConv
    A_log: Tensor
    dt_bias: Tensor
    norm: RMSNorm
    out: Linear

    def read(self, norm: AnyNorm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """As espalier/models/layers/stream.py:Reader.  Two projections read the norm, so it is not rounded for one."""
        return norm.after(delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor:
        """As espalier/models/layers/mixer.py:Mixer."""
        qkv, z, b, a = self._projected(rows)
        exact = self.A_log.dtype
        log_decay = -self.A_log.exp() * F.softplus(a.to(exact) + self.dt_bias)
        gates = torch.stack((log_decay, b.to(exact).sigmoid()), 1)
        q = p.write(layer, qkv, gates, self.conv)
        s.keep(p.kept(layer))
        read = p.attend(layer, q).flatten(0, 1)
        z = of_kept(z, layer, p).to(exact)
        gated = rms_norm(read, self.norm.weight, self.norm.eps).to(exact) * F.silu(z)
        return self.out.in_parts(gated.to(read.dtype).flatten(1))

    def _projected(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v [N, channels], z [N, heads, v_size], b and a [N, heads]."""
        keeps, qkvz, ba = self.keeps, self.qkvz(rows), self.ba(rows)
        heads, shape = keeps.heads, (keeps.heads, keeps.v_size)
        if not self.is_grouped:
            return qkvz[:, : keeps.channels], qkvz[:, keeps.channels :].unflatten(1, shape), *ba.split(heads, 1)
        share = heads // keeps.k_heads
        sizes = (keeps.k_size, keeps.k_size, share * keeps.v_size, share * keeps.v_size)
        *qkv, z = qkvz.unflatten(1, (keeps.k_heads, -1)).split(sizes, 2)
        b, a = ba.unflatten(1, (keeps.k_heads, 2, share)).unbind(2)
        return torch.cat([part.flatten(1) for part in qkv], 1), z.reshape(-1, *shape), b.flatten(1), a.flatten(1)
