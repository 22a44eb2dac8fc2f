"""Blocks that store a state of a fixed size for each request: Mamba 2, short convolutions and the gated delta rule."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.layers.quantised import InputRows
from espalier.kernels.ops.norm import norm_router, supports_norm_router
from espalier.kernels.ops.recurrence import ShortConv
from espalier.kernels.ops.states import ConvColumns, GateInputs, OutputGate
from espalier.models.layers.decoder import select_kept_rows
from espalier.models.layers.gated import gate_for_projection
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import (
    AnyNorm,
    BlockOutput,
    NormedOutputs,
    RMSNorm,
    is_rounded_in_launch,
    sum_if_unsummed,
)
from espalier.models.layers.residual import Residual
from espalier.models.weight_formats.sharded import UnsummedOutput

# The largest number of rows for which a convolution reads partial sums of its input.  For more rows, it is faster to
# add the partial sums first, because the convolution reads each partial sum once for each tap.
MAX_ROWS_WITH_PARTIAL_SUMS = 32


@dataclass(eq=False, slots=True)
class Mamba2:
    """The Mamba 2 block.
    input_projection: the stacked projections of the gate, x, B, C and dt.  conv: the convolution of the channels of C,
    B and x, in this order.
    A_log, dt_bias, D: [heads], float32 or float64.  D · x is added to the output.
    dt_limits: the minimum and maximum of dt.  norm: the norm of the gated output, applied to each group of heads that
    share B and C.
    columns: the first column of each tensor in the projections' output."""

    state_spec: RecurrentState
    input_projection: Linear
    conv: ShortConv
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor
    dt_limits: tuple[float, float]
    norm: RMSNorm
    out: Linear
    columns: ConvColumns = field(init=False)

    def __post_init__(self) -> None:
        state_spec = self.state_spec
        inner, shared = state_spec.heads * state_spec.v_size, state_spec.k_heads * state_spec.k_size
        # The stored order is the gate, x, B, C, dt.
        self.columns = state_spec.columns._replace(q_column=2 * inner + shared, k_column=2 * inner, v_column=inner)

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, InputRows]:
        """Returns (residual + delta, the norm of that sum in the form that `input_projection` takes)."""
        return self.input_projection.norm_input(norm, delta, residual)

    def __call__(self, layer: int, rows: InputRows, s: Residual, p: Pass) -> Tensor | UnsummedOutput:
        """Returns the block's output for the rows that the layer keeps.  rows: [N, H].  See decoder.py:Mixer."""
        inputs, state_spec = self.input_projection(rows), self.state_spec
        low, high = self.dt_limits
        bounds = low if low > 0 else None, high if high < inf else None
        group_heads, dt = state_spec.heads // state_spec.k_heads, inputs[:, -state_spec.heads :]
        gates = GateInputs(dt, None, self.A_log, self.dt_bias, group_heads, group_heads, bounds)
        q = p.write(layer, inputs, gates, self.conv, self.columns)
        s.keep_rows(p.kept_rows(layer))
        group_size = group_heads * state_spec.v_size
        outputs = p.attend(layer, q, self.D).flatten(2).view(-1, state_spec.k_heads, group_size)
        gate = OutputGate(select_kept_rows(inputs, layer, p), 1, group_size, True)
        return self.out.residual_delta(gate_for_projection(self.out, outputs, gate, self.norm))


@dataclass(eq=False, slots=True)
class GatedConv:
    """A short convolution whose input and output are multiplied by gates.
    input_projection: the stacked projections of the input gate, the output gate and the inputs, [3 · H, H]."""

    input_projection: Linear
    conv: ShortConv
    out: Linear

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, InputRows]:
        """Returns (residual + delta, the norm of that sum in the form that `input_projection` takes)."""
        return self.input_projection.norm_input(norm, delta, residual)

    def __call__(self, layer: int, rows: InputRows, s: Residual, p: Pass) -> Tensor | UnsummedOutput:
        """Returns the block's output for the rows that the layer keeps.  rows: [N, H].  See decoder.py:Mixer."""
        input_gate, output_gate, inputs = self.input_projection(rows).chunk(3, -1)
        convolved = p.write(layer, input_gate * inputs, None, self.conv).flatten(0, 1)
        s.keep_rows(p.kept_rows(layer))
        return self.out.residual_delta(select_kept_rows(output_gate, layer, p) * convolved)


