"""Engines for a load, in each way to decode: from a model's files, or from synthetic models of a named shape."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from espalier.bench.drive import contexts
from espalier.bench.linears import ModelShape, recipe_sizes
from espalier.bench.synthetic_models import SyntheticModels, recipe_of
from espalier.config import EngineConfig, ResolvedConfig, SpeculationConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.inputs import InputProcessor, ModelFacts
from espalier.layout import PLAIN, TreeShape
from espalier.llm import LLM, prepare
from espalier.models.draft import DraftSpec
from espalier.models.layer_loading import layer_specs_of
from espalier.models.weight_count import WeightCount
from espalier.speculate.drafters.registry import drafter_without_files
from espalier.startup.load import find
from espalier.startup.measure_chip import measure_chip
from espalier.startup.resolve import Facts, choose_algorithm, free_memory, resolve
from espalier.startup.threads import thread_facts
from espalier.startup.tree_cost import pass_weights
from espalier.synthetic.checkpoint import Recipe
from espalier.terminal.console import print_header, require_writable
from espalier.terminal.flags import (
    engine_settings,
    flag_of,
    refuse_shape_flags,
    seed_of,
    shape_settings,
    with_minimum,
)
from espalier.terminal.machine import require_gpu

# Fields of EngineConfig that --shape decides, or that only a model from files has.
DECIDED = ("model", "draft", "device", "dtype", "model_overrides")

# A way to decode: the settings of LLM that it changes.
Way = Mapping[str, Any]
AS_SET: Way = {}
PLAIN_WAY: Way = {"speculation": None}
WAYS = (AS_SET, PLAIN_WAY)


def way_with(tree: TreeShape) -> Way:
    """Decoding with this tree at every batch, or plain."""
    return PLAIN_WAY if tree == PLAIN else {"speculation": SpeculationConfig(**asdict(tree), by_batch={})}


@dataclass(frozen=True)
class BenchEngine:
    """A running engine in its LLM.  prompts: token ids for prompts of the given lengths."""

    llm: LLM
    prompts: Callable[[Sequence[int]], list[list[int]]]

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    @property
    def config(self) -> ResolvedConfig:
        return self.llm.config


class BenchEngines(Protocol):
    """settings: of LLM.  positions: of the model; the most tokens of a request."""

    settings: Mapping[str, Any]

    @property
    def positions(self) -> int: ...

    def config(self, way: Way = AS_SET) -> ResolvedConfig:
        """The configuration of `open(way)`, before anything is loaded.  num_pages is an estimate."""
        ...

    def open(self, way: Way = AS_SET) -> AbstractContextManager[BenchEngine]:
        """An engine that decodes this way.  It closes at the end of the block.

        Its memory is free only when the caller has dropped the BenchEngine too.
        """
        ...


class OfModel:
    """settings: of LLM."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @property
    def positions(self) -> int:
        return find(EngineConfig(**self.settings)).target.max_position

    def config(self, way: Way = AS_SET) -> ResolvedConfig:
        return prepare(EngineConfig(**{**self.settings, **way})).resolved

    @contextmanager
    def open(self, way: Way = AS_SET) -> Iterator[BenchEngine]:
        with LLM(**{**self.settings, **way}) as llm:

            def prompts(lengths: Sequence[int]) -> list[list[int]]:
                longest = contexts(llm, len(lengths), max(lengths))
                return [prompt[:length] for prompt, length in zip(longest, lengths, strict=True)]

            yield BenchEngine(llm, prompts)


class OfShape:
    """settings: of LLM, without the names of model and draft.  ways: all that will be opened.

    The models are made once, when they are first needed.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: Mapping[str, Any],
        device: torch.device,
        ways: Iterable[Way] = WAYS,
    ) -> None:
        self.recipe, self.settings, self.device, self.ways = recipe, settings, device, tuple(ways)

    @property
    def positions(self) -> int:
        return self.recipe.shape.target.max_position

    @cached_property
    def position_rows(self) -> int:
        return max(self.config(way).layout.position_rows for way in self.ways)

    @cached_property
    def models(self) -> SyntheticModels:
        return SyntheticModels(self.recipe, dtype_on(self.device), self.device, self.position_rows)

    @contextmanager
    def open(self, way: Way = AS_SET) -> Iterator[BenchEngine]:
        config = self.config(way)
        if (needed := config.layout.position_rows) > self.position_rows:
            raise ValueError(
                f"{way} needs {needed} positions and the models have {self.position_rows}; name it in ways"
            )
        with self.models.engine_of(config, requested_pages(self.settings)) as (engine, _):
            yield BenchEngine(_llm(engine, config), self.models.prompts)

    def config(self, way: Way = AS_SET) -> ResolvedConfig:
        return shape_config(self.recipe, {**self.settings, **way}, self.device)


def dtype_on(device: torch.device) -> torch.dtype:
    """The dtype of synthetic models on this device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def requested_pages(settings: Mapping[str, Any]) -> int | None:
    """The number of pages that the user sets; None if the engine chooses it."""
    num_pages = settings.get("num_pages")
    return num_pages if isinstance(num_pages, int) else None


