"""Where the last tokens of a text stood before: the lookup of n-gram drafting.

The work follows each request's own length, whatever the context is laid out for.  On a GPU every program beyond it ends
at once, so that one captured launch serves all lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if

if TYPE_CHECKING:
    import triton.language as tl

MAX_NGRAM = 4
BLOCK = 1024


class Matches(NamedTuple):
    """[B, K] int64 each, best first.  length: tokens that match, 0 for no match; ends: the position of the last of
    them, 0 for no match."""

    length: Tensor
    ends: Tensor


def find_matches(history: Tensor, index: Tensor, root: Tensor, topk: int) -> Matches:
    """The topk best earlier occurrences of the last tokens of each request, whose next tokens are distinct.

    history int64 [slots, W], dense; index [B] int64, the request's rows in it; root [B] int64, below W, the position of
    the last token.  Position j < root matches m tokens if history[j-m+1 .. j] equals history[root-m+1 .. root], m up to
    MAX_NGRAM.  Longest first, then latest.  Exact.
    """
    return (find_matches_triton if history.is_cuda else find_matches_reference)(history, index, root, topk)


def find_matches_triton(history: Tensor, index: Tensor, root: Tensor, topk: int) -> Matches:
    (batch,), width = index.shape, history.shape[1]
    require("find_matches: history", history, (-1, -1), torch.int64, root)
    require("find_matches: index", index, (batch,), torch.int64, root)
    require("find_matches: root", root, (batch,), torch.int64, root)
    blocks = -(-width // BLOCK)
    keys, following = (root.new_empty(batch, blocks * topk) for _ in range(2))
    found = Matches(root.new_empty(batch, topk), root.new_empty(batch, topk))
    if batch:
        strides = (index.stride(0), root.stride(0))
        _block_matches_kernel[(batch, blocks)](
            *(history, index, root, keys, following, *strides, history.stride(0), width, blocks),
            TOPK=topk,
            MAX_NGRAM=MAX_NGRAM,
            BLOCK=BLOCK,
            num_warps=4,
            **early(chip(root)),
        )
        _merge_matches_kernel[(batch,)](
            *(root, keys, following, *found, root.stride(0), width, blocks * topk),
            TOPK=topk,
            BLOCK=BLOCK,
            CANDIDATES=power_of_two(blocks * topk),
            num_warps=4,
            **early(chip(root)),
        )
    return found


def find_matches_reference(history: Tensor, index: Tensor, root: Tensor, topk: int) -> Matches:
    width = longest_known(root)
    known = history[:, :width].index_select(0, index)
    length = match_lengths(known, root)
    following = torch.roll(known, -1, 1)
    # Longest, then latest; 0 is no match.
    key = torch.where(length > 0, length * width + torch.arange(width, device=root.device), 0)
    best = []
    for _ in range(topk):
        best.append(key.amax(1, keepdim=True))
        taken = following.gather(1, best[-1] % width)
        key = key.masked_fill(following == taken, 0)
    keys = torch.cat(best, 1)
    return Matches(keys // width, keys % width)


def match_lengths(known: Tensor, root: Tensor) -> Tensor:
    """[B, W]: how many tokens match at each position of `known` [B, W]."""
    positions = torch.arange(known.shape[1], device=known.device).expand_as(known)
    alive = positions < root[:, None]
    length = torch.zeros_like(known)
    for back in range(MAX_NGRAM):
        wanted = known.gather(1, (root - back).clamp(min=0)[:, None])
        there = torch.roll(known, back, 1)
        alive = alive & (there == wanted) & (positions >= back) & (root >= back)[:, None]
        length = length + alive
    return length


def longest_known(root: Tensor) -> int:
    """Tokens of the longest request.  Reads host memory: this is the path of a CPU."""
    return int(root.max()) + 1 if root.numel() else 1


@kernel
def _block_matches_kernel(
    history_ptr, index_ptr, root_ptr, keys_ptr, following_ptr,
    index_stride, root_stride, history_stride, width, blocks,
    TOPK: tl.constexpr, MAX_NGRAM: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program a request and block of positions: the TOPK best of these, and the tokens that follow them."""
    pdl_wait_if(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    root = tl.load(root_ptr + b * root_stride)
    if tl.program_id(1) * BLOCK < root:
        text = history_ptr + tl.load(index_ptr + b * index_stride) * history_stride
        at = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        below = at < root
        alive = below
        length = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MAX_NGRAM):
            inside = alive & (at >= back) & (root >= back)
            wanted = tl.load(text + root - back, mask=root >= back, other=-1)
            alive = inside & (tl.load(text + at - back, mask=inside, other=-1) == wanted)
            length += alive.to(tl.int64)
        following = tl.load(text + at + 1, mask=below, other=-1)
        key = tl.where(length > 0, length * width + at, 0)
        out = (b * blocks + tl.program_id(1)) * TOPK
        for i in range(TOPK):
            best = tl.max(key, 0)
            taken = tl.max(tl.where(key == best, following, -1), 0)
            tl.store(keys_ptr + out + i, best)
            tl.store(following_ptr + out + i, taken)
            key = tl.where(following == taken, 0, key)


@kernel
def _merge_matches_kernel(
    root_ptr, keys_ptr, following_ptr, length_ptr, ends_ptr, root_stride, width, candidates,
    TOPK: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program a request: the TOPK best of what its blocks found; blocks beyond its length wrote nothing."""
    pdl_wait_if(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    root = tl.load(root_ptr + b * root_stride)
    at = tl.arange(0, CANDIDATES)
    real = at < (root + BLOCK - 1) // BLOCK * TOPK
    key = tl.load(keys_ptr + b * candidates + at, mask=real, other=0)
    following = tl.load(following_ptr + b * candidates + at, mask=real, other=-1)
    for i in range(TOPK):
        best = tl.max(key, 0)
        taken = tl.max(tl.where(key == best, following, -1), 0)
        tl.store(length_ptr + b * TOPK + i, best // width)
        tl.store(ends_ptr + b * TOPK + i, best % width)
        key = tl.where(following == taken, 0, key)
