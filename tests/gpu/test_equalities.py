"""The three equalities of docs/design.md on the device, after every launch, in float64 and in float32; in bf16 those of
committed rows and of what a slot carries, under teacher forcing: the oracle reads what the engine has said.

Pages are spoilt with NaN as they change hands, so that a row that is read before it is decided shows.
"""

from dataclasses import replace

import pytest
import torch

from espalier.request import SamplingParams
from tests.gpu.conftest import EQUALITIES
from tests.gpu.engines import DeviceSetup, dense_of
from tests.gpu.watching import DeviceWatch, attention_kernels
from tests.harness import prompts, request
from tests.properties.layouts import Cell, latent_cells, pairwise_cells
from tests.properties.watch import run_watched

pytestmark = pytest.mark.gpu

EAGLE = [cell for cell in pairwise_cells() if cell.algorithm == "eagle3" and cell.steps]
NGRAM = [cell for cell in pairwise_cells() if cell.algorithm == "ngram" and cell.steps]
# Every page size, number of branches, depth and window among them; what the CPU runs in full.
CELLS = [*EAGLE[1::2], *NGRAM[2::6], *latent_cells()[1::4]]


def on_device(cell: Cell, dtype: torch.dtype, attention: str) -> DeviceSetup:
    settings = {**vars(cell.setup), "dtype": dtype, "attention": attention, "kv_scales": False}
    if dtype != torch.float64:
        # A row that differs in its last bit may be rounded to another FP8 value.
        settings |= {"kv_dtype": "auto", "draft_kv_dtype": "auto"}
    if dtype == torch.bfloat16 and cell.experts:
        settings["family"] = dense_of(cell.family)
    return DeviceSetup(**settings)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_they_hold_in_float64(cell, put_on_record):
    watch = DeviceWatch(on_device(cell, torch.float64, "reference"))
    put_on_record(EQUALITIES, {"name": "torch.float64 reference", **run_watched(watch, cell.traffic)})


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_they_hold_where_numbers_are_rounded(dtype, cell, put_on_record):
    setup = on_device(cell, dtype, "auto")
    with attention_kernels() as launched:
        figures = run_watched(DeviceWatch(setup), cell.traffic)
    assert launched == {"tree_attention"}
    put_on_record(EQUALITIES, {"name": f"{dtype} {setup.backend}", **figures})


DISTURBED = DeviceSetup(
    steps=3, topk=2, num_draft_tokens=9, page_size=2, max_batch=3, max_context=40, chunk_size=16, num_pages=26
)


@pytest.mark.parametrize("graph_batch", [None, 0], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_they_hold_of_requests_that_are_chunked_preempted_and_hit(dtype, graph_batch, put_on_record):
    attention = "reference" if dtype == torch.float64 else "auto"
    watch = DeviceWatch(replace(DISTURBED, dtype=dtype, attention=attention, graph_batch=graph_batch))
    trunk = prompts(31, [23])[0]
    given = [trunk, *prompts(31, [5, 9]), trunk[:13], [*trunk[:8], 3], trunk]
    style = {"temperature": 3.0, "max_tokens": 14, "presence_penalty": 0.6, "repetition_penalty": 1.3}
    figures = run_watched(watch, [request(i, prompt, SamplingParams(**style)) for i, prompt in enumerate(given)])
    assert watch.engine.scheduler.num_preempted > 0
    put_on_record(EQUALITIES, {"name": f"disturbed, {dtype}", **figures})
