"""Engines to serve a load with, by tree and plain: of a model's files, or of a named shape cast on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from espalier.bench.drive import contexts
from espalier.bench.instrument import Watched, watch
from espalier.bench.synthetic_models import SyntheticModels
from espalier.config import EngineConfig, ResolvedConfig
from espalier.engine.engine import Engine
from espalier.kernels.runtime.launch import chip
from espalier.llm import LLM
from espalier.models.loading import geometry_of
from espalier.models.weights import WeightCount
from espalier.speculate.drafters import WITHOUT_FILES
from espalier.startup.resolve import Facts, choose_algorithm, free_memory, layout_of, resolve
from espalier.startup.threads import thread_facts
from espalier.synthetic.checkpoint import Recipe


@dataclass(frozen=True)
class BenchEngine:
    """An engine that runs, seen by `watched`; prompts: so many token ids for each of some lengths."""

    engine: Engine
    watched: Watched
    prompts: Callable[[Sequence[int]], list[list[int]]]
    config: ResolvedConfig


class BenchEngines(Protocol):
    def open(self, tree: bool) -> AbstractContextManager[BenchEngine]:
        """An engine by tree, or plain; gone at the end of the block."""
        ...


class OfModel:
    """settings: LLM's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    @contextmanager
    def open(self, tree: bool) -> Iterator[BenchEngine]:
        with LLM(**(self.settings if tree else {**self.settings, "speculation": None})) as llm:

            def prompts(lengths: Sequence[int]) -> list[list[int]]:
                whole = contexts(llm, len(lengths), max(lengths))
                return [prompt[:length] for prompt, length in zip(whole, lengths, strict=True)]

            yield BenchEngine(llm.engine, watch(llm.engine), prompts, llm.config)


class OfShape:
    """settings: LLM's, but for the model's and the draft's names; the models are made once."""

    def __init__(self, recipe: Recipe, settings: dict[str, Any], device: torch.device) -> None:
        self.recipe, self.settings, self.device = recipe, settings, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        rows = max(layout_of(self._resolved(tree)).position_rows for tree in (True, False))
        self.cast = SyntheticModels(recipe, self.dtype, device, rows)

    @contextmanager
    def open(self, tree: bool) -> Iterator[BenchEngine]:
        resolved = self._resolved(tree)
        with self.cast.engine_of(resolved) as (engine, watched, _):
            yield BenchEngine(engine, watched, self.cast.prompts, resolved)

    def _resolved(self, tree: bool) -> ResolvedConfig:
        settings = {**self.settings, "device": str(self.device), "dtype": str(self.dtype).removeprefix("torch.")}
        config = EngineConfig(**(settings if tree else {**settings, "speculation": None}))
        shape = self.recipe.shape
        spec = shape.draft_config.spec
        algorithm = choose_algorithm(config, spec.algorithm)
        if algorithm in WITHOUT_FILES:
            spec = WITHOUT_FILES[algorithm].spec
        facts = Facts(
            free_bytes=free_memory(self.device),
            weights=WeightCount(),  # the cast stands already, or is no more than a rounding of what is free
            stored_dtype=settings["dtype"],
            max_position=shape.target.max_position,
            geometry=(*geometry_of(shape.target), *spec.layers),
            hidden_size=shape.target.hidden_size,
            num_layers=shape.target.num_layers,
            chip=chip(torch.empty(0, device=self.device)) if self.device.type == "cuda" else None,
            threads=thread_facts(),
        )
        return resolve(config, shape.name, None, spec, self.device, facts)
