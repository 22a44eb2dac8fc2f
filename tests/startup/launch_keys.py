"""Prints, as JSON, which kernels launches of many forms need that the start did not compile, or what a layer
launches.  No GPU is needed.

Models and launches are tensors without data (PyTorch's "meta" device) that say that they are on a GPU.  Each launch of
a kernel is caught, and Triton's own code makes the key under which it would look for the compiled kernel.

A program of its own, because the tests run Triton's interpreter.  It takes several simulations, because PyTorch needs
seconds to load what tensors without data need.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from espalier.attention.support import Support
from espalier.bench.shapes import find_shape
from espalier.engine.cuda_stages import EagerStages, StageMemory
from espalier.engine.executor import run_launch
from espalier.engine.launch_buffer import pack_launch
from espalier.engine.launch_input import ALL_SAMPLING_FEATURES, LaunchInput, dummy_launch
from espalier.engine.prefill_policy import next_prefill_pass, pieces_of
from espalier.engine.results import ResultsRing
from espalier.kernels.layers.linear_plans import DENSE
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.runtime import launch
from espalier.kernels.runtime.launch import Chip, launch_hook
from espalier.layout import RoundLayout
from espalier.models.loading import make_target
from espalier.models.quantisers import QUANTISERS
from espalier.models.weight_formats import all_dense
from espalier.models.weights import Weights
from espalier.sampling.mask import mask_words
from espalier.sampling.prompt import PromptRows
from espalier.speculate.drafters.registry import DRAFT_FORMATS
from espalier.speculate.round import ModelRunner
from espalier.startup.build import LoadedModels, config_without_files, make_runner
from espalier.startup.measure_memory import dummy_prefill_pass, largest_prefill_pass, smaller_prefill_passes

META_DEVICE = torch.device("meta")
CHIPS = {"hopper": Chip(227 * 1024, 132, (9, 0)), "ampere": Chip(163 * 1024, 108, (8, 0))}
# As an allocation on a GPU begins.
ALLOCATED = 512
FUSED, DRAFT_WEIGHTS = "fc.weight", ("midlayer.hidden_norm.weight", "lm_head.weight", "d2t")
# Of each argument: its name, whether it is a constexpr, and its part of Triton's key.
Arguments = tuple[tuple[str, bool, Any], ...]
# Of the prompts of a pass: 1 to so many tokens.
LONGEST = (3, 20, 100, 700, 3000)
TREE = (5, 8, 64)


class MetaWeights(Weights):
    """Every weight that a model asks for, without data.

    fused: the shape of an EAGLE-3 head's fc; None: a target.  stored: "dense", or "fp8" (models/quantisers.py).
    """

    def __init__(self, fused: tuple[int, int] | None = None, stored: str = DENSE) -> None:
        self.path, self.dtype, self.device = Path("meta"), torch.bfloat16, META_DEVICE
        self.quantiser = None if stored == DENSE else QUANTISERS[stored]
        self.formats = all_dense if self.quantiser is None else self.quantiser.storage_formats({})
        self.fused = fused
        self._loaded, self._files, self._unused = {}, {}, set()
        self._names = frozenset((FUSED, *DRAFT_WEIGHTS) if fused else ())

    def __contains__(self, name: str) -> bool:
        return name in self._names if self.fused else name.endswith("weight")

    def shape(self, name: str) -> tuple[int, ...]:
        assert name == FUSED and self.fused is not None
        return self.fused

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Every weight has the shape that a model asks for."""

    def load_raw(self, name: str, *shape: int) -> torch.Tensor:
        if name == "d2t":  # the target's id of each id minus that id; not all the same, so that the map is kept
            return torch.arange(*shape)
        dtype, module = self.dtype, name.removesuffix(".weight")
        if self.quantiser is not None and name.endswith(".weight_scale"):
            dtype = torch.float32
        elif self.quantiser is not None and len(shape) == 2 and self.quantiser.is_quantised(module, shape[1]):
            dtype = FP8
        return torch.empty(shape, dtype=dtype, device=META_DEVICE)


