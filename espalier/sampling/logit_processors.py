"""What changes logits before a token is drawn: bias, bans and penalties."""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import unpack
from espalier.slots import BatchState


@dataclass(frozen=True)
class SamplingNeeds:
    """What a batch needs, known to the host at launch; all off is plain argmax.

    sampled: some temperature is above 0; filtered: some top-k, top-p or min-p is in force; penalised: some penalty;
    biased: some logit_bias or min_tokens.
    """

    sampled: bool = False
    filtered: bool = False
    penalised: bool = False
    biased: bool = False

    @property
    def any(self) -> bool:
        return self.sampled or self.filtered or self.penalised or self.biased


@dataclass(frozen=True)
class Above:
    """Drafted tokens between the root and the rows of a batch.

    tokens: [B, E], -1 for none; ancestor_bits: [B, Q, W] int64, bits of those that stand above each row, its own
    included.
    """

    tokens: Tensor
    ancestor_bits: Tensor

    def mask(self) -> Tensor:
        """[B, Q, E] bool."""
        return unpack(self.ancestor_bits, self.tokens.shape[1])


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of a batch, [B] each unless said; see SamplingParams.

    bias_ids, bias_values: [B, NB], padded by 0 and 0; stop_ids: [B, NS], padded by -1, banned for tokens drawn at
    positions below min_position; counts: [B, V], output tokens up to the root; seen: [B, V], tokens of the prompt.
    Those that only bias or penalties read are None where the batch has none.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    repetition: Tensor | None
    presence: Tensor | None
    frequency: Tensor | None
    counts: Tensor | None
    seen: Tensor | None
    bias_ids: Tensor | None
    bias_values: Tensor | None
    stop_ids: Tensor | None
    min_position: Tensor | None

    @classmethod
    def gather(cls, slots: BatchState, needs: SamplingNeeds) -> "SamplingRows":
        table, index = slots.table, slots.index

        def rows(value: Tensor, needed: bool = True) -> Tensor | None:
            return value[index] if needed else None

        return cls(
            temperature=table.temperature[index],
            top_k=table.top_k[index],
            top_p=table.top_p[index],
            min_p=table.min_p[index],
            seed=table.seed[index],
            repetition=rows(table.repetition, needs.penalised),
            presence=rows(table.presence, needs.penalised),
            frequency=rows(table.frequency, needs.penalised),
            counts=rows(table.counts, needs.penalised),
            seen=rows(table.seen, needs.penalised),
            bias_ids=rows(table.bias_ids, needs.biased),
            bias_values=rows(table.bias_values, needs.biased),
            stop_ids=rows(table.stop_ids, needs.biased),
            min_position=rows(table.min_position, needs.biased),
        )


def shape(
    logits: Tensor, rows: SamplingRows, needs: SamplingNeeds, positions: Tensor, above: Above | None = None
) -> Tensor:
    """Bias and bans, then penalties: logits [B, Q, V] of tokens drawn at positions [B, Q]; float32, float64 stays.

    What stands above a row counts as output.  The repetition penalty is over prompt and output (Keskar et al. 2019),
    the others over output alone.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if needs.biased:
        logits = _banned(_biased(logits, rows), rows, positions)
    if needs.penalised:
        logits = _penalised(logits, rows, _counts(rows, logits.shape[1], above))
    return logits


def _biased(logits: Tensor, rows: SamplingRows) -> Tensor:
    assert rows.bias_ids is not None and rows.bias_values is not None
    bias = logits.new_zeros(logits.shape[0], logits.shape[2])
    return logits + bias.scatter_add_(1, rows.bias_ids, rows.bias_values.to(bias.dtype))[:, None]


def _banned(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    assert rows.stop_ids is not None and rows.min_position is not None
    # One column more takes the padding.
    stops = torch.zeros(logits.shape[0], logits.shape[2] + 1, dtype=torch.bool, device=logits.device)
    stops.scatter_(1, rows.stop_ids.masked_fill(rows.stop_ids < 0, logits.shape[2]), True)
    early = positions < rows.min_position[:, None]
    return logits.masked_fill(stops[:, None, :-1] & early[..., None], -torch.inf)


def _counts(rows: SamplingRows, queries: int, above: Above | None) -> Tensor:
    """[B, Q or 1, V]: how often each token stands in the output before each row."""
    assert rows.counts is not None
    if above is None:
        return rows.counts[:, None]
    counts = rows.counts[:, None].repeat(1, queries, 1)
    there = above.mask() & (above.tokens >= 0)[:, None]
    ids = above.tokens.clamp(min=0)[:, None].expand_as(there)
    return counts.scatter_add_(2, ids, there.to(counts.dtype))


def _penalised(logits: Tensor, rows: SamplingRows, counts: Tensor) -> Tensor:
    assert rows.seen is not None and rows.repetition is not None
    assert rows.presence is not None and rows.frequency is not None
    repetition, presence, frequency = (
        value.to(logits.dtype)[:, None, None] for value in (rows.repetition, rows.presence, rows.frequency)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((counts > 0) | rows.seen[:, None], repeated, logits)
    return logits - (frequency * counts + presence * (counts > 0))
