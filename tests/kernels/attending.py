"""Inputs of the attention kernels: requests of different lengths over shuffled pages, NaN where no kernel may read."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.hopper.config import kv_block_rows
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.ops.attention import (
    AttentionInputs,
    Nodes,
    Prefix,
    count_contiguous_blocks,
    empty_prefix,
    tree_attention,
)
from espalier.kernels.ops.selection import KVSplitPolicy, kv_splits
from espalier.kernels.state.kv_scales import KVScales

# Compared with float64 on the same values.  float32 (IEEE): a few roundings of 2^-24 in sums of terms near one.
# bfloat16 and float16: the weights and the output are rounded to 2^-9 and 2^-12.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LSE_TOLERANCE = 2e-5
# A kernel's launch: (inputs, most splits) -> (outputs, lse).
Run = Callable[[AttentionInputs, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """lengths: committed rows of each request; rows: staged rows, None for a chain of the queries; in_order: how many
    pages of each request, from its first, are contiguous in the pool; fp8: committed and staged rows are FP8; scale: of
    scores, None for k_size ** -0.5."""

    lengths: tuple[int, ...]
    queries: int = 1
    rows: int | None = None
    page_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    k_size: int = 8
    v_size: int = 8
    window: int | None = None
    first: int = 0
    dtype: torch.dtype = torch.float32
    max_splits: int = 4
    sink: bool = False
    seed: int = 0
    in_order: int = 0
    fp8: bool = False
    softcap: float | None = None
    scale: float | None = None


def split(inputs: AttentionInputs, max_splits: int) -> AttentionInputs:
    """With at most so many splits of each request."""
    policy = KVSplitPolicy(max_splits, max_splits)
    prefix, positions = inputs.prefix, inputs.nodes.positions
    return inputs._replace(
        splits=kv_splits.triton(prefix.length, prefix.first_position, policy, positions, inputs.window or 0)
    )


def only(inputs: AttentionInputs, requests: list[int]) -> AttentionInputs:
    """The given requests, in the given order, over the same pages."""
    prefix, nodes, v_size = inputs.prefix, inputs.nodes, inputs.v_size
    bits = nodes.ancestor_bits
    k, v = (rows[requests] for rows in inputs.staged)
    return inputs._replace(
        q=inputs.q[requests],
        prefix=replace(prefix, page_table=prefix.page_table[requests], length=prefix.length[requests]),
        # Indexing copies latent rows twice: V is a view of K again.
        staged=(k, k[..., :v_size] if is_latent(inputs) else v),
        nodes=Nodes(nodes.positions[requests], nodes.row_positions[requests], None if bits is None else bits[requests]),
    )


def is_latent(inputs: AttentionInputs) -> bool:
    return inputs.pages[0].data_ptr() == inputs.pages[1].data_ptr()


def draw(case: Case, device: torch.device) -> AttentionInputs:
    """Normal values.  NaN in unused pages, in rows past a length or below `first`, and around the staged rows."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, dtype = len(case.lengths), case.dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    width = max((-(-length // case.page_size) for length in case.lengths), default=0) + 1
    pages = 1 + batch * width
    table = 1 + torch.randperm(batch * width, generator=generator).view(batch, width)
    if case.in_order:
        rest = table[:, case.in_order :].argsort(1)
        table = 1 + torch.arange(batch * width).view(batch, width)
        table[:, case.in_order :] = table[:, case.in_order :].gather(1, rest)
    table = table.int()
    rows = pages * case.page_size
    k, v = (torch.full((rows, case.kv_heads, size), torch.nan, dtype=dtype) for size in (case.k_size, case.v_size))
    for request, length in enumerate(case.lengths):
        position = torch.arange(case.first, max(length, case.first))
        row = table[request, position // case.page_size] * case.page_size + position % case.page_size
        k[row] = normal(len(position), case.kv_heads, case.k_size)
        v[row] = normal(len(position), case.kv_heads, case.v_size)
    length = torch.tensor(case.lengths, dtype=torch.int64)
    row_positions, positions, ancestor_bits = _nodes(case, length, generator)
    num_staged = row_positions.shape[1]
    # Strides as in a round: the staging buffer has more rows, and q, k and v are slices of larger tensors.
    staging = torch.full((batch, num_staged + 3, case.kv_heads, case.k_size + case.v_size), torch.nan, dtype=dtype)
    staging[:, :num_staged] = normal(batch, num_staged, case.kv_heads, case.k_size + case.v_size)
    q = torch.full((batch, case.queries, case.heads + 1, case.k_size), torch.nan, dtype=dtype)
    q[:, :, : case.heads] = normal(batch, case.queries, case.heads, case.k_size)
    staging, q = staging.to(device), q.to(device)
    scales = None
    if case.fp8:
        k, v, staging = (rows.to(FP8) for rows in (k, v, staging))
        of_k, of_v = (0.5 + torch.rand(case.kv_heads, generator=generator).to(device) for _ in range(2))
        scales = KVScales(of_k, of_v, dtype)
    staged_k, staged_v = staging[:, :num_staged].split((case.k_size, case.v_size), 3)
    prefix = Prefix(table.to(device), length.to(device), case.first)
    bits = None if ancestor_bits is None else ancestor_bits.to(device)
    inputs = AttentionInputs(
        q[:, :, : case.heads],
        (k.to(device), v.to(device)),
        case.page_size,
        prefix,
        Nodes(positions.to(device), row_positions.to(device), bits),
        empty_prefix(batch, device)[1],
        case.k_size**-0.5 if case.scale is None else case.scale,
        (staged_k, staged_v),
        case.window,
        torch.randn(case.heads, generator=generator).to(device) if case.sink else None,
        case.softcap,
        scales,
    )
    return split(inputs, case.max_splits)


def _nodes(case: Case, length: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
    """(row_positions, positions, ancestor_bits)."""
    if case.rows is None:
        positions = length[:, None] + torch.arange(case.queries)
        return positions, positions, None
    mask = torch.rand(len(length), case.rows, case.rows, generator=generator).tril() > 0.5
    mask |= torch.eye(case.rows, dtype=torch.bool)
    row_positions = length[:, None] + mask.sum(2) - 1
    first_query = case.rows - case.queries
    return row_positions, row_positions[:, first_query:], pack_bits(mask[:, first_query:])


def doubled(inputs: AttentionInputs, staged: bool = True) -> AttentionInputs:
    """In float64, with the staged rows or without them."""
    k, v = (rows.double() for rows in inputs.pages)
    staged_rows = tuple(rows.double() for rows in inputs.staged) if staged else None
    return inputs._replace(q=inputs.q.double(), pages=(k, v), staged=staged_rows)


def expected(inputs: AttentionInputs, staged: bool = True) -> tuple[Tensor, Tensor]:
    """The reference in float64."""
    return tree_attention.reference(doubled(inputs, staged))


def run(
    inputs: AttentionInputs, max_splits: int, staged: bool = True, contiguous: bool = False, **arguments
) -> tuple[Tensor, Tensor]:
    """contiguous: give the launch the counts of contiguous blocks."""
    inputs = split(inputs if staged else inputs._replace(staged=None), max_splits)
    if contiguous:
        rows = kv_block_rows(inputs.q.shape[3])
        pages = inputs.prefix.page_table, inputs.page_size, inputs.prefix.first_position, rows
        arguments["num_contiguous_blocks"] = count_contiguous_blocks.triton(inputs.splits, *pages)
    return tree_attention.triton(inputs, **arguments)


def poison_empty(monkeypatch) -> None:
    """Fill new buffers with NaN: reused memory could already contain the right results."""

    def full_of_nan(*shape, **arguments):
        filled = torch.zeros(*shape, **arguments)
        return filled.fill_(torch.nan) if filled.is_floating_point() else filled

    monkeypatch.setattr(torch, "empty", full_of_nan)


def check(case: Case, device: torch.device, staged: bool = True, **arguments) -> None:
    inputs = draw(case, device)
    check_results(case, inputs, run(inputs, case.max_splits, staged, **arguments), staged)


def check_results(case: Case, inputs: AttentionInputs, results: tuple[Tensor, Tensor], staged: bool) -> None:
    (out, lse), (exact_out, exact_lse) = results, expected(inputs, staged)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    assert out.shape == exact_out.shape and lse.shape == exact_lse.shape
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=TOLERANCE[case.dtype])
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=LSE_TOLERANCE)


