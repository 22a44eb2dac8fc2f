"""Resolves the user's configuration: chooses a value for each "auto" by device, model and free memory."""

import gc
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from espalier.attention import choose_backends, grouped_backend
from espalier.cache.layer_spec import LayerSpec
from espalier.config import DTYPES, FP8_KV, EngineConfig, ResolvedConfig, SpeculationConfig, is_unresolved
from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import require_triton
from espalier.layout import PLAIN_TREE, TREE_FIELDS, RoundLayout, TreeShape, max_draft_tokens
from espalier.models.draft import DraftSpec
from espalier.models.weight_files import WeightSize
from espalier.speculate.drafters.registry import algorithms, drafter_without_files
from espalier.startup.build import cache_specs
from espalier.startup.measure_memory import choose_max_batch, choose_num_pages_and_snapshots
from espalier.startup.sources import INDEX_BYTES, can_share_rows, choose_sources, source_sizes
from espalier.startup.threads import CpuThreadInfo, choose_threads
from espalier.startup.tree_cost import ChipFigures, PassWeights
from espalier.startup.tree_policy import (
    PredictedCosts,
    adaptive_tree_choices,
    busy_chunk_size,
    choose_trees,
    has_tree_settings,
    with_depth_of,
)

DEFAULT_STEPS, DEFAULT_TOPK, DEFAULT_NUM_DRAFT_TOKENS = 5, 4, 16
DEFAULT_PAGE_SIZE = 16
# The default tree of a draft that proposes all depths in one pass.  More depths take no more time, and more candidates
# take almost no time.
BLOCK_STEPS, BLOCK_TOPK = 15, 8
CGROUP_FOLDER = Path("/sys/fs/cgroup")
# For control groups v2 and v1: the files with the memory limit, the memory use and the statistics, and the statistic
# for cached files, whose memory the kernel frees when necessary.
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
# The minimum compute capability, because kernels need bfloat16 on tensor cores and asynchronous copies to shared
# memory.
MIN_CAPABILITY = (8, 0)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceDefaults:
    """The values that replace "auto" on one device type.
    context_limit: the maximum of max_context.  memory_share: the share of the free memory that pages may take."""

    max_batch: int
    context_limit: int
    chunk_size: int
    busy_chunk_size: int
    overlap: bool
    memory_share: float


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(8, context_limit=8192, chunk_size=512, busy_chunk_size=512, overlap=False, memory_share=0.4),
    "cuda": DeviceDefaults(
        128, context_limit=32768, chunk_size=4096, busy_chunk_size=640, overlap=True, memory_share=0.85
    ),
}


@dataclass(frozen=True)
class StartupInfo:
    """What startup knows about the machine and the models before weights are loaded.  With several ranks, all values
    are those of one rank.

    free_bytes: free memory of the device.  weights: the size of the weights of target and draft.
    stored_dtype: dtype of the target's checkpoint.  declared_kv_dtype: the kv_dtype in the target's config.json.
    layer_specs: specs of the target's layers, then of the draft's layers.
    max_position, hidden_size, num_layers: sizes of the target.  model_impl: what runs it, native or transformers.
    chip: the measured speed of the GPU; None on a CPU.  threads: the CPU's cores and threads.
    pass_weights: the sizes that determine the time of a pass."""

    free_bytes: int
    weights: WeightSize
    stored_dtype: str | None
    max_position: int
    layer_specs: tuple[LayerSpec, ...]
    hidden_size: int
    num_layers: int
    chip: ChipFigures | None
    threads: CpuThreadInfo
    pass_weights: PassWeights
    declared_kv_dtype: str | None = None
    model_impl: str = "native"

    @property
    def target_layers(self) -> range:
        return range(self.num_layers)

    @property
    def draft_layers(self) -> range:
        return range(self.num_layers, len(self.layer_specs))


