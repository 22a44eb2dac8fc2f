"""One level of a draft tree: the best candidates become the next beams, each with the bits of its ancestors.

Scores are float32.  All of espalier orders them in the same way: higher first, NaN counts as -inf, -0.0 as 0.0, ties go
to the lower index.  Exact: kernel and reference give the same integers and the same bits of scores.

Grid: one program per request, which ranks all candidates by comparing each with each, CHUNK at a time.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.tree import SelectedBeams
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.layout import ANCESTOR_BITS

# Comparisons per step of the ranking; their results are in registers.
COMPARISONS_PER_STEP = 16384


def select_beams(
    tokens: Tensor, scores: Tensor, ancestor_bits: Tensor | None, path: Tensor, first: int, num_words: int
) -> SelectedBeams:
    batch, rows, topk = tokens.shape
    require("select_beams: tokens", tokens, (-1, -1, -1), torch.int64, tokens)
    require("select_beams: scores", scores, (batch, rows, topk), torch.float32, tokens)
    if ancestor_bits is not None:
        require("select_beams: ancestor_bits", ancestor_bits, (batch, rows, num_words), torch.int64, tokens)
        ancestor_bits = ancestor_bits.contiguous()
    require("select_beams: path", path, (batch, -1), torch.int64, tokens)
    if first + topk > min(num_words * ANCESTOR_BITS, path.shape[1]) or path.stride(1) != 1:
        raise EspalierError(
            f"select_beams: row {first + topk - 1} does not fit into a contiguous path of {path.shape[1]} rows and "
            f"{num_words} words of {ANCESTOR_BITS} ancestor bits: take both sizes from the layout"
        )
    beams = SelectedBeams(
        scores.new_empty(batch, topk),
        tokens.new_empty(batch, topk),
        tokens.new_empty(batch, topk),
        tokens.new_empty(batch, topk, num_words),
    )
    if batch:
        block = power_of_two(rows * topk)
        _select_beams_kernel[(batch,)](
            *(tokens.contiguous(), scores.contiguous(), ancestor_bits, path, *beams, path.stride(0), first, topk),
            ROWS=rows,
            TOPK=topk,
            WORDS=num_words,
            BLOCK=block,
            CHUNK=max(min(block, COMPARISONS_PER_STEP // block), 1),
            BLOCK_WORDS=power_of_two(num_words),
            num_warps=4 if block <= 256 else 8,
            **pdl_arguments(chip(tokens)),
        )
    return beams


@kernel
def usable_score(score):
    """`usable` as a kernel function."""
    score = tl.where(score == score, score, float("-inf"))
    return tl.where(score == 0, 0.0, score)


@kernel
def order_of(score):
    """int32 keys in the order of the float32 scores; the scores must be usable."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@kernel
def score_of(key):
    """The score that order_of gives a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@kernel
def _select_beams_kernel(
    tokens_ptr, scores_ptr, words_ptr, path_ptr, out_scores_ptr, out_index_ptr, out_parents_ptr, out_words_ptr,
    path_stride, first, topk,
    ROWS: tl.constexpr, TOPK: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A candidate's rank is the number of better candidates.  Ranks below TOPK are beams, stored at their rank."""
    pdl_trigger_and_wait(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    candidates = request * (ROWS * TOPK)
    i = tl.arange(0, BLOCK)
    score = usable_score(tl.load(scores_ptr + candidates + i, mask=i < ROWS * TOPK, other=float("-inf")))
    key = order_of(score)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(scores_ptr + candidates + j, mask=j < ROWS * TOPK, other=float("-inf"))
        other = order_of(usable_score(other))
        tied = (other[None, :] == key[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(((other[None, :] > key[:, None]) | tied).to(tl.int32), 1)
    # The block's padding scores -inf and comes last, so its rank is at least TOPK.
    is_beam = rank < TOPK
    # Divide by the argument, not by the constant TOPK: see _select_tree_kernel.
    parent = i // topk
    beam = request * TOPK + rank
    token = tl.load(tokens_ptr + candidates + i, mask=is_beam, other=0)
    tl.store(path_ptr + request * path_stride + first + rank, token, mask=is_beam)
    tl.store(out_scores_ptr + beam, score, mask=is_beam)
    tl.store(out_index_ptr + beam, i.to(tl.int64), mask=is_beam)
    tl.store(out_parents_ptr + beam, parent.to(tl.int64), mask=is_beam)
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    row = first + rank[:, None]
    bits = tl.where(word == row // 64, tl.full([BLOCK, BLOCK_WORDS], 1, tl.int64) << (row % 64).to(tl.int64), 0)
    mask = is_beam[:, None] & (word < WORDS)
    if words_ptr is not None:
        parent_words = (request * ROWS + parent)[:, None] * WORDS + word
        bits |= tl.load(words_ptr + parent_words, mask=mask, other=0)
    tl.store(out_words_ptr + beam[:, None] * WORDS + word, bits, mask=mask)
