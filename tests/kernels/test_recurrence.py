"""Linear recurrences over chains and trees, against one row at a time along each row's own path."""

import pytest
import torch
from torch import Tensor

from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.attention.ancestor_bits import ancestor_mask
from espalier.kernels.ops.recurrence import (
    ShortConv,
    StateRows,
    conv_tail_after,
    convolve,
    row_outputs,
    scan,
    solve_updates,
)

EXACT = 1e-11
KEEPS = [
    RecurrentState(taps=4, heads=4, k_heads=2, k_size=6, v_size=5),
    RecurrentState(taps=2, heads=3, k_heads=1, k_size=4, v_size=7, delta=False, units=False),
]
kinds = pytest.mark.parametrize("keeps", KEEPS, ids=["delta", "added"])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def made(keeps: RecurrentState, batch: int, rows: int) -> tuple[Tensor, StateRows, Tensor]:
    """q, rows and a state; lengths of keys up to 1, as the delta rule needs it, and decays of all sizes."""
    k = torch.nn.functional.normalize(drawn(batch, rows, keeps.k_heads, keeps.k_size), dim=-1)
    gates = torch.stack(
        (-drawn(batch, rows, keeps.heads).exp(), drawn(batch, rows, keeps.heads + 1)[..., 1:].sigmoid()), 2
    )
    brought = StateRows(k, drawn(batch, rows, keeps.heads, keeps.v_size), gates)
    return (
        drawn(batch, rows, keeps.k_heads, keeps.k_size + 1)[..., 1:],
        brought,
        drawn(batch, keeps.heads, keeps.k_size, keeps.v_size),
    )


def step(keeps: RecurrentState, rows: StateRows, b: int, row: int, state: Tensor) -> Tensor:
    """The state [heads, k_size, v_size] of one request behind one more row, head by head."""
    share, behind = keeps.heads // keeps.k_heads, []
    for head in range(keeps.heads):
        k, v = rows.k[b, row, head // share], rows.v[b, row, head]
        log_decay, beta = rows.gates[b, row, :, head]
        decayed = state[head] * log_decay.exp()
        behind.append(decayed + torch.outer(k, beta * (v - decayed.T @ k if keeps.delta else v)))
    return torch.stack(behind)


def read(keeps: RecurrentState, q: Tensor, state: Tensor) -> Tensor:
    share = keeps.heads // keeps.k_heads
    return torch.stack([state[head].T @ q[head // share] for head in range(keeps.heads)])


@kinds
@pytest.mark.parametrize("rows", [1, 2, 64, 129])
def test_a_node_reads_the_state_of_its_parent(keeps, rows):
    parents = torch.tensor([[max(0, i - 1 - (7 * i + b) % 3) for i in range(rows)] for b in range(2)])
    void = torch.zeros_like(parents, dtype=torch.bool)
    leaves = sorted({*range(1, rows)} - {*parents[1].tolist()})
    void[1, leaves[::2]] = True
    seen = ancestor_mask(parents, void, rows)
    q, brought, state = made(keeps, 2, rows)
    out = row_outputs(q, solve_updates(brought, state, seen, keeps.delta), state, seen)
    for b in range(2):
        behind: list[Tensor] = []
        for i in range(rows):
            behind.append(step(keeps, brought, b, i, behind[parents[b, i]] if i else state[b]))
            if not void[b, i]:
                assert (out[b, i] - read(keeps, q[b, i], behind[i])).abs().max() < EXACT


@kinds
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 130])
def test_a_chain_takes_in_the_rows_that_exist(keeps, rows):
    """A request without rows keeps its state, whatever stands in its padding."""
    q, brought, state = made(keeps, 3, rows)
    count, marked = torch.tensor([rows, rows // 2, 0]), torch.tensor([rows // 3, rows // 2, 0])
    for values in brought[:2]:
        values[1, int(count[1]) :] = 7.0
    for values in brought:
        values[2] = torch.nan
    scanned = scan(q, brought, state, count, marked, keeps.delta)
    for b in range(2):
        behind, at = state[b], 0
        for at in range(int(count[b]) + 1):
            if at == marked[b] and at:
                assert (scanned.snapshot[b] - behind).abs().max() < EXACT
            if at < count[b]:
                behind = step(keeps, brought, b, at, behind)
                assert (scanned.out[b, at] - read(keeps, q[b, at], behind)).abs().max() < EXACT
        assert (scanned.state[b] - behind).abs().max() < EXACT
    assert torch.equal(scanned.state[2], state[2])


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_a_convolution_follows_a_nodes_own_path(taps):
    parents = torch.tensor([[0, 0, 0, 1, 2, 3, 3], [0, 0, 1, 2, 3, 4, 5]])
    inputs, tail, weight, bias = drawn(2, 7, 3), drawn(2, taps - 1, 3), drawn(3, taps), drawn(3)
    out = convolve(inputs, tail, parents, ShortConv(weight, bias, applies_silu=False))
    chain = convolve(inputs, tail, None, ShortConv(weight))
    for b in range(2):
        for i in range(7):
            path = [i]
            while path[0]:
                path.insert(0, int(parents[b, path[0]]))
            for rows, got, act in ((path, out, False), (range(i + 1), chain, True)):
                window = torch.cat((tail[b], inputs[b, list(rows)]))[-taps:]
                expected = (window * weight.T).sum(0)
                expected = torch.nn.functional.silu(expected) if act else expected + bias
                assert (got[b, i] - expected).abs().max() < EXACT
    after = conv_tail_after(tail, inputs, torch.tensor([0, 5]))
    assert torch.equal(after[0], tail[0]) and torch.equal(after[1], torch.cat((tail[1], inputs[1, :5]))[5:])
