"""Functions that kernels call to process a block of logits: token mask, logit bias, banned ids, penalties, temperature.

The reference, espalier/sampling/logit_processors.py, has the same operations in the same order.  Launches need
enable_fp_fusion=False, because a fused multiply-add rounds once where the reference rounds twice.  Every row reads the
parameters of its own slot, so one launch serves any mixture of requests, and a row without parameters takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.slots import FLOAT_COLUMNS, INT_COLUMNS, Columns, SlotTable

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# The columns of GatheredSlots: the columns of the slot table, and three more integer columns.
COLUMNS = Columns((*INT_COLUMNS, "slot", "num_bias", "num_stops"), FLOAT_COLUMNS)

# Launchers pass the next three classes as plain tuples, to save time on the host.  Kernels turn them into named tuples.


class LogitsArguments(NamedTuple):
    """The logits of a launch, and for each request the position of the first token that the launch samples."""

    logits_ptr: Any
    batch_stride: Any
    query_stride: Any
    first_position_ptr: Any
    first_position_stride: Any


class SlotArguments(NamedTuple):
    """Pointers to GatheredSlots and to the wide fields of the slot table, and the widths of these fields.

    bias_ids_ptr, bias_values_ptr: the token ids and values of logit_bias.  stop_ids_ptr: the request's stop ids.
    counts_ptr: how often each token is in the output.  seen_ptr: whether it is in the prompt."""

    ints_ptr: Any
    floats_ptr: Any
    bias_ids_ptr: Any
    bias_values_ptr: Any
    stop_ids_ptr: Any
    counts_ptr: Any
    seen_ptr: Any
    num_bias: Any
    num_stops: Any
    vocab: Any


class DraftedArguments(NamedTuple):
    """Drafted tokens, ancestor bits and token masks.  Penalties count only the drafted tokens first_output ..
    num_tokens - 1.

    mask_ptr: token masks, one bit per token.  mask_words: words of a mask; 0: there are no masks."""

    tokens_ptr: Any
    tokens_stride: Any
    ancestor_bits_ptr: Any
    bits_batch_stride: Any
    bits_query_stride: Any
    first_output: Any
    num_tokens: Any
    mask_ptr: Any
    mask_batch_stride: Any
    mask_query_stride: Any
    mask_words: Any


class RowParams(NamedTuple):
    """The sampling parameters of one row.  num_banned: the number of stop ids that are banned at the row's position."""

    num_bias: Any
    bias_ids_ptr: Any
    bias_values_ptr: Any
    num_banned: Any
    stop_ids_ptr: Any
    has_penalties: Any
    counts_ptr: Any
    seen_ptr: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    temperature: Any


class DraftedRow(NamedTuple):
    """The drafted tokens, ancestor bits and mask of one row.  Fields: see DraftedArguments."""

    tokens_ptr: Any
    ancestor_bits_ptr: Any
    first_output: Any
    num_tokens: Any
    mask_ptr: Any
    mask_words: Any


@dataclass(frozen=True)
class GatheredSlots:
    """The sampling parameters of a batch's slots, gathered once per launch.  Fields with many values per slot (bias,
    stop ids, counts) stay in the slot table.

    ints: [B, COLUMNS.num_ints] int64.  floats: [B, COLUMNS.num_floats] float32.  Column `slot` of ints is the slot's
    index.  Columns num_bias and num_stops are the numbers of the slot's biases and stop ids.  arguments: the argument
    that kernels call `slots`, in the order of SlotArguments.
    """

    table: SlotTable
    ints: Tensor
    floats: Tensor
    arguments: tuple[Any, ...]

    @classmethod
    def gather(cls, table: SlotTable, index: Tensor) -> GatheredSlots:
        """Gather the slots `index` [B] int64.  Slot 0, which pads a batch, is greedy and has no other parameters."""
        require("index", index, (-1,), torch.int64, table.ints)
        check_slot_table(table)
        batch = index.shape[0]
        ints = torch.empty(batch, COLUMNS.num_ints, dtype=torch.int64, device=index.device)
        floats = torch.empty(batch, COLUMNS.num_floats, dtype=torch.float32, device=index.device)
        num_bias, num_stops, vocab = table.bias_ids.shape[1], table.stop_ids.shape[1], table.counts.shape[1]
        if batch:
            _gather_kernel[(batch,)](
                *(ints, floats, index, table.ints, table.floats, table.bias_values, table.stop_ids),
                *(index.stride(0), table.ints.shape[1], vocab),
                COLUMNS=COLUMNS, INT_COLUMNS=next_power_of_2(COLUMNS.num_ints),
                FLOAT_COLUMNS=next_power_of_2(COLUMNS.num_floats), NUM_BIAS=num_bias, NUM_STOPS=num_stops,
                BLOCK_BIAS=next_power_of_2(num_bias), BLOCK_STOPS=next_power_of_2(num_stops), num_warps=4,
                **pdl_arguments(chip(index)),
            )  # fmt: skip
        wide_fields = (table.bias_ids, table.bias_values, table.stop_ids, table.counts, table.seen)
        return cls(table, ints, floats, (ints, floats, *wide_fields, num_bias, num_stops, vocab))

    @property
    def batch(self) -> int:
        return self.ints.shape[0]

    @property
    def vocab(self) -> int:
        return self.table.counts.shape[1]


