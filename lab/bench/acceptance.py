"""`python -m lab round --acceptance`: accept length on held-out text, of the tree and of variants of it.

With --trees it measures these trees alone.  A draft of several MTP modules runs in the other form too, for comparison
with the one that its config.json names.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from espalier.bench.drive import DriveResult, drive, heldout_tokens, rebuilt_engine
from espalier.config import SpeculationConfig
from espalier.engine.engine import Engine
from espalier.engine.launch_input import RoundTrace
from espalier.errors import EspalierError
from espalier.layout import TreeShape
from espalier.llm import LLM
from espalier.request import SamplingParams
from espalier.terminal.console import print_table, progress, write_json
from lab.bench.checks import refuse_tree_flags
from lab.faults.planted import plant

# Text is called repeated if a run of this many tokens occurred before.
REPEATED_RUN_TOKENS = 16
# The fault that runs an MTP draft of this form (DraftSpec.hidden_source) in the other form.
FAULT_OF_OTHER_FORM = MappingProxyType({"chain": "chain-reads-target", "target": "target-reads-chain"})
# Teacher forcing runs one round from every eighth token.
TEACHER_FORCED_STRIDE = 8


@dataclass(frozen=True)
class DraftVariant:
    """One way to draft.

    speculation: None for the user's settings; plant_fault: makes a context in which a fault is planted; shares_noise:
    see ModelRunner; teacher_forced: whether teacher forcing is measured too."""

    name: str
    speculation: SpeculationConfig | None = None
    temperature: float = 0.0
    plant_fault: Callable[[], AbstractContextManager[Any]] = nullcontext
    shares_noise: bool = True
    teacher_forced: bool = False


@dataclass(frozen=True)
class Acceptance:
    """The accept lengths of a variant: over all rounds, over rounds that begin in new text, and over rounds that begin
    inside a repeated run of REPEATED_RUN_TOKENS tokens.

    repeated_share: share of the tokens that come from rounds in repeated text; by_depth: (tried, accepted) by depth,
    from 1; same_tokens: number of requests with the same tokens as the first variant of this temperature, None if
    tokens are not compared."""

    name: str
    accept_length: float
    accept_length_new: float
    accept_length_repeated: float
    repeated_share: float
    rounds: int
    by_depth: list[tuple[int, int]]
    requests: int
    same_tokens: int | None


def default_variants(steps: int, algorithm: str, has_draft: bool) -> list[DraftVariant]:
    """The configured tree; a chain of the same steps; n-gram; a planted fault; sampling with and without coupled
    scores.  Without a draft: the tree and n-gram."""
    ngram = DraftVariant("n-gram tree", SpeculationConfig(algorithm="ngram", steps=steps))
    if not has_draft:
        return [DraftVariant("tree", teacher_forced=True), ngram]
    chain = SpeculationConfig(steps=steps, topk=1, num_draft_tokens=steps + 1)
    return [
        DraftVariant(f"{algorithm} tree", teacher_forced=True),
        DraftVariant(f"{algorithm} chain", chain),
        ngram,
        DraftVariant(f"{algorithm} tree, wrong ancestors", plant_fault=partial(plant, "wrong-ancestor")),
        DraftVariant(f"{algorithm} tree, temperature 1, coupled scores", temperature=1.0),
        DraftVariant(f"{algorithm} tree, temperature 1, scores without noise", temperature=1.0, shares_noise=False),
    ]


def tree_variants(trees: Sequence[TreeShape], algorithm: str, form: str | None) -> list[DraftVariant]:
    """A variant for each tree and, for an MTP draft of this form, a variant with this tree in the other form."""
    found = []
    for tree in trees:
        name = f"{algorithm} {tree.steps},{tree.topk},{tree.num_draft_tokens}"
        speculation = SpeculationConfig(**tree.sizes, by_batch={})
        found.append(DraftVariant(name, speculation))
        if form is not None:
            swapped = partial(plant, FAULT_OF_OTHER_FORM[form])
            found.append(DraftVariant(f"{name}, in the other form", speculation, plant_fault=swapped))
    return found


def run(args: Namespace, settings: dict[str, Any]) -> None:
    if args.trees:
        refuse_tree_flags(args, "--trees")
        if not all(tree.steps for tree in args.trees):
            raise EspalierError("--trees: a tree of steps 0 drafts nothing; leave it out")
    with progress("measuring", 2 * len(args.trees) or 7) as advance:
        rows = measure_acceptance(settings, args.prompts, args.tokens, advance, args.trees)
    about = {name: str(value) for name, value in settings.items()}
    write_json(args.json, {"settings": about, "acceptance": [asdict(row) for row in rows]})
    print_table(_acceptance_table(rows))


def measure_acceptance(
    settings: dict[str, Any],
    num_prompts: int,
    num_tokens: int,
    advance: Callable[[], None],
    trees: Sequence[TreeShape] = (),
) -> list[Acceptance]:
    """Measures the default variants, or these trees, on the same prompts.  Calls `advance` after each measurement.
    Raises EspalierError."""
    with LLM(**settings) as llm:
        steps, algorithm, draft = llm.config.layout.steps, llm.config.algorithm, llm.config.draft
        if not steps:
            raise EspalierError("--acceptance is of what is drafted, and steps=0 drafts nothing; leave one out")
        heldout_tokens(llm, num_prompts)  # raises, before anything is measured, if there are too few
        form = mtp_form_of(llm.engine)
    chosen = tree_variants(trees, algorithm, form) if trees else default_variants(steps, algorithm, draft is not None)
    rows: list[Acceptance] = []
    reference: dict[float, list[list[int]]] = {}
    for variant in chosen:
        # The fault must be planted when the engine starts, because a GPU captures its rounds then.
        with variant.plant_fault(), LLM(**_variant_settings(variant, settings)) as llm:
            engine = llm.engine
            if not variant.shares_noise:
                engine = rebuilt_engine(engine, llm.config.graph_batch, shares_noise=False)
            driven = _continue_prompts(llm, engine, variant, num_prompts, num_tokens)
            expected = reference.setdefault(variant.temperature, driven.tokens)
            same = sum(a == b for a, b in zip(driven.tokens, expected, strict=True))
            rows.append(_summarise(variant.name, driven, driven.traces, same))
            advance()
            if variant.teacher_forced:
                rows.append(_measure_teacher_forced(llm, f"{variant.name}, teacher-forced", num_prompts))
                advance()
            engine.close()
    return rows


def mtp_form_of(engine: Engine) -> str | None:
    """The form of a draft of several MTP modules; None for other drafts, which have no form."""
    spec = engine.executor.runner.drafter.spec
    return spec.hidden_source if spec.num_modules > 1 else None


def _variant_settings(variant: DraftVariant, settings: dict[str, Any]) -> dict[str, Any]:
    """LLM's settings for this variant."""
    if variant.speculation is None:
        return settings
    needs_draft = variant.speculation.algorithm != "ngram"
    kept = {name: value for name, value in settings.items() if needs_draft or name != "draft"}
    return {**kept, "speculation": variant.speculation}


