"""From what a user set to what the engine runs on: every "auto" is decided here, once.

Device, model and free memory decide.
"""

import gc
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from espalier.attention import choose_backends, grouped_backend
from espalier.cache.kv import bytes_beside_pages, bytes_per_token
from espalier.cache.layer_spec import LayerSpec
from espalier.config import DTYPES, EngineConfig, ResolvedConfig, SpeculationConfig, is_open
from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import Chip, require_triton
from espalier.layout import PLAIN, TREE_FIELDS, RoundLayout, TreeShape, max_draft_tokens
from espalier.models.draft import DraftSpec
from espalier.models.weights import WeightCount
from espalier.speculate.drafters import WITHOUT_FILES, algorithms
from espalier.startup.build import require_reentry
from espalier.startup.threads import ThreadFacts, choose_threads
from espalier.startup.tree_policy import Machine, choose_trees

STEPS, TOPK, NUM_DRAFT_TOKENS = 5, 4, 16
PAGE_SIZE = 16
LAYOUT_FIELDS = (*TREE_FIELDS, "page_size", "max_batch", "max_context", "chunk_size", "reentry")
CGROUP = Path("/sys/fs/cgroup")
# Of a GPU: bfloat16 on tensor cores, and copies that do not pass through registers.
LEAST_CAPABILITY = (8, 0)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceDefaults:
    """What "auto" means on a kind of device; memory_share: of the free memory, for the pages."""

    max_batch: int
    most_context: int
    chunk_size: int
    overlap: bool
    memory_share: float


DEFAULTS = {
    "cpu": DeviceDefaults(max_batch=8, most_context=8192, chunk_size=512, overlap=False, memory_share=0.4),
    "cuda": DeviceDefaults(max_batch=64, most_context=32768, chunk_size=2048, overlap=True, memory_share=0.85),
}


@dataclass(frozen=True)
class Facts:
    """What is known of machine and model before anything is loaded.

    free_bytes: memory of the device that nobody uses; weights: of target and draft;
    stored_dtype: the checkpoint's own; geometry: of the target's layers, then the draft's; hidden_size, num_layers: of
    the target; chip: None on a CPU; threads: of the CPU.
    """

    free_bytes: int
    weights: WeightCount
    stored_dtype: str | None
    max_position: int
    geometry: tuple[LayerSpec, ...]
    hidden_size: int
    num_layers: int
    chip: Chip | None
    threads: ThreadFacts

    @property
    def of_target(self) -> range:
        return range(self.num_layers)

    @property
    def of_draft(self) -> range:
        return range(self.num_layers, len(self.geometry))


def choose_device(config: EngineConfig) -> torch.device:
    """Raises EspalierError for a device that is not there."""
    has_cuda = torch.cuda.is_available()
    if is_open(config.device):
        return _auto_device()
    try:
        device = torch.device(config.device)
    except RuntimeError:
        raise EspalierError(f"device={config.device!r} is not supported; use cpu, cuda, cuda:N or 'auto'") from None
    if device.type not in DEFAULTS:
        raise EspalierError(f"device={config.device!r} is not supported; use cpu, cuda, cuda:N or 'auto'")
    if device.type == "cuda" and not has_cuda:
        raise EspalierError(f"device={config.device!r} is not there: PyTorch finds no CUDA device; use cpu or 'auto'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EspalierError(
            f"device={config.device!r} is not there; PyTorch finds {torch.cuda.device_count()} CUDA devices"
        )
    if device.type == "cuda" and (too_old := _too_old(device)):
        raise EspalierError(f"{too_old}; use device=cpu")
    return device


def _auto_device() -> torch.device:
    """The GPU, unless there is none or it is too old."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    too_old = _too_old(torch.device("cuda"))
    if too_old is None:
        return torch.device("cuda")
    log.warning("%s; running on the CPU", too_old)
    return torch.device("cpu")


def _too_old(device: torch.device) -> str | None:
    """What is wrong with a GPU that the kernels do not run on."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= LEAST_CAPABILITY:
        return None
    name, have, need = torch.cuda.get_device_name(device), _version(capability), _version(LEAST_CAPABILITY)
    return f"device={str(device)!r}: {name} has compute capability {have}, and {need} (Ampere) or later is needed"


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def asked_algorithm(config: EngineConfig) -> str:
    """What the user says drafts; "auto" leaves it to the draft.  Raises EspalierError for what does not exist."""
    if config.speculation is None:
        return "none"
    asked = "auto" if isinstance(config.speculation, str) else config.speculation.algorithm
    if asked not in (*algorithms(), "auto"):
        raise EspalierError(f"algorithm={asked!r} is not supported; use {', '.join(algorithms())} or 'auto'")
    return asked


