"""Accept length on held-out text, for the tree and for what it is to be compared with."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from espalier.bench.drive import Driven, drive, texts
from espalier.config import SpeculationConfig
from espalier.engine.launch_input import RoundTrace
from espalier.errors import EspalierError
from espalier.llm import LLM, faults
from espalier.request import SamplingParams
from espalier.sampling.logit_processors import SamplingRows
from espalier.sampling.pick import over_temperature
from espalier.speculate import sampler as draws

REPEAT = 16
TEACHER_FORCED_STRIDE = 8


@dataclass(frozen=True)
class Variant:
    """One way to draft.  speculation: None for the settings as they are; identical: whether tokens must be plain's."""

    name: str
    speculation: SpeculationConfig | None = None
    temperature: float = 0.0
    planted: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Acceptance:
    """Accept length over all rounds, and over those whose first token is in no repeated 16-gram, and in one.

    by_depth: (tried, accepted) from depth 1; same_tokens: requests whose tokens are those of the first variant of that
    temperature, out of `requests`; None where tokens are not compared.
    """

    name: str
    accept_length: float
    accept_length_new: float
    accept_length_repeated: float
    repeated_share: float
    rounds: int
    by_depth: list[tuple[int, int]]
    requests: int
    same_tokens: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def variants(steps: int, algorithm: str, has_draft: bool) -> list[Variant]:
    """The tree as configured; a chain of the same steps; n-gram; sampled with and without coupled scores; a fault."""
    ngram = Variant("n-gram tree", SpeculationConfig(algorithm="ngram", steps=steps))
    if not has_draft:
        return [Variant("tree"), ngram]
    chain = SpeculationConfig(steps=steps, topk=1, num_draft_tokens=steps + 1)
    return [
        Variant(f"{algorithm} tree"),
        Variant(f"{algorithm} chain", chain),
        ngram,
        Variant(f"{algorithm} tree, wrong ancestors", planted=lambda: faults().plant("wrong-ancestor")),
        Variant(f"{algorithm} tree, temperature 1, coupled scores", temperature=1.0),
        Variant(f"{algorithm} tree, temperature 1, scores without noise", temperature=1.0, planted=uncoupled),
    ]


@contextmanager
def uncoupled() -> Iterator[None]:
    """The draft scores children as if it did not know what the target will draw with."""

    def scores(logits: Tensor, rows: SamplingRows, noise: Tensor, tau: float = 1.0) -> Tensor:
        return torch.log_softmax(over_temperature(logits, rows), -1)

    coupled, by_kernels = draws.coupled_scores, draws.draft_topk_triton
    draws.coupled_scores, draws.draft_topk_triton = scores, partial(by_kernels, coupled=False)
    try:
        yield
    finally:
        draws.coupled_scores, draws.draft_topk_triton = coupled, by_kernels


def measure(settings: dict[str, Any], num_prompts: int, num_tokens: int, seen: Callable[[], None]) -> list[Acceptance]:
    """Every variant on the same prompts; `seen` is called after each."""
    with LLM(**settings) as llm:
        steps, algorithm, has_draft = llm.config.steps, llm.config.algorithm, llm.config.draft is not None
        if not steps:
            raise EspalierError("--acceptance is of what is drafted, and steps=0 drafts nothing; leave one out")
        # Whether there are so many, before the first of seven is measured.
        texts(llm, num_prompts)
    rows: list[Acceptance] = []
    reference: dict[float, list[list[int]]] = {}
    for variant in variants(steps, algorithm, has_draft):
        own = settings if variant.speculation is None else {**settings, "speculation": variant.speculation}
        if variant.speculation is not None and variant.speculation.algorithm == "ngram":
            own = {name: value for name, value in own.items() if name != "draft"}
        # Around the engine's start too: a GPU captures its rounds there.
        with variant.planted(), LLM(**own) as llm:
            driven = _generated(llm, variant, num_prompts, num_tokens)
            expected = reference.setdefault(variant.temperature, driven.tokens)
            same = sum(a == b for a, b in zip(driven.tokens, expected, strict=True))
            rows.append(_summarise(variant.name, driven, driven.traces, same))
            seen()
            if len(rows) == 1:
                rows.append(_teacher_forced(llm, f"{variant.name}, teacher-forced", num_prompts))
                seen()
    return rows


def _generated(llm: LLM, variant: Variant, num_prompts: int, num_tokens: int) -> Driven:
    prompts = [prompt for prompt, _ in texts(llm, num_prompts)]
    longest, most = max(map(len, prompts)), llm.config.max_context
    if longest + num_tokens > most:
        raise EspalierError(
            f"--tokens={num_tokens} after prompts of up to {longest} is above max_context={most}; lower --tokens or "
            "--prompts, or raise --max-context"
        )
    params = SamplingParams(temperature=variant.temperature, max_tokens=num_tokens, top_k=0, top_p=1.0)
    return drive(llm.engine, prompts, params)


def _teacher_forced(llm: LLM, name: str, num_prompts: int) -> Acceptance:
    """One round from every few tokens of the held-out text itself, whose token is the root."""
    contexts, roots = [], []
    for prompt, reference in texts(llm, num_prompts):
        whole = (prompt + reference)[: llm.config.max_context - llm.config.steps - 2]
        for at in range(len(prompt), len(whole), TEACHER_FORCED_STRIDE):
            contexts.append(whole[:at])
            roots.append(whole[at])
    params = SamplingParams(temperature=0.0, max_tokens=llm.config.steps + 2)
    driven = drive(llm.engine, contexts, params, roots=roots)
    firsts = {request: traces[:1] for request, traces in driven.traces.items()}
    return _summarise(name, driven, firsts, None)


def _summarise(name: str, driven: Driven, traces: dict[str, list[RoundTrace]], same: int | None) -> Acceptance:
    lengths: dict[bool, list[int]] = {False: [], True: []}
    by_depth: list[list[int]] = []
    for request in driven.requests:
        repeated = inside_repeats(request.tokens)
        for trace in traces[request.id]:
            first = trace.prefix_len + 1
            lengths[first in repeated].append(len(trace.emitted))
            _count_depths(by_depth, len(trace.emitted), max(trace.tree.depths))
    every = lengths[False] + lengths[True]
    return Acceptance(
        name=name,
        accept_length=_mean(every),
        accept_length_new=_mean(lengths[False]),
        accept_length_repeated=_mean(lengths[True]),
        repeated_share=sum(lengths[True]) / max(sum(every), 1),
        rounds=len(every),
        by_depth=[(tried, accepted) for tried, accepted in by_depth],
        requests=len(driven.requests),
        same_tokens=same,
    )


def _count_depths(by_depth: list[list[int]], accept_length: int, depth: int) -> None:
    for d in range(min(accept_length, depth)):
        if d == len(by_depth):
            by_depth.append([0, 0])
        by_depth[d][0] += 1
        by_depth[d][1] += d + 1 < accept_length


def inside_repeats(tokens: Sequence[int], size: int = REPEAT) -> set[int]:
    """Positions that lie in a run of `size` tokens that stood in the text before."""
    seen: set[tuple[int, ...]] = set()
    inside: set[int] = set()
    for at in range(len(tokens) - size + 1):
        run = tuple(tokens[at : at + size])
        if run in seen:
            inside.update(range(at, at + size))
        seen.add(run)
    return inside


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
