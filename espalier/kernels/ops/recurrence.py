"""Linear recurrences over chains and trees: short convolutions, and the gated delta rule with its relatives.

A row updates the state S [k_size, v_size] of a head: `S = decay · S + k ⊗ new`.  With the delta rule, `new` is
`beta · (v - decay · Sᵀ k)`; without it, `beta · v`.  The output of the row is `Sᵀ q`.  All is computed in float32
(float64 for float64).  A row of a tree starts from the state after its parent, so its sums run over its ancestors.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The number of rows of a chain that are solved together.
CHUNK_ROWS = 64
# The eps of `unit`, from the code of the published models.
UNIT_EPS = 1e-6


class ShortConv(NamedTuple):
    """A causal convolution of each channel.

    weight: [channels, taps], the tap of the row itself last.  bias: [channels] or None.  silu: whether silu follows.
    """

    weight: Tensor
    bias: Tensor | None = None
    silu: bool = True


class StateRows(NamedTuple):
    """The rows that update a state.

    k: [B, R, k_heads, k_size].  v: [B, R, heads, v_size].  gates: [B, R, 2, heads], the logarithm of the decay, and
    beta.  heads / k_heads consecutive heads share one head of k.
    """

    k: Tensor
    v: Tensor
    gates: Tensor

    def part(self, first: int, end: int) -> "StateRows":
        return StateRows(*(values[:, first:end] for values in self))


def convolved(inputs: Tensor, tail: Tensor, parents: Tensor | None, conv: ShortConv) -> Tensor:
    """Returns the convolution of `inputs` [B, R, C], in their shape and dtype.

    tail: [B, taps - 1, C], the inputs before the first row.  parents: [B, R], each row's parent row; the root is its
    own parent.  None for a chain.
    """
    (batch, rows), before = inputs.shape[:2], tail.shape[1]
    exact = torch.promote_types(inputs.dtype, torch.float32)
    values, weight = torch.cat((tail, inputs), 1).to(exact), conv.weight.to(exact)
    places = torch.arange(before + rows, device=inputs.device)
    previous = (places - 1).clamp(min=0).expand(batch, -1)
    if parents is not None:
        previous = torch.cat((previous[:, : before + 1], parents[:, 1:] + before), 1)
    at, out = places[before:].expand(batch, -1), torch.zeros_like(values[:, before:])
    for tap in reversed(range(before + 1)):
        out = torch.addcmul(out, values.gather(1, at[..., None].expand(-1, -1, values.shape[2])), weight[:, tap])
        at = previous.gather(1, at)
    if conv.bias is not None:
        out = out + conv.bias.to(exact)
    return (F.silu(out) if conv.silu else out).to(inputs.dtype)


def tail_after(tail: Tensor, inputs: Tensor, count: Tensor) -> Tensor:
    """Returns the new tail [B, taps - 1, C] after the first `count` [B] rows of `inputs` [B, R, C].
    tail: [B, taps - 1, C], the tail before these rows."""
    at = count[:, None] + torch.arange(tail.shape[1], device=count.device)
    return torch.cat((tail, inputs), 1).gather(1, at[..., None].expand(-1, -1, tail.shape[2]))


def unit(x: Tensor) -> Tensor:
    """Returns x [..., size] divided by its L2 norm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + UNIT_EPS)


class Solved(NamedTuple):
    """The updates of rows to a state: row i adds k ⊗ new.

    new: [B, heads, R, v_size].  k: [B, heads, R, k_size].  decay: [B, heads, R], the logarithm of the decay from the
    state before all rows to each row, that row's own decay included.
    """

    new: Tensor
    decay: Tensor
    k: Tensor