def _continue_prompts(
    llm: LLM, engine: Engine, variant: DraftVariant, num_prompts: int, num_tokens: int
) -> DriveResult:
    """Continue every prompt by num_tokens tokens on this engine.  Raises EspalierError if the context is too small."""
    prompts = [prompt for prompt, _ in heldout_tokens(llm, num_prompts)]
    longest, max_context = max(map(len, prompts)), llm.config.layout.max_context
    if longest + num_tokens > max_context:
        raise EspalierError(
            f"--tokens={num_tokens} after prompts of up to {longest} is above max_context={max_context}; lower "
            "--tokens or --prompts, or raise --max-context"
        )
    return drive(engine, prompts, _sampling_params(variant, num_tokens))


def _sampling_params(variant: DraftVariant, num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=variant.temperature, max_tokens=num_tokens, top_k=0, top_p=1.0)


def _measure_teacher_forced(llm: LLM, name: str, num_prompts: int) -> Acceptance:
    """One round from every TEACHER_FORCED_STRIDE-th token of the held-out text, with that token as the root."""
    contexts, roots = [], []
    for prompt, reference in heldout_tokens(llm, num_prompts):
        text_tokens = (prompt + reference)[: llm.config.layout.max_context - llm.config.layout.steps - 2]
        for position in range(len(prompt), len(text_tokens), TEACHER_FORCED_STRIDE):
            contexts.append(text_tokens[:position])
            roots.append(text_tokens[position])
    params = SamplingParams(temperature=0.0, max_tokens=llm.config.layout.steps + 2)
    driven = drive(llm.engine, contexts, params, first_tokens=roots)
    firsts = {request: traces[:1] for request, traces in driven.traces.items()}
    return _summarise(name, driven, firsts, None)


def _summarise(
    name: str, driven: DriveResult, traces: dict[str, list[RoundTrace]], num_same_tokens: int | None
) -> Acceptance:
    lengths: dict[bool, list[int]] = {False: [], True: []}
    by_depth: list[list[int]] = []
    for request in driven.requests:
        repeated = repeated_positions(request.tokens)
        for trace in traces[request.id]:
            first_token = trace.prefix_len + 1
            lengths[first_token in repeated].append(len(trace.emitted))
            _count_depths(by_depth, len(trace.emitted), max(trace.tree.depths))
    all_lengths = lengths[False] + lengths[True]
    return Acceptance(
        name=name,
        accept_length=_mean_or_zero(all_lengths),
        accept_length_new=_mean_or_zero(lengths[False]),
        accept_length_repeated=_mean_or_zero(lengths[True]),
        repeated_share=sum(lengths[True]) / max(sum(all_lengths), 1),
        rounds=len(all_lengths),
        by_depth=[(tried, accepted) for tried, accepted in by_depth],
        requests=len(driven.requests),
        same_tokens=num_same_tokens,
    )


def _count_depths(depth_counts: list[list[int]], accept_length: int, depth: int) -> None:
    for d in range(min(accept_length, depth)):
        if d == len(depth_counts):
            depth_counts.append([0, 0])
        depth_counts[d][0] += 1
        depth_counts[d][1] += d + 1 < accept_length


def repeated_positions(tokens: Sequence[int], size: int = REPEATED_RUN_TOKENS) -> set[int]:
    """Positions inside a run of `size` tokens that occurred earlier in the text."""
    seen: set[tuple[int, ...]] = set()
    inside: set[int] = set()
    for start in range(len(tokens) - size + 1):
        window = tuple(tokens[start : start + size])
        if window in seen:
            inside.update(range(start, start + size))
        seen.add(window)
    return inside


def _mean_or_zero(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _acceptance_table(rows: Sequence[Acceptance]) -> list[list[str]]:
    lines = [["", "accept length", "new text", "repeated", "share repeated", "rounds", "same tokens", "by depth"]]
    for row in rows:
        cells = [
            row.name,
            f"{row.accept_length:.2f}",
            f"{row.accept_length_new:.2f}",
            f"{row.accept_length_repeated:.2f}",
            f"{row.repeated_share:.0%}",
            str(row.rounds),
            "" if row.same_tokens is None else f"{row.same_tokens}/{row.requests}",
            " ".join(f"{accepted / tried:.2f}" for tried, accepted in row.by_depth),
        ]
        lines.append(cells)
    return lines
