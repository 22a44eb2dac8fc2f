"""The product of layouts: its factors, a pairwise array of them, corners, and the engine and traffic of one cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from espalier.config import FP8_KV
from espalier.errors import EspalierError
from espalier.layout import max_draft_tokens
from espalier.request import Request, SamplingParams
from tests.harness import Setup, directories, prompts, request
from tests.oracles.fp8_cache import ones, scales_in
from tests.oracles.reference_round import Reference
from tests.pairwise import pairwise, rows_of

MOST_NODES = 256

# The product that the house promises.
LAYOUTS: dict[str, Sequence[Any]] = {
    "page_size": (1, 2, 3, 16, 64, 256, 512),
    "topk": (1, 2, 4, 8),
    "steps": (0, 1, 3, 5, 8, 15),
    "nodes": ("2", "middle", "bound"),
    "batch": (1, 3),
}
# Of each kind of page size one: a row, no power of two, longer than most prompts.  Of each kind of width one: a chain,
# a part of the nodes, most of them.  Of each kind of depth one: none, the roots' children alone, levels that read
# levels.
ARRAY_LAYOUTS = {**LAYOUTS, "page_size": (1, 3, 256), "topk": (1, 4, 8), "steps": (0, 1, 15)}
# The least and the most of each kind, which `make test` crosses; no level is deeper than five.
FEW_LAYOUTS = {**LAYOUTS, "page_size": (1, 256), "topk": (1, 8), "steps": (0, 5), "nodes": ("2", "bound")}
# Families whose own layers keep a latent row, all with experts.  The draft of the first is Llama-shaped, that of the
# second latent.
OWN_LATENT = ("deepseek_v2", "deepseek_v3")
# Soft-caps; heads of different sizes and K as V; the same with experts; rows of earlier layers.  All have windows.
GEMMAS = ("gemma2", "gemma4", "gemma4_moe", "gemma4_e")
# Families of `family_cells`.
OTHERS = ("laguna", "mixtral", "phi3", "granitemoeshared", "granitemoehybrid", "smollm3", "olmo3", "muse_glimmer")
# What it is crossed with: pairwise by choice, in the whole product in turn.
AROUND: dict[str, Sequence[Any]] = {
    "algorithm": ("eagle3", "ngram"),
    "attention": ("sdpa", "reference"),
    "overlap": (False, True),
    "window": (None, 6),
    "draft_vocab": (None, 11),
    "keeps": ("kv", "latent", *OWN_LATENT),
    "experts": (False, True),
    "sinks": (False, True),
    "kv": ("float64", "fp8", "fp8_target"),
}
# Of different make: a plain one; windows, norms behind blocks and scaled embeddings; sinks and experts; merged
# projections; LayerNorms, biases and a window.  The last has no native family.
HOSTED = ("llama", "gemma3", "gpt_oss", "phi3", "starcoder2")
# Dtypes of K and V, of the target and of the draft.  "fp8" has the checkpoint's scales, "fp8_target" has none.
CACHES: dict[str, dict[str, Any]] = {
    "float64": {},
    "fp8": {"kv_dtype": FP8_KV, "draft_kv_dtype": FP8_KV, "kv_scales": True},
    "fp8_target": {"kv_dtype": FP8_KV},
}
# What an n-gram tree is crossed with.  The rest is of the target's pass, which does not know who proposed its tree.
AROUND_NGRAM = {name: AROUND[name] for name in ("attention", "overlap")}
CORNERS: dict[str, Sequence[Any]] = {
    "page_size": (1, 512),
    "topk": (1, 8),
    "steps": (0, 15),
    "nodes": ("2", "bound"),
    "batch": (3,),
}

# How requests are sampled, in turn: random drafts follow noise best where it is loud.
STYLES = (
    {"temperature": 0.0},
    {"temperature": 1.2},
    {"temperature": 6.0},
    {
        "temperature": 3.0,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 1.5, 7: -100.0},
        "min_tokens": 6,
        "stop_token_ids": [1],
    },
)


@dataclass(frozen=True)
class Cell:
    """One cell of the product.  nodes: "2", "middle" or "bound", the bound being MOST_NODES at most.

    keeps: "kv" or "latent", as in tests/harness.py:models, or the family of a target, one of OWN_LATENT, GEMMAS
    or OTHERS.
    sinks: of GPT-OSS, which has experts, and a window in every second layer.  kv: a key of CACHES.
    hosted: the family that a class of transformers runs.
    """

    page_size: int
    topk: int
    steps: int
    nodes: str
    batch: int
    algorithm: str = "eagle3"
    attention: str = "sdpa"
    overlap: bool = False
    window: int | None = None
    draft_vocab: int | None = None
    keeps: str = "kv"
    experts: bool = False
    sinks: bool = False
    kv: str = "float64"
    hosted: str | None = None

    def __str__(self) -> str:
        around = [self.algorithm, self.attention, *("overlap",) * self.overlap]
        around += [f"{name}{value}" for name in ("window", "draft_vocab") if (value := getattr(self, name))]
        around += [self.kv] * (self.kv != "float64")
        around += [self.keeps] * (self.keeps != "kv") + ["experts"] * self.experts + ["sinks"] * self.sinks
        around += [f"{self.hosted}-by-transformers"] if self.hosted else []
        tree = f"topk{self.topk}-steps{self.steps}-nodes_{self.nodes}"
        return "-".join([f"page{self.page_size}", tree, f"batch{self.batch}", *around])

    @property
    def num_draft_tokens(self) -> int:
        bound = min(max_draft_tokens(self.steps, self.topk), MOST_NODES)
        return {"2": 2, "middle": (2 + bound) // 2, "bound": bound}[self.nodes]

    @property
    def lengths(self) -> list[int]:
        """Prompts, the first a little short of a page, so that rounds cross into the next; the others ragged."""
        return [max(self.page_size - 4, 5), 3, 17][: self.batch]

    @property
    def max_tokens(self) -> int:
        return 9

    @property
    def names_family(self) -> bool:
        return self.keeps in (*OWN_LATENT, *GEMMAS, *OTHERS)

    @property
    def family(self) -> str:
        if self.hosted is not None:
            return self.hosted
        if self.names_family:
            return self.keeps
        if self.sinks:
            return "gpt_oss"
        if self.experts:
            return "qwen3_moe"
        # Of Ministral 3, the temperature of a node depends on its position.
        return "mistral" if self.window else "ministral3" if self.overlap and self.keeps == "kv" else "llama"

    @property
    def setup(self) -> Setup:
        return Setup(
            page_size=self.page_size,
            topk=self.topk,
            steps=self.steps,
            num_draft_tokens=self.num_draft_tokens,
            max_batch=self.batch,
            max_context=max(self.lengths) + self.max_tokens,
            chunk_size=16 if self.page_size < 256 else 128,
            algorithm=self.algorithm,
            attention=self.attention,
            overlap=self.overlap,
            family=self.family,
            window=self.window,
            draft_vocab=self.draft_vocab if self.algorithm == "eagle3" else None,
            keeps="kv" if self.names_family else self.keeps,
            model_impl="transformers" if self.hosted else "auto",
            **CACHES[self.kv],
        )

    @property
    def traffic(self) -> list[Request]:
        """One request a prompt, each sampled in another way; which comes first turns with the cell."""
        turn = self.topk + self.steps
        return [
            request(
                i, prompt, SamplingParams(max_tokens=self.max_tokens, **STYLES[(turn + i) % len(STYLES)]), seed=100 + i
            )
            for i, prompt in enumerate(prompts(7, self.lengths))
        ]


def refused(cell: Mapping[str, Any]) -> bool:
    """Whether the layout refuses a cell, of which this much is known: two nodes where no step can propose one."""
    return cell.get("steps") == 0 and cell.get("nodes") == "2"


def impossible(cell: Mapping[str, Any]) -> bool:
    """Whether the known factors of a cell are refused, or fit no family.

    DeepSeek runs here with experts and without windows; GPT-OSS, which alone has sinks, always has both.
    """
    other = cell.get("window") is not None or cell.get("experts") is False
    lacks = cell.get("window", 6) is None or not cell.get("experts", True) or cell.get("keeps", "kv") != "kv"
    return refused(cell) or (cell.get("keeps") in OWN_LATENT and other) or (bool(cell.get("sinks")) and lacks)


def pairwise_cells(layouts: Mapping[str, Sequence[Any]] = ARRAY_LAYOUTS) -> list[Cell]:
    """One array for each drafter: what goes with the one does not stand in for the other."""
    around = {name: values for name, values in AROUND.items() if name != "algorithm"}
    arrays = {"eagle3": {**layouts, **around}, "ngram": {**layouts, **AROUND_NGRAM}}
    return [Cell(**row, algorithm=name) for name, array in arrays.items() for row in pairwise(array, impossible)]


def all_cells() -> list[Cell]:
    """Every cell that is not refused, what is around it in turn; and every corner."""
    around = [row for row in rows_of(AROUND) if not impossible(row)]
    rows = [row for row in rows_of(LAYOUTS) if not refused(row)]
    corners = [Cell(**row) for row in rows_of(CORNERS) if not refused(row)]
    return [*(Cell(**row, **around[i * 7 % len(around)]) for i, row in enumerate(rows)), *corners]


def latent_cells() -> list[Cell]:
    """Every page size and topk of a latent target under EAGLE-3, with drafts of both forms."""
    factors = {"page_size": (1, 2, 16, 64, 256), "topk": (1, 2, 4, 8), "keeps": OWN_LATENT}
    fixed = {"steps": 3, "nodes": "middle", "batch": 3, "experts": True}
    return [Cell(**row, **fixed, overlap=i % 3 == 0) for i, row in enumerate(rows_of(factors))]


def hosted_cells(layouts: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Families of different make that classes of transformers run."""
    factors = {**layouts, "algorithm": AROUND["algorithm"], "overlap": (False, True), "hosted": HOSTED}
    return [Cell(**row) for row in pairwise(factors, refused)]


