"""One level of a draft: the best candidates become the next beams, each with its true ancestors.

Scores are float32 and their order is the house's only one: higher first, NaN as -inf, -0.0 as 0.0, ties to the lower
index.  Everything here is exact: kernel and reference give the same integers and the same bits of scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import own_bits
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if
from espalier.layout import ANCESTOR_BITS

if TYPE_CHECKING:
    import triton.language as tl

# Comparisons that one step of the ranking holds in registers.
COMPARED = 16384


class SelectedBeams(NamedTuple):
    """Beams of a level, best first.  scores [B, K]; places [B, K] among the level's candidates; parents [B, K]
    among the rows that they continue; words [B, K, W], the draft rows that each stands on, its own included."""

    scores: Tensor
    places: Tensor
    parents: Tensor
    ancestor_bits: Tensor


def grow(
    tokens: Tensor, scores: Tensor, ancestor_bits: Tensor | None, path: Tensor, first: int, num_words: int
) -> SelectedBeams:
    """The K best of P · K candidates, as draft rows first .. first + K - 1.

    tokens [B, P, K] int64 and scores [B, P, K] float32, of whole paths; words [B, P, W] int64 of the rows that they
    continue, None where that is the root, which is no draft row; path [B, rows] int64: tokens of the draft rows, of
    which the new ones are written; num_words: W.
    Raises EspalierError if sizes do not agree.  Exact.
    """
    return (select_beams_triton if tokens.is_cuda else select_beams_reference)(
        tokens, scores, ancestor_bits, path, first, num_words
    )


def select_beams_triton(
    tokens: Tensor, scores: Tensor, ancestor_bits: Tensor | None, path: Tensor, first: int, num_words: int
) -> SelectedBeams:
    batch, rows, topk = tokens.shape
    require("grow: tokens", tokens, (-1, -1, -1), torch.int64, tokens)
    require("grow: scores", scores, (batch, rows, topk), torch.float32, tokens)
    if ancestor_bits is not None:
        require("grow: words", ancestor_bits, (batch, rows, num_words), torch.int64, tokens)
        ancestor_bits = ancestor_bits.contiguous()
    require("grow: path", path, (batch, -1), torch.int64, tokens)
    if first + topk > min(num_words * ANCESTOR_BITS, path.shape[1]) or path.stride(1) != 1:
        raise EspalierError(
            f"grow: a path of {path.shape[1]} rows has no dense place for row {first + topk - 1}, or its {num_words} "
            "words no bit: take both from the layout that grows"
        )
    grown = SelectedBeams(
        scores.new_empty(batch, topk),
        tokens.new_empty(batch, topk),
        tokens.new_empty(batch, topk),
        tokens.new_empty(batch, topk, num_words),
    )
    if batch:
        block = power_of_two(rows * topk)
        _select_beams_kernel[(batch,)](
            tokens.contiguous(),
            scores.contiguous(),
            ancestor_bits,
            path,
            *grown,
            path.stride(0),
            first,
            topk,
            ROWS=rows,
            TOPK=topk,
            WORDS=num_words,
            N=block,
            CHUNK=max(min(block, COMPARED // block), 1),
            W=power_of_two(num_words),
            num_warps=4 if block <= 256 else 8,
            **early(chip(tokens)),
        )
    return grown


def select_beams_reference(
    tokens: Tensor, scores: Tensor, ancestor_bits: Tensor | None, path: Tensor, first: int, num_words: int
) -> SelectedBeams:
    topk = tokens.shape[2]
    best, index = ordered_topk(scores.flatten(1), topk)
    parents = index // topk
    own = own_bits(first, topk, num_words, tokens.device).expand(tokens.shape[0], -1, -1)
    inherited = (
        own if ancestor_bits is None else ancestor_bits.gather(1, parents[..., None].expand(-1, -1, num_words)) | own
    )
    path[:, first : first + topk] = tokens.flatten(1).gather(1, index)
    return SelectedBeams(best, index, parents, inherited)


def usable(scores: Tensor) -> Tensor:
    """Scores as they are compared: NaN is -inf, -0.0 is 0.0."""
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0


def ordered_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of the last dimension, ties to the lower index (torch.topk alone promises no order among equals).

    scores: float32, NaN counting as -inf.  Returns (values, indices); where there are fewer than k, -inf and index 0.
    """
    width = scores.shape[-1]
    scores = usable(scores)
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # float order as integer order
    keys = (ordered << 32) + torch.arange(width - 1, -1, -1, device=scores.device)
    best = keys.topk(min(k, width), -1).indices
    values = scores.gather(-1, best)
    missing = max(k - width, 0)
    if missing:
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        best = torch.nn.functional.pad(best, (0, missing))
    return values, best


@kernel
def usable_score(score):
    score = tl.where(score == score, score, float("-inf"))
    return tl.where(score == 0, 0.0, score)


@kernel
def order_of(score):
    """float32 order as int32 order, of usable scores."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@kernel
def _select_beams_kernel(
    tokens_ptr,
    scores_ptr,
    words_ptr,
    path_ptr,
    out_scores_ptr,
    out_index_ptr,
    out_parents_ptr,
    out_words_ptr,
    path_stride,
    first,
    topk,
    ROWS: tl.constexpr,
    TOPK: tl.constexpr,
    WORDS: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    W: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program a request.  A candidate's rank is how many come before it; the first TOPK write themselves there."""
    pdl_wait_if(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    candidates = request * (ROWS * TOPK)
    i = tl.arange(0, N)
    score = usable_score(tl.load(scores_ptr + candidates + i, mask=i < ROWS * TOPK, other=float("-inf")))
    key = order_of(score)
    rank = tl.zeros([N], tl.int32)
    for start in range(0, N, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(scores_ptr + candidates + j, mask=j < ROWS * TOPK, other=float("-inf"))
        other = order_of(usable_score(other))
        tied = (other[None, :] == key[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(((other[None, :] > key[:, None]) | tied).to(tl.int32), 1)
    # What pads the block is no better than any candidate and stands behind them all.
    is_beam = rank < TOPK
    # By an argument, not by a constant: see kernels/tree/select_tree.py.
    parent = i // topk
    beam = request * TOPK + rank
    token = tl.load(tokens_ptr + candidates + i, mask=is_beam, other=0)
    tl.store(path_ptr + request * path_stride + first + rank, token, mask=is_beam)
    tl.store(out_scores_ptr + beam, score, mask=is_beam)
    tl.store(out_index_ptr + beam, i.to(tl.int64), mask=is_beam)
    tl.store(out_parents_ptr + beam, parent.to(tl.int64), mask=is_beam)
    word = tl.arange(0, W)[None, :]
    row = first + rank[:, None]
    bits = tl.where(word == row // 64, tl.full([N, W], 1, tl.int64) << (row % 64).to(tl.int64), 0)
    meant = is_beam[:, None] & (word < WORDS)
    if words_ptr is not None:
        above = (request * ROWS + parent)[:, None] * WORDS + word
        bits |= tl.load(words_ptr + above, mask=meant, other=0)
    tl.store(out_words_ptr + beam[:, None] * WORDS + word, bits, mask=meant)