class Pointer:
    """What Triton sees of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.at = tensor.dtype, ALLOCATED + tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self.at


class Keys:
    """The launch hook: collects (kernel, Triton's key).

    arguments: of each kernel that ran, its arguments and their parts of the keys.  The keys are functions, because
    kernels of different modules may have the same name.
    """

    def __init__(self, arguments: dict[Any, set[Arguments]]) -> None:
        self.found: set[tuple[str, str]] = set()
        self.arguments = arguments

    def __call__(self, function: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        binder = function.device_caches[0][-1]
        pointers = [_seen(value) for value in args], {name: _seen(value) for name, value in kwargs.items()}
        _, specialization, options = binder(*pointers[0], **pointers[1], debug=False, instrumentation_mode="")
        self.found.add((function.fn.__name__, f"{specialization} {options}"))
        parts = (
            (param.name, param.is_constexpr, part) for param, part in zip(function.params, specialization, strict=True)
        )
        self.arguments.setdefault(function.fn, set()).add((*parts, ("options", True, str(options))))


def specialised(kernels: dict[Any, set[Arguments]]) -> list[str]:
    """kernel.argument, for each integer argument whose values alone made Triton compile another code."""
    found: set[str] = set()
    for function, launches in kernels.items():
        for place, (argument, is_constexpr, _) in enumerate(next(iter(launches))):
            others = {(*each[:place], *each[place + 1 :]) for each in launches}
            if not is_constexpr and len(others) < len(launches):
                found.add(f"{function.__name__}.{argument}")
    return sorted(found)


def _seen(value: Any) -> Any:
    return Pointer(value) if isinstance(value, torch.Tensor) else value


def _shape_of_first(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function of a tensor and numbers, whose result has the tensor's shape and dtype."""

    def found(tensor: torch.Tensor, *numbers: float, **named: float) -> torch.Tensor:
        return torch.empty_like(tensor) if tensor.is_meta else function(tensor, *numbers, **named)

    return found


def pretend_gpu() -> None:
    target = {"get_current_device": lambda: 0, "get_current_target": lambda: GPUTarget("cuda", 90, 32)}
    driver.set_active(SimpleNamespace(**target))
    torch.Tensor.is_cuda = property(lambda tensor: tensor.device == META_DEVICE)  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[assignment]
    # For tensors without data PyTorch computes these in Python, in a millisecond each.
    torch.Tensor.clamp = _shape_of_first(torch.Tensor.clamp)  # type: ignore[method-assign]
    torch.log_softmax = _shape_of_first(torch.log_softmax)
    Support.require = lambda *args, **kwargs: None  # type: ignore[method-assign]


def runner_of(name: str, num_layers: int, layout: RoundLayout, stored: str = DENSE, inner: int = 0) -> ModelRunner:
    """The first layers of a shape; with an EAGLE-3 head, if the layout has steps.

    stored: as of MetaWeights; inner: the width of the MLP, 0: that of the shape.
    """
    shape = find_shape(name)
    fields = {**shape.config_fields, "num_hidden_layers": num_layers}
    if inner:
        fields["intermediate_size"] = inner
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:num_layers]
    shape = replace(shape, config_fields=fields)
    target, draft = shape.target, None
    spec = shape.draft_config.spec if layout.steps else None
    model = make_target(MetaWeights(stored=stored), target, spec.captured_layers if spec else (), layout.position_rows)
    if spec is not None:
        weights = MetaWeights((target.hidden_size, len(spec.captured_layers) * target.hidden_size))
        draft = DRAFT_FORMATS[spec.algorithm].make(weights, shape.draft_config, model, layout.position_rows)
    algorithm = spec.algorithm if spec else "none"
    sizes = {"num_pages": 64, "overlap": True}
    return make_runner(
        LoadedModels(
            config_without_files(layout, algorithm, "triton", torch.bfloat16, META_DEVICE, **sizes), model, draft
        )
    )