def one_a_hosted_family() -> list[Cell]:
    """A cell of each: its layers know neither pages nor drafters, and every second has the other drafter and loop."""
    around = [
        {"algorithm": name, "overlap": overlap}
        for name, overlap in zip(AROUND["algorithm"], (False, True), strict=True)
    ]
    sizes = {"page_size": 3, "topk": 4, "steps": 3, "nodes": "middle", "batch": 3}
    return [Cell(**sizes, **around[i % 2], hosted=family) for i, family in enumerate(HOSTED)]


def gemma_cells() -> list[Cell]:
    """Every page size and topk of each Gemma; the first few have every family, and most of what is around it."""
    pages, fixed = (1, 3, 16, 256, 2, 64), {"steps": 3, "nodes": "middle", "batch": 3}
    kinds = list(CACHES)
    return [
        Cell(
            page_size,
            topk,
            **fixed,
            keeps=family,
            kv=kinds[(turn + i) % len(kinds)],
            attention=("reference", "sdpa")[(turn + i) % 2],
            overlap=(turn + i) % 4 < 2,
            algorithm="ngram" if (turn + i) % 5 == 4 else "eagle3",
        )
        for turn, (topk, page_size) in enumerate(product((2, 4, 1, 8), pages))
        for i, family in enumerate(GEMMAS[turn % 4 :] + GEMMAS[: turn % 4])
    ]


