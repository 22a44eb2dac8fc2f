"""Engines for a load, with the tree and plain: from a model's files, or from synthetic models of a named shape."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from espalier.bench.drive import contexts
from espalier.bench.instrument import LaunchRecord, record_launches
from espalier.bench.synthetic_models import SyntheticModels, recipe_of
from espalier.config import EngineConfig, ResolvedConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import chip
from espalier.llm import LLM
from espalier.models.loading import geometry_of
from espalier.models.weights import WeightCount
from espalier.speculate.drafters import WITHOUT_FILES
from espalier.startup.resolve import Facts, choose_algorithm, free_memory, layout_of, resolve
from espalier.startup.threads import thread_facts
from espalier.synthetic.checkpoint import Recipe
from espalier.synthetic.shapes import SHAPES
from espalier.terminal.console import print_header, require_writable
from espalier.terminal.flags import add_engine_flags, add_json_flag, engine_settings, flag_of, sized
from espalier.terminal.machine import require_gpu


@dataclass(frozen=True)
class BenchEngine:
    """A running engine and the record of its launches.  prompts: token ids for prompts of the given lengths."""

    engine: Engine
    launches: LaunchRecord
    prompts: Callable[[Sequence[int]], list[list[int]]]
    config: ResolvedConfig


class BenchEngines(Protocol):
    def open(self, tree: bool) -> AbstractContextManager[BenchEngine]:
        """An engine with the tree, or plain.  It closes at the end of the block."""
        ...


class OfModel:
    """settings: of LLM."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    @contextmanager
    def open(self, tree: bool) -> Iterator[BenchEngine]:
        with LLM(**(self.settings if tree else {**self.settings, "speculation": None})) as llm:

            def prompts(lengths: Sequence[int]) -> list[list[int]]:
                longest = contexts(llm, len(lengths), max(lengths))
                return [prompt[:length] for prompt, length in zip(longest, lengths, strict=True)]

            yield BenchEngine(llm.engine, record_launches(llm.engine), prompts, llm.config)


class OfShape:
    """settings: of LLM, without the names of model and draft.  The models are made once, for all engines."""

    def __init__(self, recipe: Recipe, settings: dict[str, Any], device: torch.device) -> None:
        self.recipe, self.settings, self.device = recipe, settings, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        rows = max(layout_of(self._resolved(tree)).position_rows for tree in (True, False))
        self.models = SyntheticModels(recipe, self.dtype, device, rows)

    @contextmanager
    def open(self, tree: bool) -> Iterator[BenchEngine]:
        resolved = self._resolved(tree)
        with self.models.engine_of(resolved) as (engine, launches, _):
            yield BenchEngine(engine, launches, self.models.prompts, resolved)

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
            weights=WeightCount(),  # the models are on the device already, or small compared with its free memory
            stored_dtype=settings["dtype"],
            max_position=shape.target.max_position,
            geometry=(*geometry_of(shape.target), *spec.layers),
            hidden_size=shape.target.hidden_size,
            num_layers=shape.target.num_layers,
            chip=chip(torch.empty(0, device=self.device)) if self.device.type == "cuda" else None,
            threads=thread_facts(),
        )
        return resolve(config, shape.name, None, spec, self.device, facts)


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `engines_of`, and --json."""
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help=f"instead of a model, on a GPU: one of {', '.join(SHAPES)}",
    )
    parser.add_argument("--accept-length", type=float, metavar="X", help="of the draft of --shape, at tree 5,8,64 (4)")
    add_json_flag(parser)
    add_engine_flags(parser)


def engines_of(asked: Namespace, batch: int, context: int, **least: int) -> BenchEngines:
    """Engines of the model or the --shape that the flags name, for this batch and context unless flags set others.

    The prefix cache is off unless it is asked for.  least: the smallest value that each size may have.
    Raises EspalierError for flags that do not fit together.
    """
    require_writable("--json", asked.json)
    sizes = {"max_batch": batch, "max_context": context, "prefix_cache": False}
    settings = sized(engine_settings(asked), sizes, **least)
    if asked.shape is None:
        if asked.accept_length is not None:
            raise EspalierError("--accept-length is for a named shape; give --shape, or leave it out")
        print_header()
        return OfModel(settings)
    refused = [name for name in ("model", "draft", "device", "dtype", "model_overrides") if name in settings]
    if refused:
        raise EspalierError(f"{flag_of(refused[0])} is not for --shape, whose models are made here; leave one out")
    device = require_gpu(f"bench {asked.measured} --shape")
    recipe = recipe_of(asked.shape, settings.get("seed", 0), asked.accept_length)
    print_header()
    return OfShape(recipe, settings, device)


def about(asked: Namespace, config: ResolvedConfig) -> dict[str, Any]:
    """What --json says of the engine that was measured."""
    return {"shape": asked.shape, "config": asdict(config)}