def choose_device(config: EngineConfig) -> torch.device:
    """Returns the device of a configuration.  Raises EspalierError if the device does not exist or is too old."""
    device = _auto_device() if is_unresolved(config.device) else _device_named(config.device)
    _require_equal_gpus(config, device)
    return device


def _device_named(name: str) -> torch.device:
    """Returns the user's device, such as "cuda:1".  Raises EspalierError if it does not exist or is too old."""
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in DEVICE_DEFAULTS:
        raise EspalierError(f"device={name!r} is not supported; use cpu, cuda, cuda:N or 'auto'")
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise EspalierError(f"device={name!r} is not available: PyTorch finds no CUDA device; use cpu or 'auto'")
    if (device.index or 0) >= torch.cuda.device_count():
        raise EspalierError(
            f"device={name!r} does not exist: PyTorch finds {torch.cuda.device_count()} CUDA devices; use another index"
        )
    if too_old := _too_old_reason(device):
        raise EspalierError(f"{too_old}; use device=cpu")
    return device


def _require_equal_gpus(config: EngineConfig, device: torch.device) -> None:
    """Raises EspalierError if there are fewer GPUs than ranks, or if the GPUs differ."""
    count = config.tensor_parallel
    if count == 1 or device.type != "cuda":
        return
    if device.index is not None:
        raise EspalierError(
            f"device={config.device!r} with tensor_parallel={count} is not supported: ranks have the GPUs 0 to "
            f"{count - 1}; use cuda, and CUDA_VISIBLE_DEVICES for others"
        )
    if count > torch.cuda.device_count():
        raise EspalierError(
            f"tensor_parallel={count} needs as many GPUs, and PyTorch finds {torch.cuda.device_count()}; lower it"
        )
    cards = [torch.cuda.get_device_properties(index) for index in range(count)]
    kinds = {(card.name, card.total_memory >> 30) for card in cards}
    if len(kinds) > 1:
        named = " and ".join(f"{name} ({gib} GiB)" for name, gib in sorted(kinds))
        raise EspalierError(
            f"tensor_parallel={count} needs equal GPUs, but these are {named}; choose equal ones with "
            "CUDA_VISIBLE_DEVICES"
        )


def _auto_device() -> torch.device:
    """Returns the GPU; the CPU if there is no GPU or if the GPU is too old."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    too_old = _too_old_reason(torch.device("cuda"))
    if too_old is None:
        return torch.device("cuda")
    log.warning("%s; running on the CPU", too_old)
    return torch.device("cpu")


def _too_old_reason(device: torch.device) -> str | None:
    """Returns why the kernels cannot run on this GPU; None if they can run."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= MIN_CAPABILITY:
        return None
    name, have, need = torch.cuda.get_device_name(device), _version_text(capability), _version_text(MIN_CAPABILITY)
    return f"device={str(device)!r}: {name} has compute capability {have}, and {need} (Ampere) or later is needed"


def _version_text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def requested_algorithm(config: EngineConfig) -> str:
    """Returns the user's algorithm, or "auto".  Raises EspalierError for an unknown algorithm."""
    if config.speculation is None:
        return "none"
    requested = "auto" if isinstance(config.speculation, str) else config.speculation.algorithm
    if requested not in (*algorithms(), "auto"):
        raise EspalierError(f"algorithm={requested!r} is not supported; use {', '.join(algorithms())} or 'auto'")
    # Depth 0 is plain decoding whatever the algorithm, so no draft is loaded.
    is_plain = isinstance(config.speculation, SpeculationConfig) and config.speculation.steps == 0
    return "none" if is_plain else requested


