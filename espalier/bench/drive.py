"""Runs an engine step by step, so that every step can be timed and every round counted."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

import torch

from espalier.config import EngineConfig, ResolvedConfig
from espalier.engine.engine import Engine
from espalier.engine.launch_input import RoundTrace
from espalier.errors import EspalierError
from espalier.llm import LLM, prepare_engine
from espalier.request import Request, SamplingParams
from espalier.startup.build import make_engine
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.startup.load import find_checkpoint
from espalier.stats import SpeculationStats
from espalier.terminal.console import print_header, require_writable
from espalier.terminal.flags import engine_settings, with_minimum

# The number of random texts for a model without a tokenizer.  Long prompts repeat these texts.
NUM_RANDOM_TEXTS = 64
# Keywords of LLM that replace those of the configured engine.
EngineVariant = Mapping[str, Any]
AS_CONFIGURED: EngineVariant = {}
PLAIN_DECODING: EngineVariant = {"speculation": None}


class Timer(Protocol):
    """Adds up the time of one part of the engine's steps, such as the forward passes.  seconds: the sum so far."""

    seconds: float


@dataclass
class DriveResult:
    """The measurements of one batch, from the arrival of its requests to their end.

    seconds: the whole time.  full_step_times: the seconds of each step whose round had all requests.  forward_seconds:
    the sum of the times that the timers of `drive` measured in these steps.  traces: {request id: a trace of each of
    its rounds}."""

    requests: list[Request]
    seconds: float
    full_step_times: list[float] = field(default_factory=list)
    forward_seconds: float = 0.0
    traces: dict[str, list[RoundTrace]] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        """The output token ids of each request."""
        return [request.output for request in self.requests]

    @property
    def num_tokens(self) -> int:
        """The number of output tokens of all requests."""
        return sum(len(request.output) for request in self.requests)

    @property
    def stats(self) -> SpeculationStats:
        total = SpeculationStats()
        for request in self.requests:
            total.merge(request.stats)
        return total


def require_one_rank(settings: Mapping[str, Any], command: str) -> None:
    """Raises EspalierError if the settings ask for several ranks.  `command` closes and rebuilds its engine, and the
    other ranks end when the engine closes."""
    if (num_ranks := settings.get("tensor_parallel", 1)) > 1:
        raise EspalierError(f"--tensor-parallel={num_ranks}: {command} measures on one GPU; leave the flag out")


def rebuilt_engine(engine: Engine, graph_batch: int, **changes: Any) -> Engine:
    """Closes `engine`, and returns a new engine on its models and buffers.  changes: ModelRunner fields to replace."""
    runner, overlap, has_cache = engine.executor.runner, engine.in_flight.overlap, engine.prefix_tree is not None
    engine.close()
    return make_engine(replace(runner, **changes), overlap, has_cache, graph_batch)


def drive(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    timers: Sequence[Timer] = (),
    first_tokens: Sequence[int] = (),
    after_step: Callable[[], None] | None = None,
) -> DriveResult:
    """Runs prompts as one batch.  timers: measure parts of a step, such as forward passes.  first_tokens: for
    each prompt, a token id that its output begins with; () for empty outputs.  after_step: called after each step."""
    requests = _make_requests(prompts, params, first_tokens)
    result = DriveResult(requests, 0.0, traces={request.id: [] for request in requests})
    round_traces: list[RoundTrace] = []
    engine.scheduler.on_round = round_traces.append
    for request in requests:
        engine.add(request)
    started_at = perf_counter()
    while engine.has_work:
        round_traces.clear()
        forward_at_start, step_started_at = sum(t.seconds for t in timers), perf_counter()
        engine.step()
        elapsed = perf_counter() - step_started_at
        for trace in round_traces:
            result.traces[trace.request_id].append(trace)
        if len(round_traces) == len(requests):
            result.full_step_times.append(elapsed)
            result.forward_seconds += sum(t.seconds for t in timers) - forward_at_start
        if after_step is not None:
            after_step()
    result.seconds = perf_counter() - started_at
    engine.scheduler.on_round = None
    return result


