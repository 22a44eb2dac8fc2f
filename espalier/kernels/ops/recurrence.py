"""Linear recurrences over chains and trees: short convolutions, and the gated delta rule with its relatives.

A row updates the state S [k_size, v_size] of a head: `S = decay · S + k ⊗ new`.  With the delta rule `new` is
`beta · (v - decay · Sᵀ k)`, without it `beta · v`.  The output of the row is `Sᵀ q`.  Everything is computed in float32
(float64 for float64).  A row of a tree reads the state of its parent, so sums are restricted to ancestors.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of a chain whose system is solved together.
CHUNK = 64
# The constant in the code of the published models.
UNIT_EPS = 1e-6


class ShortConv(NamedTuple):
    """A causal convolution of each channel.

    weight: [channels, taps], the row's own tap last; bias: [channels] or None; silu: whether silu follows.
    """

    weight: Tensor
    bias: Tensor | None = None
    silu: bool = True


class StateRows(NamedTuple):
    """The contributions of rows to a state.  k: [B, R, k_heads, k_size]; v: [B, R, heads, v_size]; gates: [B, R, 2,
    heads], the logarithm of the decay, then beta.  heads / k_heads neighbouring heads share one head of k."""

    k: Tensor
    v: Tensor
    gates: Tensor

    def part(self, first: int, end: int) -> "StateRows":
        return StateRows(*(values[:, first:end] for values in self))


def convolved(inputs: Tensor, tail: Tensor, parents: Tensor | None, conv: ShortConv) -> Tensor:
    """[B, R, C]: the convolution of `inputs` [B, R, C], in their dtype.

    tail: [B, taps - 1, C], the inputs before the first row.  parents: [B, R], each row's parent, the root's is itself;
    None for a chain.
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
    """[B, taps - 1, C]: the last inputs after `count` [B] rows of `inputs` [B, R, C] follow `tail` [B, taps - 1, C]."""
    at = count[:, None] + torch.arange(tail.shape[1], device=count.device)
    return torch.cat((tail, inputs), 1).gather(1, at[..., None].expand(-1, -1, tail.shape[2]))


def unit(x: Tensor) -> Tensor:
    """x [..., size] divided by its length."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + UNIT_EPS)


class Solved(NamedTuple):
    """A solved system of rows.  new: [B, heads, R, v_size], what each row adds under its key; decay: [B, heads, R], the
    logarithm of the decay from the first state up to and including each row; k: [B, heads, R, k_size]."""

    new: Tensor
    decay: Tensor
    k: Tensor


def solve(rows: StateRows, state: Tensor, seen: Tensor, delta: bool) -> Solved:
    """Solve for the values that rows add, starting from `state` [B, heads, k_size, v_size].

    seen: [B, R, R] bool, each row's ancestors and itself; an ancestor has a lower index.  delta: use the delta rule.
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
        system = beta[..., None] * (k @ k.transpose(2, 3)) * _between(decay, seen)
        new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
    return Solved(new, decay, k)


def outputs(q: Tensor, solved: Solved, state: Tensor, seen: Tensor) -> Tensor:
    """[B, R, heads, v_size]: the output of each row, given q [B, R, k_heads, k_size] and the state before the rows."""
    q = _by_head(q.to(state.dtype), state.shape[1])
    scores = (q @ solved.k.transpose(2, 3)) * _between(solved.decay, seen)
    out = solved.decay.exp()[..., None] * (q @ state) + scores @ solved.new
    return out.transpose(1, 2)


def state_after(rows: StateRows, solved: Solved, state: Tensor, count: Tensor) -> Tensor:
    """The state [B, heads, k_size, v_size] after the first `count` [B] rows of a chain."""
    taken = torch.arange(rows.k.shape[1], device=count.device) < count[:, None]
    log_decay = rows.gates[:, :, 0].to(state.dtype).transpose(1, 2)
    # Values of rows past `count` are dropped and not multiplied by zero, because they may be NaN.
    whole = log_decay.where(taken[:, None], 0).sum(-1)
    share = (whole[..., None] - solved.decay).exp()[..., None]
    new = (share * solved.new).where(taken[:, None, :, None], 0)
    kept = solved.k.where(taken[:, None, :, None], 0)
    return whole.exp()[..., None, None] * state + kept.transpose(2, 3) @ new


class Scanned(NamedTuple):
    """out: [B, R, heads, v_size]; state: after the last row; marked: after the marked row, if there is one."""

    out: Tensor
    state: Tensor
    marked: Tensor


def scan(q: Tensor, rows: StateRows, state: Tensor, count: Tensor, marked: Tensor | None, delta: bool) -> Scanned:
    """Run a chain of rows from `state` [B, heads, k_size, v_size] on.  Only the first `count` [B] rows exist.

    marked: [B], the number of rows after which the state is also returned; None: no such state.
    """
    outs, at_mark = [], state
    for first in range(0, q.shape[1], CHUNK):
        end = min(first + CHUNK, q.shape[1])
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
    """[1, rows, rows] bool: each row sees itself and all rows before it."""
    order = torch.arange(rows, device=device)
    return (order <= order[:, None])[None]


def _between(decay: Tensor, seen: Tensor) -> Tensor:
    """[B, heads, R, R]: the decay from each seen row to the row that sees it; 0 for rows that are not seen."""
    return (decay[..., :, None] - decay[..., None, :]).masked_fill(~seen[:, None], -torch.inf).exp()


def _by_head(values: Tensor, heads: int) -> Tensor:
    """[B, R, k_heads, size] -> [B, heads, R, size]."""
    return values.transpose(1, 2).repeat_interleave(heads // values.shape[2], 1)
