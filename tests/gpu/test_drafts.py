"""Block drafts, MTP layers and P-EAGLE heads on the GPU: every property, and graphs against the same lines run
eagerly."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from espalier.layout import RoundLayout, TreeShape
from espalier.models import CausalLM, DraftModel
from espalier.request import SamplingParams
from tests.block import FORMS, block_directories
from tests.gpu.conftest import BATCHES, EQUALITIES
from tests.gpu.engines import DeviceSetup, dense_of, loaded, rounded
from tests.gpu.traffic import mixed, run_staggered
from tests.gpu.twin import twins
from tests.gpu.watching import DeviceWatch
from tests.harness import MAX_POSITIONS, prompts, request
from tests.mtp import mtp_directories
from tests.oracles.plain_block import BlockReference, PlainBlock
from tests.oracles.reference_round import Reference
from tests.peagle import peagle_directories
from tests.properties.peagle_setup import PEagleReference
from tests.properties.watch import run_watched

pytestmark = pytest.mark.gpu

BLOCK = 7
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SIZES: Any = {"page_size": 4, "topk": 3, "steps": 5, "num_draft_tokens": 24, "max_batch": 3, "max_context": 64}


@lru_cache
def files(directories: Callable[..., tuple[Path, Path]], *arguments: Any) -> tuple[Path, Path]:
    return rounded(directories(*arguments))


def exact(setup: DeviceSetup) -> tuple[CausalLM, DraftModel]:
    """The models of an oracle."""
    target, draft = loaded(setup.paths, True, torch.float64, torch.device("cpu"), MAX_POSITIONS)
    assert draft is not None
    return target, draft


@dataclass(frozen=True)
class DeviceBlock(DeviceSetup):
    algorithm: str = "block"
    form: str = "dflash"

    @property
    def num_recomputed_tokens(self) -> int:
        return 0

    @property
    def layout(self) -> RoundLayout:
        return replace(super().layout, block_rows=BLOCK)

    @property
    def paths(self) -> tuple[Path, Path]:
        return files(block_directories, self.family, self.form, BLOCK)

    @property
    def reference(self) -> Reference:
        return BlockReference(*exact(self), PlainBlock.load(*self.paths))


@dataclass(frozen=True)
class DeviceMTP(DeviceSetup):
    algorithm: str = "mtp"
    form: tuple[int, str] = (1, "chain")

    @property
    def num_recomputed_tokens(self) -> int:
        return self.form[0]

    @property
    def paths(self) -> tuple[Path, Path]:
        return files(mtp_directories, self.family, *self.form)


@dataclass(frozen=True)
class DevicePEagle(DeviceSetup):
    algorithm: str = "peagle"

    @property
    def layout(self) -> RoundLayout:
        return replace(super().layout, block_rows=15)

    @property
    def paths(self) -> tuple[Path, Path]:
        return files(peagle_directories, self.family)

    @property
    def reference(self) -> Reference:
        return PEagleReference(*exact(self))


MTP_FORMS = ((1, "chain"), (3, "chain"), (3, "target"))
SETUPS = MappingProxyType(
    {
        **{f"block draft {form}": DeviceBlock(**SIZES, chunk_size=16, form=form) for form in FORMS},
        **{f"MTP {form}": DeviceMTP(**SIZES, chunk_size=16, form=form) for form in MTP_FORMS},
        "P-EAGLE": DevicePEagle(**SIZES, chunk_size=16),
    }
)
HYBRIDS = {"MTP, states": DeviceMTP(**SIZES, chunk_size=16, family="qwen3_5")}
CELLS = [(name, family) for name in SETUPS for family in ("llama", "deepseek_v3")]
CELLS += [(name, "deepseek_v3_wide") for name in SETUPS if name.startswith("MTP")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "family"), CELLS)
def test_every_property_holds(name, family, dtype, put_on_record):
    family = dense_of(family) if dtype == "bf16" and family != "llama" else family
    watch = DeviceWatch(replace(SETUPS[name], family=family, dtype=DTYPES[dtype]))
    trunk = prompts(31, [23])[0]
    given = [trunk, *prompts(31, [1, 2, 9]), trunk[:13], [*trunk[:8], 3], trunk]
    style = {"temperature": 3.0, "max_tokens": 14}
    figures = run_watched(watch, [request(i, prompt, SamplingParams(**style)) for i, prompt in enumerate(given)])
    put_on_record(EQUALITIES, {"name": f"{family}, {name}, {dtype}", **figures})


@pytest.mark.parametrize("name", [*SETUPS, *HYBRIDS])
@pytest.mark.parametrize("graph_batch", [None, 2], ids=["graphs", "batches above the largest graph"])
def test_every_launch_leaves_the_same_bits(graph_batch, name, put_on_record):
    """Results are read from the same place whether a graph ran or not."""
    # One step needs no pass over mask rows.
    trees = ((4, TreeShape(1, 2, 3) if name == "P-EAGLE" else TreeShape(2, 2, 5)),)
    setup = replace(
        {**SETUPS, **HYBRIDS}[name], max_batch=6, dtype=torch.bfloat16, graph_batch=graph_batch, overlap=False
    )
    setup = replace(setup, trees=trees)
    one = setup.engine()
    twin = twins(one, setup.engine())
    run_staggered(one, mixed(13, max_tokens=14), every=3)
    put_on_record(BATCHES, {"replayed": {str(batch): rounds for batch, rounds in twin.replayed.items()}})
    assert (twin.num_passes if graph_batch is None else twin.num_eager) > 0
    assert max(twin.replayed) <= (graph_batch or 6)