def empty_prefix_cache(engine: Engine) -> None:
    """Drop all cached prefixes that no request uses, so that the next prompts are computed completely."""
    if engine.prefix_tree is not None:
        engine.prefix_tree.evict(engine.pool.num_pages)


def full_step_times(results: Sequence[DriveResult]) -> list[float]:
    """Joins the full_step_times of all runs of one batch.  Raises EspalierError if no step had all requests."""
    steps = [seconds for run in results for seconds in run.full_step_times]
    if not steps:
        requests = results[0].requests
        raise EspalierError(
            f"no round held {len(requests)} requests of {len(requests[0].prompt)} tokens at once; lower --context, "
            "--batch or --max-batch, or raise --tokens or --num-pages"
        )
    return steps


def greedy_request(request_id: str, arrival_index: int, prompt: Sequence[int], num_tokens: int) -> Request:
    """Returns a greedy request that generates num_tokens tokens.  arrival_index: the request's place in the order of
    arrival, which is also its seed."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True).resolve({}, ())
    return Request(request_id, list(prompt), params, seed=arrival_index, arrival_index=arrival_index)


def _make_requests(
    prompts: Sequence[Sequence[int]], params: SamplingParams, first_tokens: Sequence[int]
) -> list[Request]:
    """Returns one request for each prompt.  first_tokens: the first output token of each; () for empty outputs."""
    resolved = params.resolve({}, ())
    first_outputs = [[root] for root in first_tokens] or [[] for _ in prompts]
    return [
        Request(
            id=str(i),
            prompt=list(prompt),
            params=resolved,
            seed=i if resolved.seed is None else resolved.seed,
            arrival_index=i,
            output=list(output),
            from_draft=[False] * len(output),
        )
        for i, (prompt, output) in enumerate(zip(prompts, first_outputs, strict=True))
    ]


def heldout_texts() -> list[dict[str, str]]:
    """Returns {"prompt", "reference"} pairs that the bundled model was not trained on.  Raises EspalierError."""
    path = BUNDLED_FILES / "heldout.jsonl"
    if not path.exists():
        raise EspalierError(f"{path} is not in this installation; install espalier again")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def heldout_tokens(llm: LLM, num_texts: int | None = None) -> list[tuple[list[int], list[int]]]:
    """Returns (prompt, reference) of the first `num_texts` held-out texts, as token ids; None for all texts.

    For a model without a tokenizer, the tokens are random.  Raises EspalierError if there are fewer held-out texts."""
    if llm.tokenizer is not None:
        texts = heldout_texts()
        if num_texts is not None and num_texts > len(texts):
            raise EspalierError(f"--prompts={num_texts} is not supported; there are {len(texts)} held-out texts")
        encode = llm.tokenizer.encode
        return [split_tokens(encode, text["prompt"], text["reference"]) for text in texts[:num_texts]]
    size, generator = (num_texts or NUM_RANDOM_TEXTS, 192), torch.Generator().manual_seed(0)
    rows = torch.randint(0, llm.model_config.vocab_size, size, generator=generator).tolist()
    return [(tokens[:128], tokens[128:]) for tokens in rows]


def split_tokens(encode: Callable[[str], list[int]], prompt: str, reference: str) -> tuple[list[int], list[int]]:
    """Tokenizes prompt + reference as one text, because a token may span the end of the prompt.  Returns all tokens in
    two parts: the longest common prefix with the tokens of the prompt alone (at least one token), and the rest."""
    prompt_tokens, all_tokens = encode(prompt), encode(prompt + reference)
    pairs = zip(prompt_tokens, all_tokens, strict=False)
    num_shared = next((i for i, (left, right) in enumerate(pairs) if left != right), len(prompt_tokens))
    border = min(max(num_shared, 1), len(all_tokens) - 1)
    return all_tokens[:border], all_tokens[border:]


def heldout_prompts(llm: LLM, num_prompts: int, length: int) -> list[list[int]]:
    """Returns `num_prompts` prompts of `length` tokens, cut from the joined held-out texts at evenly spaced offsets."""
    joined = [token for prompt, reference in heldout_tokens(llm) for token in prompt + reference]
    while len(joined) < 2 * length:
        joined += joined
    stride = (len(joined) - length) // num_prompts
    return [joined[i * stride : i * stride + length] for i in range(num_prompts)]


@dataclass(frozen=True)
class BenchEngine:
    """An LLM with its running engine.  make_prompts: takes prompt lengths, and returns a prompt (token ids) of each."""

    llm: LLM
    make_prompts: Callable[[Sequence[int]], list[list[int]]]

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    @property
    def config(self) -> ResolvedConfig:
        return self.llm.config


class BenchEngines(Protocol):
    """Opens engines of one model.  settings: the keywords of LLM.  max_positions: the longest context of the model."""

    settings: Mapping[str, Any]

    @property
    def max_positions(self) -> int: ...

    def config(self, variant: EngineVariant = AS_CONFIGURED) -> ResolvedConfig:
        """Returns the configuration of `open(variant)` without loading the model.  num_pages is an estimate."""
        ...

    def open(self, variant: EngineVariant = AS_CONFIGURED) -> AbstractContextManager[BenchEngine]:
        """Opens an engine with the settings of `variant`, and closes it at the end of the block.

        The engine's memory is released only when the caller has dropped the BenchEngine too."""
        ...


