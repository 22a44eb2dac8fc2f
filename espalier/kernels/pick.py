"""The token at each row of the target's logits, in three launches and without a copy of the logits.

The reference is `pick` in espalier/sampling/pick.py, which also says what is computed; speculate/draws.py chooses
between the two.  First every split of the vocabulary gives its best, then a program a row merges them; last, rows with
filters draw over their own logits once more (cut.py).  Splits follow from the vocabulary alone, every row reads
its own slot, so a row's token depends on nothing else and one launch serves every mixture.

Exact: bias, bans, penalties and temperature equal the reference bit for bit given the same logits; so greedy tokens do,
and drawn ones but for ties within the noise's rounding (noise.py) and top-p's (cut.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.cut import block_of, draw_filtered
from espalier.kernels.dependent import after_previous, early
from espalier.kernels.launch import chip, kernel, power_of_two, require
from espalier.kernels.noise import gumbel_at, noise_keys
from espalier.kernels.shaping import SlotRows, above_arguments, logits_arguments, row_of, shaped

if TYPE_CHECKING:
    import triton.language as tl

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
    given = logits_arguments(logits, rows.vocab, rows, first)
    require("offsets", offsets, (batch, queries), torch.int64, logits)
    hanging = above_arguments(above, first_above, queries, rows)
    tokens = torch.empty(batch, queries, dtype=torch.int64, device=logits.device)
    finite = torch.empty(batch, queries, dtype=torch.bool, device=logits.device)
    if not tokens.numel():
        return tokens, finite
    split, block = split_sizes(rows.vocab)
    places, splits = batch * queries, -(-rows.vocab // split)
    exact = torch.promote_types(logits.dtype, torch.float32)
    values = torch.empty(places, splits, dtype=exact, device=logits.device)
    ids = torch.empty(places, splits, dtype=torch.int32, device=logits.device)
    shared = ((offsets, *offsets.stride()), given, rows.arguments(), hanging, queries, splits)
    # A multiply-add rounds once where the reference rounds twice.
    exactly = {"enable_fp_fusion": False, **early(chip(logits))}
    _best_of_split_kernel[(places, splits)](values, ids, *shared, SPLIT=split, BLOCK=block, num_warps=4, **exactly)
    _merge_kernel[(places,)](
        tokens, finite, values, ids, splits, SPLITS=power_of_two(splits), num_warps=1, **early(chip(logits))
    )
    # A pass over a row waits for its blocks one after the other: few and wide.
    programs, wide = min(places, chip(logits).processors), min(4 * block, power_of_two(rows.vocab))
    _draw_filtered_kernel[(programs,)](tokens, finite, values, *shared, places, BLOCK=wide, num_warps=16, **exactly)
    return tokens, finite


def split_sizes(vocab: int) -> tuple[int, int]:
    """(ids a program of the first launch covers, ids it reads at a time)."""
    block = min(BLOCK, power_of_two(vocab))
    return max(SPLIT, block), block


@kernel
def offset_of(out, queries, offsets):
    offsets_ptr, batch_stride, query_stride = offsets
    return tl.load(offsets_ptr + out // queries * batch_stride + out % queries * query_stride)


@kernel
def _best_of_split_kernel(
    values_ptr,
    ids_ptr,
    offsets,
    logits,
    slots,
    above,
    queries,
    splits,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Best (value, lowest id) of a split: of logit / T + noise, without the noise in a row with filters."""
    after_previous(DEPENDENT)
    out = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    offset = offset_of(out, queries, offsets)
    b, logits_ptr, position, row, hanging = row_of(out, queries, offset, logits, slots, above)
    ints, floats, vocab = slots[0] + b * 8, slots[1] + b * 8, slots[9]
    exact: tl.constexpr = values_ptr.dtype.element_ty
    noisy = (tl.load(floats) > 0) & (tl.load(ints + 7) == 0)
    k0, k1 = noise_keys(tl.load(ints + 1), position)
    best = tl.full([BLOCK], float("-inf"), exact)
    at = split * SPLIT + tl.arange(0, BLOCK)
    first_nan = tl.full([BLOCK], 2147483647, tl.int32)
    end = tl.minimum(split * SPLIT + SPLIT, vocab)
    coming = block_of(logits_ptr, split * SPLIT, end, BLOCK)
    for start in range(split * SPLIT, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = coming.to(exact)
        # On its way while this block is looked at.
        coming = block_of(logits_ptr, start + BLOCK, end, BLOCK)
        x = shaped(x, ids, ids < end, row, hanging)
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
def _merge_kernel(tokens_ptr, finite_ptr, values_ptr, ids_ptr, splits, SPLITS: tl.constexpr, DEPENDENT: tl.constexpr):
    """The best of a row's splits; its value stays with the first of them."""
    after_previous(DEPENDENT)
    out = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    there = split < splits
    values = tl.load(values_ptr + out * splits + split, mask=there, other=float("-inf"))
    ids = tl.load(ids_ptr + out * splits + split, mask=there, other=2147483647)
    nan = tl.min(tl.where(values != values, ids, 2147483647), 0)
    best = tl.max(tl.where(values != values, float("-inf"), values), 0)
    token = tl.min(tl.where(values == best, ids, 2147483647), 0)
    tl.store(tokens_ptr + out, tl.where(nan < 2147483647, nan, token).to(tl.int64))
    tl.store(finite_ptr + out, (nan == 2147483647) & (tl.abs(best) < float("inf")))
    tl.store(values_ptr + out * splits + split, tl.zeros_like(values) + best, mask=split == 0)


@kernel
def _draw_filtered_kernel(
    tokens_ptr,
    finite_ptr,
    values_ptr,
    offsets,
    logits,
    slots,
    above,
    queries,
    splits,
    rows,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Draw again, from what the filters leave, in those rows that have any.

    A program goes through many rows: most of them ask for nothing, and a program each would cost more than that.
    """
    after_previous(DEPENDENT)
    vocab = slots[9]
    for out in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        ints, floats = slots[0] + out // queries * 8, slots[1] + out // queries * 8
        if (tl.load(ints + 7) != 0) & (tl.load(finite_ptr + out) != 0):
            offset = offset_of(out, queries, offsets)
            _b, logits_ptr, position, row, hanging = row_of(out, queries, offset, logits, slots, above)
            k0, k1 = noise_keys(tl.load(ints + 1), position)
            filters = (tl.load(ints + 2), tl.load(floats + 1), tl.load(floats + 2))
            top = tl.load(values_ptr + out * splits)
            token = draw_filtered(logits_ptr, vocab, row, hanging, top, filters, k0, k1, BLOCK)
            tl.store(tokens_ptr + out, token.to(tl.int64))
