"""Engines for benches: of a model's files, or of synthetic models of a named shape."""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from espalier.bench.drive import AS_CONFIGURED, PLAIN_DECODING, BenchEngine, BenchEngines, EngineVariant, ModelEngines
from espalier.bench.linears import ModelShape
from espalier.cache.layer_spec import specs_of_rank
from espalier.config import EngineConfig, ResolvedConfig, SpeculationConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.inputs import InputProcessor, ModelInfo
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.llm import LLM
from espalier.models.declared_weights import require_shards
from espalier.models.draft import DraftSpec
from espalier.models.layer_loading import layer_specs_of
from espalier.models.weight_files import WeightSize
from espalier.shards import Shards
from espalier.speculate.drafters.registry import draft_shards, drafter_without_files
from espalier.startup.resolve import StartupInfo, choose_algorithm, free_memory, resolve
from espalier.startup.threads import cpu_thread_info
from espalier.startup.tree_cost import measure_chip, pass_weights
from espalier.terminal.console import print_header, require_gpu, require_writable
from espalier.terminal.flags import engine_settings, flag_of, with_minimum
from lab.bench.ranked_models import synthetic_models
from lab.bench.synthetic_models import SyntheticModels, recipe_sizes, recipe_with_accept_length
from lab.shape_flags import refuse_shape_flags, shape_settings
from lab.synthetic.checkpoint import Recipe, total_bytes

# Fields of EngineConfig that --shape decides, or that only a model from files has.
SETTINGS_OF_SHAPE = ("model", "draft", "device", "dtype", "model_overrides")

DEFAULT_VARIANTS = (AS_CONFIGURED, PLAIN_DECODING)


def load_sizes(batch: int, context: int) -> dict[str, Any]:
    """Returns defaults of `engines_of_flags` for a load of this batch and context, without a prefix cache."""
    return {"max_batch": batch, "max_context": context, "prefix_cache": False}


def variant_with_tree(tree: TreeShape) -> EngineVariant:
    """Returns the engine variant that decodes with this tree at every batch, or plain."""
    return PLAIN_DECODING if tree == PLAIN_TREE else {"speculation": SpeculationConfig(**tree.sizes, by_batch={})}


