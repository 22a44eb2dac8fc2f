"""Blocks that keep a state of a fixed size: Mamba 2, a short convolution, and the gated delta rule."""

from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.norm import norm_router, takes_router
from espalier.kernels.ops.recurrence import ShortConv
from espalier.kernels.ops.states import Columns, GateInputs, OutputGate, gated_norm, rounds_groups
from espalier.models.layers.decoder import of_kept
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import AnyNorm, Delta, Normed, RMSNorm, is_rounded_before, summed
from espalier.models.layers.stream import Stream
from espalier.models.weight_formats.sharded import Unsummed


@dataclass(eq=False, slots=True)
class Mamba2:
    """inputs: stacked projections of the gate, x, B and C, and dt.  conv: of the channels of C, B and x, in this order.

    A_log, dt_bias, skip: [heads], float32 at least; skip: the factor of x that is added to the output.
    limits: of dt.  norm: of the gated output, for each group of heads that share B and C.
    """

    keeps: RecurrentState
    inputs: Linear
    conv: ShortConv
    A_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    limits: tuple[float, float]
    norm: RMSNorm
    out: Linear
    columns: Columns = field(init=False)

    def __post_init__(self) -> None:
        keeps = self.keeps
        inner, shared = keeps.heads * keeps.v_size, keeps.k_heads * keeps.k_size
        # The stored order is the gate, x, B, C, dt.
        self.columns = keeps.columns._replace(q=2 * inner + shared, k=2 * inner, v=inner)

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.inputs.read(norm, delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor | Unsummed:
        """As espalier/models/layers/decoder.py:Mixer."""
        inputs, keeps = self.inputs(rows), self.keeps
        low, high = self.limits
        bounds = low if low > 0 else None, high if high < inf else None
        share = keeps.heads // keeps.k_heads
        dt = GateInputs(inputs[:, -keeps.heads :], None, self.A_log, self.dt_bias, share, share, bounds)
        q = p.write(layer, inputs, dt, self.conv, self.columns)
        s.keep(p.kept(layer))
        read = p.attend(layer, q, self.skip).flatten(2).view(-1, keeps.k_heads, share * keeps.v_size)
        gate = OutputGate(of_kept(inputs, layer, p), 1, share * keeps.v_size, True)
        return self.out.for_stream(_gated_norm(read, gate, self.norm, self.out))


@dataclass(eq=False, slots=True)
class GatedConv:
    """gates: stacked projections of the gate before, the gate behind and the inputs, [3 · hidden, hidden]."""

    gates: Linear
    conv: ShortConv
    out: Linear

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.gates.read(norm, delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor | Unsummed:
        """As espalier/models/layers/decoder.py:Mixer."""
        before, behind, inputs = self.gates(rows).chunk(3, -1)
        convolved = p.write(layer, before * inputs, None, self.conv).flatten(0, 1)
        s.keep(p.kept(layer))
        return self.out.for_stream(of_kept(behind, layer, p) * convolved)


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

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, tuple[Rows, Tensor]]:
        """As espalier/models/layers/stream.py:Reader: the norm as qkvz takes it, and the product of ba.

        For a few rows the norm and ba are one launch.  The launch that norms also rounds for qkvz.
        """
        rounding = self.qkvz.rounding if is_rounded_before(x, x.shape[1], self.qkvz.rounding) else None
        of_ba = self.ba.weight.dense_tensor() if takes_router(x) else None
        own = None if of_ba is None or isinstance(delta, Normed) else summed(delta)
        if of_ba is not None and own is not None and norm.weight is not None:
            total, _, of_qkvz, ba = norm_router.triton(own, x, norm.weight, norm.eps, of_ba, rounding, x.dtype)
            return total, (of_qkvz, ba)
        total, normed, of_qkvz = norm.both_after(delta if own is None else own, x, rounding)
        return total, (of_qkvz, self.ba(normed))

    def __call__(self, layer: int, rows: tuple[Rows, Tensor], s: Stream, p: Pass) -> Tensor | Unsummed:
        """As espalier/models/layers/decoder.py:Mixer."""
        qkvz, ba = self.qkvz(rows[0]), rows[1]
        q = p.write(layer, qkvz, self._gates(ba), self.conv, self.columns)
        s.keep(p.kept(layer))
        read = p.attend(layer, q).flatten(0, 1)
        gate = OutputGate(of_kept(qkvz, layer, p)[:, self.z_at :], self.share, self.columns.v_step, False)
        return self.out.for_stream(_gated_norm(read, gate, self.norm, self.out))

    def _gates(self, ba: Tensor) -> GateInputs:
        """ba: [N, 2 · heads]."""
        apart, step = (self.share, 2 * self.share) if self.is_grouped else (self.keeps.heads, self.share)
        return GateInputs(ba[:, apart:], ba, self.A_log, self.dt_bias, self.share, step)


def _gated_norm(read: Tensor, gate: OutputGate, norm: RMSNorm, out: Linear) -> Rows:
    """The normed and gated rows as `out` takes them: where one launch can round them for it, it does."""
    rounding, (groups, size) = out.rounding, read.shape[1:]
    is_rounded = rounding is not None and is_rounded_before(read, groups * size, rounding)
    if rounding is None or not is_rounded or not rounds_groups(size, groups, rounding):
        return gated_norm(read, gate, norm.weight, norm.eps)
    return gated_norm(read, gate, norm.weight, norm.eps, rounding)
