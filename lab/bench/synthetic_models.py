"""The synthetic models of a named shape, made once on a device from a seed, and engines that run them in turn."""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from espalier.attention import default_backend
from espalier.bench.linears import ModelShape, model_sizes, with_draft
from espalier.bench.shapes import find_shape
from espalier.cache.kv import LayerStack
from espalier.config import ResolvedConfig, is_unresolved
from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import DENSE
from espalier.kernels.ops.drafts import MAX_STEPS
from espalier.layout import RoundLayout
from espalier.models import CausalLM, DraftModel
from espalier.models.draft import MAX_MODULES
from espalier.startup.build import LoadedModels, assemble_engine, config_without_files
from espalier.startup.load import build_engine_of_models
from lab.bench.instrument import count_kernels
from lab.synthetic.checkpoint import Recipe, build_models, total_bytes
from lab.synthetic.quantised import require_format_fits

# The draft's skill is chosen for an accept length at this tree.
ACCEPT_LENGTH_TREE = (5, 8, 64)
DEFAULT_ACCEPT_LENGTH = 4.0


@dataclass(frozen=True)
class StartupCost:
    """The cost of starting an engine.

    seconds: time to measure pages, to build and to capture; graphs_bytes: the size of the CUDA graphs' memory pool;
    kernels: the number of kernels in the graph of the largest batch.  The last two are None without CUDA graphs."""

    seconds: float
    pages_bytes: int
    staging_bytes: int
    graphs_bytes: int | None
    kernels: int | None


RunningEngine = tuple[Engine, StartupCost]


class OneBucket(RoundLayout):
    """A layout that pads all rounds to the largest batch, so that one graph is captured."""

    def batch_buckets(self, max_batch_size: int) -> tuple[int, ...]:
        return (max_batch_size,) if max_batch_size else ()


def recipe_sizes(recipe: Recipe) -> ModelShape:
    """The sizes of a recipe's models, for their floor."""
    target = replace(model_sizes(recipe.shape.target), weight_format=recipe.weights)
    return with_draft(target, recipe.draft_config, recipe.draft_weights)


def recipe_with_accept_length(shape: str, seed: int, accept_length: float | None = None, **fields: Any) -> Recipe:
    """Returns the recipe of a named shape whose draft reaches this accept length with ACCEPT_LENGTH_TREE.

    accept_length: None for DEFAULT_ACCEPT_LENGTH.  fields: see recipe_of_shape.  With a block_size below the tree's
    steps, the accept length is that of as many steps.
    Raises EspalierError also for an accept length that no draft reaches.
    """
    recipe, (steps, topk, nodes) = recipe_of_shape(shape, seed, **fields), ACCEPT_LENGTH_TREE
    if fields.get("accept_lengths") is not None:
        if accept_length is not None:
            raise EspalierError("--accept-lengths and --accept-length both set how good the draft is; leave one out")
        return recipe
    wanted = DEFAULT_ACCEPT_LENGTH if accept_length is None else accept_length
    return recipe.with_accept_length(wanted, min(steps, recipe.block_size or steps), topk, nodes)


