"""Builds an engine from loaded models: chooses attention backends, allocates buffers, makes drafter and executor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from espalier.attention import ModelCache, grouped_backend
from espalier.cache.kv import PagedKV, StagedKV, bytes_per_token
from espalier.cache.layer_spec import LayerSpec, layers_with_rows, with_row_dtype
from espalier.cache.states import StateTable, bytes_per_state, table_rows
from espalier.config import FP8_KV, ResolvedConfig
from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.engine.executor import CpuExecutor, Executor
from espalier.engine.tree_choice import MeasuredTreeChooser, TreeChooser
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.state.kv_scales import KVScales
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.models.draft import DraftModel
from espalier.shards import SINGLE_RANK, Shards
from espalier.slots import SlotTable
from espalier.speculate.drafters.base import Drafter
from espalier.speculate.drafters.path_merging import PathMergingDrafter
from espalier.speculate.drafters.registry import make_drafter
from espalier.speculate.round import ModelRunner
from espalier.speculate.sources.base import HostSource
from espalier.speculate.sources.index import IndexSource
from espalier.speculate.sources.own_text import OwnTextSource
from espalier.speculate.sources.prediction import PredictionSource


@dataclass(frozen=True)
class LoadedModels:
    """The models of one engine, and the engine's configuration.
    draft: None if the drafter has no model.  shards: which part of the target this rank holds."""

    config: ResolvedConfig
    target: CausalLM
    draft: DraftModel | None = None
    shards: Shards = SINGLE_RANK

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.device)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    def with_num_pages(self, num_pages: int) -> "LoadedModels":
        return replace(self, config=replace(self.config, num_pages=num_pages))

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What all layers of target and draft keep in the KV cache (see cache_specs)."""
        drafts = () if self.draft is None else self.draft.layer_specs
        return cache_specs(self.target.layer_specs, drafts, self.config.kv_dtype, self.config.draft_kv_dtype)


def config_without_files(
    layout: RoundLayout,
    algorithm: str,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    **differing_fields: Any,
) -> ResolvedConfig:
    """Returns the configuration of an engine for models that were not loaded from files.
    By default, overlap, prefix cache and CUDA graphs are off, and there are pages for a full batch.
    algorithm, attention: the names in ResolvedConfig.  differing_fields: the fields of ResolvedConfig that differ from
    these defaults."""
    name = str(dtype).removeprefix("torch.")
    row_fields = {"kv_dtype": name, "draft_kv_dtype": name, "draft_attention": attention, "num_pages": layout.max_pages}
    switches: dict[str, Any] = {"overlap": False, "prefix_cache": False, "graph_batch": 0, "seed": 0}
    switches |= {"model_impl": "native", "model_overrides": {}}
    switches |= {"num_snapshots": 4 * layout.max_batch * bool(differing_fields.get("prefix_cache"))}
    defaults: dict[str, Any] = {"model": "", "draft": None, "threads": torch.get_num_threads()}
    return ResolvedConfig(
        layout=layout,
        algorithm=algorithm,
        attention=attention,
        dtype=name,
        device=str(device),
        **{**defaults, **row_fields, **switches, **differing_fields},
    )


def cache_specs(
    target: Sequence[LayerSpec], draft: Sequence[LayerSpec], kv_dtype: str, draft_kv_dtype: str
) -> tuple[LayerSpec, ...]:
    """Returns the specs of all layers, the target's first, with the dtypes in which the KV cache stores their rows.
    target, draft: the layers' specs in the model's dtype.  kv_dtype, draft_kv_dtype: the fields of ResolvedConfig."""
    row_dtype, draft_row_dtype = (FP8 if name == FP8_KV else None for name in (kv_dtype, draft_kv_dtype))
    specs = (*with_row_dtype(target, row_dtype), *with_row_dtype(draft, draft_row_dtype))
    # A layer that reads another layer's rows has the row dtype of that layer.
    return tuple(
        spec if spec.shares_with is None else replace(spec, cache_spec=specs[spec.shares_with].cache_spec)
        for spec in specs
    )


def describe_cache_size(config: ResolvedConfig, specs: Sequence[LayerSpec], dtype: torch.dtype) -> str:
    """Returns a text about the memory of KV pages and recurrent states.  specs: of all layers.  dtype: the model's."""
    tokens, token_bytes = config.layout.tokens_in(config.num_pages), bytes_per_token(specs, dtype)
    pages = f"pages hold {tokens} tokens, {token_bytes} bytes each: {tokens * token_bytes / 2**30:.1f} GiB"
    state, rows = bytes_per_state(specs, dtype), table_rows(config.layout, config.num_snapshots)
    if not state:
        return pages
    return (
        f"{pages}; states of {config.layout.max_batch} slots and {config.num_snapshots} snapshots, {state} bytes each: "
        f"{rows * state / 2**30:.1f} GiB"
    )


