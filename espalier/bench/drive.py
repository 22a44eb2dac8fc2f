"""Steps an engine directly, so that every step can be timed and every round counted."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

import torch

from espalier.engine.engine import Engine
from espalier.engine.launch_input import RoundTrace
from espalier.errors import EspalierError
from espalier.llm import LLM
from espalier.request import Request, SamplingParams
from espalier.startup.build import engine_of
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.stats import SpeculationStats

# For a model without a tokenizer.  Longer prompts repeat these texts.
RANDOM_TEXTS = 64


class Timer(Protocol):
    """Sums the time of what it times."""

    seconds: float


@dataclass
class Driven:
    """One batch, from arrival to end.

    full_steps: seconds of each step that harvested a round of every request; forward_seconds: spent in the models'
    forward passes during those steps; traces: by request id, in order.
    """

    requests: list[Request]
    seconds: float
    full_steps: list[float] = field(default_factory=list)
    forward_seconds: float = 0.0
    traces: dict[str, list[RoundTrace]] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        return [request.output for request in self.requests]

    @property
    def num_tokens(self) -> int:
        return sum(len(request.output) for request in self.requests)

    @property
    def stats(self) -> SpeculationStats:
        total = SpeculationStats()
        for request in self.requests:
            total.merge(request.stats)
        return total


def rebuilt(engine: Engine, graph_batch: int, **changes: Any) -> Engine:
    """A new engine on the models and buffers of this one, which is closed.  changes: fields of ModelRunner."""
    runner, overlap, has_cache = engine.executor.runner, engine.in_flight.overlap, engine.prefixes is not None
    engine.close()
    return engine_of(replace(runner, **changes), overlap, has_cache, graph_batch)


def drive(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    timers: Sequence[Timer] = (),
    roots: Sequence[int] = (),
    after_step: Callable[[], None] | None = None,
) -> Driven:
    """Run prompts as one batch.  roots: the first token of each output, where it is given instead of sampled."""
    requests = _requests(prompts, params, roots)
    driven = Driven(requests, 0.0, traces={request.id: [] for request in requests})
    harvested: list[RoundTrace] = []
    engine.scheduler.on_round = harvested.append
    for request in requests:
        engine.add(request)
    begun = perf_counter()
    while engine.has_work:
        harvested.clear()
        forward, step = sum(t.seconds for t in timers), perf_counter()
        engine.step()
        elapsed = perf_counter() - step
        for trace in harvested:
            driven.traces[trace.request_id].append(trace)
        if len(harvested) == len(requests):
            driven.full_steps.append(elapsed)
            driven.forward_seconds += sum(t.seconds for t in timers) - forward
        if after_step is not None:
            after_step()
    driven.seconds = perf_counter() - begun
    engine.scheduler.on_round = None
    return driven


def empty_prefix_cache(engine: Engine) -> None:
    """Forget all cached prefixes that no request uses, so that the next prompts are prefilled whole."""
    if engine.prefixes is not None:
        engine.prefixes.evict(engine.pool.num_pages)


def full_steps(runs: Sequence[Driven]) -> list[float]:
    """The full_steps of all runs of one batch.  Raises EspalierError if there are none."""
    steps = [seconds for run in runs for seconds in run.full_steps]
    if not steps:
        requests = runs[0].requests
        raise EspalierError(
            f"no round held {len(requests)} requests of {len(requests[0].prompt)} tokens at once; lower --context, "
            "--batch or --max-batch, or raise --tokens or --num-pages"
        )
    return steps


def greedy_request(name: str, arrival: int, prompt: Sequence[int], num_tokens: int) -> Request:
    """A request that runs to num_tokens tokens.  arrival: its number in the order of arrival, and its seed."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True).resolve({}, ())
    return Request(name, list(prompt), params, seed=arrival, arrival=arrival)


def _requests(prompts: Sequence[Sequence[int]], params: SamplingParams, roots: Sequence[int]) -> list[Request]:
    resolved = params.resolve({}, ())
    given = [[root] for root in roots] or [[] for _ in prompts]
    return [
        Request(
            id=str(i),
            prompt=list(prompt),
            params=resolved,
            seed=i if resolved.seed is None else resolved.seed,
            arrival=i,
            output=list(output),
            from_draft=[False] * len(output),
        )
        for i, (prompt, output) in enumerate(zip(prompts, given, strict=True))
    ]


def heldout() -> list[dict[str, str]]:
    """{"prompt", "reference"} pairs from files that the bundled model was not trained on.  Raises EspalierError."""
    path = BUNDLED_FILES / "heldout.jsonl"
    if not path.exists():
        raise EspalierError(f"{path} is not in this installation; install espalier again")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(llm: LLM, count: int | None = None) -> list[tuple[list[int], list[int]]]:
    """(prompt, reference) of the first `count` held-out texts, None: of all.  Together they are the tokens of the text.

    A model without a tokenizer gets random tokens.  Raises EspalierError if there are fewer texts than `count`.
    """
    if llm.tokenizer is not None:
        if count is not None and count > len(heldout()):
            raise EspalierError(f"--prompts={count} is not supported; there are {len(heldout())} held-out texts")
        return [parts_of(llm.tokenizer.encode, entry["prompt"], entry["reference"]) for entry in heldout()[:count]]
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(0, llm.model_config.vocab_size, (count or RANDOM_TEXTS, 192), generator=generator).tolist()
    return [(tokens[:128], tokens[128:]) for tokens in draw]


def parts_of(encode: Callable[[str], list[int]], prompt: str, reference: str) -> tuple[list[int], list[int]]:
    """The tokens of a text in two parts.  The first are those that the prompt alone begins with too, at least one.

    A tokenizer may have a token across the border, so the prompt's own tokens may not be the first of the text's.
    """
    alone, whole = encode(prompt), encode(prompt + reference)
    shared = next((i for i, (one, other) in enumerate(zip(alone, whole, strict=False)) if one != other), len(alone))
    border = min(max(shared, 1), len(whole) - 1)
    return whole[:border], whole[border:]


def contexts(llm: LLM, batch: int, length: int) -> list[list[int]]:
    """`batch` prompts of `length` tokens, cut from the joined held-out texts at evenly spaced places."""
    joined = [token for prompt, reference in texts(llm) for token in prompt + reference]
    while len(joined) < 2 * length:
        joined += joined
    stride = (len(joined) - length) // batch
    return [joined[i * stride : i * stride + length] for i in range(batch)]
