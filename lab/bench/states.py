"""Cases of `python -m lab kernels`: layers with a recurrent state, compared with the bytes of their states.

Each call has the states of another layer, so that no state is in the L2 cache.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from espalier.bench.timing import run_in_order
from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack_bits
from espalier.kernels.ops.recurrence import ShortConv, StateRows
from espalier.kernels.ops.states import (
    GateInputs,
    OutputGate,
    PathRows,
    PreparedRows,
    RowInputs,
    SlotStates,
    chain_outputs,
    commit_states,
    commit_tails,
    gated_norm,
    prepare_rows,
    tree_outputs,
)
from lab.bench.cases import KernelCase
from lab.bench.passes import state_bytes, state_flops

STATE_COLUMNS = ("what", "layer", "requests x rows")
# Qwen3.6-35B-A3B, Qwen3.6-27B, Nemotron 3 30B-A3B.
STATE_LAYERS = {
    "delta 32 on 16": RecurrentState(taps=4, heads=32, k_heads=16, k_size=128, v_size=128),
    "delta 48 on 16": RecurrentState(taps=4, heads=48, k_heads=16, k_size=128, v_size=128),
    "mamba 64 on 8": RecurrentState(4, heads=64, k_heads=8, k_size=128, v_size=64, delta=False, units=False),
}
BATCH_SIZES, NODE_COUNTS, PROMPT_ROWS = (1, 8, 32), (1, 16, 64), 8192
# Rows of an accepted path.
PATH_ROWS = 3
# Bytes of states beyond which the first layer's have left the L2 cache.
BEYOND_CACHE_BYTES = 2**28
DTYPE = torch.bfloat16


def state_cases(device: torch.device) -> Iterator[KernelCase]:
    for name, keeps in STATE_LAYERS.items():
        for batch in BATCH_SIZES:
            for nodes in NODE_COUNTS:
                yield from tree_cases(name, keeps, batch, nodes, device)
            yield commit_case(name, keeps, batch, device)
        yield from prompt_cases(name, keeps, device)


def tree_cases(name: str, keeps: RecurrentState, batch: int, nodes: int, device: torch.device) -> Iterator[KernelCase]:
    """Yields cases of a verify pass of one layer: its input launch, its state read and its norm."""
    layers = min(48, max(2, -(-BEYOND_CACHE_BYTES // (batch * state_bytes(keeps)))))
    table = random_tensor(device, layers, batch + 1, keeps.heads, keeps.k_size, keeps.v_size, dtype=torch.float32)
    slots = torch.arange(1, batch + 1, device=device)
    parents = ((torch.arange(nodes) - 1).clamp(min=0) // 4).expand(batch, -1).to(device)
    bits = pack_bits(ancestor_mask(parents, torch.zeros_like(parents, dtype=torch.bool), nodes))
    q, rows = random_rows(keeps, device, batch, nodes)
    shape = name, f"{batch} x {nodes}"
    read = batch * state_bytes(keeps)
    calls = [partial(tree_outputs, q, rows, SlotStates(each, slots), bits, None, keeps.delta) for each in table]
    yield KernelCase(("read", *shape), read, 0, run_in_order(calls), layers)
    if nodes == 16:
        yield from small_cases(shape, keeps, batch, nodes, parents, device)


def small_cases(
    shape: tuple[str, str], keeps: RecurrentState, batch: int, width: int, parents: Tensor | None, device: torch.device
) -> Iterator[KernelCase]:
    """The launches around the read: the convolution with gates and lengths, and the norm."""
    count, share, inner = batch * width, keeps.heads // keeps.k_heads, keeps.heads * keeps.v_size
    inputs = random_tensor(device, count, keeps.channels + inner)
    ba = random_tensor(device, count, 2 * keeps.heads)
    A_log, dt_bias = (random_tensor(device, keeps.heads, dtype=torch.float32) for _ in range(2))
    gates = GateInputs(ba[:, keeps.heads :], ba if keeps.delta else None, A_log, dt_bias, share, share)
    conv = ShortConv(random_tensor(device, keeps.channels, keeps.taps))
    tail = random_tensor(device, batch + 1, keeps.taps - 1, keeps.channels)
    rows = RowInputs(tail, torch.arange(1, batch + 1, device=device), parents, None, width)
    q, brought = random_rows(keeps, device, count)
    staged = torch.empty(count, keeps.channels, dtype=DTYPE, device=device) if parents is not None else None
    out = PreparedRows(q if keeps.units else q.to(DTYPE), *brought, staged)
    moved = 2 * count * keeps.channels * (2 if staged is None else 3)
    yield KernelCase(("inputs", *shape), moved, 0, partial(prepare_rows, inputs, gates, conv, keeps.columns, rows, out))
    groups, size = (keeps.heads, keeps.v_size) if keeps.delta else (keeps.k_heads, share * keeps.v_size)
    gate = OutputGate(inputs, 1, size, not keeps.delta)
    weight, read = random_tensor(device, size if keeps.delta else inner), random_tensor(device, count, groups, size)
    yield KernelCase(("norm", *shape), 3 * 2 * count * inner, 0, partial(gated_norm, read, gate, weight, 1e-6))


def commit_case(name: str, keeps: RecurrentState, batch: int, device: torch.device) -> KernelCase:
    """Commit the states and the convolution tails of all layers, in one launch each.  The time is that of one layer."""
    layers = min(48, max(2, -(-BEYOND_CACHE_BYTES // (batch * state_bytes(keeps)))))
    table = random_tensor(device, layers, batch + 2, keeps.heads, keeps.k_size, keeps.v_size, dtype=torch.float32)
    tail = random_tensor(device, layers, batch + 2, keeps.taps - 1, keeps.channels)
    _, rows = random_rows(keeps, device, layers, 16 * batch)
    inputs = random_tensor(device, layers, 16 * batch, keeps.channels)
    slots = torch.arange(1, batch + 1, device=device)
    source = 16 * (slots[:, None] - 1) + torch.tensor([0, 1, 5, 9], device=device)
    count = torch.full_like(slots, PATH_ROWS)
    path = PathRows(slots, source, count, count * 0, count * 0, None, None, 4, batch + 1)

    def run() -> None:
        commit_tails(tail, inputs, path, keeps.columns)
        commit_states(table, rows, path, keeps.delta)

    return KernelCase(("commit", name, f"{batch} x {PATH_ROWS}"), 2 * batch * state_bytes(keeps), 0, run, layers)


def prompt_cases(name: str, keeps: RecurrentState, device: torch.device) -> Iterator[KernelCase]:
    table = random_tensor(device, 2, keeps.heads, keeps.k_size, keeps.v_size, dtype=torch.float32)
    slots, count = torch.ones(1, dtype=torch.int64, device=device), torch.full((1,), PROMPT_ROWS, device=device)
    path = PathRows(slots, None, count, None, None, None, None, PROMPT_ROWS, 0)
    q, rows = random_rows(keeps, device, 1, PROMPT_ROWS)
    shape = name, f"1 x {PROMPT_ROWS}"
    run = partial(chain_outputs, q, rows, SlotStates(table, slots), path, None, keeps.delta)
    yield KernelCase(("prompt", *shape), 0, state_flops(keeps, PROMPT_ROWS), run)
    yield from small_cases(shape, keeps, 1, PROMPT_ROWS, None, device)


def random_rows(keeps: RecurrentState, device: torch.device, *shape: int) -> tuple[Tensor, StateRows]:
    """Returns (q, random rows [*shape, ...])."""
    q, k = (random_tensor(device, *shape, keeps.k_heads, keeps.k_size, dtype=torch.float32) for _ in range(2))
    gates = torch.rand(*shape, 2, keeps.heads, device=device)
    gates[..., 0, :] *= -0.1
    k = torch.nn.functional.normalize(k, dim=-1)
    q = q if keeps.units else q.to(DTYPE)
    return q, StateRows(k, random_tensor(device, *shape, keeps.heads, keeps.v_size), gates)


def random_tensor(device: torch.device, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)
