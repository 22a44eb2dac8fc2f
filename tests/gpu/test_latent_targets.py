"""The configurations of the reports that docs/seeds.md answers, on a DeepSeek-V3 target under a latent draft.

After every launch the properties hold, and the kernel that ran is the one that should attend to latent rows.  The
target has experts in float32.
"""

from dataclasses import replace

import pytest
import torch

from espalier.request import Request, SamplingParams
from lab.faults.planted import plant
from tests.gpu.conftest import EQUALITIES
from tests.gpu.engines import DeviceSetup, dense_of
from tests.gpu.watching import DeviceWatch, attention_kernels
from tests.harness import Setup, prompts, request
from tests.properties import watch as held
from tests.properties.summary import FAULT
from tests.properties.watch import Watch, run_watched

pytestmark = pytest.mark.gpu

TREE = {"topk": 8, "steps": 5, "num_draft_tokens": 64}
# What attends to latent rows of each family: 12 + 8 values, and 512 + 64 as in the published models.
KERNELS = {"deepseek_v3": "tree_attention", "deepseek_v3_wide": "latent_attention"}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
each_kernel = pytest.mark.parametrize("family", KERNELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# By the names of docs/seeds.md, with the lengths of their prompts and outputs.
REPORTS: dict[str, tuple[Setup, tuple[int, ...], int]] = {
    "page 64, topk 8": (
        Setup(page_size=64, overlap=True, max_context=160, chunk_size=64, max_batch=3, **TREE),
        (1, 63, 64, 65, 127),
        12,
    ),
    "page 4, topk 8, lock-step": (
        Setup(page_size=4, overlap=False, max_context=64, max_batch=3, **TREE),
        (1, 3, 4, 5, 31, 40),
        16,
    ),
    "page 256, long prompt": (
        Setup(page_size=256, overlap=True, max_context=500, chunk_size=512, max_batch=2, **TREE),
        (480, 7),
        20,
    ),
}
TALK = Setup(page_size=512, overlap=True, max_context=1100, chunk_size=512, max_batch=2, num_pages=7, **TREE)


def on_device(setup: Setup, family: str, dtype: str) -> DeviceSetup:
    family = dense_of(family) if dtype == "bf16" else family
    return DeviceSetup(**{**vars(setup), "family": family, "dtype": DTYPES[dtype], "attention": "auto"})


def asked(lengths: tuple[int, ...], most: int) -> list[Request]:
    """Greedy and sampled in turn."""
    return [
        request(i, prompt, SamplingParams(temperature=2.0 * (i % 2), max_tokens=most))
        for i, prompt in enumerate(prompts(20, lengths))
    ]


def talk(watch: Watch, turns: int, told: int, said: int) -> dict[str, object]:
    """Each turn asks all of the talk so far and something new; whole pages of it are not computed again."""
    engine, so_far, figures = watch.engine, list[int](), dict[str, object]()
    for turn, new in enumerate(prompts(21, [told] * turns)):
        so_far += new
        r = request(turn, so_far, SamplingParams(temperature=2.0 * (turn % 2), max_tokens=said))
        figures = run_watched(watch, [r], last=turn == turns - 1)
        known = max(0, len(so_far) - len(new) - 1)
        assert r.cached_tokens >= known // engine.layout.page_size * engine.layout.page_size
        so_far = so_far + r.output
    assert engine.prefix_tree is not None and len(engine.prefix_tree) == (len(so_far) - 1) // engine.layout.page_size
    assert engine.pool.num_free + len(engine.prefix_tree) + 1 == engine.pool.num_pages, "a page has leaked"
    return figures


@each_kernel
@each_dtype
@pytest.mark.parametrize("report", REPORTS)
def test_reports(report: str, dtype: str, family: str, put_on_record) -> None:
    setup, lengths, most = REPORTS[report]
    with attention_kernels() as launched:
        figures = run_watched(DeviceWatch(on_device(setup, family, dtype)), asked(lengths, most))
    assert launched == {KERNELS[family]}
    put_on_record(EQUALITIES, {"name": f"{family}, {report}, {dtype}", **figures})


# Targets whose queries choose rows, of both kernels.  In bfloat16 another row may score as well.
CHOOSING = {"glm_moe_dsa": "tree_attention", "deepseek_v32_wide": "latent_attention"}


@pytest.mark.parametrize("family", CHOOSING)
@pytest.mark.parametrize("report", REPORTS)
def test_reports_where_queries_choose_rows(report: str, family: str, put_on_record) -> None:
    setup, lengths, most = REPORTS[report]
    with attention_kernels() as launched:
        figures = run_watched(DeviceWatch(on_device(setup, family, "float32")), asked(lengths, most))
    assert CHOOSING[family] in launched
    put_on_record(EQUALITIES, {"name": f"{family}, {report}, float32", **figures})


@each_kernel
@each_dtype
def test_several_turns_on_pages_of_512(dtype: str, family: str, put_on_record) -> None:
    with attention_kernels() as launched:
        figures = talk(DeviceWatch(on_device(TALK, family, dtype)), turns=4, told=230, said=12)
    assert launched == {KERNELS[family]}
    put_on_record(EQUALITIES, {"name": f"{family}, page 512, several turns, {dtype}", **figures})


# Each with the property that is there to catch it, as in tests/properties/test_faults.py.  A graph captures the fault.
FAULTS = {
    "rows-without-topk": held.PROPOSAL,
    "packed-stride": held.INCREMENTAL,
    "rope-left-out": held.INCREMENTAL,
}


@each_kernel
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, family: str, put_on_record) -> None:
    setup, lengths, most = REPORTS["page 4, topk 8, lock-step"]
    setup = replace(setup, topk=3, steps=4, num_draft_tokens=24)
    with plant(name) as fault, pytest.raises(AssertionError):
        run_watched(DeviceWatch(on_device(setup, family, "float32"), [FAULTS[name]]), asked(lengths, most))
    put_on_record(FAULT, [f"{name}, {family} on a GPU", " ".join(fault.reports) or "-", FAULTS[name]])
