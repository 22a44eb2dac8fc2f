"""Tiny engines for properties: random float64 models with a vocabulary of 16, so that random drafts are accepted
often."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from espalier.config import ResolvedConfig
from espalier.engine.engine import Engine
from espalier.layout import RoundLayout, TreeShape, max_draft_tokens
from espalier.models import CausalLM, DraftModel, load_target
from espalier.request import Request, SamplingParams
from espalier.speculate.drafters.registry import drafter_without_files
from espalier.startup.build import LoadedModels, assemble_engine, config_without_files
from espalier.stats import SpeculationStats
from tests.builders import add_kv_scales, make_eagle3, make_target
from tests.checkpoints import load_pair
from tests.folders import new_folder
from tests.latent import make_latent
from tests.pages import check_pages
from tests.recurrent import make_recurrent

VOCAB = 16
DTYPE = torch.float64
CPU = torch.device("cpu")
MAX_POSITIONS = 4096
# The fields of a latent draft: no size is its target's own.
LATENT_HEAD: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
# The families whose drafts are latent.
LATENT_HEADS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT_HEAD,
    "glm4_moe_lite": LATENT_HEAD,
    "glm_moe_dsa": LATENT_HEAD,
    "deepseek_v3_wide": {**LATENT_HEAD, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


# The blocks that keep a state, by layer; the last layer computes only rows that are read.
HYBRIDS: dict[str, tuple[str | None, ...]] = {
    "hybrid": ("delta", None, "added"),
    "hybrid_conv": (None, "conv", "delta"),
}


@lru_cache
def directories(
    family: str = "llama",
    seed: int = 0,
    window: int | None = None,
    draft_vocab: int | None = None,
    kv_scales: bool = False,
) -> tuple[Path, Path]:
    """A tiny target and its EAGLE-3 draft, made once a process.

    window: of the attention of every layer (mistral, qwen3_moe) or of every second one (gpt_oss).  The drafts of some
    latent families are latent too.  kv_scales: whether the target has scales of K and V.
    """
    root = new_folder("tiny-")
    slides = {} if window is None else {"sliding_window": window, "use_sliding_window": True}
    target = make_target(root / "target", family=family, seed=seed, vocab=VOCAB, **slides)
    if kv_scales:
        add_kv_scales(target)
    fields = LATENT_HEADS.get(family.removesuffix("_dense").partition("_topk")[0], {})
    return target, make_eagle3(root / "draft", target, seed=seed + 1, draft_vocab=draft_vocab, **fields)


@lru_cache
def models(
    family: str = "llama",
    seed: int = 0,
    speculative: bool = True,
    window: int | None = None,
    draft_vocab: int | None = None,
    position_rows: int = MAX_POSITIONS,
    keeps: str = "kv",
    kv_scales: bool = False,
    model_impl: str = "auto",
) -> tuple[CausalLM, DraftModel | None]:
    """(target, draft) loaded in float64; the target alone captures nothing.

    keeps: "kv", as in tests/latent.py, or one of HYBRIDS.
    """
    target, draft = _loaded(family, seed, speculative, window, draft_vocab, position_rows, kv_scales, model_impl)
    if keeps in HYBRIDS:
        make_recurrent(target, HYBRIDS[keeps], seed)
    elif keeps != "kv":
        make_latent(target, draft, keeps, seed)
    return target, draft


def _loaded(
    family: str,
    seed: int,
    speculative: bool,
    window: int | None,
    draft_vocab: int | None,
    position_rows: int,
    kv_scales: bool,
    model_impl: str,
) -> tuple[CausalLM, DraftModel | None]:
    target_path, draft_path = directories(family, seed, window, draft_vocab, kv_scales)
    how: dict[str, Any] = {"dtype": DTYPE, "device": CPU, "position_rows": position_rows}
    if not speculative:
        return load_target(target_path, model_impl=model_impl, **how), None
    return load_pair(target_path, draft_path, model_impl, **how)


@dataclass(frozen=True)
class Setup:
    """One cell of the product of layouts."""

    page_size: int = 16
    topk: int = 2
    steps: int = 3
    num_draft_tokens: int = 8
    max_batch: int = 4
    max_context: int = 96
    chunk_size: int = 32
    num_pages: int | None = None
    algorithm: str = "eagle3"
    attention: str = "sdpa"
    overlap: bool = False
    prefix_cache: bool = True
    family: str = "llama"
    seed: int = 0
    window: int | None = None
    draft_vocab: int | None = None
    keeps: str = "kv"
    draft_attention: str | None = None
    trees: tuple[tuple[int, TreeShape], ...] = ()
    kv_dtype: str = "float64"
    kv_scales: bool = False
    draft_kv_dtype: str = "float64"
    model_impl: str = "auto"
    num_snapshots: int = 12
    num_text_paths: int = 0
    num_sent_paths: int = 0
    shared_rows: int = 0
    drafts: bool = True

    @property
    def num_recomputed_tokens(self) -> int:
        return 0 if drafter_without_files(self.algorithm) else 1

    def plain(self) -> "Setup":
        return replace(self, algorithm="none", steps=0, topk=1, num_draft_tokens=1, trees=(), shared_rows=0)

    @property
    def layout(self) -> RoundLayout:
        nodes = min(self.num_draft_tokens, max_draft_tokens(self.steps, self.topk))
        tree = (self.steps, self.topk, nodes)
        sizes = (self.max_batch, *tree, self.page_size, self.max_context, self.num_recomputed_tokens, self.chunk_size)
        sources = {"num_text_paths": self.num_text_paths, "num_sent_paths": self.num_sent_paths}
        return RoundLayout(*sizes, trees=self.trees, **sources, shared_rows=self.shared_rows, drafts=self.drafts)

    def models(self, position_rows: int = MAX_POSITIONS) -> tuple[CausalLM, DraftModel | None]:
        is_drafted = self.algorithm == "eagle3"
        of_files = self.family, self.seed, is_drafted, self.window, self.draft_vocab
        return models(*of_files, position_rows, self.keeps, self.kv_scales, self.model_impl)

    def engine(self) -> Engine:
        # As many positions as the layout says and no more, so that one too many is an error here.
        return assemble_engine(LoadedModels(self.config(), *self.models(self.layout.position_rows)))

    def config(self, dtype: torch.dtype = DTYPE, device: torch.device = CPU, **chosen: Any) -> ResolvedConfig:
        """chosen: fields of ResolvedConfig that are no fields here."""
        layout = self.layout
        return config_without_files(
            layout,
            self.algorithm,
            self.attention,
            dtype,
            device,
            draft_attention=self.draft_attention or self.attention,
            num_pages=self.num_pages or layout.max_pages,
            overlap=self.overlap,
            prefix_cache=self.prefix_cache,
            kv_dtype=self.kv_dtype,
            draft_kv_dtype=self.draft_kv_dtype,
            num_snapshots=self.num_snapshots,
            **chosen,
        )


def request(
    index: int, prompt: Sequence[int], params: SamplingParams | None = None, seed: int | None = None
) -> Request:
    """A request without text; seed: of its noise, by default its index."""
    resolved = (params or SamplingParams(temperature=0.0, max_tokens=24)).resolve({}, ())
    return Request(
        id=f"r{index}",
        prompt=list(prompt),
        params=resolved,
        seed=index if seed is None else seed,
        arrival_index=index,
        stop_ids=frozenset(resolved.stop_token_ids),
    )


@dataclass
class Ran:
    """What came of a run: outputs by request, in order, and what speculation did."""

    requests: list[Request]
    stats: SpeculationStats

    @property
    def tokens(self) -> list[list[int]]:
        return [r.output for r in self.requests]


def run(engine: Engine, requests: Sequence[Request], check: bool = True) -> Ran:
    """Add all, step to the end; pages are conserved after every step."""
    for r in requests:
        engine.add(r)
    while engine.has_work:
        engine.step()
        if check:
            check_pages(engine)
    engine.close()
    return Ran(list(requests), engine.totals)


def prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
