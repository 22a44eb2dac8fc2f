"""The engines of `lab round --shape`: one engine for each tree, with a user's sizes, or one for each cell."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from espalier.config import ResolvedConfig, SpeculationConfig, is_unresolved
from espalier.engine.engine import Engine
from espalier.layout import RoundLayout
from espalier.models.draft import DraftSpec
from lab.bench.cells import RoundCell
from lab.bench.engines import requested_pages, shape_config
from lab.bench.full_rounds import require_cell_fits
from lab.bench.synthetic_models import RunningEngine, StartupCost, SyntheticModels
from lab.synthetic.checkpoint import Recipe


class EngineSizes(Protocol):
    """Decides which cells share an engine, and how large the engine is."""

    def name(self, cell: RoundCell) -> str:
        """Returns the name of the cell's engine.  Cells whose engines have the same name share one engine."""
        ...

    def layout(self, cell: RoundCell, num_rounds: int) -> RoundLayout:
        """Returns the layout of the cell's engine.  Raises EspalierError if the cell does not fit into it."""
        ...

    def open(self, models: SyntheticModels, cell: RoundCell, num_rounds: int) -> AbstractContextManager[RunningEngine]:
        """Opens the cell's engine; closed at the end of the block.  Its memory is freed when the caller drops it."""
        ...


class UserEngineSizes:
    """The sizes that LLM chooses for a user.  All cells of a tree and page size share an engine.

    settings: arguments of LLM, without the models, the tree and the page size, which cells name.
    """

    def __init__(self, recipe: Recipe, settings: Mapping[str, Any], device: torch.device) -> None:
        self.recipe, self.settings, self.device = recipe, settings, device

    def name(self, cell: RoundCell) -> str:
        return cell.tree_name

    def layout(self, cell: RoundCell, num_rounds: int) -> RoundLayout:
        layout = self.config(cell).layout
        require_cell_fits(layout, self.recipe.shape.target.max_position, cell, num_rounds)
        return layout

    def open(self, models: SyntheticModels, cell: RoundCell, num_rounds: int) -> AbstractContextManager[RunningEngine]:
        return models.make_engine(self.config(cell), requested_pages(self.settings))

    def config(self, cell: RoundCell) -> ResolvedConfig:
        steps, topk, nodes = cell.tree
        # by_batch is empty: the cell's tree runs at every batch.
        fixed = (
            SpeculationConfig(steps=steps, topk=topk, num_draft_tokens=nodes, by_batch={}) if cell.has_draft else None
        )
        tree = SpeculationConfig() if cell.is_auto else fixed
        settings = {**self.settings, "page_size": cell.page_size, "speculation": tree}
        return shape_config(self.recipe, settings, self.device)


@dataclass(frozen=True)
class CellEngineSizes:
    """Each cell has an engine that is exactly as large as the cell, without a prefix cache.

    draft: the spec of the draft.  all_buckets: capture the rounds of every batch bucket, not only of the cell's batch.
    """

    draft: DraftSpec
    chunk_size: int = 2048
    attention: str | None = None
    overlap: bool = True
    all_buckets: bool = False
    kv_dtype: str = "auto"
    draft_kv_dtype: str = "auto"

    def name(self, cell: RoundCell) -> str:
        return cell.name

    def layout(self, cell: RoundCell, num_rounds: int) -> RoundLayout:
        return cell.own_layout(self.chunk_size, num_rounds, self.draft)

    def open(self, models: SyntheticModels, cell: RoundCell, num_rounds: int) -> AbstractContextManager[RunningEngine]:
        draft = self.kv_dtype if is_unresolved(self.draft_kv_dtype) else self.draft_kv_dtype
        stored = {"kv_dtype": self.kv_dtype, "draft_kv_dtype": draft}
        layout = self.layout(cell, num_rounds)
        return models.engine(layout, self.attention, self.overlap, self.all_buckets, **stored)


@dataclass(frozen=True)
class EngineStats:
    """The name, the sizes and the startup cost of one engine."""

    name: str
    max_batch: int
    max_context: int
    chunk_size: int
    busy_chunk_size: int
    page_size: int
    num_pages: int
    prefix_cache: bool
    start: StartupCost

    @classmethod
    def of(cls, name: str, engine: Engine, start: StartupCost) -> "EngineStats":
        layout = engine.layout
        return cls(
            name=name,
            max_batch=layout.max_batch,
            max_context=layout.max_context,
            chunk_size=layout.chunk_size,
            busy_chunk_size=layout.max_pass_rows(is_streamed=True),
            page_size=layout.page_size,
            num_pages=engine.pool.num_pages,
            prefix_cache=engine.prefix_tree is not None,
            start=start,
        )