class ModelEngines:
    """The BenchEngines of a model that is loaded from files.  settings: the keywords of LLM."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @property
    def max_positions(self) -> int:
        return find_checkpoint(EngineConfig(**self.settings)).target.max_position

    def config(self, variant: EngineVariant = AS_CONFIGURED) -> ResolvedConfig:
        """Returns the configuration of `open(variant)`, without loading the model."""
        return prepare_engine(EngineConfig(**{**self.settings, **variant})).resolved

    @contextmanager
    def open(self, variant: EngineVariant = AS_CONFIGURED) -> Iterator[BenchEngine]:
        """Opens an engine with the settings of `variant`, and closes it after the block."""
        with LLM(**{**self.settings, **variant}) as llm:

            def make_prompts(lengths: Sequence[int]) -> list[list[int]]:
                longest = heldout_prompts(llm, len(lengths), max(lengths))
                return [prompt[:length] for prompt, length in zip(longest, lengths, strict=True)]

            yield BenchEngine(llm, make_prompts)


def variants_to_compare(engines: BenchEngines) -> dict[str, EngineVariant]:
    """Returns {name: engine variant} of the variants to compare: with the configured tree, and plain decoding."""
    return (
        {"tree": AS_CONFIGURED, "plain": PLAIN_DECODING} if engines.config().layout.steps else {"plain": PLAIN_DECODING}
    )


def require_positions(max_positions: int, num_needed: int, *flags: str) -> None:
    """Raises EspalierError if a request needs more tokens than the model has positions.  num_needed: the tokens of the
    longest request.  flags: the flags that ask for them, with their values, for the error message."""
    if num_needed > max_positions:
        raise EspalierError(
            f"{' and '.join(flags)} need {num_needed} tokens a request, and the model takes at most {max_positions}; "
            "ask for less"
        )


def engines_of(args: Namespace, defaults: Mapping[str, Any], **minimums: int) -> BenchEngines:
    """Returns engines of the model that the flags name.

    defaults: values for settings that are "auto".  minimums: the smallest allowed value of a setting.  Raises
    EspalierError for a smaller value."""
    require_writable("--json", args.json)
    engines = ModelEngines(with_minimum(engine_settings(args), defaults, **minimums))
    print_header()
    return engines
