"""Several ranks give what one process gives: tokens, log-probabilities and committed rows, in float64.

Only the order of sums differs, so numbers are compared to 1e-9 and tokens exactly.  Ranks compare their own decisions,
log-probabilities included, bit by bit (engine/ranks.py:decisions_of).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.engine.ranks import RankFailed
from espalier.errors import EspalierError
from espalier.kernels.layers.blocks import BLOCK_TYPES
from espalier.models.config import ModelConfig
from espalier.models.declared_weights import require_shards
from espalier.models.loading import read_config
from espalier.request import Request, SamplingParams
from espalier.shards import SINGLE_RANK
from espalier.startup import ranks
from espalier.startup.build import assemble_engine
from lab.faults.rank_faults import RANK_FAULTS
from tests.block import block_directories
from tests.builders import CONFIGS, add_kv_scales, make_eagle3, make_target
from tests.engine.fake_cuda import fake_cuda
from tests.folders import new_folder
from tests.gguf import convert
from tests.grammar.test_lossless import asked
from tests.harness import LATENT_HEADS, Setup, prompts, request
from tests.models.test_gemma4_assistant import pair
from tests.mtp import mtp_directories
from tests.peagle import peagle_directories
from tests.properties.block_setup import BlockSetup
from tests.properties.mtp_setup import MTPSetup
from tests.properties.peagle_setup import PEagleSetup
from tests.quantised import KINDS, ORDERED, quantise
from tests.ranks import Group, models_of, planes_of, run_open, whole

CLOSE = 1e-9
# Sizes that two and three ranks divide; K/V heads by ranks: divided, or held by all.
SIZES: dict[str, Any] = {"hidden": 48, "heads": 6, "kv_heads": 6}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "deepseek_v3": {"moe_intermediate_size": 24},
    "deepseek_v2": {"moe_intermediate_size": 24, "q_lora_rank": None},
    **{family: {"moe_intermediate_size": 24} for family in ("glm4_moe", "glm4_moe_lite", "dots1")},
    **{family: {"moe_intermediate_size": 24} for family in ("deepseek_v32", "glm_moe_dsa")},
    "granitemoeshared": {"shared_intermediate_size": 24},
    "granitemoehybrid": {"shared_intermediate_size": 48, "mamba_n_heads": 12},
    "laguna": {"shared_expert_intermediate_size": 24, "num_attention_heads_per_layer": [6, 12, 6]},
}
# As formats need it: groups and blocks of 16 and 32 in every part.
WIDE: dict[str, Any] = {"hidden": 96, "heads": 6, "kv_heads": 6, "head_dim": 32}


@dataclass(frozen=True)
class Case:
    """draft: the algorithm, of a block draft its form; kind: of tests/quantised.py; sizes: of the target."""

    name: str
    count: int = 2
    family: str = "llama"
    draft: str = "eagle3"
    kind: str | None = None
    kv_heads: int | None = None
    traffic: Callable[[], list[Request]] = lambda: styled()
    setup: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.count}-{self.name}"

    @property
    def files(self) -> tuple[Path, Path | None]:
        target, draft = directories(self.family, self.draft, self.kind, self.kv_heads)
        return target, None if self.draft in ("ngram", "none") else draft

    def made(self) -> Setup:
        # Small trees: each pass joins the ranks some ten times.
        how: dict[str, Any] = {"steps": 2, "topk": 2, "num_draft_tokens": 5, "max_batch": 3, "page_size": 3}
        how |= {"max_context": 64, "family": self.family} | dict(self.setup)
        if self.draft == "mtp":
            return MTPSetup(**how)
        if self.draft == "peagle":
            return PEagleSetup(**how)
        if self.draft in ("eagle3", "ngram", "assistant"):
            return Setup(algorithm=self.draft, **how)
        return Setup(**how).plain() if self.draft == "none" else BlockSetup(form=self.draft, **how)


@lru_cache
def directories(family: str, draft: str, kind: str | None, kv_heads: int | None) -> tuple[Path, Path]:
    if draft == "mtp":
        return mtp_directories(family, 1)
    if draft == "peagle":
        return peagle_directories(family)
    if draft == "assistant":
        return pair(family)
    if draft not in ("eagle3", "ngram", "none"):
        return block_directories(family, draft, 4)
    root, sizes = new_folder("ranks-"), {**(WIDE if kind else SIZES), **OF_FAMILY.get(family, {})}
    if kind == "fp8-joined":
        # Blocks of 16 rows in each part of an expert.
        sizes |= {"moe_intermediate_size": 96}
    if kind in OF_EXPERTS and family == "qwen2_moe":
        sizes |= {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
    if kind in ("mxfp4", *IN_GGUF):
        # Blocks of 32 columns in each half of an expert.
        sizes |= {"intermediate_size": 192}
    target = make_target(root / "target", family, **{**sizes, **({"kv_heads": kv_heads} if kv_heads else {})})
    if kind in IN_GGUF:
        convert(target, root / "model.gguf", lambda name: kind)
        return root / "model.gguf", root
    if kind == "kv-scales":
        add_kv_scales(target)
    elif kind is not None:
        quantise(target, kind)
    fields = LATENT_HEADS.get(family, {})
    return target, make_eagle3(root / "draft", target, seed=1, draft_vocab=13, **fields)


def styled() -> list[Request]:
    """Greedy, sampled with filters and penalties, and log-probabilities of the prompt."""
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 0},
    ]
    return [
        request(i, prompt, SamplingParams(max_tokens=6, **style))
        for i, (prompt, style) in enumerate(zip(prompts(11, (9, 4)), styles, strict=True))
    ]


def hitting() -> list[Request]:
    """Prompts that share a prefix.  The second is greedy."""
    trunk, ways = prompts(29, [9])[0], [SamplingParams(max_tokens=4, temperature=heat) for heat in (1.0, 0.0, 1.0)]
    made = [request(i, [*trunk[:kept], i], ways[i]) for i, kept in enumerate((9, 7, 4))]
    for each in made[1:]:
        each.prefix_leader = made[0]
    return made


def crowding() -> list[Request]:
    return [
        request(i, prompt, SamplingParams(temperature=3.0, max_tokens=14, presence_penalty=0.6))
        for i, prompt in enumerate(prompts(31, [5, 12, 7]))
    ]


def one_greedy() -> list[Request]:
    """Of requests that run together."""
    return [request(0, prompts(31, [5])[0], SamplingParams(temperature=0.0, max_tokens=14)), *crowding()[1:]]


def in_grammars() -> list[Request]:
    return asked(2, 1.2, count=3, max_tokens=6)


CROWDED = (("num_pages", 16), ("max_context", 30), ("overlap", True))
OVERLAP = (("overlap", True),)
IN_FP8 = (("kv_dtype", "fp8_e4m3"), ("draft_kv_dtype", "fp8_e4m3"), ("kv_scales", True))
OF_EXPERTS = ("awq", "gptq", "packed-group", "fp8-channel-token")
IN_GGUF = [name for name, kind in BLOCK_TYPES.items() if kind.block_values == 32]
SMALLER = [
    Case("kv-grammars-overlap", traffic=in_grammars, setup=OVERLAP),
    Case("latent-experts", family="deepseek_v3"),
    Case("stacked-experts-ngram", family="gpt_oss", draft="ngram", traffic=hitting),
    Case("shared-gate-crowded", family="qwen2_moe", draft="none", traffic=crowding, setup=CROWDED),
    Case("fp8-block", kind="fp8-block", draft="none"),
    Case("shared-rows-and-text", traffic=one_greedy, setup=(("shared_rows", 3), ("num_text_paths", 2))),
    Case("latent-mtp", family="deepseek_v32", draft="mtp"),
    Case("held-kv", 3, kv_heads=1, traffic=in_grammars),
    Case("gptq", 3, kind="gptq", draft="none"),
    Case("stored-as-one-held-kv", 3, family="phi3", draft="none", kv_heads=1, traffic=hitting),
    Case("norms-of-all-heads", 2, family="olmo3", draft="none", traffic=hitting),
    Case("own-layers", 2, family="gemma4_moe", draft="none", traffic=hitting),
]
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "qwen2_moe", "qwen3_moe", "gpt_oss"),
    *("glm4_moe", "glm4_moe_lite", "dots1", "deepseek_v2", "deepseek_v3"),
    *("deepseek_v32", "glm_moe_dsa", "exaone4", "minimax_m2"),
    *("ministral", "ministral3", "granite", "smollm3", "mixtral", "phi3", "olmo2", "olmo3", "laguna", "muse_glimmer"),
    *("granitemoe", "granitemoeshared", "granitemoehybrid", "gemma4", "gemma4_moe", "gemma4_e", "gemma4_unified"),
)
LARGER = [
    Case("latent-experts", 3, family="deepseek_v3", draft="ngram", setup=OVERLAP),
    *(Case(f"{family}-{draft}", count, family, draft, traffic=traffic, setup=setup)
      for family in FAMILIES for count in (2, 3)
      for draft, traffic, setup in (("eagle3", styled, OVERLAP), ("none", hitting, ()), ("ngram", crowding, CROWDED))),
    *(Case(f"{draft}-{traffic.__name__}", 2, family, draft, traffic=traffic, setup=setup)
      for family, draft in (("llama", "peagle"), ("mimo", "mtp"), ("glm4_moe", "mtp"), ("qwen3", "dflash"),
                            ("qwen3", "dspark"), ("qwen3", "dflash2"), ("qwen3", "rnn"))
      for traffic, setup in ((styled, ()), (in_grammars, OVERLAP), (hitting, ()))),
    *(Case(kind, count, kind=kind, draft="none") for kind in KINDS if kind not in ORDERED for count in (2, 3)),
    *(Case(f"stored-as-one-{kind}", 3, "phi3", "none", kind) for kind in KINDS if kind not in ORDERED),
    *(Case(f"assistant-{traffic.__name__}", 2, family, "assistant", traffic=traffic)
      for family in ("gemma4", "gemma4_e") for traffic in (styled, in_grammars, hitting)),
    *(Case("norms-of-held-heads", count, "olmo2", "none", kv_heads=1) for count in (2, 3)),
    *(Case(f"moe-{kind}", 2, "qwen2_moe", "none", kind) for kind in OF_EXPERTS),
    *(Case(f"gguf-{kind}", count, kind=kind, draft="none") for kind in IN_GGUF for count in (2, 3)),
    *(Case("fp8-joined", count, "gemma4_moe", "none", "fp8-joined") for count in (2, 3)),
    *(Case("mxfp4", count, "gpt_oss", "none", "mxfp4") for count in (2, 3)),
    *(Case("kv-scales", count, kind="kv-scales", setup=IN_FP8) for count in (2, 3)),
    *(Case("held-kv", 2, kv_heads=1, traffic=traffic) for traffic in (styled, in_grammars, hitting)),
]  # fmt: skip


@pytest.mark.full
def test_every_architecture_that_is_divided_is_compared():
    files = [case.files[0] for case in (*SMALLER, *LARGER) if case.draft in ("none", "mtp") and case.kind is None]
    compared = {read_config(path).architecture for path in files}
    assert {config.architecture for config in map(config_of, CONFIGS) if divides(config)} <= compared


def config_of(family: str) -> ModelConfig:
    return read_config(make_target(new_folder("ranks-") / family, family, **SIZES, **OF_FAMILY.get(family, {})))


def divides(config: ModelConfig) -> bool:
    try:
        require_shards(config, 2)
    except EspalierError:
        return False
    return True


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Group]]:
    made = {count: Group(count) for count in (2, 3)}
    yield made
    for group in made.values():
        group.finish()


@lru_cache
def alone(case: Case) -> tuple[list[Request], list[torch.Tensor]]:
    """What one process gives, and the pages that it leaves."""
    setup = case.made()
    engine = assemble_engine(models_of(*case.files, setup.config(), SINGLE_RANK))
    requests, planes = run_open(engine, case.traffic()), planes_of(engine)
    assert setup.num_pages is None or engine.scheduler.num_preempted
    engine.close()
    return requests, planes


def compare(case: Case, requests: list[Request], engine: Engine, group: Group) -> None:
    wanted, planes = alone(case)
    assert [each.output for each in requests] == [each.output for each in wanted]
    assert [each.error for each in requests] == [None] * len(requests)
    # The draft proposes the same trees.
    assert [each.stats for each in requests] == [each.stats for each in wanted]
    for one, other in zip(requests, wanted, strict=True):
        for own, its in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert [entry and entry.logprob for entry in own] == pytest.approx(
                [entry and entry.logprob for entry in its], abs=CLOSE
            )
    for plane, *parts in zip(planes, planes_of(engine), *group.ranks.call(planes_of), strict=True):
        torch.testing.assert_close(whole(parts, plane.shape[2]), plane, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_gpu_executor_of_ranks_says_what_one_process_says(overlap, monkeypatch):
    """On a CUDA of the CPU, without graphs, which know nothing of collectives.  Rounds are in stages."""

    def gpu_executor(runner, overlap, graph_batch, capture_stages):
        return CudaExecutor(runner, 0, overlap=overlap, capture_stages=capture_stages)

    case = Case("gpu", traffic=in_grammars, setup=(("overlap", overlap), ("attention", "reference")))
    alone(case)
    fake_cuda(monkeypatch)
    monkeypatch.setattr(ranks, "make_executor", gpu_executor)
    group = Group(2)
    engine = group.engine(case.made(), case.files)
    assert isinstance(engine.executor.own_executor, CudaExecutor)
    compare(case, run_open(engine, case.traffic()), engine, group)
    engine.close()
    group.finish()


@pytest.mark.parametrize(("family", "draft"), [("llama", "none"), ("gemma3", "none"), ("gemma3", "eagle3")])
def test_a_rank_holds_its_part_of_the_vocabulary(family, draft, groups):
    """The tied embeddings of Gemma 3 too; the whole embedding only where a draft reads it at each of its levels."""
    case = Case("vocabulary", family=family, draft=draft)
    engine = groups[2].engine(case.made(), case.files)
    target = engine.executor.runner.target
    vocab, head = target.config.vocab_size, target.head.weight.own_weight.tensor
    assert len(head) == vocab // 2 and len(target.embed.weight) == (vocab if draft == "eagle3" else vocab // 2)
    is_tied = head.untyped_storage().data_ptr() == target.embed.weight.untyped_storage().data_ptr()
    assert is_tied == (family == "gemma3")
    engine.close()


def agrees(case: Case, group: Group) -> bool:
    """Whether the property holds."""
    engine = group.engine(case.made(), case.files)
    try:
        compare(case, run_open(engine, case.traffic()), engine, group)
    except (AssertionError, RankFailed):
        return False
    finally:
        engine.close()
    return True


PACKED = Case("packed-group", kind="packed-group", draft="none")
CAUGHT_BY = {
    "product-not-summed": Case("llama", draft="none", traffic=hitting),
    "prompt-of-another-launch": Case("llama", draft="none", traffic=hitting),
    "experts-one-part-off": Case("qwen3_moe", family="qwen3_moe", draft="none", traffic=hitting),
    "scales-across": PACKED,
}


@pytest.mark.parametrize("name", RANK_FAULTS)
def test_the_property_catches(name, groups):
    group, case = groups[2], CAUGHT_BY[name]
    assert agrees(case, group)
    with group.plant(name):
        assert not agrees(case, group)


@pytest.mark.parametrize("case", [*SMALLER, *(pytest.param(case, marks=pytest.mark.full) for case in LARGER)], ids=str)
def test_ranks_give_what_one_process_gives(case, groups):
    group = groups[case.count]
    engine = group.engine(case.made(), case.files)
    try:
        compare(case, run_open(engine, case.traffic()), engine, group)
    finally:
        engine.close()