def solve(rows: StateRows, state: Tensor, seen: Tensor, delta: bool) -> Solved:
    """Computes the updates of rows that follow `state` [B, heads, k_size, v_size].

    seen: [B, R, R] bool, the ancestors of each row and the row itself; an ancestor has a lower index.
    delta: whether the update is the delta rule's.
    """
    exact = state.dtype
    heads = state.shape[1]
    k = _by_head(rows.k.to(exact), heads)
    log_decay, beta = rows.gates.to(exact).permute(2, 0, 3, 1)
    decay = (seen[:, None].to(exact) @ log_decay[..., None])[..., 0]
    new = _by_head(rows.v.to(exact), heads)
    if delta:
        new = new - decay.exp()[..., None] * (k @ state)
    new = beta[..., None] * new
    if delta and k.shape[2] > 1:
        system = beta[..., None] * (k @ k.transpose(2, 3)) * _pairwise_decay(decay, seen)
        new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
    return Solved(new, decay, k)


def outputs(q: Tensor, solved: Solved, state: Tensor, seen: Tensor) -> Tensor:
    """Returns each row's output [B, R, heads, v_size], from the state after that row.  q: [B, R, k_heads, k_size]."""
    q = _by_head(q.to(state.dtype), state.shape[1])
    scores = (q @ solved.k.transpose(2, 3)) * _pairwise_decay(solved.decay, seen)
    out = solved.decay.exp()[..., None] * (q @ state) + scores @ solved.new
    return out.transpose(1, 2)


def state_after(rows: StateRows, solved: Solved, state: Tensor, count: Tensor) -> Tensor:
    """Returns the state [B, heads, k_size, v_size] after the first `count` [B] rows of a chain."""
    taken = torch.arange(rows.k.shape[1], device=count.device) < count[:, None]
    log_decay = rows.gates[:, :, 0].to(state.dtype).transpose(1, 2)
    # Rows past `count` are dropped, not multiplied by zero, because their values may be NaN.
    whole = log_decay.where(taken[:, None], 0).sum(-1)
    share = (whole[..., None] - solved.decay).exp()[..., None]
    new = (share * solved.new).where(taken[:, None, :, None], 0)
    kept = solved.k.where(taken[:, None, :, None], 0)
    return whole.exp()[..., None, None] * state + kept.transpose(2, 3) @ new


class Scanned(NamedTuple):
    """The result of `scan`.

    out: [B, R, heads, v_size].  state: the state after the last row.  marked: the snapshot, the state after the first
    `marked` rows, if a snapshot is requested.
    """

    out: Tensor
    state: Tensor
    marked: Tensor


def scan(q: Tensor, rows: StateRows, state: Tensor, count: Tensor, marked: Tensor | None, delta: bool) -> Scanned:
    """Computes the outputs and states of a chain of rows that follows `state` [B, heads, k_size, v_size].

    count: [B], how many rows exist.  marked: [B], a snapshot: the state after this many rows is also returned; None: no
    snapshots.
    """
    outs, at_mark = [], state
    for first in range(0, q.shape[1], CHUNK_ROWS):
        end = min(first + CHUNK_ROWS, q.shape[1])
        part, seen = rows.part(first, end), causal(end - first, q.device)
        solved = solve(part, state, seen, delta)
        outs.append(outputs(q[:, first:end], solved, state, seen))
        if marked is not None:
            is_here = (marked > first) & (marked <= end)
            at_mark = state_after(part, solved, state, marked - first).where(is_here[:, None, None, None], at_mark)
        state = state_after(part, solved, state, count - first)
    out = torch.cat(outs, 1) if outs else q.new_empty(*rows.v.shape, dtype=state.dtype)
    return Scanned(out, state, at_mark)


def causal(rows: int, device: torch.device) -> Tensor:
    """Returns [1, rows, rows] bool: the rows that each row of a chain sees, which are all up to itself."""
    order = torch.arange(rows, device=device)
    return (order <= order[:, None])[None]


def _pairwise_decay(decay: Tensor, seen: Tensor) -> Tensor:
    """[B, heads, R, R]: for each row and each row that it sees, the decay from the seen row to it; 0 for other rows."""
    return (decay[..., :, None] - decay[..., None, :]).masked_fill(~seen[:, None], -torch.inf).exp()


def _by_head(values: Tensor, heads: int) -> Tensor:
    """[B, R, k_heads, size] -> [B, heads, R, size]."""
    return values.transpose(1, 2).repeat_interleave(heads // values.shape[2], 1)