def shape_config(recipe: Recipe, settings: Mapping[str, Any], device: torch.device) -> ResolvedConfig:
    """The settings resolved as LLM resolves them, for the models of a recipe.  Raises EspalierError."""
    dtype = str(dtype_on(device)).removeprefix("torch.")
    config = EngineConfig(**{**settings, "device": str(device), "dtype": dtype})
    shape = recipe.shape
    spec = recipe.draft_config.spec
    algorithm = choose_algorithm(config, spec.algorithm)
    if drafter_without_files(algorithm):
        spec = DraftSpec(algorithm)
    facts = Facts(
        free_bytes=free_memory(device),
        weights=WeightCount(),  # the models are on the device already, or small compared with its free memory
        stored_dtype=dtype,
        max_position=shape.target.max_position,
        layer_specs=(*layer_specs_of(shape.target), *spec.layers),
        hidden_size=shape.target.hidden_size,
        num_layers=shape.target.num_layers,
        chip=measure_chip(device) if device.type == "cuda" else None,
        threads=thread_facts(),
        pass_weights=pass_weights(shape.target, None if drafter_without_files(algorithm) else recipe.draft_config),
    )
    return resolve(config, shape.name, None, spec, device, facts)


def _llm(engine: Engine, config: ResolvedConfig) -> LLM:
    """An LLM of synthetic models.  Its prompts are token ids, because there is no tokenizer."""
    target = engine.executor.runner.target.config
    facts = ModelFacts(config.model, target.vocab_size, config.layout.max_context, max_position=target.max_position)
    return LLM.from_engine(engine, replace(config, num_pages=engine.pool.num_pages), InputProcessor(facts, None))


def compared_ways(made: BenchEngines) -> dict[str, Way]:
    """The ways to decode that are compared, by name: plain decoding alone where no tree is set."""
    return {"tree": AS_SET, "plain": PLAIN_WAY} if made.config().layout.steps else {"plain": PLAIN_WAY}


def load_sizes(batch: int, context: int) -> dict[str, Any]:
    """Defaults of `engines_of` for a load: an engine for this batch and context, without a prefix cache."""
    return {"max_batch": batch, "max_context": context, "prefix_cache": False}


def require_positions(positions: int, needed: int, *asked: str) -> None:
    """Refuse a request of more tokens than the model has positions.  asked: the flags with their values, as given.

    Raises EspalierError.
    """
    if needed > positions:
        raise EspalierError(
            f"{' and '.join(asked)} need {needed} tokens a request, and the model takes at most {positions}; "
            "ask for less"
        )


def engines_of(args: Namespace, defaults: Mapping[str, Any], ways: Iterable[Way] = WAYS, **least: int) -> BenchEngines:
    """Engines of the model or the --shape that the flags name.

    defaults: of settings whose flags were not given; ways: all that will be opened; least: the smallest value that each
    size may have.
    Raises EspalierError for flags that do not fit together.
    """
    require_writable("--json", args.json)
    settings = with_minimum(engine_settings(args), defaults, **least)
    if args.shape is None:
        refuse_shape_flags(args)
    made = engines_with(args, settings, ways)
    print_header()
    return made


def engines_with(args: Namespace, settings: Mapping[str, Any], ways: Iterable[Way] = WAYS) -> BenchEngines:
    """Engines of the model or the --shape, with settings of LLM.  Raises EspalierError for one that does not fit."""
    if args.shape is None:
        return OfModel(settings)
    refuse_decided(settings)
    device = require_gpu(f"bench {args.measured} --shape")
    recipe = recipe_of(**shape_settings(args, seed_of(settings)))
    return OfShape(recipe, settings, device, ways)


def shape_of(args: Namespace) -> ModelShape:
    """The sizes of the --shape that the flags describe."""
    return recipe_sizes(recipe_of(**shape_settings(args, 0)))


def refuse_decided(settings: Mapping[str, Any]) -> None:
    """Refuse settings that --shape decides.  Raises EspalierError."""
    refused = [name for name in DECIDED if name in settings]
    if refused:
        raise EspalierError(f"{flag_of(refused[0])} is not for --shape, whose models are made here; leave one out")


def about(args: Namespace, config: ResolvedConfig) -> dict[str, Any]:
    """What --json says of the engine that was measured."""
    return {"shape": args.shape, "config": config.as_dict()}
