"""Gates the outputs of heads before the output projection."""

from torch import Tensor

from espalier.kernels.layers.quantised import InputRows
from espalier.kernels.ops.states import OutputGate, can_round_groups, gated_norm
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm, is_rounded_in_launch


def gate_for_projection(out: Linear, head_outputs: Tensor, gate: OutputGate, norm: RMSNorm | None) -> InputRows:
    """Returns the normed and gated rows of head_outputs [N, groups, size], in the form that `out` takes.
    If `out` takes quantised inputs, the kernel of the norm quantises the rows, if it supports this quantisation.
    out: the output projection.  norm: the norm of each group; None for no norm.  Without a norm, each group is split
    into pieces if `out` needs several scales for the columns of a group."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    rounding, (groups, size) = out.rounding, head_outputs.shape[1:]
    if rounding is None or not is_rounded_in_launch(head_outputs, groups * size, rounding):
        return gated_norm(head_outputs, gate, weight, eps)
    columns = rounding.columns(groups * size)
    if norm is None and size % columns == 0:
        pieces = size // columns
        head_outputs, gate = (
            head_outputs.unflatten(2, (pieces, columns)).flatten(1, 2),
            gate._replace(adjacent_groups=gate.adjacent_groups * pieces),
        )
    is_rounded = can_round_groups(head_outputs.shape[2], head_outputs.shape[1], rounding)
    return gated_norm(head_outputs, gate, weight, eps, rounding if is_rounded else None)
