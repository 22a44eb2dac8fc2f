"""Compares a quantised target or draft with its original, both in the engine, on held-out text.

A model without a tokenizer cannot read that text.  It reads random tokens with the original's own continuation.

Both models read the same tokens.  Agreement is the share of positions with the same likeliest token; KL compares the
distributions over the whole vocabulary.  For this, the original's hidden states and its head are kept.

Accept lengths are measured with the tree at every batch size, even if an engine would choose plain decoding there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
from torch import Tensor

from espalier.bench.choose import without_by_batch
from espalier.bench.drive import drive, heldout_tokens, rebuilt_engine
from espalier.errors import EspalierError
from espalier.llm import LLM
from espalier.request import SamplingParams

# The tokens of a text that the original writes itself.
OWN_TEXT_TOKENS = 256
# The rows whose distributions are compared at once.
COMPARED_ROWS = 256

# (prompt, the text after it) pairs, as token ids.
TokenPairs = list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Accuracy:
    """How close a quantised copy is to its model.

    agreement: share of positions with the same likeliest token.  kl: mean, in nats.  perplexity: of the text, by the
    model and by its quantised copy.  accept_length: of both models with the draft; None without a draft.
    is_own_text: whether the original wrote the text.
    """

    positions: int
    agreement: float
    kl: float
    perplexity: tuple[float, float]
    accept_length: tuple[float, float] | None
    is_own_text: bool


@dataclass(frozen=True)
class ModelRun:
    """The results of one model for the texts.

    hidden: for each text, the final hidden states [positions, H] that predict the counted tokens, on the CPU;
    following: the counted tokens; logits: the model's head, without the model.
    """

    texts: TokenPairs
    is_own_text: bool
    hidden: list[Tensor]
    following: list[Tensor]
    logits: Callable[[Tensor], Tensor]
    accept_length: float | None

    def logprobs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (log-probabilities [ROWS, V], following tokens [ROWS]) for all positions, on the model's device."""
        for hidden, following in zip(self.hidden, self.following, strict=True):
            for rows, tokens in zip(hidden.split(COMPARED_ROWS), following.split(COMPARED_ROWS), strict=True):
                logits = self.logits(rows)
                yield logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1), tokens


