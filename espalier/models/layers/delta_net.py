"""The gated delta rule as a block (Yang et al. 2025, arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it."""

from dataclasses import dataclass, field

from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.recurrence import ShortConv
from espalier.kernels.ops.states import Columns, GateInputs, OutputGate, gated_norm
from espalier.models.layers.linear import Linear
from espalier.models.layers.mixer import of_kept
from espalier.models.layers.norm import AnyNorm, Delta, RMSNorm
from espalier.models.layers.stream import Stream
from espalier.models.weight_formats.sharded import Unsummed


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
    share: int = field(init=False)
    columns: Columns = field(init=False)
    z_at: int = field(init=False)

    def __post_init__(self) -> None:
        keeps = self.keeps
        self.share = keeps.heads // keeps.k_heads
        self.columns = keeps.columns
        self.z_at = keeps.channels
        if self.is_grouped:
            of_group = self.share * keeps.v_size
            step = 2 * keeps.k_size + 2 * of_group
            self.columns = keeps.columns._replace(k=keeps.k_size, v=2 * keeps.k_size, k_step=step, v_step=step)
            self.z_at = 2 * keeps.k_size + of_group

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Tensor]:
        """As espalier/models/layers/stream.py:Reader.  Two projections read the norm, so it is not rounded for one."""
        return norm.after(delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor | Unsummed:
        """As espalier/models/layers/mixer.py:Mixer."""
        qkvz, ba = self.qkvz(rows), self.ba(rows)
        q = p.write(layer, qkvz, self._gates(ba), self.conv, self.columns)
        s.keep(p.kept(layer))
        read = p.attend(layer, q).flatten(0, 1)
        gate = OutputGate(of_kept(qkvz, layer, p)[:, self.z_at :], self.share, self.columns.v_step, False)
        return self.out.for_stream(gated_norm(read, gate, self.norm.weight, self.norm.eps))

    def _gates(self, ba: Tensor) -> GateInputs:
        """ba: [N, 2 · heads]."""
        apart, step = (self.share, 2 * self.share) if self.is_grouped else (self.keeps.heads, self.share)
        return GateInputs(ba[:, apart:], ba, self.A_log, self.dt_bias, self.share, step)
