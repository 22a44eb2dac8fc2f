"""Writes the log-probabilities of emitted tokens to a launch's results, for requests that want log-probabilities.

There are two launches.  The first finds the likeliest tokens of each split (a part of the vocabulary), and the split's
sum of exponentials.  The second merges the splits, one program per token.  Programs of requests without
log-probabilities end at once.  So a CUDA graph can always have both launches.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.sampling import accumulation_dtype
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, choose_split_size, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.logprobs import CHOSEN, RANK, TOKEN, TOP, row_words

# The fewest and the most token ids per program of the first launch.  Launches with many rows have larger splits.
MIN_SPLIT_SIZE = 2048
MAX_SPLIT_SIZE = 8192


def write_logprobs(
    ring: Tensor, entry: Tensor, logits: Tensor, rows: Tensor, tokens: Tensor, length: Tensor, num_logprobs: Tensor
) -> None:
    """The launcher of ops/sampling.py:write_logprobs.

    Token ids and ranks equal the reference's.  In float32, log-probabilities are within 2**-16 of the reference's,
    because the order of summation differs.  Raises EspalierError for a tensor with another shape, dtype or device."""
    (batch, _, vocab), width = logits.shape, tokens.shape[1]
    num_words = ring.shape[3]
    max_logprobs = (num_words - TOP) // 2
    require("logprobs: logits", logits, (batch, -1, -1), None, logits)
    require("logprobs: entry", entry, (1,), torch.int64, logits)
    require("logprobs: length", length, (batch,), torch.int64, logits)
    require("logprobs: num_logprobs", num_logprobs, (batch,), torch.int64, logits)
    for name, value in (("rows", rows), ("tokens", tokens)):
        require(f"logprobs: {name}", value, (batch, width), torch.int64, logits)
    require("logprobs: ring", ring[:, :batch, :width], (-1, batch, width, row_words(max_logprobs)), torch.int64, logits)
    if ring.stride()[2:] != (num_words, 1):
        raise EspalierError(f"logprobs: the ring's rows have strides {ring.stride()[2:]}, not {(num_words, 1)}")
    if not tokens.numel():
        return
    gpu, num_tokens = chip(logits), batch * width
    split_size = choose_split_size(vocab, num_tokens, gpu, min(MIN_SPLIT_SIZE, next_power_of_2(vocab)), MAX_SPLIT_SIZE)
    num_splits = -(-vocab // split_size)
    sum_dtype = accumulation_dtype(logits)
    values = torch.empty(num_tokens, num_splits, max_logprobs, dtype=sum_dtype, device=logits.device)
    ids = torch.empty(num_tokens, num_splits, max_logprobs, dtype=torch.int32, device=logits.device)
    # Per split: its maximum, its sum of exp(logit - maximum), and the number of its logits above the token's logit.
    split_stats = torch.empty(num_tokens, num_splits, 3, dtype=sum_dtype, device=logits.device)
    rows, tokens, length, num_logprobs = (value.contiguous() for value in (rows, tokens, length, num_logprobs))
    dense_logits = logits if logits.stride(2) == 1 else logits.contiguous()
    shared_arguments = (tokens, length, num_logprobs, width, num_splits)
    _split_logprobs_kernel[(num_tokens, num_splits)](
        *(values, ids, split_stats, dense_logits, rows, *shared_arguments, vocab, *dense_logits.stride()[:2]),
        MAX_LOGPROBS=max_logprobs, SPLIT_SIZE=split_size, num_warps=4, **pdl_arguments(gpu),
    )  # fmt: skip
    candidates = next_power_of_2(num_splits * max_logprobs)
    _merge_logprobs_kernel[(num_tokens,)](
        *(ring, ring.view(torch.float64), entry, values, ids, split_stats, dense_logits, rows),
        *(*shared_arguments, *ring.stride()[:2], *dense_logits.stride()[:2]),
        TOKEN=TOKEN, RANK=RANK, CHOSEN=CHOSEN, TOP_IDS=TOP, TOP_VALUES=TOP + 1, MAX_LOGPROBS=max_logprobs,
        WORDS=num_words, SPLITS=next_power_of_2(num_splits), CANDIDATES=candidates,
        num_warps=min(max(candidates // 256, 1), 4), **pdl_arguments(gpu),
    )  # fmt: skip


@kernel
def _split_logprobs_kernel(
    values_ptr, ids_ptr, split_stats_ptr, logits_ptr, rows_ptr, tokens_ptr, length_ptr, num_logprobs_ptr,
    width, splits, vocab, batch_stride, row_stride,
    MAX_LOGPROBS: tl.constexpr, SPLIT_SIZE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, splits of the vocabulary).  width: tokens per request.  rows_ptr: the logits row of each token."""
    pdl_trigger_and_wait(USE_PDL)
    token_index = tl.program_id(0).to(tl.int64)
    b, w = token_index // width, token_index % width
    num_logprobs = tl.load(num_logprobs_ptr + b)
    if (num_logprobs >= 0) & (w < tl.load(length_ptr + b)):
        exact: tl.constexpr = values_ptr.dtype.element_ty
        split = tl.program_id(1)
        row_ptr = logits_ptr + b * batch_stride + tl.load(rows_ptr + token_index) * row_stride
        index = split * SPLIT_SIZE + tl.arange(0, SPLIT_SIZE)
        x = tl.load(row_ptr + index, mask=index < vocab, other=float("-inf")).to(exact)
        token_logit = tl.load(row_ptr + tl.load(tokens_ptr + token_index)).to(exact)
        at = token_index * splits + split
        top = tl.max(x, 0)
        tl.store(split_stats_ptr + at * 3, top)
        tl.store(split_stats_ptr + at * 3 + 1, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
        tl.store(split_stats_ptr + at * 3 + 2, tl.sum((x > token_logit).to(tl.int32), 0).to(exact))
        is_left = index < vocab
        for k in range(tl.minimum(num_logprobs, MAX_LOGPROBS)):
            best = tl.max(tl.where(is_left, x, float("-inf")), 0)
            best_id = tl.min(tl.where(is_left & (x == best), index, 2147483647), 0)
            tl.store(values_ptr + at * MAX_LOGPROBS + k, best)
            tl.store(ids_ptr + at * MAX_LOGPROBS + k, best_id)
            is_left = is_left & (index != best_id)


@kernel
def _merge_logprobs_kernel(
    words_ptr, floats_ptr, entry_ptr,
    values_ptr, ids_ptr, split_stats_ptr, logits_ptr, logits_rows_ptr, tokens_ptr, length_ptr, num_logprobs_ptr,
    width, splits, ring_entry_stride, ring_batch_stride, batch_stride, row_stride,
    TOKEN: tl.constexpr, RANK: tl.constexpr, CHOSEN: tl.constexpr, TOP_IDS: tl.constexpr, TOP_VALUES: tl.constexpr,
    MAX_LOGPROBS: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr, CANDIDATES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a token.  Among equal logits, candidates are in order of ids, so the lowest id comes first.

    words_ptr, floats_ptr: the ring, as int64 and as float64.  TOKEN to TOP_VALUES: offsets in a row, whose layout is in
    espalier/logprobs.py.  logits_rows_ptr: the row of `logits` that each token was picked from."""
    pdl_trigger_and_wait(USE_PDL)
    place = tl.program_id(0).to(tl.int64)
    b, w = place // width, place % width
    num_logprobs = tl.load(num_logprobs_ptr + b)
    if (num_logprobs >= 0) & (w < tl.load(length_ptr + b)):
        exact: tl.constexpr = values_ptr.dtype.element_ty
        split = tl.arange(0, SPLITS)
        stats_offset = (place * splits + split) * 3
        maxima = tl.load(split_stats_ptr + stats_offset, mask=split < splits, other=float("-inf"))
        sums = tl.load(split_stats_ptr + stats_offset + 1, mask=split < splits, other=0.0)
        num_above = tl.load(split_stats_ptr + stats_offset + 2, mask=split < splits, other=0.0)
        top = tl.max(maxima, 0)
        log_sum = tl.log(tl.sum(sums * tl.exp(maxima - tl.where(top == float("-inf"), 0.0, top)), 0))
        row_ptr = logits_ptr + b * batch_stride + tl.load(logits_rows_ptr + place) * row_stride
        token = tl.load(tokens_ptr + place)
        token_logit = tl.load(row_ptr + token).to(exact)
        out = tl.load(entry_ptr) * ring_entry_stride + b * ring_batch_stride + w * WORDS
        tl.store(words_ptr + out + TOKEN, token)
        tl.store(words_ptr + out + RANK, 1 + tl.sum(num_above.to(tl.int32), 0).to(tl.int64))
        tl.store(floats_ptr + out + CHOSEN, ((token_logit - top) - log_sum).to(tl.float64))
        candidate = tl.arange(0, CANDIDATES)
        num_wanted = tl.minimum(num_logprobs, MAX_LOGPROBS)
        is_left = (candidate < splits * MAX_LOGPROBS) & (candidate % MAX_LOGPROBS < num_wanted)
        values = tl.load(values_ptr + place * splits * MAX_LOGPROBS + candidate, mask=is_left, other=float("-inf"))
        ids = tl.load(ids_ptr + place * splits * MAX_LOGPROBS + candidate, mask=is_left, other=2147483647)
        # If a split has fewer ids than candidates, its last candidates have this id, which is no token.
        is_left = is_left & (ids != 2147483647)
        for k in range(num_wanted):
            best = tl.max(tl.where(is_left, values, float("-inf")), 0)
            best_candidate = tl.min(tl.where(is_left & (values == best), candidate, 2147483647), 0)
            best_id = tl.sum(tl.where(candidate == best_candidate, ids, 0), 0)
            tl.store(words_ptr + out + TOP_IDS + 2 * k, best_id.to(tl.int64))
            tl.store(floats_ptr + out + TOP_VALUES + 2 * k, ((best - top) - log_sum).to(tl.float64))
            is_left = is_left & (candidate != best_candidate)