def choose_algorithm(config: EngineConfig, draft_algorithm: str | None) -> str:
    """Returns the user's algorithm, else the draft's algorithm, else "ngram".
    draft_algorithm: the algorithm for the format of the draft that was found; None if no draft was found.
    Raises EspalierError if the user's algorithm and the draft do not fit together."""
    requested = requested_algorithm(config)
    if requested == "auto":
        return draft_algorithm or "ngram"
    if drafter_without_files(requested):
        if requested != "none" and config.draft is not None:
            raise EspalierError(
                f"algorithm={requested!r} takes no draft, but draft={str(config.draft)!r} is set; remove one of them"
            )
        return requested
    if draft_algorithm is None:
        raise EspalierError(
            f"algorithm={requested!r} needs a draft; give draft= a directory or Hugging Face id, or use 'ngram'"
        )
    if requested != draft_algorithm:
        raise EspalierError(
            f"algorithm={requested!r} is set, but the draft is for {draft_algorithm!r}; remove one of them"
        )
    return requested


def resolve(
    config: EngineConfig, model: str, draft: str | None, spec: DraftSpec, device: torch.device, info: StartupInfo
) -> ResolvedConfig:
    """Returns the configuration with each "auto" resolved.  model, draft: paths.  Raises EspalierError on conflicts."""
    defaults, dtype = DEVICE_DEFAULTS[device.type], _value_or_default(config.dtype, _default_dtype(device, info))
    kv_dtype, draft_kv_dtype = _kv_dtypes(config, dtype, info)
    own, drafts = (info.layer_specs[layers.start : layers.stop] for layers in (info.target_layers, info.draft_layers))
    info = replace(info, layer_specs=cache_specs(own, drafts, kv_dtype, draft_kv_dtype))
    in_dtype = getattr(torch, dtype)
    attention, draft_attention = _attention_backends(config, device, in_dtype, info)
    speculation = config.speculation if isinstance(config.speculation, SpeculationConfig) else SpeculationConfig()
    tree = _configured_tree(speculation, spec)
    predicted = None if info.chip is None else PredictedCosts(info.pass_weights, info.chip)
    max_batch = choose_max_batch(config, info, in_dtype, defaults.max_batch)
    trees = choose_trees(speculation.by_batch, tree, predicted, has_tree_settings(speculation), max_batch)
    chunk_size = _value_or_default(config.chunk_size, defaults.chunk_size)
    overlap = _value_or_default(config.overlap, defaults.overlap)
    sources = choose_sources(speculation, spec.algorithm, tree, device)
    can_share = can_share_rows(info.layer_specs, info.model_impl, device)
    of_engine = (spec.algorithm, can_share, sources, info.pass_weights)
    costs, choices = adaptive_tree_choices(speculation, tree, predicted, max_batch, *of_engine, spec.max_steps)
    layout = RoundLayout(
        max_batch=max_batch,
        **asdict(with_depth_of(tree, choices)),
        page_size=_value_or_default(config.page_size, DEFAULT_PAGE_SIZE),
        max_context=_max_context(config, info, defaults),
        num_recomputed_tokens=spec.num_recomputed_tokens,
        block_rows=spec.block_rows,
        chunk_size=chunk_size,
        busy_chunk_size=busy_chunk_size(config, chunk_size, defaults.busy_chunk_size, predicted),
        trees=tuple(trees.items()),
        **source_sizes(sources, searches_on_host=device.type == "cpu" and not overlap),
        choices=choices,
    )
    if device.type == "cuda":
        require_triton()
    setting = (device.type, in_dtype, layout.page_size, info.layer_specs)
    grouped_backend(attention, *setting, info.target_layers, exact_lengths=not overlap)
    if info.draft_layers:
        lacks_first_rows, exact = spec.num_recomputed_tokens > 0, not overlap and spec.num_recomputed_tokens <= 1
        grouped_backend(draft_attention, *setting, info.draft_layers, lacks_first_rows, exact)
    prefix_cache = _value_or_default(config.prefix_cache, True)
    num_pages, num_snapshots = choose_num_pages_and_snapshots(
        config, layout, info, in_dtype, defaults.memory_share, prefix_cache
    )
    return ResolvedConfig(
        model=model,
        draft=draft,
        algorithm=spec.algorithm,
        layout=layout,
        device=str(device),
        dtype=dtype,
        kv_dtype=kv_dtype,
        draft_kv_dtype=draft_kv_dtype,
        threads=_num_threads(config, device, info, in_dtype),
        attention=attention,
        draft_attention=draft_attention,
        num_pages=num_pages,
        num_snapshots=num_snapshots,
        prefix_cache=prefix_cache,
        overlap=overlap,
        graph_batch=_graph_batch(config, layout, device),
        model_impl=info.model_impl,
        model_overrides=dict(config.model_overrides),
        seed=_value_or_default(config.seed, secrets.randbits(63)),
        round_costs=costs,
        sources=sources,
        index_bytes=_value_or_default(speculation.index_bytes, INDEX_BYTES) * ("index" in sources),
        tensor_parallel=config.tensor_parallel,
    )