def check_batches(case: Case, inputs: AttentionInputs, run: Run) -> None:
    """A request's bits are the same alone, in any batch, at any index, and on a second run."""
    out, lse = run(inputs, case.max_splits)
    order = list(range(len(case.lengths)))
    for requests in ([*order[::-1]], order[1:], [0], [order[-1], 0, order[-1]]):
        again, again_lse = run(only(inputs, requests), case.max_splits)
        assert torch.equal(again, out[requests]) and torch.equal(again_lse, lse[requests])


def check_more_words(inputs: AttentionInputs, run: Run) -> None:
    """The first levels of a draft tree have the ancestor words of all its rows."""
    out, lse = run(inputs, 4)
    nodes = replace(inputs.nodes, ancestor_bits=torch.nn.functional.pad(inputs.nodes.ancestor_bits, (0, 2)))
    more, more_lse = run(inputs._replace(nodes=nodes), 4)
    assert torch.equal(more, out) and torch.equal(more_lse, lse)


def difference(out: Tensor, plain: Tensor) -> str:
    """How two results [B, Q, heads, size] differ: how many values, by how much, and in which rows."""
    errors = (out.double() - plain.double()).abs()
    errors[errors.isnan()] = torch.inf
    rows = (errors.amax(3) > 0).nonzero().tolist()
    return (
        f"{int((errors > 0).sum())} of {errors.numel()} values differ, by {float(errors.max())} at most; "
        f"{len(rows)} rows (request, query, head) are affected, for example {rows[:4]}"
    )