def recipe_of_shape(shape: str, seed: int, **fields: Any) -> Recipe:
    """Returns the recipe of a named shape with these fields of Recipe; None: the field's default.

    layers: see Shape.with_layers; accept_lengths: see Recipe.with_acceptance.  Raises EspalierError for an unknown
    shape, for fields that do not fit together, and for a weight format that the shape does not have.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    mtp_layers, block_size, block_fade = (given.get(name) for name in ("mtp_layers", "block_size", "block_fade"))
    if mtp_layers is not None and not 1 <= mtp_layers <= MAX_MODULES:
        raise EspalierError(f"--mtp-layers={mtp_layers} is not supported; use 1 to {MAX_MODULES}, or leave it out")
    if "mtp_form" in given and mtp_layers is None:
        raise EspalierError("--mtp-form is for an MTP head; give --mtp-layers, or leave it out")
    if block_size is not None and not 2 <= block_size <= MAX_STEPS:
        raise EspalierError(f"--block-size={block_size} is not supported; use 2 to {MAX_STEPS}, or leave it out")
    if block_size is not None and mtp_layers is not None:
        raise EspalierError("--block-size and --mtp-layers name two drafts; leave one out")
    if block_fade is not None and (block_size is None or not 0 < block_fade <= 1):
        raise EspalierError(
            f"--block-fade={block_fade} is not supported; use above 0 to 1, with --block-size, or leave it out"
        )
    by_depth = given.pop("accept_lengths", None)
    if by_depth is not None and (given.keys() & {"skill", "block_fade"}):
        raise EspalierError("--accept-lengths sets how good the draft is; leave out --skill and --block-fade")
    found, layers = find_shape(shape), given.pop("layers", None)
    if layers is not None:
        found = found.with_layers(layers)
    if "weights" in given:
        require_format_fits(found.target, given["weights"])
    recipe = Recipe(found, seed, **given)
    return recipe if by_depth is None else recipe.with_acceptance(by_depth)


class SyntheticModels:
    """The target and the draft of a recipe.  seconds: the time to make them; weights_bytes: their size."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype, device: torch.device, position_rows: int) -> None:
        self.recipe, self.dtype, self.device = recipe, dtype, device
        self.chain = recipe.chain()
        self.make(position_rows)

    def make(self, position_rows: int) -> None:
        begun = perf_counter()
        self.target, self.draft = build_models(self.recipe, self.dtype, self.device, position_rows)
        # Without a draft nothing reads the captured hidden states.
        self.plain_target = copy.copy(self.target)
        self.plain_target.captured_layers = ()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = perf_counter() - begun

    @property
    def about(self) -> dict[str, Any]:
        recipe = {**asdict(self.recipe), "shape": self.recipe.shape.name, "dtype": str(self.dtype).split(".")[1]}
        return {"recipe": recipe, "weights_seconds": self.seconds, "weights_bytes": self.weights_bytes}

    @property
    def title(self) -> str:
        """Returns one line of text about the models, for the top of a table or a plot."""
        kind = "" if self.recipe.weights == DENSE else f"{self.recipe.weights} "
        size = f"{self.weights_bytes / 1e9:.1f} GB of {kind}weights made in {self.seconds:.1f} s"
        routing = f"; routing correlation {self.recipe.routing_correlation}" if self.recipe.shape.target.experts else ""
        runs = " by transformers" if self.recipe.model_impl == "transformers" else ""
        return f"{self.recipe.shape.name}{runs}, {size}; {self.recipe.draft_name} of skill {self.recipe.skill}{routing}"

    @property
    def weights_bytes(self) -> int:
        """Bytes of target and draft, the embedding included."""
        tensors, draft_tensors = self.recipe.tensors(self.dtype, "meta")
        return total_bytes(tensors) + total_bytes(draft_tensors)

    def engine(
        self, layout: RoundLayout, attention: str | None, overlap: bool, all_buckets: bool = False, **chosen: Any
    ) -> AbstractContextManager[RunningEngine]:
        """Opens an engine of this layout, with pages for a full batch of full contexts; closed at the end of the block.

        steps=0 is plain decoding without a draft.  all_buckets: capture the rounds of every batch bucket, not only of
        the largest; chosen: fields of ResolvedConfig that differ from config_without_files; "auto" changes nothing."""
        algorithm = self.draft.spec.algorithm if layout.steps else "none"
        sizes = {f.name: getattr(layout, f.name) for f in fields(layout)}
        config = config_without_files(
            layout if all_buckets else OneBucket(**sizes),
            algorithm,
            attention or default_backend(self.device.type, self.dtype),
            self.dtype,
            self.device,
            overlap=overlap,
            graph_batch=layout.max_batch if self.device.type == "cuda" else 0,
            **{name: value for name, value in chosen.items() if not is_unresolved(value)},
        )
        return self._running(partial(assemble_engine, LoadedModels(config, *self._models(algorithm)), keep_graphs=True))

    def make_engine(self, config: ResolvedConfig, num_pages: int | None) -> AbstractContextManager[RunningEngine]:
        """Opens the engine that LLM builds for a configuration, with the device and the dtype of these models.

        num_pages: set by the user; None: on a GPU, as many as fit.
        """
        loaded = LoadedModels(config, *self._models(config.algorithm))
        return self._running(lambda: build_engine_of_models(loaded, num_pages, keep_graphs=True)[0])

    def _models(self, algorithm: str) -> tuple[CausalLM, DraftModel | None]:
        """The target and the draft of this algorithm."""
        return (self.target, self.draft) if algorithm == self.draft.spec.algorithm else (self.plain_target, None)

    @contextmanager
    def _running(self, build: Callable[[], Engine]) -> Iterator[RunningEngine]:
        begun = perf_counter()
        engine = build()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = _startup_cost(engine, perf_counter() - begun)
        try:
            yield engine, start
        finally:
            engine.close()
            del engine
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def prompts(self, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
        """Returns prompts of these lengths that follow the chain, each from a random place."""
        generator = torch.Generator().manual_seed(seed)
        places = torch.randint(0, self.chain.size, (len(lengths),), generator=generator)
        steps = [torch.arange(length) * self.chain.shifts[0] for length in lengths]
        return [self.chain.token_at(place + step).tolist() for place, step in zip(places, steps, strict=True)]

    def follows(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Whether the greedy tokens after a prompt of `prompts` are the chain's."""
        steps = torch.arange(1, len(output) + 1) * self.chain.shifts[0]
        return self.chain.token_at(self.chain.place[prompt[-1]] + steps).tolist() == list(output)


def _startup_cost(engine: Engine, seconds: float) -> StartupCost:
    runner, executor = engine.executor.runner, engine.executor
    pages = _stack_bytes([*runner.pages.target_stacks, *runner.pages.draft_stacks])
    staging = _stack_bytes(runner.cache.staging.stacks)
    if not (isinstance(executor, CudaExecutor) and executor.graphs):
        return StartupCost(seconds, pages, staging, None, None)
    largest = executor.graphs[executor.runner.layout.round_forms(executor.captured_buckets[-1:])[0]].graph
    pool = tuple(largest.pool())
    segments = torch.cuda.memory_snapshot()
    held = sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == pool)
    return StartupCost(seconds, pages, staging, held, count_kernels(largest))


def _stack_bytes(stacks: Sequence[LayerStack]) -> int:
    return sum(tensor.numel() * tensor.element_size() for stack in stacks for tensor in stack.planes)