class ShapeEngines:
    """Engines of one named shape.  The models are made once, when they are first needed.

    settings: arguments of LLM, without the names of model and draft.  variants: all variants that will be opened.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: Mapping[str, Any],
        device: torch.device,
        variants: Iterable[EngineVariant] = DEFAULT_VARIANTS,
    ) -> None:
        self.recipe, self.settings, self.device, self.variants = recipe, settings, device, tuple(variants)

    @property
    def max_positions(self) -> int:
        return self.recipe.shape.target.max_position

    @cached_property
    def position_rows(self) -> int:
        return max(self.config(way).layout.position_rows for way in self.variants)

    @cached_property
    def models(self) -> SyntheticModels:
        return synthetic_models(self.recipe, self.settings, dtype_on(self.device), self.device, self.position_rows)

    @contextmanager
    def open(self, variant: EngineVariant = AS_CONFIGURED) -> Iterator[BenchEngine]:
        config = self.config(variant)
        if (needed := config.layout.position_rows) > self.position_rows:
            raise ValueError(
                f"{variant} needs {needed} positions and the models have {self.position_rows}; name it in variants"
            )
        with self.models.make_engine(config, requested_pages(self.settings)) as (engine, _):
            yield BenchEngine(_llm_of_engine(engine, config), self.models.prompts)

    def config(self, variant: EngineVariant = AS_CONFIGURED) -> ResolvedConfig:
        return shape_config(self.recipe, {**self.settings, **variant}, self.device)


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
    shape, shards = recipe.shape, Shards(0, config.tensor_parallel)
    require_shards(shape.target, shards.count)
    algorithm = choose_algorithm(config, recipe.draft_config.spec.algorithm)
    draft_config = None if drafter_without_files(algorithm) else recipe.draft_config
    spec = DraftSpec(algorithm) if draft_config is None else draft_config.spec
    of_draft = draft_shards(draft_config, shards)
    facts = StartupInfo(
        free_bytes=free_memory(device) - unmade_model_bytes(recipe, dtype_on(device), config.tensor_parallel),
        weights=WeightSize(),  # the models are on the device already, or small compared with its free memory
        stored_dtype=dtype,
        max_position=shape.target.max_position,
        layer_specs=(
            *specs_of_rank(layer_specs_of(shape.target), shards),
            *specs_of_rank(spec.layer_specs, of_draft),
        ),
        hidden_size=shape.target.hidden_size,
        num_layers=shape.target.num_layers,
        chip=measure_chip(device) if device.type == "cuda" else None,
        threads=cpu_thread_info(),
        model_impl=recipe.model_impl,
        pass_weights=pass_weights(shape.target, draft_config).of_rank(shards.count, of_draft.count),
    )
    return resolve(config, shape.name, None, spec, device, facts)


def unmade_model_bytes(recipe: Recipe, dtype: torch.dtype, ranks: int) -> int:
    """Returns the bytes of the models that several ranks will make; 0 for one rank, whose models are made already."""
    if ranks == 1:
        return 0
    target, draft = recipe.tensors(dtype, "meta")
    return total_bytes(target) // ranks + total_bytes(draft)


def _llm_of_engine(engine: Engine, config: ResolvedConfig) -> LLM:
    """Returns an LLM of synthetic models.  Its prompts are token ids, because there is no tokenizer."""
    target = engine.executor.runner.target.config
    facts = ModelInfo(config.model, target.vocab_size, config.layout.max_context, max_position=target.max_position)
    return LLM.from_engine(engine, replace(config, num_pages=engine.pool.num_pages), InputProcessor(facts, None))


def engines_of_flags(
    args: Namespace, defaults: Mapping[str, Any], variants: Iterable[EngineVariant] = DEFAULT_VARIANTS, **least: int
) -> BenchEngines:
    """Engines of the model or the --shape that the flags name.

    defaults: settings for flags that were not given; variants: all variants that will be opened; least: the smallest
    allowed values of sizes.  Raises EspalierError for flags that do not fit together."""
    require_writable("--json", args.json)
    settings = with_minimum(engine_settings(args), defaults, **least)
    if args.shape is None:
        refuse_shape_flags(args)
    made = engines_with_settings(args, settings, variants)
    print_header()
    return made


def engines_with_settings(
    args: Namespace, settings: Mapping[str, Any], variants: Iterable[EngineVariant] = DEFAULT_VARIANTS
) -> BenchEngines:
    """Engines of the model or the --shape, with settings of LLM.  Raises EspalierError for one that does not fit."""
    if args.shape is None:
        return ModelEngines(settings)
    refuse_settings_of_shape(settings)
    device = require_gpu(f"{args.command} --shape")
    recipe = recipe_with_accept_length(**shape_settings(args, settings))
    return ShapeEngines(recipe, settings, device, variants)


def shape_of_flags(args: Namespace) -> ModelShape:
    """The sizes of the --shape that the flags describe."""
    return recipe_sizes(recipe_with_accept_length(**shape_settings(args, {})))


def refuse_settings_of_shape(settings: Mapping[str, Any]) -> None:
    """Refuse settings that --shape decides.  Raises EspalierError."""
    refused = [name for name in SETTINGS_OF_SHAPE if name in settings]
    if refused:
        raise EspalierError(f"{flag_of(refused[0])} is not for --shape, whose models are made here; leave one out")


def engine_report(args: Namespace, config: ResolvedConfig) -> dict[str, Any]:
    """Returns the entries of --json about the measured engine."""
    return {"shape": args.shape, "config": config.as_dict()}
