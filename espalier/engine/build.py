"""Puts an engine together from parts that are already loaded."""

import torch

from espalier.attention import backend
from espalier.cache.kv import Pages, Staging
from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.engine.executor import CpuExecutor
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.models.draft import DraftModel
from espalier.slots import SlotTable
from espalier.speculate.drafters import make_drafter
from espalier.speculate.round import Round


def assemble(
    layout: RoundLayout,
    target: CausalLM,
    draft: DraftModel | None,
    algorithm: str,
    *,
    attention: str,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    overlap: bool,
    prefix_cache: bool,
    graph_batch: int = 0,
) -> Engine:
    """An engine over these models.  graph_batch: the largest batch whose rounds are CUDA graphs; 0: none.

    Raises EspalierError where the backend cannot run them.
    """
    round = make_round(layout, target, draft, algorithm, attention, num_pages, dtype, device)
    return engine_of(round, overlap, prefix_cache, graph_batch)


def engine_of(round: Round, overlap: bool, prefix_cache: bool, graph_batch: int = 0) -> Engine:
    """An engine on buffers that nobody else launches on."""
    is_cuda = round.pages.device.type == "cuda"
    executor = CudaExecutor(round, graph_batch) if is_cuda else CpuExecutor(round, overlap)
    return Engine(executor, overlap, prefix_cache)


def make_round(
    layout: RoundLayout,
    target: CausalLM,
    draft: DraftModel | None,
    algorithm: str,
    attention: str,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Round:
    """The buffers that follow from the layout, around the models."""
    chosen = backend(attention)
    geometry = (*target.geometry, *(draft.geometry if draft is not None else ()))
    chosen.support.require(device.type, dtype, layout.page_size, geometry)
    pages = Pages(layout, num_pages, geometry, len(target.geometry), dtype, device)
    staging = Staging(geometry, range(len(target.geometry)), layout.verify_rows, dtype, device)
    drafter = make_drafter(algorithm, draft, layout, pages, chosen, geometry)
    table = SlotTable(layout, target.config.vocab_size, drafter.spec.carried, dtype, device)
    return Round(layout, table, pages, staging, target, drafter, chosen)
