"""Puts an engine together from parts that are already loaded."""

import torch

from espalier.attention import backend
from espalier.cache.kv import Pages, Staging
from espalier.engine.engine import Engine
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.models.eagle3 import Eagle3Draft
from espalier.slots import SlotTable
from espalier.speculate.drafters.base import Drafter, NoDrafter
from espalier.speculate.drafters.eagle3 import Eagle3Drafter
from espalier.speculate.drafters.ngram import NgramDrafter
from espalier.speculate.round import Round

DRAFT_LAYERS = {"none": 0, "ngram": 0, "eagle3": 1}


def assemble(
    layout: RoundLayout,
    target: CausalLM,
    draft: Eagle3Draft | None,
    algorithm: str,
    *,
    attention: str,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    overlap: bool,
    prefix_cache: bool,
) -> Engine:
    """An engine over these models.  Raises EspalierError where the backend cannot run them."""
    chosen = backend(attention)
    geometry = (*target.geometry, *(draft.geometry if draft is not None else ()))
    chosen.support.require(device.type, dtype, layout.page_size, geometry)
    pages = Pages(layout, num_pages, geometry, len(target.geometry), dtype, device)
    staging = Staging(geometry, range(len(target.geometry)), layout.verify_rows, dtype, device)
    vocab_size = target.config.vocab_size
    drafter: Drafter = NoDrafter()
    if algorithm == "ngram":
        drafter = NgramDrafter(layout, vocab_size)
    if draft is not None:
        drafter = Eagle3Drafter(draft, layout, pages, chosen, geometry, vocab_size)
    table = SlotTable(layout, vocab_size, drafter.carried, dtype, device)
    return Engine(Round(layout, table, pages, staging, target, drafter, chosen), overlap, prefix_cache)
