"""Linear recurrences over chains and trees: short convolutions, the gated delta rule, and the update of Mamba-2.

A row (a token's q, k, v) updates the state S [k_size, v_size] of a head: `S = decay · S + k ⊗ new`.  With the delta
rule, `new` is `beta · (v - decay · Sᵀ k)`.  Without this rule, `new` is `beta · v`.  The row's output is `Sᵀ q`.  Sums
are in float32 (float64 for float64).  In a tree, a row starts from the state after its parent row.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The number of rows of a chain whose updates are solved as one system of linear equations.
CHUNK_ROWS = 64
# The eps of `l2_normalize`, from the code of the published models.
L2_NORM_EPS = 1e-6


class ShortConv(NamedTuple):
    """A causal convolution of each channel over the last `taps` rows, then silu if applies_silu.

    weight: [channels, taps]; the last tap is for the row itself.  bias: [channels] or None."""

    weight: Tensor
    bias: Tensor | None = None
    applies_silu: bool = True


class StateRows(NamedTuple):
    """The rows that update a state.

    k: [B, R, k_heads, k_size].  v: [B, R, heads, v_size].  gates: [B, R, 2, heads], the natural logarithm of the decay,
    then beta.  heads / k_heads consecutive heads share one head of k."""

    k: Tensor
    v: Tensor
    gates: Tensor


def convolve(inputs: Tensor, tail: Tensor, parents: Tensor | None, conv: ShortConv) -> Tensor:
    """Returns the convolution of `inputs` [B, R, C], with the same shape and dtype.

    tail: [B, taps - 1, C], the inputs before the first row.  parents: [B, R], each row's parent; None: a chain."""
    (batch, rows), tail_rows = inputs.shape[:2], tail.shape[1]
    wide_dtype = torch.promote_types(inputs.dtype, torch.float32)
    values, weight = torch.cat((tail, inputs), 1).to(wide_dtype), conv.weight.to(wide_dtype)
    indices = torch.arange(tail_rows + rows, device=inputs.device)
    previous = (indices - 1).clamp(min=0).expand(batch, -1)
    if parents is not None:
        previous = torch.cat((previous[:, : tail_rows + 1], parents[:, 1:] + tail_rows), 1)
    row_index, out = indices[tail_rows:].expand(batch, -1), torch.zeros_like(values[:, tail_rows:])
    for tap in reversed(range(tail_rows + 1)):
        out = torch.addcmul(out, values.gather(1, row_index[..., None].expand(-1, -1, values.shape[2])), weight[:, tap])
        row_index = previous.gather(1, row_index)
    if conv.bias is not None:
        out = out + conv.bias.to(wide_dtype)
    return (F.silu(out) if conv.applies_silu else out).to(inputs.dtype)


def conv_tail_after(tail: Tensor, inputs: Tensor, row_counts: Tensor) -> Tensor:
    """Returns the new tail [B, taps - 1, C] after the first `row_counts` [B] rows of `inputs` [B, R, C].
    tail: [B, taps - 1, C], the tail before these rows."""
    at = row_counts[:, None] + torch.arange(tail.shape[1], device=row_counts.device)
    return torch.cat((tail, inputs), 1).gather(1, at[..., None].expand(-1, -1, tail.shape[2]))


