"""Batches for sampling: the rows that the slot table would hold for requests."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from espalier.engine.launch_input import slot_init
from espalier.limits import MAX_STOP_IDS
from espalier.request import Request, ResolvedParams
from espalier.sampling.logit_processors import SlotSamplingParams
from espalier.slots import FLOAT_COLUMNS, INT_COLUMNS

NUM_BIAS = 6


def request(
    prompt: Sequence[int] = (0,), output: Sequence[int] = (), seed: int = 0, stop_ids: Sequence[int] = (), **params
) -> Request:
    resolved = ResolvedParams(**params)
    return Request("r", list(prompt), resolved, seed, 0, frozenset(stop_ids), output=list(output))


def rows_of(requests: Sequence[Request], vocab: int) -> SlotSamplingParams:
    """What the slot table holds: counts of the output, the root included."""

    numbers = [slot_init(replace(r, slot=1), r.tokens, 0, 0, 0, 0).numbers for r in requests]

    def padded(values, width: int, rest: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor([[*row, *[rest] * (width - len(row))] for row in values], dtype=dtype)

    return SlotSamplingParams(
        ints=torch.tensor([[row[name] for name in INT_COLUMNS] for row in numbers]),
        floats=torch.tensor([[row[name] for name in FLOAT_COLUMNS] for row in numbers], dtype=torch.float32),
        counts=torch.tensor([[r.output.count(t) for t in range(vocab)] for r in requests], dtype=torch.int32),
        seen=torch.tensor([[t in r.prompt for t in range(vocab)] for r in requests]),
        bias_ids=padded([r.params.logit_bias.keys() for r in requests], NUM_BIAS, 0),
        bias_values=padded([r.params.logit_bias.values() for r in requests], NUM_BIAS, 0, torch.float32),
        stop_ids=padded([sorted(r.stop_ids) for r in requests], MAX_STOP_IDS, -1),
    )


def chi_square_z(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations a chi-square statistic lies above its mean, by its normal limit."""
    degrees = counts.numel() - 1
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    return (statistic - degrees) / (2 * degrees) ** 0.5
