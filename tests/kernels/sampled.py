"""Batches that sample in every way, for the kernels that pick and that score children."""

from collections.abc import Mapping, Sequence

import torch

from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.ops.state import gather_slots
from espalier.kernels.sampling.logit_processors import GatheredSlots
from espalier.layout import RoundLayout
from espalier.request import ResolvedParams
from espalier.sampling.logit_processors import DraftedAncestors, SamplingFeatures, SlotSamplingParams
from espalier.sampling.pick import gumbel
from espalier.slots import BatchState, SlotTable

ALL_SAMPLING_FEATURES = SamplingFeatures(sampled=True, filtered=True, penalised=True, biased=True)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}

# What a row may ask for; the kernels serve them all in one launch.
ASKED: tuple[Mapping[str, float], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 1_000_000, "top_p": 1e-6},
    {**PENALTIES, "bias": 3, "stops": 2},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "bias": 4, **PENALTIES},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "stops": 3, "repetition_penalty": 0.8, "presence_penalty": -0.5},
    {"temperature": 1e-3, "frequency_penalty": -0.3, "bias": 1},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.99},
)


def table_of(asked: Sequence[Mapping[str, float]], vocab: int, device: torch.device, seed: int = 0) -> SlotTable:
    """Slot i + 1 asks for asked[i]: the number of bias entries and of stop ids are drawn where it says how many."""
    layout = RoundLayout(max(len(asked), 1), 2, 2, 4, 16, 64, 1, 32)
    table = SlotTable(layout, vocab, {}, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    table.stop_ids.fill_(-1)
    for slot, params in enumerate(asked, 1):
        numbers = {name: value for name, value in params.items() if name not in ("bias", "stops")}
        for name, value in ResolvedParams(**{"temperature": 0.0, **numbers}).slot_values().items():
            getattr(table, name)[slot] = value
        table.seed[slot] = int(torch.randint(2**62, (), generator=generator))
        num_bias, num_stops = min(int(params.get("bias", 0)), vocab), min(int(params.get("stops", 0)), vocab - 1)
        ids = torch.randperm(vocab, generator=generator)
        table.bias_ids[slot, :num_bias] = ids[:num_bias]
        table.bias_values[slot, :num_bias] = 4 * torch.randn(num_bias, generator=generator)
        table.stop_ids[slot, :num_stops] = ids[-num_stops:] if num_stops else ids[:0]
        table.min_position[slot] = 100
        table.counts[slot] = torch.randint(-2, 3, (vocab,), generator=generator).clamp(min=0)
        table.seen[slot] = torch.rand(vocab, generator=generator) < 0.3
    moved = SlotTable(layout, vocab, {}, torch.float32, device)
    for name in ("ints", "floats", "bias_ids", "bias_values", "stop_ids", "counts", "seen"):
        getattr(moved, name).copy_(getattr(table, name))
    return moved


def slots_of(table: SlotTable, index: Sequence[int]) -> BatchState:
    return gather_slots(table, torch.tensor(index, dtype=torch.int64, device=table.root.device))


def reference_rows(slots: BatchState) -> SlotSamplingParams:
    return SlotSamplingParams.gather(slots, ALL_SAMPLING_FEATURES)


def kernel_rows(slots: BatchState) -> GatheredSlots:
    return GatheredSlots.gather(slots.table, slots.index)


def noise_at(slots: BatchState, positions: torch.Tensor, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    return gumbel(slots.table.seed[slots.index], positions, vocab, torch.promote_types(dtype, torch.float32))


def random_above(
    batch: int, queries: int, extra: int, vocab: int, device: torch.device, seed: int = 0
) -> DraftedAncestors:
    """Drafted tokens, some void, above a row at random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, vocab, (batch, extra), generator=generator)
    on_path = torch.rand(batch, queries, extra, generator=generator) < 0.4
    return DraftedAncestors(tokens.to(device), pack_bits(on_path).to(device))


def random_logits(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)
