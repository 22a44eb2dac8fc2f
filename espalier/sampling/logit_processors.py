"""Changes to logits before a token is drawn: bias, bans and penalties."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import unpack_bits
from espalier.slots import FLOAT_COLUMNS, INT_COLUMNS, BatchState


@dataclass(frozen=True)
class SamplingFeatures:
    """Which sampling features the requests of a batch need, as the host knows at launch.  If none is needed, the token
    is the argmax of the logits.

    sampled: a temperature above 0.  filtered: top-k, top-p or min-p.  penalised: a penalty.  biased: logit_bias or
    min_tokens."""

    sampled: bool = False
    filtered: bool = False
    penalised: bool = False
    biased: bool = False

    @property
    def any(self) -> bool:
        return self.sampled or self.filtered or self.penalised or self.biased


class DraftedAncestors(NamedTuple):
    """The drafted tokens between the root of a tree and the rows whose logits are processed.

    tokens: [B, E], the E drafted tokens of each request, -1 for none.  ancestor_bits: [B, Q, W] int64, for each of Q
    rows.  Bit e says whether token e is on the path from the root to the row.  The row's own token is on this path."""

    tokens: Tensor
    ancestor_bits: Tensor

    def mask(self) -> Tensor:
        """Returns [B, Q, E] bool: whether each drafted token is on the path from the root to each row."""
        return unpack_bits(self.ancestor_bits, self.tokens.shape[1])


@dataclass(frozen=True)
class SlotSamplingParams:
    """Sampling parameters of a batch: the rows of its slots in the slot table.

    ints: [B, INT_COLUMNS] int64 and floats: [B, FLOAT_COLUMNS] float32; each column is also an attribute, a view [B].
    bias_ids, bias_values: [B, NB], the tokens of logit_bias and the values to add to their logits, padded with 0.
    stop_ids: [B, NS], stop tokens, which are banned at positions below min_position (because of min_tokens), padded
    with -1.  These three tensors are None if the batch has no logit_bias and no min_tokens.
    counts: [B, V], how often each token is in the output up to the root.  seen: [B, V] bool, whether each token is in
    the prompt.  Both are None if the batch has no penalties."""

    ints: Tensor
    floats: Tensor
    counts: Tensor | None
    seen: Tensor | None
    bias_ids: Tensor | None
    bias_values: Tensor | None
    stop_ids: Tensor | None

    if TYPE_CHECKING:

        def __getattr__(self, column: str) -> Tensor: ...

    def __post_init__(self) -> None:
        for names, columns in ((INT_COLUMNS, self.ints), (FLOAT_COLUMNS, self.floats)):
            vars(self).update(zip(names, columns.unbind(1), strict=True))

    @classmethod
    def gather(cls, slots: BatchState, sampling_features: SamplingFeatures) -> "SlotSamplingParams":
        """Reads the rows of a batch's slots.  sampling_features: which processors the batch needs; others get None."""
        table, index = slots.table, slots.index

        def gather_rows(slot_rows: Tensor, is_needed: bool) -> Tensor | None:
            return slot_rows[index] if is_needed else None

        return cls(
            ints=table.ints[index],
            floats=table.floats[index],
            counts=gather_rows(table.counts, sampling_features.penalised),
            seen=gather_rows(table.seen, sampling_features.penalised),
            bias_ids=gather_rows(table.bias_ids, sampling_features.biased),
            bias_values=gather_rows(table.bias_values, sampling_features.biased),
            stop_ids=gather_rows(table.stop_ids, sampling_features.biased),
        )


def process_logits(
    logits: Tensor,
    params: SlotSamplingParams,
    sampling_features: SamplingFeatures,
    positions: Tensor,
    drafted_ancestors: DraftedAncestors | None = None,
) -> Tensor:
    """Apply bias and bans, then penalties.

    logits: [B, Q, V], for tokens at positions [B, Q].  Returns float32 logits; float64 logits stay float64.  Penalties
    count a row's drafted ancestors as output.  The repetition penalty applies to prompt and output (Keskar et al.
    2019), the other penalties to output only."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling_features.biased:
        logits = _ban_stop_tokens(_add_bias(logits, params), params, positions)
    if sampling_features.penalised:
        logits = _penalise(logits, params, _output_counts(params, logits.shape[1], drafted_ancestors))
    return logits


def _add_bias(logits: Tensor, params: SlotSamplingParams) -> Tensor:
    """Adds logit_bias, for every row of a request.  logits: [B, Q, V]."""
    assert params.bias_ids is not None and params.bias_values is not None
    bias = logits.new_zeros(logits.shape[0], logits.shape[2])
    return logits + bias.scatter_add_(1, params.bias_ids, params.bias_values.to(bias.dtype))[:, None]


def _ban_stop_tokens(logits: Tensor, params: SlotSamplingParams, positions: Tensor) -> Tensor:
    """Sets the logits [B, Q, V] of stop tokens at positions before min_position to -inf.  positions: [B, Q]."""
    assert params.stop_ids is not None
    # One extra column receives the padding of stop_ids.
    stops = torch.zeros(logits.shape[0], logits.shape[2] + 1, dtype=torch.bool, device=logits.device)
    stops.scatter_(1, params.stop_ids.masked_fill(params.stop_ids < 0, logits.shape[2]), True)
    early = positions < params.min_position[:, None]
    return logits.masked_fill(stops[:, None, :-1] & early[..., None], -torch.inf)


def _output_counts(params: SlotSamplingParams, num_queries: int, drafted_ancestors: DraftedAncestors | None) -> Tensor:
    """Returns [B, Q, V]: how often each token is in the output before each row.  Without drafted ancestors, all rows
    have equal counts, and the result is [B, 1, V]."""
    assert params.counts is not None
    if drafted_ancestors is None:
        return params.counts[:, None]
    counts = params.counts[:, None].repeat(1, num_queries, 1)
    is_counted = drafted_ancestors.mask() & (drafted_ancestors.tokens >= 0)[:, None]
    ids = drafted_ancestors.tokens.clamp(min=0)[:, None].expand_as(is_counted)
    return counts.scatter_add_(2, ids, is_counted.to(counts.dtype))


def _penalise(logits: Tensor, params: SlotSamplingParams, counts: Tensor) -> Tensor:
    """Applies the penalties to logits [B, Q, V].  counts: [B, Q or 1, V], how often each token is in the output."""
    assert params.seen is not None
    repetition, presence, frequency = (
        value.to(logits.dtype)[:, None, None]
        for value in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    )
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((counts > 0) | params.seen[:, None], penalised, logits)
    return logits - (frequency * counts + presence * (counts > 0))