def check_slot_table(table: SlotTable) -> None:
    """Check that the table's fields are contiguous, with the kernels' shapes and dtypes.  Raises EspalierError."""
    slots, vocab = table.ints.shape[0], table.counts.shape[1]
    expected: dict[str, tuple[int, torch.dtype]] = {
        "ints": (len(INT_COLUMNS), torch.int64),
        "floats": (len(FLOAT_COLUMNS), torch.float32),
        "bias_ids": (-1, torch.int64),
        "bias_values": (table.bias_ids.shape[1], torch.float32),
        "stop_ids": (-1, torch.int64),
        "counts": (vocab, torch.int32),
        "seen": (vocab, torch.bool),
    }
    for name, (width, dtype) in expected.items():
        value = getattr(table, name)
        require(f"table.{name}", value, (slots, width), dtype, table.ints)
        if not value.is_contiguous():
            raise EspalierError(f"table.{name} must be contiguous; allocate it whole")


def logits_arguments(logits: Tensor, vocab: int, slots: GatheredSlots, first_positions: Tensor) -> tuple[Any, ...]:
    """Build the kernels' argument `logits`, in the order of LogitsArguments.

    logits: [B, Q, vocab], contiguous in the last dimension; first_positions: [B] int64, the position of the first token
    that the launch samples.  Raises EspalierError for other shapes and dtypes."""
    require("logits", logits, (slots.batch, -1, vocab), None, slots.ints)
    require("first_positions", first_positions, (slots.batch,), torch.int64, slots.ints)
    if logits.dtype not in LOGIT_DTYPES or (vocab > 1 and logits.stride(2) != 1):
        raise EspalierError(
            f"logits are {logits.dtype} of stride {logits.stride(2)} in the vocabulary; give bfloat16, float16, "
            "float32 or float64 whose last dimension is dense"
        )
    return (logits, *logits.stride()[:2], first_positions, first_positions.stride(0))


