"""One level of a draft tree: the best candidates become the next beams, each with the bits of its ancestors.

Scores are float32.  All of espalier orders them in the same way: higher first, NaN counts as -inf, -0.0 as 0.0, ties go
to the lower index.  Exact: kernel and reference give the same integers and the same bits of scores.

Grid: one program per request, which ranks all candidates by comparing each with each, CHUNK at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import own_bits
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.layout import ANCESTOR_BITS

if TYPE_CHECKING:
    import triton.language as tl

# Comparisons per step of the ranking; their results are in registers.
COMPARISONS_PER_STEP = 16384
# Up to so many scores the reference sorts them.
FEW = 64


class SelectedBeams(NamedTuple):
    """The beams of a level, best first.  scores: [B, K] float32; places: [B, K] int64, the beam's index among the
    level's candidates; parents: [B, K] int64, the index of its parent among the P rows; ancestor_bits: [B, K, W] int64,
    the bits of its ancestors among the draft rows and of itself."""

    scores: Tensor
    places: Tensor
    parents: Tensor
    ancestor_bits: Tensor


def select_beams(
    tokens: Tensor, scores: Tensor, ancestor_bits: Tensor | None, path: Tensor, first: int, num_words: int
) -> SelectedBeams:
    """The K best of P · K candidates become draft rows first to first + K - 1.

    tokens: [B, P, K] int64; scores: [B, P, K] float32, path scores.  ancestor_bits: [B, P, W] int64 of the P parent
    rows; None: the parent is the root, which is not a draft row.  path: [B, rows] int64, the tokens of the draft rows;
    the new rows' tokens are written to it.  num_words: W.  Raises EspalierError if sizes do not agree.  Exact.
    """
    return (select_beams_triton if tokens.is_cuda else select_beams_reference)(
        tokens, scores, ancestor_bits, path, first, num_words
    )


def select_beams_triton(
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


def select_beams_reference(
    tokens: Tensor, scores: Tensor, ancestor_bits: Tensor | None, path: Tensor, first: int, num_words: int
) -> SelectedBeams:
    topk = tokens.shape[2]
    best, index = ordered_topk(scores.flatten(1), topk)
    parents = index // topk
    bits = own_bits(first, topk, num_words, tokens.device).expand(tokens.shape[0], -1, -1)
    if ancestor_bits is not None:
        bits = bits | ancestor_bits.gather(1, parents[..., None].expand(-1, -1, num_words))
    path[:, first : first + topk] = tokens.flatten(1).gather(1, index)
    return SelectedBeams(best, index, parents, bits)


def usable(scores: Tensor) -> Tensor:
    """Scores in the form in which they are compared: NaN becomes -inf, -0.0 becomes 0.0."""
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).add_(0.0)


def ordered_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of the last dimension; ties go to the lower index (torch.topk leaves the order of ties open).

    scores: float32; NaN counts as -inf.  Returns (values, indices).  If there are fewer than k, the rest is -inf with
    index 0.
    """
    width = scores.shape[-1]
    scores = usable(scores)
    best = scores.sort(dim=-1, descending=True, stable=True).indices if width <= FEW else _topk_of_keys(scores, k)
    best = best[..., :k]
    values = scores.gather(-1, best)
    missing = max(k - width, 0)
    if missing:
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        best = torch.nn.functional.pad(best, (0, missing))
    return values, best


def _topk_of_keys(scores: Tensor, k: int) -> Tensor:
    """The indices of ordered_topk.  A sort would take 3 to 15 times as long for a vocabulary, and less time for FEW."""
    width, bits = scores.shape[-1], scores.contiguous().view(torch.int32)
    # Integers in the order of the floats.  In place: for a vocabulary, new tensors would take longer than the rest.
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    # The low half of a key breaks ties by index.
    keys = torch.arange(width - 1, -1, -1, device=scores.device).add(ordered, alpha=1 << 32)
    return keys.topk(min(k, width), -1).indices


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
