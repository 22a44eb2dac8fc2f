"""Prints, as JSON, where a sampling parameter `top_a` shows up that only espalier/request.py declares.

A program of its own, over a copy of the package that has such a parameter (test_columns.py).
"""

import json
from argparse import ArgumentParser

import torch
import triton.language as tl

from espalier.engine.launch_input import slot_init
from espalier.errors import EspalierError
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.sampling.logit_processors import COLUMNS, GatheredSlots
from espalier.kernels.sampling.pick import sample_triton
from espalier.request import Request, ResolvedParams, SamplingParams
from espalier.sampling.pick import pick
from espalier.server.openai import ChatRequest
from espalier.slots import SlotTable
from espalier.terminal.flags import add_sampling_flags
from tests.interpreter import adapt_interpreter
from tests.kernels.sampled import (
    ALL_SAMPLING_FEATURES,
    ASKED,
    noise_at,
    random_logits,
    reference_rows,
    slots_of,
    table_of,
)

VOCAB = 48


@kernel
def _read_kernel(out_ptr, floats_ptr, COLUMNS: tl.constexpr):
    b = tl.program_id(0)
    tl.store(out_ptr + b, tl.load(floats_ptr + b * COLUMNS.num_floats + COLUMNS.top_a))


def refusal() -> str:
    try:
        SamplingParams(top_a=2.0)
    except EspalierError as error:
        return str(error)
    return ""


def flags() -> list[str]:
    parser = ArgumentParser()
    add_sampling_flags(parser, 16)
    return [flag for action in parser._actions for flag in action.option_strings]


def admitted(table: SlotTable) -> tuple[float, float]:
    """The value in the slot table, and the value that a kernel reads from the rows of a batch."""
    request = Request("r", [1], ResolvedParams(top_a=0.75), 0, 0, slot=2)
    update = table.init_updates([slot_init(request, [1], 0, 0, 9, 3)])["floats"]
    table.write(
        {"floats": update._replace(indices=torch.from_numpy(update.indices), values=torch.from_numpy(update.values))}
    )
    out, rows = torch.zeros(2), GatheredSlots.gather(table, torch.tensor([1, 2]))
    _read_kernel[(2,)](out, rows.floats, COLUMNS=COLUMNS)
    return table.top_a[2].item(), out[1].item()


def agrees() -> bool:
    """Whether the kernels pick the reference's tokens: each column is where both look for it."""
    slots = slots_of(table_of(ASKED, VOCAB, torch.device("cpu")), range(1, len(ASKED) + 1))
    logits, first = random_logits(0, len(ASKED), 1, VOCAB), torch.full((len(ASKED),), 97)
    positions = first[:, None]
    noise = noise_at(slots, positions, VOCAB, logits.dtype)
    expected = pick(logits, reference_rows(slots), ALL_SAMPLING_FEATURES, positions, noise)
    rows = GatheredSlots.gather(slots.table, slots.index)
    return torch.equal(sample_triton(logits, rows, first, torch.zeros_like(positions))[0], expected.tokens)


if __name__ == "__main__":
    adapt_interpreter()
    in_table, in_kernel = admitted(table_of(({}, {}), VOCAB, torch.device("cpu")))
    shown = {"column": in_table, "kernel": in_kernel, "neutral": ResolvedParams().slot_values()["top_a"]}
    shown |= {"has_filters": ResolvedParams(top_a=0.75).has_filters, "refusal": refusal(), "agrees": agrees()}
    shown |= {"flag": "--top-a" in flags(), "api": ChatRequest.model_fields["top_a"].description}
    shown["resolved"] = SamplingParams().resolve({"top_a": 0.25}, ()).top_a
    print(json.dumps(shown))
