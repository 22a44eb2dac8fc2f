"""Accepts a path of a tree: the longest path from the root whose tokens the target sampled too.  Also has gather_rows.

Grid of accept: one program per request, which holds all nodes in registers.  All values are integers or booleans, so
kernel and reference agree exactly.

Grid of gather_rows: (output rows, blocks of up to MAX_BLOCK_COLUMNS columns, parts).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.tree import AcceptedPath, Tree
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.layout import ANCESTOR_BITS


def accept(
    tree: Tree, target_tokens: Tensor, is_finite: Tensor, max_accept_depth: Tensor, is_real: Tensor, steps: int
) -> AcceptedPath:
    """The launcher of ops/tree.py:accept.  is_real: [B], False for padding.  steps: the greatest depth."""
    tokens, parents, depths, _, ancestors = tree
    batch, nodes = tokens.shape
    num_ancestor_words = -(-nodes // ANCESTOR_BITS)
    for name, value in (("tokens", tokens), ("parents", parents), ("depths", depths), ("target_tokens", target_tokens)):
        require(f"accept: {name}", value, (batch, nodes), torch.int64, tokens)
    require("accept: ancestors", ancestors, (batch, nodes, num_ancestor_words), torch.int64, tokens)
    require("accept: is_finite", is_finite, (batch, nodes), torch.bool, tokens)
    require("accept: max_accept_depth", max_accept_depth, (batch,), torch.int64, tokens)
    require("accept: is_real", is_real, (batch,), torch.bool, tokens)
    sizes = ((batch, steps + 1), (batch,), (batch, steps + 1), (batch,))
    path = AcceptedPath(*(tokens.new_empty(size) for size in sizes))
    if batch:
        inputs = (tokens, parents, depths, ancestors, target_tokens, is_finite, max_accept_depth, is_real)
        _accept_kernel[(batch,)](
            *(value.contiguous() for value in inputs),
            *path,
            NODES=nodes, WORDS=num_ancestor_words, LEVELS=steps + 1, BLOCK_WORDS=next_power_of_2(num_ancestor_words),
            BLOCK_LEVELS=next_power_of_2(steps + 1), num_warps=4, **pdl_arguments(chip(tokens)),
        )  # fmt: skip
    return path


@kernel
def _accept_kernel(
    tokens_ptr, parents_ptr, depths_ptr, words_ptr, target_tokens_ptr, is_finite_ptr, max_depth_ptr, is_real_ptr,
    rows_ptr, length_ptr, emitted_ptr, num_finite_ptr,
    NODES: tl.constexpr, WORDS: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, BLOCK_LEVELS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """WORDS: int64 words of ancestor bits per node.  LEVELS: steps + 1.  BLOCK_WORDS, BLOCK_LEVELS: the next powers of
    two."""
    pdl_trigger_and_wait(USE_PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_WORDS * 64)
    exists = node < NODES
    index = request * NODES + node
    token = tl.load(tokens_ptr + index, mask=exists, other=0)
    parent = tl.load(parents_ptr + index, mask=exists, other=0)
    depth = tl.load(depths_ptr + index, mask=exists, other=0).to(tl.int32)
    parent_pick = tl.load(target_tokens_ptr + request * NODES + parent, mask=exists, other=0)
    max_depth = tl.load(max_depth_ptr + request)
    matches = ((token == parent_pick) & (depth <= max_depth)) | (node == 0)

    # A node is kept if the node and all its ancestors match.  Mismatches are packed into words, as ancestors are.
    mismatch_bits = (matches == 0).to(tl.int64) << (node % 64).to(tl.int64)
    mismatches = tl.sum(tl.reshape(mismatch_bits, [BLOCK_WORDS, 64]), 1)
    word = tl.arange(0, BLOCK_WORDS)
    ancestors = tl.load(
        words_ptr + index[:, None] * WORDS + word[None, :], mask=exists[:, None] & (word < WORDS)[None, :], other=0
    )
    rejected = tl.max(((ancestors & mismatches[None, :]) != 0).to(tl.int32), 1)
    is_kept = exists & (rejected == 0)
    # The best key is the deepest kept node; among equally deep nodes, the lowest index.
    best_key = tl.max(tl.where(is_kept, depth * NODES + (NODES - 1 - node), -1), 0)
    last_node = NODES - 1 - best_key % NODES
    last_depth = best_key // NODES

    path_words = tl.load(words_ptr + (request * NODES + last_node) * WORDS + node // 64, mask=exists, other=0)
    on_path = exists & (((path_words >> (node % 64).to(tl.int64)) & 1) != 0)
    out = request * LEVELS
    tl.store(rows_ptr + out + depth, node.to(tl.int64), mask=on_path)
    tl.store(emitted_ptr + out + depth - 1, token, mask=on_path & (depth > 0))
    # The nodes of the path have filled the entries up to last_depth.  Only later entries are zeroed, so no entry is
    # written twice.
    path_index = tl.arange(0, BLOCK_LEVELS)
    zeros = tl.zeros([BLOCK_LEVELS], tl.int64)
    tl.store(rows_ptr + out + path_index, zeros, mask=(path_index > last_depth) & (path_index < LEVELS))
    tl.store(emitted_ptr + out + path_index, zeros, mask=(path_index > last_depth) & (path_index < LEVELS))
    tl.store(emitted_ptr + out + last_depth, tl.load(target_tokens_ptr + request * NODES + last_node))
    is_real = tl.load(is_real_ptr + request) != 0
    tl.store(length_ptr + request, tl.where(is_real, last_depth + 1, 0).to(tl.int64))
    is_finite = tl.load(is_finite_ptr + index, mask=exists, other=1) != 0
    num_finite = tl.min(tl.where(on_path & (is_finite == 0), depth, last_depth + 1), 0)
    tl.store(num_finite_ptr + request, tl.where(is_real, num_finite, 0).to(tl.int64))


MAX_BLOCK_COLUMNS = 2048


def gather_rows(rows: Tensor, *parts: Tensor) -> Tensor:
    """The launcher of ops/tree.py:gather_rows.  rows: [B, W], indices of rows.  parts: [B, D, n] each."""
    batch, width = rows.shape
    values = parts[0]
    size, strides = values.shape[2], values.stride()
    for part in parts:
        require("gather_rows: values", part, (batch, values.shape[1], size), values.dtype, values)
    require("gather_rows: rows", rows, (batch, width), torch.int64, values)
    if strides[2] != 1 or any(part.stride() != strides for part in parts):
        raise EspalierError("gather_rows: parts must have the same strides, and be contiguous in the last dimension")
    out = values.new_empty(batch, width, len(parts) * size)
    if out.numel():
        block = min(next_power_of_2(size), MAX_BLOCK_COLUMNS)
        _gather_rows_kernel[(batch * width, -(-size // block), len(parts))](
            *(parts, rows, out, width, size, *strides[:2], *rows.stride()),
            PARTS=len(parts), BLOCK=block, num_warps=4, **pdl_arguments(chip(values)),
        )  # fmt: skip
    return out


@kernel
def _gather_rows_kernel(
    parts, rows_ptr, out_ptr, width, size, values_stride_b, values_stride_r, rows_stride_b, rows_stride_w,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """width: rows per request in `out`.  size: columns of each part.  values_*: the strides of the parts."""
    pdl_trigger_and_wait(USE_PDL)
    out_row = tl.program_id(0).to(tl.int64)
    b = out_row // width
    row = tl.load(rows_ptr + b * rows_stride_b + out_row % width * rows_stride_w)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = b * values_stride_b + row * values_stride_r + column
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            value = tl.load(parts[part] + at, mask=column < size, other=0.0)
            tl.store(out_ptr + (out_row * PARTS + part) * size + column, value, mask=column < size)