def family_cells() -> list[Cell]:
    """Two cells of each family that differs from those of the array in more than sizes, the most special first."""
    factors = {"keeps": OTHERS, "page_size": (3, 16)}
    fixed = {"topk": 4, "steps": 3, "nodes": "middle", "batch": 3}
    return [Cell(**row, **fixed, overlap=i % 3 == 0) for i, row in enumerate(rows_of(factors))]


def refused_cells() -> list[Cell]:
    return [Cell(**row) for row in rows_of(LAYOUTS) if refused(row)]


def is_refused(cell: Cell) -> bool:
    """Ask the layout itself."""
    try:
        replace(cell.setup.layout, num_draft_tokens=cell.num_draft_tokens)
    except EspalierError:
        return True
    return False


@lru_cache
def reference(
    family: str,
    seed: int,
    window: int | None,
    draft_vocab: int | None,
    speculative: bool,
    keeps: str,
    kv_dtype: str,
    draft_kv_dtype: str,
    kv_scales: bool,
    model_impl: str,
) -> Reference:
    """The oracle over the models of a setup, kept for the process: what it has decoded plainly is the same in every
    layout."""
    algorithm = "eagle3" if speculative else "none"
    setup = Setup(
        family=family,
        seed=seed,
        window=window,
        draft_vocab=draft_vocab,
        algorithm=algorithm,
        keeps=keeps,
        kv_scales=kv_scales,
        model_impl=model_impl,
    )
    target, draft = setup.models()
    stored = directories(family, seed, window, draft_vocab, kv_scales)[0]
    scales = draft_scales = None
    if kv_dtype == FP8_KV:
        scales = [
            scales_in(stored, layer, rows.kv_heads, rows.num_read_planes)
            if kv_scales
            else ones(rows.kv_heads, rows.num_read_planes)
            for layer, rows in (
                (i if spec.shares_with is None else spec.shares_with, spec.cache_spec)
                for i, spec in enumerate(target.layer_specs)
            )
        ]
    if draft_kv_dtype == FP8_KV and draft is not None:
        draft_scales = [ones(spec.cache_spec.kv_heads, spec.cache_spec.num_read_planes) for spec in draft.layer_specs]
    return Reference(target, draft, scales=scales, draft_scales=draft_scales)


def reference_of(setup: Setup) -> Reference:
    is_drafted = setup.algorithm == "eagle3"
    of_cache = setup.kv_dtype, setup.draft_kv_dtype, setup.kv_scales
    of_files = setup.family, setup.seed, setup.window, setup.draft_vocab
    return reference(*of_files, is_drafted, setup.keeps, *of_cache, setup.model_impl)
