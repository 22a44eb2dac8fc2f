"""P-EAGLE heads on the GPU: every property, and graphs against the same lines run eagerly."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from espalier.layout import RoundLayout, TreeShape
from espalier.request import SamplingParams
from tests.gpu.conftest import BATCHES, EQUALITIES
from tests.gpu.engines import DeviceSetup, dense_of, loaded, rounded
from tests.gpu.traffic import mixed, run_staggered
from tests.gpu.twin import twins
from tests.gpu.watching import DeviceWatch
from tests.harness import MAX_POSITIONS, prompts, request
from tests.peagle import peagle_directories
from tests.properties.peagle_setup import PEagleReference
from tests.properties.watch import run_watched

pytestmark = pytest.mark.gpu

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@lru_cache
def files(family: str) -> tuple[Path, Path]:
    return rounded(peagle_directories(family))


@dataclass(frozen=True)
class DevicePEagle(DeviceSetup):
    algorithm: str = "peagle"

    @property
    def layout(self) -> RoundLayout:
        return replace(super().layout, block_rows=15)

    @property
    def paths(self) -> tuple[Path, Path]:
        return files(self.family)

    @property
    def reference(self) -> PEagleReference:
        target, draft = loaded(self.paths, True, torch.float64, torch.device("cpu"), MAX_POSITIONS)
        assert draft is not None
        return PEagleReference(target, draft)


SETUP = DevicePEagle(page_size=4, topk=3, steps=5, num_draft_tokens=24, max_batch=3, max_context=64, chunk_size=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ("llama", "deepseek_v3"))
def test_every_property_holds(family, dtype, put_on_record):
    family = dense_of(family) if dtype == "bf16" and family != "llama" else family
    watch = DeviceWatch(replace(SETUP, family=family, dtype=DTYPES[dtype]))
    trunk = prompts(31, [23])[0]
    given = [trunk, *prompts(31, [1, 2, 9]), trunk[:13], [*trunk[:8], 3], trunk]
    style = {"temperature": 3.0, "max_tokens": 14}
    figures = run_watched(watch, [request(i, prompt, SamplingParams(**style)) for i, prompt in enumerate(given)])
    put_on_record(EQUALITIES, {"name": f"{family}, P-EAGLE, {dtype}", **figures})


@pytest.mark.parametrize("graph_batch", [None, 2], ids=["graphs", "batches above the largest graph"])
def test_every_launch_leaves_the_same_bits(graph_batch, put_on_record):
    """Results are read from the same place whether a graph ran or not."""
    trees = ((4, TreeShape(1, 2, 3)),)
    setup = replace(SETUP, max_batch=6, dtype=torch.bfloat16, graph_batch=graph_batch, overlap=False, trees=trees)
    one = setup.engine()
    twin = twins(one, setup.engine())
    run_staggered(one, mixed(13, max_tokens=14), every=3)
    put_on_record(BATCHES, {"replayed": {str(batch): rounds for batch, rounds in twin.replayed.items()}})
    assert twin.num_eager > 0 and max(twin.replayed) <= (graph_batch or 6)