def choose_algorithm(config: EngineConfig, of_draft: str | None) -> str:
    """What drafts: what the user says, else the draft that is given (or bundled), else n-gram lookup.

    of_draft: the algorithm of that draft's format; None without a draft.
    """
    asked = asked_algorithm(config)
    if asked == "auto":
        return of_draft or "ngram"
    if asked in WITHOUT_FILES:
        if asked != "none" and config.draft is not None:
            raise EspalierError(
                f"algorithm={asked!r} takes no draft, and draft={str(config.draft)!r} is given; leave one out"
            )
        return asked
    if of_draft is None:
        raise EspalierError(
            f"algorithm={asked!r} needs a draft; give draft= a directory or Hugging Face id, or use 'ngram'"
        )
    if asked != of_draft:
        raise EspalierError(f"algorithm={asked!r} is asked for and the draft is for {of_draft!r}; leave one out")
    return asked


def resolve(
    config: EngineConfig, model: str, draft: str | None, spec: DraftSpec, device: torch.device, facts: Facts
) -> ResolvedConfig:
    """Decide every open field and check everything against everything.  Raises EspalierError."""
    defaults = DEFAULTS[device.type]
    dtype = _or(config.dtype, _dtype(device, facts))
    attention, draft_attention = _attention(config, device, getattr(torch, dtype), facts)
    asked = config.speculation if isinstance(config.speculation, SpeculationConfig) else SpeculationConfig()
    tree = _tree(asked, spec.algorithm)
    machine = None if facts.chip is None else Machine(facts.chip, dtype, facts.hidden_size, facts.num_layers)
    max_batch = _or(config.max_batch, defaults.max_batch)
    is_named = any(not is_open(getattr(asked, name)) for name in TREE_FIELDS)
    trees = choose_trees(asked.by_batch, tree, machine, is_named, max_batch)
    layout = RoundLayout(
        max_batch=max_batch,
        **asdict(tree),
        page_size=_or(config.page_size, PAGE_SIZE),
        max_context=_max_context(config, facts, defaults),
        reentry=spec.reentry,
        chunk_size=_or(config.chunk_size, defaults.chunk_size),
        trees=tuple(trees.items()),
    )
    if device.type == "cuda":
        require_triton()
    of_all = (device.type, getattr(torch, dtype), layout.page_size, facts.geometry)
    grouped_backend(attention, *of_all, facts.of_target)
    if facts.of_draft:
        grouped_backend(draft_attention, *of_all, facts.of_draft, left_bound=True)
    prefix_cache = _or(config.prefix_cache, all(spec.keeps.reenters_anywhere for spec in facts.geometry))
    require_reentry(prefix_cache, facts.geometry)
    return ResolvedConfig(
        model=model,
        draft=draft,
        algorithm=spec.algorithm,
        by_batch={least: asdict(shape) for least, shape in trees.items()},
        device=str(device),
        dtype=dtype,
        threads=choose_threads(config.threads, device.type, facts.weights.nbytes(getattr(torch, dtype)), facts.threads),
        attention=attention,
        draft_attention=draft_attention,
        num_pages=_num_pages(config, layout, facts, getattr(torch, dtype)),
        prefix_cache=prefix_cache,
        overlap=_or(config.overlap, defaults.overlap),
        graph_batch=_graph_batch(config, layout, device),
        model_overrides=dict(config.model_overrides),
        seed=config.seed,
        **{name: getattr(layout, name) for name in LAYOUT_FIELDS},
    )


def layout_of(config: ResolvedConfig) -> RoundLayout:
    """The layout that a resolved configuration names."""
    sizes = {name: getattr(config, name) for name in LAYOUT_FIELDS}
    trees = tuple((least, TreeShape(**shape)) for least, shape in config.by_batch.items())
    return RoundLayout(trees=trees, **sizes)


