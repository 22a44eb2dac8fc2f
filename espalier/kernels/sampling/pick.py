"""Samples a token for each row of the target's logits, in three launches and without a copy of the logits.

The reference is `pick` in espalier/sampling/pick.py; speculate/sampler.py chooses between kernels and reference.  The
first launch finds the best token of each split (a part of the vocabulary).  The second merges the splits, one program
per row.  The third samples again in rows with top-k, top-p or min-p (top_k_top_p.py).  A row's token does not depend on
the splits.  Every row reads the parameters of its own slot, so one launch serves any mixture of requests.

For the same logits, the results of bias, bans, penalties and temperature equal the reference's bit for bit.  So greedy
tokens are equal.  Sampled tokens are equal too, unless two scores differ by less than the rounding of the noise
(noise.py), or a token is at the limit of top-p (top_k_top_p.py).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.runtime.jit import float_to_key, kernel, key_to_float
from espalier.kernels.runtime.launch import chip, choose_split_size, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.kernels.sampling.logit_processors import (
    COLUMNS,
    DraftedArguments,
    GatheredSlots,
    LogitsArguments,
    SlotArguments,
    drafted_arguments,
    leaves_logits_unchanged,
    load_row_arguments,
    logits_arguments,
    process_logits,
)
from espalier.kernels.sampling.noise import gumbel_noise, noise_keys
from espalier.kernels.sampling.top_k_top_p import draw_filtered

# The fewest and the most token ids per split.  Launches with many rows have larger splits.
MIN_SPLIT_SIZE = 2048
MAX_SPLIT_SIZE = 32768
# Token ids per load in a row whose logits are processed, and bytes per load in a row whose logits are not.
BLOCK = 1024
UNPROCESSED_BLOCK_BYTES = 4096


def sample_triton(
    logits: Tensor,
    slots: GatheredSlots,
    first_positions: Tensor,
    offsets: Tensor,
    drafted: tuple[Tensor, Tensor] | None = None,
    first_output: int = 0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample the tokens at positions first_positions [B] + offsets [B, Q].

    Returns (tokens [B, Q] int64, finite [B, Q] bool).  finite is False for a row with a NaN or an infinite best logit.
    The token of a row with a NaN is the id of the first NaN.

    logits: [B, Q, V], bfloat16, float16, float32 or float64 (then computed in float64), contiguous in the last
    dimension.  drafted: (tokens [B, E], ancestor_bits [B, Q, W]), drafted tokens, and for each row the bits of the
    tokens on its path; penalties count these tokens from index `first_output` on.  mask: [B, Q, ceil(V / 32)] int32,
    bits of allowed tokens (sampling/mask.py); None allows all.
    """
    batch, queries = logits.shape[:2]
    logits_args = logits_arguments(logits, slots.vocab, slots, first_positions)
    require("offsets", offsets, (batch, queries), torch.int64, logits)
    drafted_args = drafted_arguments(drafted, first_output, queries, slots, mask)
    tokens = torch.empty(batch, queries, dtype=torch.int64, device=logits.device)
    finite = torch.empty(batch, queries, dtype=torch.bool, device=logits.device)
    if not tokens.numel():
        return tokens, finite
    gpu, rows = chip(logits), batch * queries
    size = choose_split_size(slots.vocab, rows, gpu, MIN_SPLIT_SIZE, MAX_SPLIT_SIZE)
    splits = -(-slots.vocab // size)
    key_dtype = torch.int64 if logits.dtype == torch.float64 else torch.int32
    keys = torch.empty(rows, splits, dtype=key_dtype, device=logits.device)
    ids = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    shared = ((offsets, *offsets.stride()), logits_args, slots.arguments, drafted_args, queries, splits)
    options = {"COLUMNS": COLUMNS, "enable_fp_fusion": False, **pdl_arguments(gpu)}
    _best_of_split_kernel[(rows, splits)](keys, ids, *shared, size, **block_sizes(logits), num_warps=4, **options)
    _merge_row_kernel[(rows,)](
        tokens, finite, keys, ids, splits, SPLITS=next_power_of_2(splits), num_warps=1, **pdl_arguments(gpu)
    )
    # A program waits for the load of each block, so it reads few, wide blocks.
    programs, block = min(rows, gpu.processors), min(4 * BLOCK, next_power_of_2(slots.vocab))
    _draw_filtered_kernel[(programs,)](tokens, finite, keys, *shared, rows, BLOCK=block, num_warps=16, **options)
    return tokens, finite


def block_sizes(logits: Tensor) -> dict[str, int]:
    """Returns the block sizes of _best_of_split_kernel, as constexpr arguments.

    BLOCK: token ids per load.  UNPROCESSED_BLOCK: token ids per load in rows whose logits need no change and no noise.
    BLOCK and UNPROCESSED_BLOCK are powers of two, at most the vocabulary's size.  IDS_PER_THREAD: how many adjacent
    ids a thread reads at once: 1, unless the address, the strides and the vocabulary size are multiples of 16.
    """
    vocab, size = logits.shape[2], logits.element_size()
    block, unprocessed = (min(most, 1 << vocab.bit_length() - 1) for most in (BLOCK, UNPROCESSED_BLOCK_BYTES // size))
    offsets = (logits.data_ptr(), *logits.stride()[:2], vocab)
    ids_per_thread = 1 if any(offset % 16 for offset in offsets) else 16 // size
    return {"BLOCK": block, "UNPROCESSED_BLOCK": unprocessed, "IDS_PER_THREAD": ids_per_thread}


@kernel
def load_offset(launch_row, queries, offsets):
    """Returns the offset of a row of the launch.  offsets: (pointer to [B, queries], its two strides)."""
    offsets_ptr, batch_stride, query_stride = offsets
    return tl.load(offsets_ptr + launch_row // queries * batch_stride + launch_row % queries * query_stride)


@kernel
def nan_max(a, b):
    """Returns the maximum of a and b; NaN if a or b is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@kernel
def key_for_argmax(x):
    """Convert a block of floats to integers in the order of argmax: 0.0 equals -0.0, and NaN is above all numbers."""
    not_a_number = float_to_key(tl.full(x.shape, float("nan"), x.dtype))
    return tl.where(x == x, float_to_key(x + 0.0), not_a_number)


@kernel
def first_id_of_block(start, end, BLOCK: tl.constexpr):
    """Returns the first id of the next block: `start`, or a lower id, so that the whole block is below `end`.

    With a lower first id, some ids of this split or of the previous split are read again.  This does not change the
    best id."""
    return tl.minimum(start, tl.maximum(end - BLOCK, 0))


@kernel
def score_block(x, ids, vocab, row, drafted_row, noise, dtype: tl.constexpr, IS_UNPROCESSED: tl.constexpr):
    """Returns the scores of a block of ids: the logits x if IS_UNPROCESSED, else process_logits(x) plus noise."""
    x = x.to(dtype)
    if not IS_UNPROCESSED:
        adds_noise, k0, k1 = noise
        x = process_logits(x, ids, ids < vocab, row, drafted_row)
        if adds_noise:
            x = x + gumbel_noise(ids, k0, k1, dtype)
    return x


@kernel
def find_best_id(
    logits_ptr, loaded_block, begin, end, vocab, row, drafted_row, noise,
    dtype: tl.constexpr, IS_UNPROCESSED: tl.constexpr, BLOCK: tl.constexpr, IDS_PER_THREAD: tl.constexpr,
):  # fmt: skip
    """Returns (key of the best score, lowest id with this score) among ids begin .. end - 1 and a few ids before.

    loaded_block: the first block, already loaded.  A thread reads IDS_PER_THREAD adjacent ids of each block.  The
    thread keeps only the largest score and the first block with this score, because keeping ids would take several
    times as long.  At the end, the id is found among the IDS_PER_THREAD ids of the best thread and block.
    """
    group_offsets = tl.arange(0, BLOCK // IDS_PER_THREAD) * IDS_PER_THREAD
    best = tl.full([BLOCK // IDS_PER_THREAD], float("-inf"), dtype)
    first_ids = tl.zeros([BLOCK // IDS_PER_THREAD], tl.int32) + first_id_of_block(begin, end, BLOCK)
    for start in range(begin, end, BLOCK):
        first = first_id_of_block(start, end, BLOCK)
        x = loaded_block
        # The next block is loaded while this block is compared.
        loaded_block = tl.load(logits_ptr + first_id_of_block(start + BLOCK, end, BLOCK) + tl.arange(0, BLOCK))
        x = score_block(x, first + tl.arange(0, BLOCK), vocab, row, drafted_row, noise, dtype, IS_UNPROCESSED)
        group_max = tl.reduce(tl.reshape(x, [BLOCK // IDS_PER_THREAD, IDS_PER_THREAD]), 1, nan_max)
        # If `best` is NaN, first_ids does not change, so that the first NaN wins.
        first_ids = tl.where((best == best) & ~(group_max <= best), first, first_ids)
        best = nan_max(best, group_max)
    keys = key_for_argmax(best)
    key = tl.max(keys, 0)
    best_id = tl.min(tl.where(keys == key, first_ids + group_offsets, 2147483647), 0)
    if IDS_PER_THREAD > 1:
        ids = best_id + tl.arange(0, IDS_PER_THREAD)
        x = score_block(tl.load(logits_ptr + ids), ids, vocab, row, drafted_row, noise, dtype, IS_UNPROCESSED)
        best_id = tl.min(tl.where(key_for_argmax(x) == key, ids, 2147483647), 0)
    return key, best_id


@kernel(do_not_specialize=["splits"])
def _best_of_split_kernel(
    keys_ptr, ids_ptr, offsets, logits, slots, drafted, queries, splits, split_size,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, UNPROCESSED_BLOCK: tl.constexpr, IDS_PER_THREAD: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write a split's best key (the key of its best score), and the lowest id with that key, to keys and ids [rows,
    splits].  A score is logit / T + noise; rows with filters get no noise here.  logits, slots, drafted: see
    load_row_arguments."""
    pdl_trigger_and_wait(USE_PDL)
    out = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    offset = load_offset(out, queries, offsets)
    logits, slots, drafted = LogitsArguments(*logits), SlotArguments(*slots), DraftedArguments(*drafted)
    b, logits_ptr, position, row, drafted_row = load_row_arguments(
        out, queries, offset, logits, slots, drafted, COLUMNS
    )
    ints, vocab = slots.ints_ptr + b * COLUMNS.num_ints, slots.vocab
    exact: tl.constexpr = tl.float32 if keys_ptr.dtype.element_ty == tl.int32 else tl.float64
    begin = split * split_size
    end = tl.minimum(begin + split_size, vocab)
    # This load starts before the row's parameters are known.  With the mask, the compiler does not move the load.
    ids = first_id_of_block(begin, end, UNPROCESSED_BLOCK) + tl.arange(0, UNPROCESSED_BLOCK)
    block = tl.load(logits_ptr + ids, mask=ids < vocab)
    if leaves_logits_unchanged(row) & (drafted.mask_words == 0):
        none = (False, 0, 0)
        key, best_id = find_best_id(
            logits_ptr, block, begin, end, vocab, row, drafted_row, none, exact, True, UNPROCESSED_BLOCK, IDS_PER_THREAD
        )
    else:
        k0, k1 = noise_keys(tl.load(ints + COLUMNS.seed), position)
        noise = ((row.temperature > 0) & (tl.load(ints + COLUMNS.has_filters) == 0), k0, k1)
        loaded_block = tl.load(logits_ptr + first_id_of_block(begin, end, BLOCK) + tl.arange(0, BLOCK))
        key, best_id = find_best_id(
            logits_ptr, loaded_block, begin, end, vocab, row, drafted_row, noise, exact, False, BLOCK, IDS_PER_THREAD
        )
    tl.store(keys_ptr + out * splits + split, key)
    tl.store(ids_ptr + out * splits + split, best_id)


@kernel
def _merge_row_kernel(tokens_ptr, finite_ptr, keys_ptr, ids_ptr, splits, SPLITS: tl.constexpr, USE_PDL: tl.constexpr):
    """Find the best token among a row's splits.
    The best key is also stored at the row's first split, where _draw_filtered_kernel reads it as the largest logit."""
    pdl_trigger_and_wait(USE_PDL)
    out = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    split_exists = split < splits
    ids = tl.load(ids_ptr + out * splits + split, mask=split_exists, other=2147483647)
    # Lanes past the last split read the key of the first split, because every value of a key has a meaning.
    keys = tl.load(keys_ptr + out * splits + tl.where(split_exists, split, 0))
    best = tl.max(keys, 0)
    token = tl.min(tl.where(keys == best, ids, 2147483647), 0)
    tl.store(tokens_ptr + out, token.to(tl.int64))
    tl.store(finite_ptr + out, tl.abs(key_to_float(best)) < float("inf"))
    tl.store(keys_ptr + out * splits + split, tl.zeros_like(keys) + best, mask=split == 0)


@kernel(do_not_specialize=["splits"])
def _draw_filtered_kernel(
    tokens_ptr, finite_ptr, keys_ptr, offsets, logits, slots, drafted, queries, splits, rows,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Sample again in rows with filters (top-k, top-p, min-p), from the tokens that the filters leave.

    Each program covers many rows, and first reads has_filters of 32 rows at once.  Most rows have no filters, so one
    program per row, or one load per row, would take longer."""
    pdl_trigger_and_wait(USE_PDL)
    logits, slots, drafted = LogitsArguments(*logits), SlotArguments(*slots), DraftedArguments(*drafted)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    has_filters = tl.zeros([32], tl.int64)
    for begin in range(program, rows, 32 * num_programs):
        own_rows = begin + tl.arange(0, 32) * num_programs
        ints = slots.ints_ptr + own_rows // queries * COLUMNS.num_ints
        has_filters |= tl.load(ints + COLUMNS.has_filters, mask=own_rows < rows, other=0)
    for out in range(program.to(tl.int64), tl.where(tl.max(has_filters, 0) != 0, rows, 0), num_programs):
        ints = slots.ints_ptr + out // queries * COLUMNS.num_ints
        floats = slots.floats_ptr + out // queries * COLUMNS.num_floats
        if (tl.load(ints + COLUMNS.has_filters) != 0) & (tl.load(finite_ptr + out) != 0):
            offset = load_offset(out, queries, offsets)
            _b, logits_ptr, position, row, drafted_row = load_row_arguments(
                out, queries, offset, logits, slots, drafted, COLUMNS
            )
            k0, k1 = noise_keys(tl.load(ints + COLUMNS.seed), position)
            filters = (
                tl.load(ints + COLUMNS.top_k),
                tl.load(floats + COLUMNS.top_p),
                tl.load(floats + COLUMNS.min_p),
            )
            max_logit = key_to_float(tl.load(keys_ptr + out * splits))
            token = draw_filtered(logits_ptr, slots.vocab, row, drafted_row, max_logit, filters, k0, k1, BLOCK)
            tl.store(tokens_ptr + out, token.to(tl.int64))
