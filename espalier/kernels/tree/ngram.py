"""The lookup of n-gram drafting: finds the earlier positions in a text at which its last tokens also occur.

Grid of the first kernel: (requests, blocks of BLOCK positions).  The grid covers the longest possible history, so one
CUDA graph serves all lengths.  Programs past a request's length exit at once.  The second kernel has one program per
request, which merges the matches of all blocks.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.drafts import MAX_NGRAM, NgramMatches
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

BLOCK = 1024


def find_matches(history: Tensor, history_rows: Tensor, root_positions: Tensor, topk: int) -> NgramMatches:
    """The launcher of ops/drafts.py:find_matches.  history_rows: the row of `history` of each request."""
    (batch,), width = history_rows.shape, history.shape[1]
    require("find_matches: history", history, (-1, -1), torch.int64, root_positions)
    require("find_matches: index", history_rows, (batch,), torch.int64, root_positions)
    require("find_matches: root", root_positions, (batch,), torch.int64, root_positions)
    blocks = -(-width // BLOCK)
    keys, next_tokens = (root_positions.new_empty(batch, blocks * topk) for _ in range(2))
    matches = NgramMatches(root_positions.new_empty(batch, topk), root_positions.new_empty(batch, topk))
    if batch:
        strides = (history_rows.stride(0), root_positions.stride(0))
        _block_matches_kernel[(batch, blocks)](
            *(history, history_rows, root_positions, keys, next_tokens, *strides, history.stride(0), width, blocks),
            TOPK=topk, MAX_NGRAM=MAX_NGRAM, BLOCK=BLOCK, num_warps=4, **pdl_arguments(chip(root_positions)),
        )  # fmt: skip
        _merge_matches_kernel[(batch,)](
            *(root_positions, keys, next_tokens, *matches, root_positions.stride(0), width, blocks * topk),
            TOPK=topk, BLOCK=BLOCK, CANDIDATES=next_power_of_2(blocks * topk), num_warps=4,
            **pdl_arguments(chip(root_positions)),
        )  # fmt: skip
    return matches


@kernel
def _block_matches_kernel(
    history_ptr, index_ptr, root_ptr, keys_ptr, next_tokens_ptr,
    index_stride, root_stride, history_stride, width, blocks,
    TOPK: tl.constexpr, MAX_NGRAM: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Find a block's TOPK best matches.  Write their keys (length · width + position) and the tokens after them."""
    pdl_trigger_and_wait(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    root = tl.load(root_ptr + b * root_stride)
    if tl.program_id(1) * BLOCK < root:
        tokens_ptr = history_ptr + tl.load(index_ptr + b * index_stride) * history_stride
        position = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        before_root = position < root
        is_match = before_root
        length = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MAX_NGRAM):
            is_compared = is_match & (position >= back) & (root >= back)
            root_token = tl.load(tokens_ptr + root - back, mask=root >= back, other=-1)
            is_match = is_compared & (tl.load(tokens_ptr + position - back, mask=is_compared, other=-1) == root_token)
            length += is_match.to(tl.int64)
        next_tokens = tl.load(tokens_ptr + position + 1, mask=before_root, other=-1)
        keys = tl.where(length > 0, length * width + position, 0)
        out = (b * blocks + tl.program_id(1)) * TOPK
        for i in range(TOPK):
            best_key = tl.max(keys, 0)
            next_token = tl.max(tl.where(keys == best_key, next_tokens, -1), 0)
            tl.store(keys_ptr + out + i, best_key)
            tl.store(next_tokens_ptr + out + i, next_token)
            # The remaining matches must continue with a different token.
            keys = tl.where(next_tokens == next_token, 0, keys)


@kernel
def _merge_matches_kernel(
    root_ptr, keys_ptr, next_tokens_ptr, length_ptr, ends_ptr, root_stride, width, candidates,
    TOPK: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Merge the matches of a request's blocks into its TOPK best.  Blocks past the request's length wrote nothing."""
    pdl_trigger_and_wait(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    root = tl.load(root_ptr + b * root_stride)
    candidate = tl.arange(0, CANDIDATES)
    mask = candidate < (root + BLOCK - 1) // BLOCK * TOPK
    keys = tl.load(keys_ptr + b * candidates + candidate, mask=mask, other=0)
    next_tokens = tl.load(next_tokens_ptr + b * candidates + candidate, mask=mask, other=-1)
    for i in range(TOPK):
        best_key = tl.max(keys, 0)
        next_token = tl.max(tl.where(keys == best_key, next_tokens, -1), 0)
        tl.store(length_ptr + b * TOPK + i, best_key // width)
        tl.store(ends_ptr + b * TOPK + i, best_key % width)
        keys = tl.where(next_tokens == next_token, 0, keys)
