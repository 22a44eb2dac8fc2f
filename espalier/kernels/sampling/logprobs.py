"""Writes log-probabilities of emitted tokens to the results of a launch, for requests that want log-probabilities.

There are two launches.  The first finds, per split of the vocabulary, the likeliest tokens and the split's part of the
softmax's sum.  The second merges the splits, one program per token.  Programs of other requests end at once, so a CUDA
graph always has both launches.
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
    """Runs ops/sampling.py:write_logprobs on a GPU.

    Token ids and ranks are exact.  In float32, log-probabilities are within 2**-16 of the reference's, which sums in
    another order.  Raises EspalierError for a tensor with another shape, dtype or device.
    """
    (batch, _, vocab), width = logits.shape, tokens.shape[1]
    num_words = ring.shape[3]
    most = (num_words - TOP) // 2
    require("logprobs: logits", logits, (batch, -1, -1), None, logits)
    require("logprobs: entry", entry, (1,), torch.int64, logits)
    require("logprobs: length", length, (batch,), torch.int64, logits)
    require("logprobs: num_logprobs", num_logprobs, (batch,), torch.int64, logits)
    for name, value in (("rows", rows), ("tokens", tokens)):
        require(f"logprobs: {name}", value, (batch, width), torch.int64, logits)
    require("logprobs: ring", ring[:, :batch, :width], (-1, batch, width, row_words(most)), torch.int64, logits)
    if ring.stride()[2:] != (num_words, 1):
        raise EspalierError(f"logprobs: the ring's rows have strides {ring.stride()[2:]}, not {(num_words, 1)}")
    if not tokens.numel():
        return
    gpu, places = chip(logits), batch * width
    split = choose_split_size(vocab, places, gpu, min(MIN_SPLIT_SIZE, next_power_of_2(vocab)), MAX_SPLIT_SIZE)
    splits = -(-vocab // split)
    exact = accumulation_dtype(logits)
    values = torch.empty(places, splits, most, dtype=exact, device=logits.device)
    ids = torch.empty(places, splits, most, dtype=torch.int32, device=logits.device)
    # Per split: its maximum, its sum of exp(logit - maximum), and the number of logits above the chosen one.
    parts = torch.empty(places, splits, 3, dtype=exact, device=logits.device)
    rows, tokens, length, num_logprobs = (value.contiguous() for value in (rows, tokens, length, num_logprobs))
    dense = logits if logits.stride(2) == 1 else logits.contiguous()
    shared = (tokens, length, num_logprobs, width, splits)
    _split_logprobs_kernel[(places, splits)](
        *(values, ids, parts, dense, rows, *shared, vocab, *dense.stride()[:2]),
        MAX_LOGPROBS=most, SPLIT_SIZE=split, num_warps=4, **pdl_arguments(gpu),
    )  # fmt: skip
    candidates = next_power_of_2(splits * most)
    _merge_logprobs_kernel[(places,)](
        *(ring, ring.view(torch.float64), entry, values, ids, parts, dense, rows),
        *(*shared, *ring.stride()[:2], *dense.stride()[:2]),
        TOKEN=TOKEN, RANK=RANK, CHOSEN=CHOSEN, TOP_IDS=TOP, TOP_VALUES=TOP + 1, MAX_LOGPROBS=most, WORDS=num_words,
        SPLITS=next_power_of_2(splits), CANDIDATES=candidates, num_warps=min(max(candidates // 256, 1), 4),
        **pdl_arguments(gpu),
    )  # fmt: skip


@kernel
def _split_logprobs_kernel(
    values_ptr, ids_ptr, split_stats_ptr, logits_ptr, rows_ptr, tokens_ptr, length_ptr, num_logprobs_ptr,
    width, splits, vocab, batch_stride, row_stride,
    MAX_LOGPROBS: tl.constexpr, SPLIT_SIZE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(USE_PDL)
    place = tl.program_id(0).to(tl.int64)
    b, w = place // width, place % width
    num_logprobs = tl.load(num_logprobs_ptr + b)
    if (num_logprobs >= 0) & (w < tl.load(length_ptr + b)):
        exact: tl.constexpr = values_ptr.dtype.element_ty
        split = tl.program_id(1)
        row_ptr = logits_ptr + b * batch_stride + tl.load(rows_ptr + place) * row_stride
        index = split * SPLIT_SIZE + tl.arange(0, SPLIT_SIZE)
        x = tl.load(row_ptr + index, mask=index < vocab, other=float("-inf")).to(exact)
        chosen = tl.load(row_ptr + tl.load(tokens_ptr + place)).to(exact)
        part = place * splits + split
        top = tl.max(x, 0)
        tl.store(split_stats_ptr + part * 3, top)
        tl.store(split_stats_ptr + part * 3 + 1, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
        tl.store(split_stats_ptr + part * 3 + 2, tl.sum((x > chosen).to(tl.int32), 0).to(exact))
        left = index < vocab
        for k in range(tl.minimum(num_logprobs, MAX_LOGPROBS)):
            best = tl.max(tl.where(left, x, float("-inf")), 0)
            at = tl.min(tl.where(left & (x == best), index, 2147483647), 0)
            tl.store(values_ptr + part * MAX_LOGPROBS + k, best)
            tl.store(ids_ptr + part * MAX_LOGPROBS + k, at)
            left = left & (index != at)


@kernel
def _merge_logprobs_kernel(
    words_ptr, floats_ptr, entry_ptr,
    values_ptr, ids_ptr, split_stats_ptr, logits_ptr, rows_ptr, tokens_ptr, length_ptr, num_logprobs_ptr,
    width, splits, ring_entry_stride, ring_batch_stride, batch_stride, row_stride,
    TOKEN: tl.constexpr, RANK: tl.constexpr, CHOSEN: tl.constexpr, TOP_IDS: tl.constexpr, TOP_VALUES: tl.constexpr,
    MAX_LOGPROBS: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr, CANDIDATES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a token.  Candidates are in order of ids, so of equal candidates the lowest id comes first.

    words_ptr, floats_ptr: the ring, as integers and as floats.  TOKEN to TOP_VALUES: offsets in a row of
    espalier/logprobs.py.
    """
    pdl_trigger_and_wait(USE_PDL)
    place = tl.program_id(0).to(tl.int64)
    b, w = place // width, place % width
    num_logprobs = tl.load(num_logprobs_ptr + b)
    if (num_logprobs >= 0) & (w < tl.load(length_ptr + b)):
        exact: tl.constexpr = values_ptr.dtype.element_ty
        split = tl.arange(0, SPLITS)
        part = (place * splits + split) * 3
        tops = tl.load(split_stats_ptr + part, mask=split < splits, other=float("-inf"))
        totals = tl.load(split_stats_ptr + part + 1, mask=split < splits, other=0.0)
        above = tl.load(split_stats_ptr + part + 2, mask=split < splits, other=0.0)
        top = tl.max(tops, 0)
        total = tl.log(tl.sum(totals * tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)), 0))
        row_ptr = logits_ptr + b * batch_stride + tl.load(rows_ptr + place) * row_stride
        token = tl.load(tokens_ptr + place)
        chosen = tl.load(row_ptr + token).to(exact)
        out = tl.load(entry_ptr) * ring_entry_stride + b * ring_batch_stride + w * WORDS
        tl.store(words_ptr + out + TOKEN, token)
        tl.store(words_ptr + out + RANK, 1 + tl.sum(above.to(tl.int32), 0).to(tl.int64))
        tl.store(floats_ptr + out + CHOSEN, ((chosen - top) - total).to(tl.float64))
        candidate = tl.arange(0, CANDIDATES)
        wanted = tl.minimum(num_logprobs, MAX_LOGPROBS)
        left = (candidate < splits * MAX_LOGPROBS) & (candidate % MAX_LOGPROBS < wanted)
        values = tl.load(values_ptr + place * splits * MAX_LOGPROBS + candidate, mask=left, other=float("-inf"))
        ids = tl.load(ids_ptr + place * splits * MAX_LOGPROBS + candidate, mask=left, other=2147483647)
        # This id pads the candidates of a split with too few ids.
        left = left & (ids != 2147483647)
        for k in range(wanted):
            best = tl.max(tl.where(left, values, float("-inf")), 0)
            at = tl.min(tl.where(left & (values == best), candidate, 2147483647), 0)
            best_id = tl.sum(tl.where(candidate == at, ids, 0), 0)
            tl.store(words_ptr + out + TOP_IDS + 2 * k, best_id.to(tl.int64))
            tl.store(floats_ptr + out + TOP_VALUES + 2 * k, ((best - top) - total).to(tl.float64))
            left = left & (candidate != at)