def drafted_arguments(
    drafted: tuple[Tensor, Tensor] | None,
    first_output: int,
    queries: int,
    slots: GatheredSlots,
    mask: Tensor | None = None,
) -> tuple[Any, ...]:
    """Build the kernels' argument `drafted`, in the order of DraftedArguments.

    drafted: (tokens [B, E], ancestor_bits [B, Q, W]), None for no drafted tokens.  first_output: the index of the first
    token that penalties count.  mask: [B, Q, ceil(V / 32)] int32, bits of allowed tokens; None allows all.  Raises
    EspalierError for other shapes and dtypes.
    """
    placeholder = slots.ints
    mask_arguments: tuple[Any, ...] = (placeholder, 0, 0, 0)
    if mask is not None:
        require("mask", mask, (slots.batch, queries, -(-slots.vocab // 32)), torch.int32, slots.ints)
        if mask.stride(2) != 1:
            raise EspalierError("mask must be dense in its last dimension; allocate it whole")
        mask_arguments = (mask, *mask.stride()[:2], mask.shape[2])
    if drafted is None:
        return (placeholder, 0, placeholder, 0, 0, 0, 0, *mask_arguments)
    tokens, bits = drafted
    require("drafted tokens", tokens, (slots.batch, -1), torch.int64, slots.ints)
    require("drafted ancestor_bits", bits, (slots.batch, queries, -1), torch.int64, slots.ints)
    num_tokens = tokens.shape[1]
    if num_tokens > 64 * bits.shape[2] or tokens.stride(1) != 1 or bits.stride(2) != 1:
        raise EspalierError(
            f"drafted ancestor_bits need a bit for each of {num_tokens} tokens, both dense in their last dimension"
        )
    return (tokens, tokens.stride(0), bits, *bits.stride()[:2], first_output, num_tokens, *mask_arguments)


@kernel
def _gather_kernel(
    ints_ptr, floats_ptr, index_ptr, table_ints_ptr, table_floats_ptr, bias_values_ptr, stop_ids_ptr,
    index_stride, num_table_ints, vocab,
    COLUMNS: tl.constexpr, INT_COLUMNS: tl.constexpr, FLOAT_COLUMNS: tl.constexpr,
    NUM_BIAS: tl.constexpr, NUM_STOPS: tl.constexpr, BLOCK_BIAS: tl.constexpr, BLOCK_STOPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write one row of GatheredSlots per program.  num_table_ints: the number of columns in the table's `ints`."""
    pdl_trigger_and_wait(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(index_ptr + b * index_stride)
    is_real = slot > 0
    bias_entry = tl.arange(0, BLOCK_BIAS)
    values = tl.load(bias_values_ptr + slot * NUM_BIAS + bias_entry, mask=is_real & (bias_entry < NUM_BIAS), other=0.0)
    stop_entry = tl.arange(0, BLOCK_STOPS)
    stop_ids = tl.load(stop_ids_ptr + slot * NUM_STOPS + stop_entry, mask=is_real & (stop_entry < NUM_STOPS), other=-1)
    column = tl.arange(0, INT_COLUMNS)
    ints = tl.load(table_ints_ptr + slot * num_table_ints + column, mask=is_real & (column < num_table_ints), other=0)
    # A top_k of the whole vocabulary means no top_k.
    ints = tl.where((column == COLUMNS.top_k) & (ints >= vocab), 0, ints)
    ints = tl.where(column == COLUMNS.slot, slot, ints)
    ints = tl.where(column == COLUMNS.num_bias, tl.max(tl.where(values != 0.0, bias_entry + 1, 0), 0), ints)
    ints = tl.where(column == COLUMNS.num_stops, tl.max(tl.where(stop_ids >= 0, stop_entry + 1, 0), 0), ints)
    tl.store(ints_ptr + b * COLUMNS.num_ints + column, ints, mask=column < COLUMNS.num_ints)
    column = tl.arange(0, FLOAT_COLUMNS)
    is_float_column = column < COLUMNS.num_floats
    floats = tl.load(table_floats_ptr + slot * COLUMNS.num_floats + column, mask=is_real & is_float_column, other=0.0)
    tl.store(floats_ptr + b * COLUMNS.num_floats + column, floats, mask=is_float_column)


@kernel
def load_row_arguments(launch_row, queries, offset, logits, slots, drafted, COLUMNS: tl.constexpr):
    """Returns (request, pointer to the logits, position of the token, RowParams, DraftedRow) of a row of the launch.

    launch_row: request · queries + query.  offset: the row's position minus the first position of its request.
    logits, slots, drafted: LogitsArguments, SlotArguments, DraftedArguments."""
    b = launch_row // queries
    q = launch_row % queries
    position = tl.load(logits.first_position_ptr + b * logits.first_position_stride) + offset
    drafted_row = DraftedRow(
        tokens_ptr=drafted.tokens_ptr + b * drafted.tokens_stride,
        ancestor_bits_ptr=drafted.ancestor_bits_ptr + b * drafted.bits_batch_stride + q * drafted.bits_query_stride,
        first_output=drafted.first_output, num_tokens=drafted.num_tokens,
        mask_ptr=drafted.mask_ptr + b * drafted.mask_batch_stride + q * drafted.mask_query_stride,
        mask_words=drafted.mask_words,
    )  # fmt: skip
    logits_ptr = logits.logits_ptr + b * logits.batch_stride + q * logits.query_stride
    return b, logits_ptr, position, load_row_params(b, position, slots, COLUMNS), drafted_row


@kernel
def load_row_params(b, position, slots, COLUMNS: tl.constexpr):
    """Returns the RowParams for a token that is sampled at `position` in row b of the batch."""
    ints = slots.ints_ptr + b * COLUMNS.num_ints
    floats = slots.floats_ptr + b * COLUMNS.num_floats
    slot = tl.load(ints + COLUMNS.slot)
    is_early = position < tl.load(ints + COLUMNS.min_position)
    return RowParams(
        num_bias=tl.load(ints + COLUMNS.num_bias).to(tl.int32), bias_ids_ptr=slots.bias_ids_ptr + slot * slots.num_bias,
        bias_values_ptr=slots.bias_values_ptr + slot * slots.num_bias,
        num_banned=tl.where(is_early, tl.load(ints + COLUMNS.num_stops), 0).to(tl.int32),
        stop_ids_ptr=slots.stop_ids_ptr + slot * slots.num_stops, has_penalties=tl.load(ints + COLUMNS.has_penalties),
        counts_ptr=slots.counts_ptr + slot * slots.vocab, seen_ptr=slots.seen_ptr + slot * slots.vocab,
        repetition_penalty=tl.load(floats + COLUMNS.repetition_penalty),
        presence_penalty=tl.load(floats + COLUMNS.presence_penalty),
        frequency_penalty=tl.load(floats + COLUMNS.frequency_penalty),
        temperature=tl.load(floats + COLUMNS.temperature),
    )  # fmt: skip


@kernel
def leaves_logits_unchanged(row):
    """Returns whether process_logits leaves the row's logits unchanged, except for the mask.  row: RowParams."""
    return (row.num_bias == 0) & (row.num_banned == 0) & (row.has_penalties == 0) & ~(row.temperature > 0)


@kernel
def divide_exactly(x, y):
    """Returns x / y, correctly rounded.  Triton's `/` of float32 is not correctly rounded."""
    if x.dtype == tl.float32:
        ratio = tl.div_rn(x, y)
    else:
        ratio = x / y
    return ratio


@kernel
def process_logits(x, ids, is_token, row, drafted):
    """Apply mask, bias, bans, penalties and temperature to logits x of token ids [BLOCK], in the dtype of x.

    x: [BLOCK], or [BLOCK, n] for n rows with the same parameters.  is_token: [BLOCK]; where it is false, the caller
    sets x to -inf, and x stays -inf.  row, drafted: RowParams, DraftedRow."""
    exact: tl.constexpr = x.dtype
    if drafted.mask_words > 0:
        word = tl.load(drafted.mask_ptr + ids // 32, mask=is_token, other=0)
        x = tl.where(as_column((word >> (ids % 32)) & 1 != 0, x), x, float("-inf"))
    for e in range(row.num_bias):
        biased_x = x + tl.load(row.bias_values_ptr + e).to(exact)
        x = tl.where(as_column(ids == tl.load(row.bias_ids_ptr + e), x), biased_x, x)
    for e in range(row.num_banned):
        x = tl.where(as_column(ids == tl.load(row.stop_ids_ptr + e), x), float("-inf"), x)
    if row.has_penalties != 0:
        counts = tl.load(row.counts_ptr + ids, mask=is_token, other=0)
        for e in range(drafted.first_output, drafted.num_tokens):
            is_ancestor = (tl.load(drafted.ancestor_bits_ptr + e // 64) >> (e % 64)) & 1
            counts += ((ids == tl.load(drafted.tokens_ptr + e)) & (is_ancestor != 0)).to(tl.int32)
        is_seen = as_column(tl.load(row.seen_ptr + ids, mask=is_token, other=0) != 0, x)
        counts = as_column(counts, x)
        is_counted = counts > 0
        factor = tl.zeros_like(x) + row.repetition_penalty.to(exact)
        x = tl.where(is_counted | is_seen, tl.where(x > 0, divide_exactly(x, factor), x * factor), x)
        frequency, presence = row.frequency_penalty.to(exact), row.presence_penalty.to(exact)
        x = x - (frequency * counts.to(exact) + presence * is_counted.to(exact))
    if row.temperature > 0:
        x = divide_exactly(x, tl.zeros_like(x) + row.temperature.to(exact))
    return x


@kernel
def as_column(values, x):
    """Returns `values` [BLOCK] in a shape that broadcasts with x [BLOCK] or [BLOCK, n].  Callers load values with one
    dimension, because a two-dimensional load would give x a layout in which sums over BLOCK are slow."""
    if len(x.shape) == 2:
        values = values[:, None]
    return values