def kv_scales(target: CausalLM) -> dict[int, KVScales]:
    """Returns the scales of an FP8 KV cache by layer index.  A checkpoint has scales for all layers or for no layer.
    The rows of a draft have no scales: rounding in a draft cannot change the output.
    Raises EspalierError if only some layers of the target have a scale, or if a scale is not a positive number."""
    scales_by_layer = {layer: scales for layer, scales in enumerate(target.kv_scales) if scales is not None}
    remedy = "use a complete checkpoint, or set kv_dtype to the model's dtype"
    specs = target.layer_specs
    layers_with_own_rows = [
        layer for layer in layers_with_rows(specs, range(len(specs))) if specs[layer].shares_with is None
    ]
    missing = [layer for layer in layers_with_own_rows if layer not in scales_by_layer]
    if (target.config.declared_kv_dtype or scales_by_layer) and missing:
        raise EspalierError(
            f"weight 'model.layers.{missing[0]}.self_attn.k_scale' is missing, and kv_dtype={FP8_KV} needs it in each "
            f"layer: {remedy}"
        )
    for layer, scales in scales_by_layer.items():
        for name, scale in (("k", scales.k), ("v", scales.v)):
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise EspalierError(
                    f"weight 'model.layers.{layer}.self_attn.{name}_scale' is {scale.tolist()}, not a positive number: "
                    f"{remedy}"
                )
    return scales_by_layer


def assemble_engine(loaded: LoadedModels, keep_graphs: bool = False, capture_stages: bool = False) -> Engine:
    """Builds an engine that runs these models.
    keep_graphs, capture_stages: see CudaExecutor.
    Raises EspalierError if a backend cannot run a layer."""
    config, runner = loaded.config, make_runner(loaded)
    executor = make_executor(runner, config.overlap, config.graph_batch, keep_graphs, capture_stages)
    sources = make_host_sources(config.sources, config.index_bytes, config.layout.num_text_paths == 0)
    return Engine(executor, config.overlap, config.prefix_cache, make_tree_chooser(config), sources)


def make_engine(runner: ModelRunner, overlap: bool, prefix_cache: bool, graph_batch: int = 0) -> Engine:
    """Returns an engine that uses the buffers of `runner`.  No other engine may use the same runner."""
    return Engine(make_executor(runner, overlap, graph_batch), overlap, prefix_cache)


def make_tree_chooser(config: ResolvedConfig) -> TreeChooser | None:
    """Returns the object that chooses trees while the engine runs; None if the tree of each batch size is fixed."""
    if config.round_costs is None or not config.layout.choices:
        return None
    return MeasuredTreeChooser(config.layout, config.round_costs, is_lookup=config.algorithm == "ngram")


def make_host_sources(names: Sequence[str], index_bytes: int, searches_text: bool) -> list[HostSource]:
    """Returns the sources of draft tokens that run on the host, in order of preference.
    names: the names of all sources.  searches_text: whether the host (True) or the device runs the source "text"."""
    sources: list[HostSource] = [PredictionSource()] if "prediction" in names else []
    sources += [OwnTextSource()] if "text" in names and searches_text else []
    return [*sources, IndexSource(index_bytes)] if "index" in names else sources


def make_executor(
    runner: ModelRunner,
    overlap: bool,
    graph_batch: int = 0,
    keep_graphs: bool = False,
    capture_stages: bool = False,
) -> Executor:
    """Returns the object that runs launches on the runner's device.  For the arguments see CudaExecutor."""
    if runner.pages.device.type == "cuda":
        return CudaExecutor(runner, graph_batch, keep_graphs, overlap, capture_stages)
    return CpuExecutor(runner, overlap)


def make_runner(loaded: LoadedModels) -> ModelRunner:
    """Chooses attention backends, allocates all buffers, and returns the runner that holds models and buffers."""
    config, target, device, dtype = loaded.config, loaded.target, loaded.device, loaded.dtype
    layout, specs, exact_lengths = config.layout, loaded.layer_specs, not config.overlap
    target_layers, draft_layers = range(len(target.layer_specs)), range(len(target.layer_specs), len(specs))
    setting = (device.type, dtype, layout.page_size, specs)
    backend = grouped_backend(config.attention, *setting, target_layers, exact_lengths=exact_lengths)
    scales = kv_scales(target) if config.kv_dtype == FP8_KV else None
    pages = PagedKV(layout, config.num_pages, specs, len(target_layers), dtype, device, scales)
    # Module k of an MTP draft has no K/V rows below position k.  So with several modules, the host knows no exact
    # lengths.
    exact = exact_lengths and layout.num_recomputed_tokens <= 1
    draft_backend = grouped_backend(
        config.draft_attention, *setting, draft_layers, layout.num_recomputed_tokens > 0, exact
    )
    states = None
    if bytes_per_state(target.layer_specs, dtype):
        states = StateTable(layout, config.num_snapshots, target.layer_specs, dtype, device)
    cache, draft_cache = (
        ModelCache(specs, layers, pages, StagedKV(specs, layers, rows, dtype, device), layers_backend, layers_states)
        for layers, rows, layers_backend, layers_states in (
            (target_layers, layout.target_rows, backend, states),
            (draft_layers, layout.draft_rows, draft_backend, None),
        )
    )
    drafter: Drafter = make_drafter(config.algorithm, loaded.draft, layout, draft_cache)
    if layout.calibrates_scores:
        drafter = PathMergingDrafter(drafter, layout)
    table = SlotTable(layout, target.config.vocab_size, drafter.spec.slot_tensor_shapes, dtype, device)
    return ModelRunner(layout, table, cache, target, drafter)
