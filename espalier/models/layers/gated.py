"""Gates the outputs of heads, for the projection behind them."""

from torch import Tensor

from espalier.kernels.layers.quantised import InputRows
from espalier.kernels.ops.states import OutputGate, can_round_groups, gated_norm
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm, is_rounded_before


def gated_for(out: Linear, read: Tensor, gate: OutputGate, norm: RMSNorm | None) -> InputRows:
    """Returns the normed and gated rows of read [N, groups, size] in the form that `out` takes.

    If `out` takes rounded inputs and the launch of the norm can round them, that launch does it.
    norm: None for the gate alone, see kernels/ops/states.py:gated_norm.  Then a group may have several scales.
    """
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    rounding, (groups, size) = out.rounding, read.shape[1:]
    if rounding is None or not is_rounded_before(read, groups * size, rounding):
        return gated_norm(read, gate, weight, eps)
    columns = rounding.columns(groups * size)
    if norm is None and size % columns == 0:
        pieces = size // columns
        read = read.unflatten(2, (pieces, columns)).flatten(1, 2)
        gate = gate._replace(adjacent_groups=gate.adjacent_groups * pieces)
    is_rounded = can_round_groups(read.shape[2], read.shape[1], rounding)
    return gated_norm(read, gate, weight, eps, rounding if is_rounded else None)
