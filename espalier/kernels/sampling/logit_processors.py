"""What changes logits before a token is drawn, block by block inside a kernel: bias, bans, penalties, temperature.

The reference is espalier/sampling/logit_processors.py, operation by operation (launch with enable_fp_fusion=False: a
fused multiply-add rounds once where the reference rounds twice).  Every row reads what its own slot asks for, so one
launch serves a batch of any mixture and a row that asks for nothing does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if
from espalier.slots import SlotTable

if TYPE_CHECKING:
    import triton.language as tl

LOGITS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NUM_INTS = 8
NUM_FLOATS = 8
INTS = ("top_k", "seed", "min_position")
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


@dataclass(frozen=True)
class SlotRows:
    """Sampling parameters of a batch, gathered once a launch; the wide fields stay in the table.

    ints [B, 8] int64: slot, seed, top_k, min_position, number of bias entries, number of stop ids, whether penalties
    and whether filters are in force.  floats [B, 8] float32: temperature, top_p, min_p, repetition, presence,
    frequency.
    """

    table: SlotTable
    ints: Tensor
    floats: Tensor

    @classmethod
    def gather(cls, table: SlotTable, index: Tensor) -> SlotRows:
        """Rows of the slots `index` [B] int64.  Slot 0, which pads a batch, is greedy and unshaped."""
        require("index", index, (-1,), torch.int64, table.temperature)
        check_table(table)
        batch = index.shape[0]
        ints = torch.empty(batch, NUM_INTS, dtype=torch.int64, device=index.device)
        floats = torch.empty(batch, NUM_FLOATS, dtype=torch.float32, device=index.device)
        if batch:
            num_bias, num_stops = table.bias_ids.shape[1], table.stop_ids.shape[1]
            _gather_kernel[(batch,)](
                ints,
                floats,
                index,
                index.stride(0),
                *(getattr(table, name) for name in (*INTS, *FLOATS)),
                table.top_k.stride(0),
                table.temperature.stride(0),
                table.bias_values,
                table.stop_ids,
                table.counts.shape[1],
                NUM_BIAS=num_bias,
                NUM_STOPS=num_stops,
                BIAS=power_of_two(num_bias),
                STOPS=power_of_two(num_stops),
                num_warps=4,
                **early(chip(index)),
            )
        return cls(table, ints, floats)

    @property
    def batch(self) -> int:
        return self.ints.shape[0]

    @property
    def vocab(self) -> int:
        return self.table.counts.shape[1]

    def arguments(self) -> tuple[Any, ...]:
        """The kernels' argument `slots`."""
        table = self.table
        wide = (table.bias_ids, table.bias_values, table.stop_ids, table.counts, table.seen)
        return (self.ints, self.floats, *wide, *(value.shape[1] for value in wide[1:4]))


def check_table(table: SlotTable) -> None:
    """Scalars of one type share a stride, the wide fields are dense: what the kernels address them by."""
    slots, like = table.temperature.shape[0], table.temperature
    for names, dtype in ((INTS, torch.int64), (FLOATS, torch.float32)):
        for name in names:
            value = getattr(table, name)
            require(f"table.{name}", value, (slots,), dtype, like)
            if value.stride() != getattr(table, names[0]).stride():
                raise EspalierError(f"table.{name} and table.{names[0]} differ in stride; allocate them alike")
    vocab = table.counts.shape[1]
    wide: dict[str, tuple[int, torch.dtype]] = {
        "bias_ids": (-1, torch.int64),
        "bias_values": (table.bias_ids.shape[1], torch.float32),
        "stop_ids": (-1, torch.int64),
        "counts": (vocab, torch.int32),
        "seen": (vocab, torch.bool),
    }
    for name, (width, dtype) in wide.items():
        value = getattr(table, name)
        require(f"table.{name}", value, (slots, width), dtype, like)
        if not value.is_contiguous():
            raise EspalierError(f"table.{name} must be contiguous; allocate it whole")


def logits_arguments(logits: Tensor, vocab: int, rows: SlotRows, first: Tensor) -> tuple[Any, ...]:
    """The kernels' argument `logits`, checked: [B, Q, vocab], dense in the last, of tokens from `first` [B] on."""
    require("logits", logits, (rows.batch, -1, vocab), None, rows.ints)
    require("first", first, (rows.batch,), torch.int64, rows.ints)
    if logits.dtype not in LOGITS or (vocab > 1 and logits.stride(2) != 1):
        raise EspalierError(
            f"logits are {logits.dtype} of stride {logits.stride(2)} in the vocabulary; give bfloat16, float16, "
            "float32 or float64 whose last dimension is dense"
        )
    return (logits, logits.stride(0), logits.stride(1), first, first.stride(0))