class DeltaNetInput(NamedTuple):
    """normed_rows: the block's normed input, in the form that qkvz takes.  ba: the output of the projection ba."""

    normed_rows: InputRows
    ba: Tensor


@dataclass(eq=False, slots=True)
class DeltaNet:
    """The gated delta rule.
    qkvz: the stacked projections of q, k, v and the output gate z.  ba: the stacked projections of b and a.
    is_grouped: whether the rows of qkvz and of ba are grouped by k head: all rows of head 0 come first, then all rows
    of head 1, and so on.  If false, all rows of q come first, then all rows of k, and so on.
    A_log, dt_bias: [heads], float32 or float64.  The decay is exp(-exp(A_log) · softplus(a + dt_bias)); beta is
    sigmoid(b).  norm: the norm of each head's output, which is then multiplied by silu(z).
    v_heads_per_k_head: the number of v heads per k head.  columns, z_column: the first columns of q, k, v and of z in
    the output of qkvz.
    """

    state_spec: RecurrentState
    qkvz: Linear
    ba: Linear
    is_grouped: bool
    conv: ShortConv
    A_log: Tensor
    dt_bias: Tensor
    norm: RMSNorm
    out: Linear
    v_heads_per_k_head: int = field(init=False)
    columns: ConvColumns = field(init=False)
    z_column: int = field(init=False)

    def __post_init__(self) -> None:
        state_spec = self.state_spec
        self.v_heads_per_k_head = state_spec.heads // state_spec.k_heads
        self.columns = state_spec.columns
        self.z_column = state_spec.channels
        if self.is_grouped:
            group_size = self.v_heads_per_k_head * state_spec.v_size
            step = 2 * state_spec.k_size + 2 * group_size
            self.columns = state_spec.columns._replace(
                k_column=state_spec.k_size, v_column=2 * state_spec.k_size, k_head_stride=step, v_group_stride=step
            )
            self.z_column = 2 * state_spec.k_size + group_size

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, DeltaNetInput]:
        """Returns (residual + delta, the DeltaNetInput of that sum).  See residual.py:NormReader.  For a few rows,
        one kernel computes the norm and the product with ba.  The norm's kernel also quantises the input of qkvz."""
        rounding = self.qkvz.rounding if is_rounded_in_launch(residual, residual.shape[1], self.qkvz.rounding) else None
        ba_weight = self.ba.weight.dense_tensor() if supports_norm_router(residual) else None
        summed = None if ba_weight is None or isinstance(delta, NormedOutputs) else sum_if_unsummed(delta)
        if ba_weight is not None and summed is not None and norm.weight is not None:
            arguments = summed, residual, norm.weight, norm.eps, ba_weight, rounding, residual.dtype
            total, _, qkvz_rows, ba = norm_router.triton(*arguments)
            return total, DeltaNetInput(qkvz_rows, ba)
        total, normed, qkvz_rows = norm.add_norm_and_round(delta if summed is None else summed, residual, rounding)
        return total, DeltaNetInput(qkvz_rows, self.ba.partial_sums(normed))

    def __call__(self, layer: int, inputs: DeltaNetInput, s: Residual, p: Pass) -> Tensor | UnsummedOutput:
        """Returns the block's output for the rows that the layer keeps.  inputs: the result of norm_input."""
        project = self.qkvz.partial_sums if len(inputs.normed_rows) <= MAX_ROWS_WITH_PARTIAL_SUMS else self.qkvz
        qkvz = project(inputs.normed_rows)
        q = p.write(layer, qkvz, self._gate_inputs(inputs.ba), self.conv, self.columns)
        s.keep_rows(p.kept_rows(layer))
        head_outputs = p.attend(layer, q).flatten(0, 1)
        z = select_kept_rows(qkvz, layer, p)[..., self.z_column :]
        gate = OutputGate(z, self.v_heads_per_k_head, self.columns.v_group_stride, False)
        return self.out.residual_delta(gate_for_projection(self.out, head_outputs, gate, self.norm))

    def _gate_inputs(self, ba: Tensor) -> GateInputs:
        """Returns the inputs of decay and beta.  ba: [..., N, 2 · heads], from `self.ba`, or partial sums."""
        group_heads = self.v_heads_per_k_head
        first_a, step = (group_heads, 2 * group_heads) if self.is_grouped else (self.state_spec.heads, group_heads)
        return GateInputs(ba[..., first_a:], ba, self.A_log, self.dt_bias, group_heads, step)