@dataclass(frozen=True)
class Simulation:
    """shape: a name of synthetic/shapes.py, of which the first layers run; passes: of random form, that are served.

    inner: as of runner_of.
    """

    shape: str
    layers: int
    drafts: bool
    passes: int
    max_batch: int = 64
    chunk_size: int = 8192
    page_size: int = 64
    chip: str = "hopper"
    inner: int = 0

    @property
    def layout(self) -> RoundLayout:
        tree = TREE if self.drafts else (0, 1, 1)
        sizes = (self.max_batch, *tree, self.page_size, 8192, int(self.drafts), self.chunk_size)
        return RoundLayout(*sizes, busy_chunk_size=max(self.chunk_size // 3, 16))

    @torch.inference_mode()
    def run(self) -> dict[str, Any]:
        layout = self.layout
        launch._chip = lambda device: CHIPS[self.chip]  # type: ignore[assignment]
        runner, memory = runner_of(self.shape, self.layers, layout, inner=self.inner), StageMemory(META_DEVICE)
        vocab_size = runner.target.config.vocab_size
        results = ResultsRing(layout, vocab_size, 3, META_DEVICE)

        arguments: dict[Any, set[Arguments]] = {}

        def keys_of(launches: Iterable[LaunchInput]) -> set[tuple[str, str]]:
            keys = Keys(arguments)
            launch_hook.set(keys)
            for launch_input in launches:
                run_without_data(runner, results, memory, launch_input)
            return keys.found

        rounds = [dummy_launch(batch) for batch in layout.batch_buckets(layout.max_batch)]
        largest_rounds = (largest_prefill_pass(layout, width) for width in layout.chunk_widths)
        before = keys_of((*rounds, *largest_rounds))
        staged = keys_of(replace(each, is_staged=True) for each in rounds) - before
        smaller = keys_of(smaller_prefill_passes(layout, vocab_size))
        random = Random(7)
        served = keys_of(random_pass(layout, vocab_size, random) for _ in range(self.passes))
        served |= keys_of(dummy_prefill_pass(width, 1, 1, 0) for width in layout.chunk_widths)
        return {
            "specialised": specialised(arguments),
            "staged": names(staged),
            "smaller": names(smaller - before),
            "served": names(served - before - staged - smaller),
            "without_smaller": names(served - before),
        }


@dataclass(frozen=True)
class Layer:
    """A layer in plain decoding of one request.

    shape: a name of synthetic/shapes.py; stored: as of MetaWeights; layer: which one, from 0.
    """

    shape: str
    stored: str = DENSE
    layer: int = 1

    @torch.inference_mode()
    def run(self) -> dict[str, int]:
        """How often it launches each kernel: a round that ends with this layer, less one that ends before it."""
        launch._chip = lambda device: CHIPS["hopper"]  # type: ignore[assignment]
        return dict(self._launches(self.layer + 1) - self._launches(self.layer))

    def _launches(self, layers: int) -> Counter[str]:
        layout, found = Simulation(self.shape, layers, False, 0).layout, Counter[str]()
        runner = runner_of(self.shape, layers, layout, self.stored)
        launch_hook.set(lambda function, grid, *args, **kwargs: found.update([function.fn.__name__]))
        run_without_data(
            runner,
            ResultsRing(layout, runner.target.config.vocab_size, 3, META_DEVICE),
            StageMemory(META_DEVICE),
            dummy_launch(1),
        )
        return found


def run_without_data(runner: ModelRunner, results: ResultsRing, memory: StageMemory, launch_input: LaunchInput) -> None:
    """As CudaExecutor runs a launch."""
    packed = pack_launch(runner.table, launch_input, 0, launch_input.form())
    if launch_input.is_staged:
        EagerStages(runner, results, packed, ALL_SAMPLING_FEATURES, len(launch_input.slots), memory).run()
        return
    on_device = packed.with_vector(torch.empty(len(packed.vector), dtype=torch.int64, device=META_DEVICE))
    masks = (
        None
        if launch_input.masks is None
        else torch.empty(launch_input.masks.shape, dtype=torch.int32, device=META_DEVICE)
    )
    run_launch(runner, results, on_device, launch_input.width, ALL_SAMPLING_FEATURES, launch_input.prompt_rows, masks)


def names(keys: set[tuple[str, str]]) -> list[str]:
    return sorted(name for name, _ in keys)


def random_pass(layout: RoundLayout, vocab_size: int, random: Random) -> LaunchInput:
    """A pass as the scheduler makes it, of dummies."""
    longest = random.choice(LONGEST)
    left = [random.randint(1, longest) for _ in range(random.choice((1, 1, 2, 3, random.randint(1, layout.max_batch))))]
    made = next_prefill_pass(layout, left, layout.max_pass_rows(random.random() < 0.5))
    batch = len(made.lengths)
    wanted = replace(dummy_launch(batch, made.width), lengths=made.lengths, pieces=pieces_of(made))
    kind = random.random()
    if kind < 0.2:
        return replace(wanted, masks=np.zeros((batch, 1, mask_words(vocab_size)), np.int32))
    if kind < 0.5:
        spans = ((0, random.randint(1, made.lengths[0])), *((0, 0),) * (batch - 1))
        return replace(wanted, prompt_rows=PromptRows(spans, (random.randint(0, 20), *(0,) * (batch - 1))))
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("asked", type=json.loads, help="JSON: a list of fields of Simulation, or of Layer")
    pretend_gpu()
    found = [(Simulation if "passes" in fields else Layer)(**fields).run() for fields in parser.parse_args().asked]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