def _num_threads(config: EngineConfig, device: torch.device, info: StartupInfo, dtype: torch.dtype) -> int:
    """Returns the number of threads of each rank.  On a CPU all ranks share the cores."""
    threads = choose_threads(config.threads, device.type, info.weights.nbytes(dtype), info.threads)
    return max(threads // config.tensor_parallel, 1) if is_unresolved(config.threads) else threads


def _attention_backends(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, info: StartupInfo
) -> tuple[str, str]:
    """Returns the attention backends of target and draft.  By default, the draft has the target's backend.
    Raises EspalierError if draft_attention is set and the drafter has no layers."""
    target_backend = None if is_unresolved(config.attention) else config.attention
    draft_backend = target_backend if is_unresolved(config.draft_attention) else config.draft_attention
    target = choose_backends(target_backend, device.type, dtype, info.layer_specs, info.target_layers)
    if not info.draft_layers:
        if not is_unresolved(config.draft_attention):
            raise EspalierError(
                f"draft_attention={config.draft_attention!r} is set, but the drafter has no layers; leave it out"
            )
        return target, target
    return target, choose_backends(draft_backend, device.type, dtype, info.layer_specs, info.draft_layers)


def _kv_dtypes(config: EngineConfig, dtype: str, info: StartupInfo) -> tuple[str, str]:
    """Returns kv_dtype and draft_kv_dtype.  Raises EspalierError for a dtype that is neither FP8 nor the model's."""
    kv_dtype = _value_or_default(config.kv_dtype, info.declared_kv_dtype or dtype)
    if is_unresolved(config.kv_dtype) and info.declared_kv_dtype:
        log.info("kv_dtype=%s, as the checkpoint's kv_cache_scheme declares", kv_dtype)
    if not is_unresolved(config.draft_kv_dtype) and not info.draft_layers:
        raise EspalierError(
            f"draft_kv_dtype={config.draft_kv_dtype!r} is set, but the drafter has no layers; leave it out"
        )
    draft_kv_dtype = _value_or_default(config.draft_kv_dtype, kv_dtype)
    for name, value in (("kv_dtype", kv_dtype), ("draft_kv_dtype", draft_kv_dtype)):
        if value not in (FP8_KV, dtype):
            raise EspalierError(f"{name}={value!r} differs from dtype={dtype!r}; use {dtype}, {FP8_KV} or 'auto'")
    return kv_dtype, draft_kv_dtype


def _value_or_default(setting: Any, default: Any) -> Any:
    return default if is_unresolved(setting) else setting


def _default_dtype(device: torch.device, info: StartupInfo) -> str:
    """Returns the dtype of a model whose dtype is not set: float32 on a CPU, else the checkpoint's."""
    if device.type == "cpu" or info.stored_dtype not in DTYPES:
        return "float32"
    return info.stored_dtype


def _max_context(config: EngineConfig, info: StartupInfo, defaults: DeviceDefaults) -> int:
    if is_unresolved(config.max_context):
        return min(info.max_position, defaults.context_limit)
    if int(config.max_context) > info.max_position:
        raise EspalierError(
            f"max_context={config.max_context} is above the model's {info.max_position} positions; lower it, or, if "
            "the model supports more, set max_position_embeddings with model_overrides"
        )
    return int(config.max_context)


def _configured_tree(speculation: SpeculationConfig, spec: DraftSpec) -> TreeShape:
    """Returns the configured tree.
    Raises EspalierError if tree settings are combined with plain decoding, or if the tree is impossible."""
    if spec.algorithm == "none" or speculation.steps == 0:
        _refuse_tree(speculation, "steps=0" if speculation.steps == 0 else "algorithm='none'")
        return PLAIN_TREE
    limit = BLOCK_STEPS if spec.max_steps is None else spec.max_steps
    default_steps, default_topk = (
        (min(BLOCK_STEPS, limit), BLOCK_TOPK) if spec.block_rows else (DEFAULT_STEPS, DEFAULT_TOPK)
    )
    steps, topk = _value_or_default(speculation.steps, default_steps), _value_or_default(speculation.topk, default_topk)
    if spec.max_steps is not None and steps > spec.max_steps:
        raise EspalierError(
            f"steps={steps} is above the {spec.max_steps} tokens that this draft proposes in a round; lower it"
        )
    num_draft_tokens = min(DEFAULT_NUM_DRAFT_TOKENS, max_draft_tokens(steps, topk))
    return TreeShape(steps, topk, _value_or_default(speculation.num_draft_tokens, num_draft_tokens))


def _refuse_tree(speculation: SpeculationConfig, cause: str) -> None:
    """Raises EspalierError if a tree setting is combined with a setting for plain decoding.
    cause: the setting for plain decoding."""
    for name in TREE_FIELDS:
        if (value := getattr(speculation, name)) not in ("auto", getattr(PLAIN_TREE, name)):
            raise EspalierError(f"{cause} is plain decoding, but {name}={value} is set; remove one of them")


def _graph_batch(config: EngineConfig, layout: RoundLayout, device: torch.device) -> int:
    """Returns the largest batch with CUDA graphs: by default max_batch on a GPU, and 0 on a CPU.
    Raises EspalierError if the user's graph_batch is above max_batch, or above 0 on a CPU."""
    if is_unresolved(config.graph_batch):
        return layout.max_batch if device.type == "cuda" else 0
    if device.type != "cuda" and config.graph_batch:
        raise EspalierError(f"graph_batch={config.graph_batch} needs device=cuda; use 0 or 'auto' on {device.type}")
    if int(config.graph_batch) > layout.max_batch:
        raise EspalierError(
            f"graph_batch={config.graph_batch} is above max_batch={layout.max_batch}; lower it, or raise max_batch"
        )
    return int(config.graph_batch)


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of the GPU.  For a CPU, returns the free bytes of the machine, within the limit of the
    process's control group."""
    if device.type == "cuda":
        # PyTorch may still cache memory of a closed LLM, which the driver counts as used.
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return min(_machine_memory(), *_cgroup_memory())


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        # macOS reports only the total memory.  This code assumes that half of it is free.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_memory() -> list[int]:
    """Returns 2**63, and the bytes that each limit of cgroups v2 and v1 still leaves to this control group."""
    remaining = [2**63]
    for limit, used, statistics, cached in CGROUP_FILES:
        try:
            in_use = int((CGROUP_FOLDER / used).read_text()) - _statistic_bytes(CGROUP_FOLDER / statistics, cached)
            remaining.append(int((CGROUP_FOLDER / limit).read_text()) - in_use)
        except (OSError, ValueError):
            continue
    return remaining


def _statistic_bytes(file: Path, name: str) -> int:
    """Returns the bytes on the line `name` of a control group's statistics; 0 if there is no such line."""
    try:
        return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(f"{name} "))
    except (OSError, StopIteration):
        return 0
