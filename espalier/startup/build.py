"""Puts an engine together from parts that are already loaded."""

from collections.abc import Sequence

import torch

from espalier.attention import grouped_backend
from espalier.cache.kv import PagedKV, StagedKV
from espalier.cache.layer_spec import LayerSpec
from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.engine.executor import CpuExecutor
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.models.draft import DraftModel
from espalier.slots import SlotTable
from espalier.speculate.drafters import make_drafter
from espalier.speculate.round import ModelRunner


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
) -> Engine:
    """An engine over these models.  attention: as attention.choose_backends gives it; draft_attention: by default the
    same; graph_batch: the largest batch whose rounds are CUDA graphs; 0: none; keep_graphs: see CudaExecutor.

    Raises EspalierError where the backend cannot run them, or the prefix cache cannot hold what they keep.
    """
    require_reentry(prefix_cache, (*target.geometry, *(draft.geometry if draft is not None else ())))
    runner = make_runner(layout, target, draft, algorithm, attention, num_pages, dtype, device, draft_attention)
    return engine_of(runner, overlap, prefix_cache, graph_batch, keep_graphs)


def require_reentry(prefix_cache: bool, specs: Sequence[LayerSpec]) -> None:
    """Refuse a prefix cache where a layer cannot be entered again behind any cached page.  Raises EspalierError."""
    for spec in specs:
        if prefix_cache and not spec.keeps.reenters_anywhere:
            raise EspalierError(
                f"prefix_cache=True is not supported with layers that keep {spec.keeps.kind}: a prefix can be entered "
                "again only where one was saved; use prefix_cache=False or 'auto'"
            )


def engine_of(
    runner: ModelRunner, overlap: bool, prefix_cache: bool, graph_batch: int = 0, keep_graphs: bool = False
) -> Engine:
    """An engine on buffers that nobody else launches on."""
    is_cuda = runner.pages.device.type == "cuda"
    executor = CudaExecutor(runner, graph_batch, keep_graphs=keep_graphs) if is_cuda else CpuExecutor(runner, overlap)
    return Engine(executor, overlap, prefix_cache)


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
) -> ModelRunner:
    """The buffers that follow from the layout, around the models.  draft_attention: None for the target's."""
    specs = (*target.geometry, *(draft.geometry if draft is not None else ()))
    of_target, of_draft = range(len(target.geometry)), range(len(target.geometry), len(specs))
    of_all = (device.type, dtype, layout.page_size, specs)
    chosen = grouped_backend(attention, *of_all, of_target)
    pages = PagedKV(layout, num_pages, specs, len(of_target), dtype, device)
    staging = StagedKV(specs, of_target, layout.target_rows, dtype, device)
    # Rows below a draft's re-entry do not exist.
    drafts = grouped_backend(draft_attention or attention, *of_all, of_draft, left_bound=layout.reentry > 0)
    drafter = make_drafter(algorithm, draft, layout, pages, drafts, specs)
    table = SlotTable(layout, target.config.vocab_size, drafter.spec.carried, dtype, device)
    return ModelRunner(layout, table, pages, staging, target, drafter, chosen)
