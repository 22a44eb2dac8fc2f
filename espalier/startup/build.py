"""Builds an engine from loaded models: backends, buffers, drafter, executor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from espalier.attention import ModelCache, grouped_backend
from espalier.cache.kv import PagedKV, StagedKV, bytes_per_token
from espalier.cache.layer_spec import LayerSpec, stored_as
from espalier.config import FP8_KV
from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.engine.executor import CpuExecutor
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.state.kv_scales import KVScales
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.models.draft import DraftModel
from espalier.slots import SlotTable
from espalier.speculate.drafters.registry import make_drafter
from espalier.speculate.round import ModelRunner


@dataclass(frozen=True)
class KVDtypes:
    """Dtypes of the rows of target and draft in staging and pages; None: the model's."""

    target: torch.dtype | None = None
    draft: torch.dtype | None = None


AS_MODEL = KVDtypes()


def kv_dtypes_of(kv_dtype: str, draft_kv_dtype: str) -> KVDtypes:
    """From the names in a ResolvedConfig."""
    return KVDtypes(*(FP8 if name == FP8_KV else None for name in (kv_dtype, draft_kv_dtype)))


def cache_specs(target: Sequence[LayerSpec], draft: Sequence[LayerSpec], kv: KVDtypes) -> tuple[LayerSpec, ...]:
    """The specs of all layers, the target's first, with the dtypes in which their rows are stored."""
    return (*stored_as(target, kv.target), *stored_as(draft, kv.draft))


def cache_size(specs: Sequence[LayerSpec], num_pages: int, page_size: int, dtype: torch.dtype) -> str:
    """What the pages hold, in words.  specs: of all layers; dtype: the model's."""
    tokens, each = num_pages * page_size, bytes_per_token(specs, dtype)
    return f"pages hold {tokens} tokens, {each} bytes each: {tokens * each / 2**30:.1f} GiB"


def kv_scales(target: CausalLM) -> dict[int, KVScales]:
    """The scales of FP8 rows by layer, which the checkpoint has for all layers or for none.

    A draft's rows have none: they only decide what is proposed.  Raises EspalierError if a layer lacks them, or has one
    that is no scale.
    """
    stored = {layer: scales for layer, scales in enumerate(target.kv_scales) if scales is not None}
    instead = "use a complete checkpoint, or set kv_dtype to the model's dtype"
    missing = [layer for layer in range(len(target.layer_specs)) if layer not in stored]
    if (target.config.declared_kv_dtype or stored) and missing:
        raise EspalierError(
            f"weight 'model.layers.{missing[0]}.self_attn.k_scale' is missing, and kv_dtype={FP8_KV} needs it in each "
            f"layer: {instead}"
        )
    for layer, scales in stored.items():
        for name, scale in (("k", scales.k), ("v", scales.v)):
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise EspalierError(
                    f"weight 'model.layers.{layer}.self_attn.{name}_scale' is {scale.tolist()}, not a positive number: "
                    f"{instead}"
                )
    return stored


def assemble(
    layout: RoundLayout,
    target: CausalLM,
    draft: DraftModel | None,
    algorithm: str,
    *,
    attention: str,
    draft_attention: str | None = None,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    overlap: bool,
    prefix_cache: bool,
    graph_batch: int = 0,
    keep_graphs: bool = False,
    capture_stages: bool = False,
    kv: KVDtypes = AS_MODEL,
) -> Engine:
    """Build an engine that runs these models.

    attention: backends as named by attention.choose_backends; draft_attention: the same for the draft, by default
    `attention`; graph_batch: the largest batch whose rounds are CUDA graphs; 0: none;
    keep_graphs, capture_stages: see CudaExecutor.
    Raises EspalierError if a backend cannot run a layer.
    """
    runner = make_runner(
        layout,
        target,
        draft,
        algorithm,
        attention=attention,
        draft_attention=draft_attention,
        num_pages=num_pages,
        dtype=dtype,
        device=device,
        overlap=overlap,
        kv=kv,
    )
    return engine_of(runner, overlap, prefix_cache, graph_batch, keep_graphs, capture_stages)


def engine_of(
    runner: ModelRunner,
    overlap: bool,
    prefix_cache: bool,
    graph_batch: int = 0,
    keep_graphs: bool = False,
    capture_stages: bool = False,
) -> Engine:
    """An engine on the buffers of `runner`, which no other engine may use."""
    is_cuda = runner.pages.device.type == "cuda"
    if is_cuda:
        executor = CudaExecutor(runner, graph_batch, keep_graphs, overlap, capture_stages)
        return Engine(executor, overlap, prefix_cache)
    return Engine(CpuExecutor(runner, overlap), overlap, prefix_cache)


def make_runner(
    layout: RoundLayout,
    target: CausalLM,
    draft: DraftModel | None,
    algorithm: str,
    attention: str,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    draft_attention: str | None = None,
    overlap: bool = False,
    kv: KVDtypes = AS_MODEL,
) -> ModelRunner:
    """Allocate all buffers of the layout, and choose backends.

    draft_attention: None for the target's backends; overlap: whether rounds are launched before the one before is read.
    """
    specs = cache_specs(target.layer_specs, draft.layer_specs if draft is not None else (), kv)
    target_layers, draft_layers = range(len(target.layer_specs)), range(len(target.layer_specs), len(specs))
    setting = (device.type, dtype, layout.page_size, specs)
    backend = grouped_backend(attention, *setting, target_layers, exact_lengths=not overlap)
    scales = None if kv.target is None else kv_scales(target)
    pages = PagedKV(layout, num_pages, specs, len(target_layers), dtype, device, scales)
    # Draft rows 0 .. reentry-1 do not exist.
    exact, names = not overlap and layout.reentry <= 1, draft_attention or attention
    draft_backend = grouped_backend(names, *setting, draft_layers, layout.reentry > 0, exact)
    cache, draft_cache = (
        ModelCache(specs, layers, pages, StagedKV(specs, layers, rows, dtype, device), of_layers)
        for layers, rows, of_layers in (
            (target_layers, layout.target_rows, backend),
            (draft_layers, layout.draft_rows, draft_backend),
        )
    )
    drafter = make_drafter(algorithm, draft, layout, draft_cache)
    table = SlotTable(layout, target.config.vocab_size, drafter.spec.carried, dtype, device)
    return ModelRunner(layout, table, cache, target, drafter)
