"""The synthetic models of a named shape on several ranks.  Each rank makes its own part."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from espalier.config import ResolvedConfig
from espalier.models.declared_weights import require_shards
from espalier.shards import Shards
from espalier.startup.build import LoadedModels
from espalier.startup.load import build_engine_of_ranks
from espalier.startup.ranks import starting_ranks
from lab.bench.synthetic_models import RunningEngine, SyntheticModels
from lab.synthetic.checkpoint import Recipe, build_models


class RankedModels(SyntheticModels):
    """Synthetic models that each rank of an engine makes for itself, at every start of an engine."""

    def make(self, position_rows: int) -> None:
        self.seconds = 0.0

    @contextmanager
    def make_engine(self, config: ResolvedConfig, num_pages: int | None) -> Iterator[RunningEngine]:
        """See SyntheticModels.make_engine."""
        require_shards(self.recipe.shape.target, config.tensor_parallel)
        work = partial(load_recipe_models, self.recipe)
        with (
            starting_ranks(config.tensor_parallel) as ranks,
            self._running(lambda: build_engine_of_ranks(ranks, config, num_pages, work)[0]) as running,
        ):
            yield running


def synthetic_models(
    recipe: Recipe, settings: Mapping[str, Any], dtype: torch.dtype, device: torch.device, position_rows: int
) -> SyntheticModels:
    """Returns the models for engines with these settings of LLM."""
    kind = RankedModels if settings.get("tensor_parallel", 1) > 1 else SyntheticModels
    return kind(recipe, dtype, device, position_rows)


def load_recipe_models(recipe: Recipe, config: ResolvedConfig, shards: Shards) -> LoadedModels:
    """Returns one rank's models (espalier/startup/ranks.py:LoadRankModels)."""
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    target, draft = build_models(recipe, dtype, device, config.layout.position_rows, shards)
    if config.algorithm != draft.spec.algorithm:
        target.captured_layers = ()
        return LoadedModels(config, target, None, shards)
    return LoadedModels(config, target, draft, shards)