def l2_normalize(x: Tensor) -> Tensor:
    """Returns x [..., size] divided by its L2 norm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_NORM_EPS)


class StateUpdates(NamedTuple):
    """The outer products that rows add to a state: row i adds k[i] ⊗ values[i].

    values: [B, heads, R, v_size].  k: [B, heads, R, k_size].  log_decay: [B, heads, R], the sum of the log decays of
    each row and its ancestors."""

    values: Tensor
    log_decay: Tensor
    k: Tensor


def solve_updates(rows: StateRows, state: Tensor, ancestor_mask: Tensor, is_delta_rule: bool) -> StateUpdates:
    """Computes the updates of rows that follow `state` [B, heads, k_size, v_size].

    ancestor_mask: [B, R, R] bool, the ancestors of each row and the row itself; an ancestor has a lower index.
    is_delta_rule: whether rows update the state by the delta rule; see the top of this file."""
    wide_dtype = state.dtype
    heads = state.shape[1]
    k = _to_head_major(rows.k.to(wide_dtype), heads)
    log_decay, beta = rows.gates.to(wide_dtype).permute(2, 0, 3, 1)
    decay = (ancestor_mask[:, None].to(wide_dtype) @ log_decay[..., None])[..., 0]
    added = _to_head_major(rows.v.to(wide_dtype), heads)
    if is_delta_rule:
        added = added - decay.exp()[..., None] * (k @ state)
    added = beta[..., None] * added
    if is_delta_rule and k.shape[2] > 1:
        system = beta[..., None] * (k @ k.transpose(2, 3)) * _pairwise_decay(decay, ancestor_mask)
        added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
    return StateUpdates(added, decay, k)


def row_outputs(q: Tensor, updates: StateUpdates, state: Tensor, ancestor_mask: Tensor) -> Tensor:
    """Returns the outputs [B, R, heads, v_size]; a row's output reads the state after the row.
    q: [B, R, k_heads, k_size].  updates: the result of solve_updates for the same state and ancestor_mask."""
    q = _to_head_major(q.to(state.dtype), state.shape[1])
    scores = (q @ updates.k.transpose(2, 3)) * _pairwise_decay(updates.log_decay, ancestor_mask)
    out = updates.log_decay.exp()[..., None] * (q @ state) + scores @ updates.values
    return out.transpose(1, 2)


def state_after(rows: StateRows, updates: StateUpdates, state: Tensor, row_counts: Tensor) -> Tensor:
    """Returns the state [B, heads, k_size, v_size] after the first `row_counts` [B] rows of a chain.
    state: the state before the chain.  updates: the result of solve_updates for this state."""
    is_taken = torch.arange(rows.k.shape[1], device=row_counts.device) < row_counts[:, None]
    log_decay = rows.gates[:, :, 0].to(state.dtype).transpose(1, 2)
    # Rows past `row_counts` are dropped, not multiplied by zero, because their values may be NaN.
    total_decay = log_decay.where(is_taken[:, None], 0).sum(-1)
    decay_after = (total_decay[..., None] - updates.log_decay).exp()[..., None]
    added = (decay_after * updates.values).where(is_taken[:, None, :, None], 0)
    keys = updates.k.where(is_taken[:, None, :, None], 0)
    return total_decay.exp()[..., None, None] * state + keys.transpose(2, 3) @ added


class ScanResult(NamedTuple):
    """The result of `scan`.

    out: [B, R, heads, v_size], the outputs.  state: the state after row_counts rows.  snapshot: the state after
    snapshot_counts rows."""

    out: Tensor
    state: Tensor
    snapshot: Tensor


def scan(
    q: Tensor, rows: StateRows, state: Tensor, row_counts: Tensor, snapshot_counts: Tensor | None, is_delta_rule: bool
) -> ScanResult:
    """Computes the outputs and states of a chain of rows that follows `state` [B, heads, k_size, v_size].

    row_counts: [B], how many rows exist.  snapshot_counts: [B], after how many rows a snapshot (a copy of the state) is
    taken; 0 or None: no snapshot.  q: [B, R, k_heads, k_size]."""
    chunk_outputs, snapshot = [], state
    for first in range(0, q.shape[1], CHUNK_ROWS):
        end = min(first + CHUNK_ROWS, q.shape[1])
        chunk = StateRows(*(values[:, first:end] for values in rows))
        mask = causal_mask(end - first, q.device)
        updates = solve_updates(chunk, state, mask, is_delta_rule)
        chunk_outputs.append(row_outputs(q[:, first:end], updates, state, mask))
        if snapshot_counts is not None:
            ends_in_chunk = (snapshot_counts > first) & (snapshot_counts <= end)
            snapshot = state_after(chunk, updates, state, snapshot_counts - first).where(
                ends_in_chunk[:, None, None, None], snapshot
            )
        state = state_after(chunk, updates, state, row_counts - first)
    out = torch.cat(chunk_outputs, 1) if chunk_outputs else q.new_empty(*rows.v.shape, dtype=state.dtype)
    return ScanResult(out, state, snapshot)


def causal_mask(num_rows: int, device: torch.device) -> Tensor:
    """Returns [1, num_rows, num_rows] bool, the ancestor_mask of a chain: entry [0, i, j] is True if j <= i."""
    order = torch.arange(num_rows, device=device)
    return (order <= order[:, None])[None]


def _pairwise_decay(decay: Tensor, ancestor_mask: Tensor) -> Tensor:
    """Returns [B, heads, R, R]: at [.., i, j] the decay from row j to row i, or 0 if j is no ancestor of i."""
    return (decay[..., :, None] - decay[..., None, :]).masked_fill(~ancestor_mask[:, None], -torch.inf).exp()


def _to_head_major(values: Tensor, num_heads: int) -> Tensor:
    """Rearranges [B, R, k_heads, size] to [B, num_heads, R, size].  Heads that share a head of k get a copy each."""
    return values.transpose(1, 2).repeat_interleave(num_heads // values.shape[2], 1)
