"""Block drafts on the GPU: every property, and graphs against the same lines run eagerly."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from espalier.layout import RoundLayout, TreeShape
from espalier.request import SamplingParams
from tests.block import FORMS, block_directories
from tests.gpu.conftest import BATCHES, EQUALITIES
from tests.gpu.engines import DeviceSetup, dense_of, loaded, rounded
from tests.gpu.traffic import mixed, run_staggered
from tests.gpu.twin import twins
from tests.gpu.watching import DeviceWatch
from tests.harness import MAX_POSITIONS, prompts, request
from tests.oracles.plain_block import BlockReference, PlainBlock
from tests.properties.watch import run_watched

pytestmark = pytest.mark.gpu

BLOCK = 7
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
every_form = pytest.mark.parametrize("form", FORMS)


@lru_cache
def files(family: str, form: str) -> tuple[Path, Path]:
    return rounded(block_directories(family, form, BLOCK))


@dataclass(frozen=True)
class DeviceBlock(DeviceSetup):
    algorithm: str = "block"
    form: str = "dflash"

    @property
    def reentry(self) -> int:
        return 0

    @property
    def layout(self) -> RoundLayout:
        return replace(super().layout, block_rows=BLOCK)

    @property
    def paths(self) -> tuple[Path, Path]:
        return files(self.family, self.form)

    @property
    def reference(self) -> BlockReference:
        target, draft = loaded(self.paths, True, torch.float64, torch.device("cpu"), MAX_POSITIONS)
        assert draft is not None
        return BlockReference(target, draft, PlainBlock.load(*self.paths))


SETUP = DeviceBlock(page_size=4, topk=3, steps=5, num_draft_tokens=24, max_batch=3, max_context=64, chunk_size=16)


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ("llama", "deepseek_v3"))
def test_every_property_holds(family, dtype, form, put_on_record):
    family = dense_of(family) if dtype == "bf16" and family != "llama" else family
    watch = DeviceWatch(replace(SETUP, family=family, form=form, dtype=DTYPES[dtype]))
    trunk = prompts(31, [23])[0]
    given = [trunk, *prompts(31, [1, 2, 9]), trunk[:13], [*trunk[:8], 3], trunk]
    style = {"temperature": 3.0, "max_tokens": 14}
    figures = run_watched(watch, [request(i, prompt, SamplingParams(**style)) for i, prompt in enumerate(given)])
    put_on_record(EQUALITIES, {"name": f"{family}, block draft {form}, {dtype}", **figures})


@every_form
@pytest.mark.parametrize("graph_batch", [None, 2], ids=["graphs", "batches above the largest graph"])
def test_every_launch_leaves_the_same_bits(graph_batch, form, put_on_record):
    """Results are read from the same place whether a graph ran or not."""
    trees = ((4, TreeShape(2, 2, 5)),)
    setup = replace(SETUP, form=form, max_batch=6, dtype=torch.bfloat16, graph_batch=graph_batch, overlap=False)
    setup = replace(setup, trees=trees)
    one = setup.engine()
    twin = twins(one, setup.engine())
    run_staggered(one, mixed(13, max_tokens=14), every=3)
    put_on_record(BATCHES, {"replayed": {str(batch): rounds for batch, rounds in twin.replayed.items()}})
    assert twin.num_eager > 0 and max(twin.replayed) <= (graph_batch or 6)