def _attention(config: EngineConfig, device: torch.device, dtype: torch.dtype, facts: Facts) -> tuple[str, str]:
    """Backends of the target and of the draft, by default the same.  Raises EspalierError for one of no draft."""
    asked = None if is_open(config.attention) else config.attention
    draft = asked if is_open(config.draft_attention) else config.draft_attention
    target = choose_backends(asked, device.type, dtype, facts.geometry, facts.of_target)
    if not facts.of_draft:
        if not is_open(config.draft_attention):
            raise EspalierError(
                f"draft_attention={config.draft_attention!r} is set, and what drafts has no layers; leave it out"
            )
        return target, target
    return target, choose_backends(draft, device.type, dtype, facts.geometry, facts.of_draft)


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if is_open(value) else value


def _dtype(device: torch.device, facts: Facts) -> str:
    if device.type == "cpu" or facts.stored_dtype not in DTYPES:
        return "float32"
    return facts.stored_dtype


def _max_context(config: EngineConfig, facts: Facts, defaults: DeviceDefaults) -> int:
    if is_open(config.max_context):
        return min(facts.max_position, defaults.most_context)
    if int(config.max_context) > facts.max_position:
        raise EspalierError(
            f"max_context={config.max_context} is above the model's {facts.max_position} positions; lower it, or "
            "replace max_position_embeddings with model_overrides if you know that the model can"
        )
    return int(config.max_context)


def _tree(asked: SpeculationConfig, algorithm: str) -> TreeShape:
    """The configured one."""
    if algorithm == "none":
        beside = [name for name in TREE_FIELDS if getattr(asked, name) not in ("auto", getattr(PLAIN, name))]
        if beside:
            raise EspalierError(
                f"algorithm='none' is plain decoding and {beside[0]}={getattr(asked, beside[0])} is set; leave one out"
            )
        return PLAIN
    steps, topk = _or(asked.steps, STEPS), _or(asked.topk, TOPK)
    return TreeShape(steps, topk, _or(asked.num_draft_tokens, min(NUM_DRAFT_TOKENS, max_draft_tokens(steps, topk))))


def _graph_batch(config: EngineConfig, layout: RoundLayout, device: torch.device) -> int:
    """All batches, unless the user says otherwise; none where there are no CUDA graphs."""
    if is_open(config.graph_batch):
        return layout.max_batch if device.type == "cuda" else 0
    if device.type != "cuda" and config.graph_batch:
        raise EspalierError(f"graph_batch={config.graph_batch} needs device=cuda; use 0 or 'auto' on {device.type}")
    if int(config.graph_batch) > layout.max_batch:
        raise EspalierError(
            f"graph_batch={config.graph_batch} is above max_batch={layout.max_batch}; lower it, or raise max_batch"
        )
    return int(config.graph_batch)


def _num_pages(config: EngineConfig, layout: RoundLayout, facts: Facts, dtype: torch.dtype) -> int:
    """What is set, else what a share of the free memory holds, up to what a full batch of full contexts uses.

    Counts the dummy page.  Raises EspalierError where not even one full context fits.
    """
    token = bytes_per_token(facts.geometry, dtype)
    beside = bytes_beside_pages(layout, facts.geometry[: facts.num_layers], facts.geometry[facts.num_layers :], dtype)
    left = facts.free_bytes - facts.weights.nbytes(dtype) - beside
    free = f"the free memory ({facts.free_bytes / 2**30:.1f} GiB, weights included)"
    page = layout.tokens_in(token)
    if isinstance(config.num_pages, int):
        if config.num_pages * page > left:
            raise EspalierError(
                f"num_pages={config.num_pages} of {layout.page_size} tokens needs "
                f"{config.num_pages * page / 2**30:.1f} GiB and {free} holds {max(left // page, 0)} pages; "
                "lower it, or leave it to 'auto'"
            )
        return config.num_pages
    affordable = int(left * DEFAULTS[choose_device(config).type].memory_share) // page
    if affordable < layout.least_pages:
        raise EspalierError(
            f"max_context={layout.max_context} needs {layout.least_pages} pages of {layout.page_size} tokens and "
            f"{free} holds {max(affordable, 0)}; lower max_context, or set num_pages yourself"
        )
    return min(affordable, layout.most_pages)


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses: of the CUDA device, or of this machine within its control group's limit."""
    if device.type == "cuda":
        # What an LLM that was closed let go of lies in PyTorch's cache, which the driver counts as used.
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return min(_machine_memory(), *_cgroup_memory())


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        # macOS tells its whole memory only; half of it is taken to be free.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_memory() -> list[int]:
    """What the limits of this process's control group leave, for each version of the interface that is there."""
    pairs = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    left = [2**63]
    for limit, used in pairs:
        try:
            left.append(int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text()))
        except (OSError, ValueError):
            continue
    return left