def above_arguments(
    above: tuple[Tensor, Tensor] | None, first: int, queries: int, rows: SlotRows, mask: Tensor | None = None
) -> tuple[Any, ...]:
    """The kernels' argument `above`, checked: (tokens [B, E], ancestor_bits [B, Q, W]) of which `first` and those after
    it count, None for nothing; mask [B, Q, ceil(V / 32)] int32 of the tokens allowed, None for all."""
    masks: tuple[Any, ...] = (rows.ints, 0, 0, 0)
    if mask is not None:
        require("mask", mask, (rows.batch, queries, -(-rows.vocab // 32)), torch.int32, rows.ints)
        if mask.stride(2) != 1:
            raise EspalierError("mask must be dense in its last dimension; allocate it whole")
        masks = (mask, *mask.stride()[:2], mask.shape[2])
    if above is None:
        return (rows.ints, 0, rows.ints, 0, 0, 0, 0, *masks)
    tokens, ancestor_bits = above
    require("above.tokens", tokens, (rows.batch, -1), torch.int64, rows.ints)
    require("above.words", ancestor_bits, (rows.batch, queries, -1), torch.int64, rows.ints)
    num_above = tokens.shape[1]
    if num_above > 64 * ancestor_bits.shape[2] or tokens.stride(1) != 1 or ancestor_bits.stride(2) != 1:
        raise EspalierError(f"above needs a bit for each of {num_above} tokens, both dense in their last dimension")
    return (
        tokens,
        tokens.stride(0),
        ancestor_bits,
        ancestor_bits.stride(0),
        ancestor_bits.stride(1),
        first,
        num_above,
        *masks,
    )


@kernel
def _gather_kernel(
    ints_ptr,
    floats_ptr,
    index_ptr,
    index_stride,
    top_k_ptr,
    seed_ptr,
    min_position_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    int_stride,
    float_stride,
    bias_values_ptr,
    stop_ids_ptr,
    vocab,
    NUM_BIAS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BIAS: tl.constexpr,
    STOPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    pdl_wait_if(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(index_ptr + b * index_stride)
    real = slot > 0
    top_k = tl.load(top_k_ptr + slot * int_stride)
    temperature = tl.where(real, tl.load(temperature_ptr + slot * float_stride), 0.0)
    top_p = tl.load(top_p_ptr + slot * float_stride)
    min_p = tl.load(min_p_ptr + slot * float_stride)
    repetition = tl.load(repetition_ptr + slot * float_stride)
    presence = tl.load(presence_ptr + slot * float_stride)
    frequency = tl.load(frequency_ptr + slot * float_stride)
    entry = tl.arange(0, BIAS)
    values = tl.load(bias_values_ptr + slot * NUM_BIAS + entry, mask=entry < NUM_BIAS, other=0.0)
    num_bias = tl.max(tl.where(values != 0.0, entry + 1, 0), 0)
    stop = tl.arange(0, STOPS)
    stop_ids = tl.load(stop_ids_ptr + slot * NUM_STOPS + stop, mask=stop < NUM_STOPS, other=-1)
    num_stops = tl.max(tl.where(stop_ids >= 0, stop + 1, 0), 0)
    penalised = real & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0))
    cuts_k = (top_k > 0) & (top_k < vocab)
    filtered = (temperature > 0.0) & (cuts_k | (top_p < 1.0) | (min_p > 0.0))
    ints = ints_ptr + b * 8
    tl.store(ints, slot)
    tl.store(ints + 1, tl.load(seed_ptr + slot * int_stride))
    tl.store(ints + 2, tl.where(cuts_k, top_k, 0))
    tl.store(ints + 3, tl.load(min_position_ptr + slot * int_stride))
    tl.store(ints + 4, tl.where(real, num_bias, 0).to(tl.int64))
    tl.store(ints + 5, tl.where(real, num_stops, 0).to(tl.int64))
    tl.store(ints + 6, penalised.to(tl.int64))
    tl.store(ints + 7, filtered.to(tl.int64))
    floats = floats_ptr + b * 8
    tl.store(floats, temperature)
    tl.store(floats + 1, top_p)
    tl.store(floats + 2, min_p)
    tl.store(floats + 3, repetition)
    tl.store(floats + 4, presence)
    tl.store(floats + 5, frequency)


@kernel
def row_of(out, queries, offset, logits, slots, above):
    """(row of the batch, its logits, position drawn at, what shapes it, what stands above it) of row `out` of a launch.

    logits, slots, above: tuples, as logits_arguments, SlotRows.arguments and above_arguments make them.
    """
    logits_ptr, batch_stride, query_stride, first_ptr, first_stride = logits
    tokens_ptr, tokens_stride, words_ptr, words_batch_stride, words_query_stride, first_above, num_above = above[:7]
    mask_ptr, mask_batch_stride, mask_query_stride, mask_words = above[7:]
    b = out // queries
    q = out % queries
    position = tl.load(first_ptr + b * first_stride) + offset
    words_ptr += b * words_batch_stride + q * words_query_stride
    mask_ptr += b * mask_batch_stride + q * mask_query_stride
    hanging = (tokens_ptr + b * tokens_stride, words_ptr, first_above, num_above, mask_ptr, mask_words)
    return b, logits_ptr + b * batch_stride + q * query_stride, position, slot_row(b, position, slots), hanging


@kernel
def slot_row(b, position, slots):
    """What shapes a token drawn at `position` in row b of the batch, as shaped() takes it."""
    ints_ptr, floats_ptr, bias_ids_ptr, bias_values_ptr, stop_ids_ptr, counts_ptr, seen_ptr = slots[:7]
    num_bias, num_stops, vocab = slots[7:]
    ints = ints_ptr + b * 8
    floats = floats_ptr + b * 8
    slot = tl.load(ints)
    banned = tl.where(position < tl.load(ints + 3), tl.load(ints + 5), 0)
    return (
        tl.load(ints + 4).to(tl.int32),
        bias_ids_ptr + slot * num_bias,
        bias_values_ptr + slot * num_bias,
        banned.to(tl.int32),
        stop_ids_ptr + slot * num_stops,
        tl.load(ints + 6),
        counts_ptr + slot * vocab,
        seen_ptr + slot * vocab,
        tl.load(floats + 3),
        tl.load(floats + 4),
        tl.load(floats + 5),
        tl.load(floats),
    )


@kernel
def leaves_as_it_is(row):
    """Whether a row asks for nothing, so that shaped() gives its logits back.  row: as slot_row gives it."""
    return (row[0] == 0) & (row[3] == 0) & (row[5] == 0) & ~(row[11] > 0)


@kernel
def divided(x, y):
    """x / y, correctly rounded; a plain `/` of float32 is not."""
    if x.dtype == tl.float32:
        ratio = tl.div_rn(x, y)
    else:
        ratio = x / y
    return ratio


@kernel
def shaped(x, ids, inside, row, above):
    """Mask, bias, bans, penalties, temperature: logits x of token ids [BLOCK], in the dtype that x has.

    Lanes that are not `inside` hold -inf and keep it.  row, above: as row_of gives them.
    """
    (
        num_bias,
        bias_ids_ptr,
        bias_values_ptr,
        num_banned,
        stop_ids_ptr,
        penalised,
        counts_ptr,
        seen_ptr,
        repetition,
        presence,
        frequency,
        temperature,
    ) = row
    tokens_ptr, words_ptr, first_above, num_above, mask_ptr, mask_words = above
    exact: tl.constexpr = x.dtype
    if mask_words > 0:
        word = tl.load(mask_ptr + ids // 32, mask=inside, other=0)
        x = tl.where((word >> (ids % 32)) & 1 != 0, x, float("-inf"))
    for e in range(num_bias):
        x = tl.where(ids == tl.load(bias_ids_ptr + e), x + tl.load(bias_values_ptr + e).to(exact), x)
    for e in range(num_banned):
        x = tl.where(ids == tl.load(stop_ids_ptr + e), float("-inf"), x)
    if penalised != 0:
        counts = tl.load(counts_ptr + ids, mask=inside, other=0)
        for e in range(first_above, num_above):
            there = (tl.load(words_ptr + e // 64) >> (e % 64)) & 1
            counts += ((ids == tl.load(tokens_ptr + e)) & (there != 0)).to(tl.int32)
        counted = counts > 0
        seen = tl.load(seen_ptr + ids, mask=inside, other=0) != 0
        factor = tl.zeros_like(x) + repetition.to(exact)
        x = tl.where(counted | seen, tl.where(x > 0, divided(x, factor), x * factor), x)
        x = x - (frequency.to(exact) * counts.to(exact) + presence.to(exact) * counted.to(exact))
    if temperature > 0:
        x = divided(x, tl.zeros_like(x) + temperature.to(exact))
    return x
