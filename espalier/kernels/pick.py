"""The token at each row of the target's logits, in two launches and without a copy of the logits.

The reference is `pick` in espalier/sampling/pick.py, which also says what is computed; speculate/draws.py chooses
between the two.  First every split of the vocabulary gives its best, then a program a row merges them; a row with
filters draws there, over its own logits once more (cut.py).  Splits follow from the vocabulary alone, every row reads
its own slot, so a row's token depends on nothing else and one launch serves every mixture.

Exact: bias, bans, penalties and temperature equal the reference bit for bit given the same logits; so greedy tokens do,
and drawn ones but for ties within the noise's rounding (noise.py) and top-p's (cut.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.cut import draw_filtered, shaped_block
from espalier.kernels.launch import kernel, power_of_two, require
from espalier.kernels.noise import gumbel_at, noise_keys
from espalier.kernels.shaping import SlotRows, above_arguments, slot_row

if TYPE_CHECKING:
    import triton.language as tl

LOGITS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SPLIT = 8192
BLOCK = 1024


def pick_triton(
    logits: Tensor,
    rows: SlotRows,
    first: Tensor,
    offsets: Tensor,
    above: tuple[Tensor, Tensor] | None = None,
    first_above: int = 0,
) -> tuple[Tensor, Tensor]:
    """Tokens [B, Q] int64 drawn at positions first [B] + offsets [B, Q], and whether each row was finite [B, Q] bool.

    logits: [B, Q, V], bfloat16, float16, float32 or float64 (which computes in float64), its last dimension dense.
    above: (tokens [B, E], words [B, Q, W]), drafted tokens that count as output, those from `first_above` on.  A row
    with a NaN is not finite and its token is that of the first NaN; one whose best is infinite is not finite either.
    """
    batch, queries = logits.shape[:2]
    check_logits(logits, rows, rows.vocab)
    require("first", first, (batch,), torch.int64, logits)
    require("offsets", offsets, (batch, queries), torch.int64, logits)
    tokens = torch.empty(batch, queries, dtype=torch.int64, device=logits.device)
    finite = torch.empty(batch, queries, dtype=torch.bool, device=logits.device)
    above_tokens, above_words = above or (None, None)
    hanging = above_arguments(above_tokens, above_words, first_above, queries, rows)
    if not tokens.numel():
        return tokens, finite
    split, block = split_sizes(rows.vocab)
    splits = -(-rows.vocab // split)
    exact = torch.promote_types(logits.dtype, torch.float32)
    values = torch.empty(batch * queries, splits, dtype=exact, device=logits.device)
    ids = torch.empty(batch * queries, splits, dtype=torch.int32, device=logits.device)
    shared = (
        *(logits, logits.stride(0), logits.stride(1), first, first.stride(0), offsets, *offsets.stride()),
        *rows.arguments(),
        *hanging,
        queries,
    )
    # A multiply-add rounds once where the reference rounds twice.
    how = {"BLOCK": block, "num_warps": 4, "enable_fp_fusion": False}
    _best_of_split_kernel[(batch * queries, splits)](values, ids, *shared, splits, SPLIT=split, **how)
    how |= {"num_warps": 8}
    _settle_kernel[(batch * queries,)](
        tokens, finite, values, ids, *shared, splits, SPLITS=power_of_two(splits), **how
    )
    return tokens, finite


def check_logits(logits: Tensor, rows: SlotRows, vocab: int) -> None:
    require("logits", logits, (rows.batch, -1, vocab), None, rows.ints)
    if logits.dtype not in LOGITS or (logits.shape[2] > 1 and logits.stride(2) != 1):
        raise EspalierError(
            f"logits are {logits.dtype} of stride {logits.stride(2)} in the vocabulary; give bfloat16, float16, float32 "
            "or float64 whose last dimension is dense"
        )


def split_sizes(vocab: int) -> tuple[int, int]:
    """(ids a program of the first launch covers, ids it reads at a time)."""
    block = min(BLOCK, power_of_two(vocab))
    return max(SPLIT, block), block


@kernel
def _best_of_split_kernel(
    values_ptr,
    ids_ptr,
    logits_ptr,
    batch_stride,
    query_stride,
    first_ptr,
    first_stride,
    offsets_ptr,
    offsets_batch_stride,
    offsets_query_stride,
    ints_ptr,
    floats_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    stop_ids_ptr,
    counts_ptr,
    seen_ptr,
    num_bias,
    num_stops,
    vocab,
    tokens_ptr,
    tokens_stride,
    words_ptr,
    words_batch_stride,
    words_query_stride,
    first_above,
    num_above,
    queries,
    splits,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best (value, lowest id) of a split: of logit / T + noise, without the noise in a row with filters."""
    out = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b = out // queries
    q = out % queries
    offset = tl.load(offsets_ptr + b * offsets_batch_stride + q * offsets_query_stride)
    position = tl.load(first_ptr + b * first_stride) + offset
    row = slot_row(
        b,
        position,
        ints_ptr,
        floats_ptr,
        bias_ids_ptr,
        bias_values_ptr,
        stop_ids_ptr,
        counts_ptr,
        seen_ptr,
        num_bias,
        num_stops,
        vocab,
    )
    words = words_ptr + b * words_batch_stride + q * words_query_stride
    above = (tokens_ptr + b * tokens_stride, words, first_above, num_above)
    logits = logits_ptr + b * batch_stride + q * query_stride
    exact: tl.constexpr = values_ptr.dtype.element_ty
    noisy = (tl.load(floats_ptr + b * 8) > 0) & (tl.load(ints_ptr + b * 8 + 7) == 0)
    k0, k1 = noise_keys(tl.load(ints_ptr + b * 8 + 1), position)
    best = tl.full([BLOCK], float("-inf"), exact)
    at = split * SPLIT + tl.arange(0, BLOCK)
    first_nan = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, vocab), BLOCK):
        x, ids = shaped_block(logits, start, vocab, exact, row, above, BLOCK)
        if noisy:
            x = x + gumbel_at(ids, k0, k1, exact)
        first_nan = tl.minimum(first_nan, tl.where(x != x, ids, 2147483647))
        at = tl.where(x > best, ids, at)
        best = tl.where(x > best, x, best)
    value = tl.max(best, 0)
    index = tl.min(tl.where(best == value, at, 2147483647), 0)
    nan = tl.min(first_nan, 0)
    is_nan = nan < 2147483647
    tl.store(values_ptr + out * splits + split, tl.where(is_nan, float("nan"), value))
    tl.store(ids_ptr + out * splits + split, tl.where(is_nan, nan, index))