class HiddenRecorder:
    """A target that keeps the hidden states behind a prompt's logits.  One request may run at a time."""

    def __init__(self, model: Any):
        self.model = model
        self._launch: list[Tensor] = []
        self._kept: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        self._end_launch()
        return self.model(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        self._launch.append(hidden.flatten(0, -2))
        return self.model.logits(hidden)

    def _end_launch(self) -> None:
        # The last logits of a launch are those that the next token is sampled from, so their rows are left out.
        self._kept += self._launch[:-1]
        self._launch = []

    def take(self) -> Tensor:
        """The rows [positions, H] that were kept since the last `take`."""
        self._end_launch()
        kept, self._kept = self._kept, []
        return torch.cat(kept)


def compare_accuracy(
    model: str,
    quantised: str,
    settings: Mapping[str, Any],
    num_texts: int,
    num_tokens: int,
    advance: Callable[[], None],
) -> Accuracy:
    """Compare a model with its quantised copy.

    settings: of both engines, with the draft.  num_tokens: generated from each prompt for the accept length.
    advance: called after each text of each model.
    """
    settings = without_by_batch(settings)
    first = _run_model(model, settings, num_texts, num_tokens, None, advance)
    second = _run_model(quantised, settings, num_texts, num_tokens, first, advance)
    lengths = None
    if first.accept_length is not None and second.accept_length is not None:
        lengths = (first.accept_length, second.accept_length)
    positions, agreement, kl, *losses = _mean_differences(first, second)
    perplexity = exp(losses[0]), exp(losses[1])
    return Accuracy(int(positions), agreement, kl, perplexity, lengths, first.is_own_text)


def _mean_differences(first: ModelRun, second: ModelRun) -> list[float]:
    """The number of positions, then means over the positions: agreement, KL, and each model's loss on the text."""
    totals = torch.zeros(5, dtype=torch.float64)
    for (ours, tokens), (theirs, _) in zip(first.logprobs(), second.logprobs(), strict=True):
        agrees = (ours.argmax(-1) == theirs.argmax(-1)).sum()
        losses = [-each.gather(-1, tokens[:, None].to(each.device)).sum() for each in (ours, theirs)]
        sums = torch.stack([agrees, kl_divergence(ours, theirs).sum(), *losses]).cpu().double()
        totals += torch.cat([torch.tensor([float(len(tokens))], dtype=torch.float64), sums])
    return [float(totals[0]), *(totals[1:] / totals[0]).tolist()]


def kl_divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) in nats: [..].  first, second: log-probabilities [.., V] over the vocabulary."""
    return torch.where(first.isneginf(), 0.0, first.exp() * (first - second)).sum(-1)


def accept_lengths(
    target: str,
    drafts: tuple[str, str],
    settings: Mapping[str, Any],
    num_texts: int,
    num_tokens: int,
    advance: Callable[[], None],
) -> tuple[float, float]:
    """The accept lengths of a target with a draft, and with its quantised copy, on the same prompts.

    num_tokens: generated from each prompt.
    """
    found = []
    for draft in drafts:
        with LLM(target, draft=draft, **without_by_batch(settings)) as llm:
            found.append(_accept_length(llm, [prompt for prompt, _ in heldout_tokens(llm, num_texts)], num_tokens))
        advance()
    return found[0], found[1]


def _run_model(
    model: str,
    settings: Mapping[str, Any],
    num_texts: int,
    num_tokens: int,
    first: ModelRun | None,
    advance: Callable[[], None],
) -> ModelRun:
    """Run one model over the texts.

    first: the run of the original, whose texts the copy reads too; None: make texts.
    """
    with LLM(model, **settings) as llm:
        is_own_text = llm.tokenizer is None
        pairs = (_own_texts if is_own_text else heldout_tokens)(llm, num_texts) if first is None else first.texts
        accept_length = None
        if llm.config.layout.steps and llm.config.draft is not None:
            accept_length = _accept_length(llm, [prompt for prompt, _ in pairs], num_tokens)
        limit = llm.config.layout.max_context - 1
        recorder = HiddenRecorder(llm.engine.executor.runner.target)
        llm.engine = rebuilt_engine(llm.engine, 0, target=recorder)
        hidden, following = [], []
        for prompt, reference in pairs:
            # Random tokens are no text, so their predictions are not counted.
            begin = len(prompt) if is_own_text else 1
            whole = (prompt + reference)[:limit]
            hidden.append(_hidden_states(llm, recorder, whole)[begin - 1 :].cpu())
            following.append(torch.tensor(whole[begin:]))
            advance()
        head, device = recorder.model.head, torch.device(llm.config.device)
    return ModelRun(pairs, is_own_text, hidden, following, lambda rows: head(rows.to(device)), accept_length)


def _hidden_states(llm: LLM, recorder: HiddenRecorder, tokens: list[int]) -> Tensor:
    """[len(tokens) - 1, H]: the final hidden states of a text, without the last one.  Raises EspalierError."""
    [request] = drive(llm.engine, [tokens], SamplingParams(max_tokens=0, prompt_logprobs=0)).requests
    rows = recorder.take()
    if request.error is not None or len(rows) != len(tokens) - 1:
        raise EspalierError(f"{llm.config.model}: a text failed ({request.error})")
    return rows


def _accept_length(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> float:
    prompts, greedy = _cut_to_context(llm, prompts, num_tokens)
    return drive(llm.engine, prompts, greedy).stats.accept_length


def _own_texts(llm: LLM, count: int) -> TokenPairs:
    prompts, greedy = _cut_to_context(llm, [prompt for prompt, _ in heldout_tokens(llm, count)], OWN_TEXT_TOKENS)
    return [(prompt, output.token_ids) for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True)]


def _cut_to_context(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> tuple[list[list[int]], SamplingParams]:
    """Prompts and greedy parameters for `num_tokens` tokens.  In a short context both are cut, each to half of it."""
    context = llm.config.layout.max_context - 1
    num = min(num_tokens, context // 2)
    greedy = SamplingParams(temperature=0.0, max_tokens=num, top_k=0, top_p=1.0)
    return [prompt[: context - num] for prompt in prompts], greedy