@kernel
def _settle_kernel(
    tokens_out_ptr,
    finite_ptr,
    values_ptr,
    ids_ptr,
    logits_ptr,
    batch_stride,
    query_stride,
    first_ptr,
    first_stride,
    offsets_ptr,
    offsets_batch_stride,
    offsets_query_stride,
    ints_ptr,
    floats_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    stop_ids_ptr,
    counts_ptr,
    seen_ptr,
    num_bias,
    num_stops,
    vocab,
    tokens_ptr,
    tokens_stride,
    words_ptr,
    words_batch_stride,
    words_query_stride,
    first_above,
    num_above,
    queries,
    splits,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the splits of a row; where filters are in force, draw from what they leave."""
    out = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    there = split < splits
    values = tl.load(values_ptr + out * splits + split, mask=there, other=float("-inf"))
    ids = tl.load(ids_ptr + out * splits + split, mask=there, other=2147483647)
    nan = tl.min(tl.where(values != values, ids, 2147483647), 0)
    best = tl.max(tl.where(values != values, float("-inf"), values), 0)
    token = tl.min(tl.where(values == best, ids, 2147483647), 0)
    finite = (nan == 2147483647) & (tl.abs(best) < float("inf"))
    token = tl.where(nan < 2147483647, nan, token)
    b = out // queries
    if finite & (tl.load(ints_ptr + b * 8 + 7) != 0):
        q = out % queries
        offset = tl.load(offsets_ptr + b * offsets_batch_stride + q * offsets_query_stride)
        position = tl.load(first_ptr + b * first_stride) + offset
        row = slot_row(
            b,
            position,
            ints_ptr,
            floats_ptr,
            bias_ids_ptr,
            bias_values_ptr,
            stop_ids_ptr,
            counts_ptr,
            seen_ptr,
            num_bias,
            num_stops,
            vocab,
        )
        words = words_ptr + b * words_batch_stride + q * words_query_stride
        above = (tokens_ptr + b * tokens_stride, words, first_above, num_above)
        logits = logits_ptr + b * batch_stride + q * query_stride
        k0, k1 = noise_keys(tl.load(ints_ptr + b * 8 + 1), position)
        top_k = tl.load(ints_ptr + b * 8 + 2)
        top_p = tl.load(floats_ptr + b * 8 + 1)
        min_p = tl.load(floats_ptr + b * 8 + 2)
        best, token = draw_filtered(logits, vocab, row, above, best, top_k, top_p, min_p, k0, k1, BLOCK)
    tl.store(tokens_out_ptr + out, token.to(tl.int64))
    tl.store(finite_ptr + out, finite)
