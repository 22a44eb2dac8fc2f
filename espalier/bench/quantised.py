"""Compares a quantised target or draft with its original, by running both in the engine on held-out text.

Both models read the same tokens.  If they have no tokenizer, the tokens are random prompts with the continuations that
the original model generates.  Agreement is the share of positions with the same likeliest token.  KL compares
distributions over the whole vocabulary, so the original's hidden states and lm_head are kept until the copy has run.

Accept lengths are measured with the configured tree, even if an engine would choose plain decoding.
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

# The length of a text that the original model generates, in tokens.
GENERATED_LENGTH = 256
# The distributions of at most this number of positions are compared at once.
MAX_LOGIT_ROWS = 256

# (prompt, continuation) pairs, as token ids.
TokenPairs = list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Accuracy:
    """The measured differences between a model and its quantised copy.

    positions: the number of compared positions.  agreement: the share of positions with the same likeliest token.  kl:
    the mean KL divergence in nats.  perplexity, accept_length: (of the model, of its copy), on the same texts.
    accept_length: None without a draft.  is_own_text: whether the original model generated the text."""

    positions: int
    agreement: float
    kl: float
    perplexity: tuple[float, float]
    accept_length: tuple[float, float] | None
    is_own_text: bool


@dataclass(frozen=True)
class ModelOutputs:
    """The results of running one model over the texts.  is_own_text, accept_length: as in Accuracy, of this model.

    hidden: for each text, the final hidden states [positions, H], on the CPU.  next_tokens: for each text, the token
    after each position.  logits: applies the model's lm_head to hidden states, after the model is closed."""

    texts: TokenPairs
    is_own_text: bool
    hidden: list[Tensor]
    next_tokens: list[Tensor]
    logits: Callable[[Tensor], Tensor]
    accept_length: float | None

    def logprobs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (log-probabilities [B, V], following tokens [B]) for all positions.  B <= MAX_LOGIT_ROWS."""
        for hidden, next_tokens in zip(self.hidden, self.next_tokens, strict=True):
            for rows, tokens in zip(hidden.split(MAX_LOGIT_ROWS), next_tokens.split(MAX_LOGIT_ROWS), strict=True):
                logits = self.logits(rows)
                yield logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1), tokens


class HiddenRecorder:
    """Wraps a target, and keeps the hidden states of prompt positions, from which it computes logits for prompt
    log-probabilities.  Only one request may run at a time."""

    def __init__(self, model: Any):
        self.model = model
        self._pass_rows: list[Tensor] = []
        self._kept_rows: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        self._end_pass()
        return self.model(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the target's logits of hidden states [..., H], which are recorded."""
        self._pass_rows.append(hidden.flatten(0, -2))
        return self.model.logits(hidden)

    def _end_pass(self) -> None:
        # The last logits of a forward pass are not for prompt log-probabilities: the next token is sampled from them.
        self._kept_rows += self._pass_rows[:-1]
        self._pass_rows = []

    def take_hidden(self) -> Tensor:
        """Returns the rows [positions, H] that were kept since the last call, and drops them."""
        self._end_pass()
        kept, self._kept_rows = self._kept_rows, []
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

    settings: the keywords of LLM for both models, with the draft.  num_tokens: the tokens to generate after each prompt
    to measure the accept length.  advance: called after each text of each model."""
    settings = without_by_batch(settings)
    original = _run_model(model, settings, num_texts, num_tokens, None, advance)
    copy = _run_model(quantised, settings, num_texts, num_tokens, original, advance)
    lengths = None
    if original.accept_length is not None and copy.accept_length is not None:
        lengths = (original.accept_length, copy.accept_length)
    positions, agreement, kl, *losses = _mean_differences(original, copy)
    perplexity = exp(losses[0]), exp(losses[1])
    return Accuracy(int(positions), agreement, kl, perplexity, lengths, original.is_own_text)


def _mean_differences(original: ModelOutputs, copy: ModelOutputs) -> list[float]:
    """Returns the number of positions, and means over them: agreement, KL, and each model's loss on the text."""
    totals = torch.zeros(5, dtype=torch.float64)
    for (original_logprobs, tokens), (copy_logprobs, _) in zip(original.logprobs(), copy.logprobs(), strict=True):
        agrees = (original_logprobs.argmax(-1) == copy_logprobs.argmax(-1)).sum()
        losses = [-x.gather(-1, tokens[:, None].to(x.device)).sum() for x in (original_logprobs, copy_logprobs)]
        sums = torch.stack([agrees, kl_divergence(original_logprobs, copy_logprobs).sum(), *losses]).cpu().double()
        totals += torch.cat([torch.tensor([float(len(tokens))], dtype=torch.float64), sums])
    return [float(totals[0]), *(totals[1:] / totals[0]).tolist()]


def kl_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Returns KL(first || second) in nats, [..].  first, second: log-probabilities [.., V] over the vocabulary."""
    return torch.where(first.isneginf(), 0.0, first.exp() * (first - second)).sum(-1)


def accept_lengths(
    target: str,
    drafts: tuple[str, str],
    settings: Mapping[str, Any],
    num_texts: int,
    num_tokens: int,
    advance: Callable[[], None],
) -> tuple[float, float]:
    """Returns the accept lengths of a target with a draft, and with the draft's quantised copy, on the same prompts.
    drafts: (the draft, its quantised copy).  num_tokens: the tokens to generate from each prompt.  advance: called
    after each draft.  settings: further keywords of LLM.  num_texts: how many prompts are used."""
    lengths = []
    for draft in drafts:
        with LLM(target, draft=draft, **without_by_batch(settings)) as llm:
            lengths.append(_accept_length(llm, [prompt for prompt, _ in heldout_tokens(llm, num_texts)], num_tokens))
        advance()
    return lengths[0], lengths[1]


def _run_model(
    model: str,
    settings: Mapping[str, Any],
    num_texts: int,
    num_tokens: int,
    original: ModelOutputs | None,
    advance: Callable[[], None],
) -> ModelOutputs:
    """Runs one model over the texts.  original: for the quantised copy, the outputs of the original model, with the
    texts to read.  For the original model, None: this run makes the texts.  advance: called after each text."""
    with LLM(model, **settings) as llm:
        is_own_text = llm.tokenizer is None
        pairs = (_make_texts if is_own_text else heldout_tokens)(llm, num_texts) if original is None else original.texts
        accept_length = None
        if llm.config.layout.steps and llm.config.draft is not None:
            accept_length = _accept_length(llm, [prompt for prompt, _ in pairs], num_tokens)
        limit = llm.config.layout.max_context - 1
        recorder = HiddenRecorder(llm.engine.executor.runner.target)
        llm.engine = rebuilt_engine(llm.engine, 0, target=recorder)
        hidden, next_tokens = [], []
        for prompt, reference in pairs:
            # The positions of a random prompt are not compared.
            begin = len(prompt) if is_own_text else 1
            tokens = (prompt + reference)[:limit]
            hidden.append(_hidden_states(llm, recorder, tokens)[begin - 1 :].cpu())
            next_tokens.append(torch.tensor(tokens[begin:]))
            advance()
        head, device = recorder.model.head, torch.device(llm.config.device)
    return ModelOutputs(pairs, is_own_text, hidden, next_tokens, lambda rows: head(rows.to(device)), accept_length)


def _hidden_states(llm: LLM, recorder: HiddenRecorder, tokens: list[int]) -> Tensor:
    """Returns the final hidden states [len(tokens) - 1, H] of all tokens but the last.  Raises EspalierError."""
    [request] = drive(llm.engine, [tokens], SamplingParams(max_tokens=0, prompt_logprobs=0)).requests
    rows = recorder.take_hidden()
    if request.error is not None or len(rows) != len(tokens) - 1:
        raise EspalierError(f"{llm.config.model}: a text failed ({request.error})")
    return rows


def _accept_length(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> float:
    """Returns the mean accept length of greedy outputs of `num_tokens` tokens."""
    prompts, greedy = _cut_to_context(llm, prompts, num_tokens)
    return drive(llm.engine, prompts, greedy).stats.accept_length


def _make_texts(llm: LLM, num_texts: int) -> TokenPairs:
    """Returns (prompt, greedy output) for each held-out prompt, as token ids."""
    prompts, greedy = _cut_to_context(llm, [prompt for prompt, _ in heldout_tokens(llm, num_texts)], GENERATED_LENGTH)
    return [(prompt, output.token_ids) for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True)]


def _cut_to_context(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> tuple[list[list[int]], SamplingParams]:
    """Returns (prompts, greedy parameters for `num_tokens` tokens).  Both are cut to fit max_context: at most half of
    the context is for generated tokens, and the prompts get the rest."""
    context = llm.config.layout.max_context - 1
    num_generated = min(num_tokens, context // 2)
    greedy = SamplingParams(temperature=0.0, max_tokens=num_generated, top_k=0, top_p=1.0)
    return [prompt[: context - num_generated] for prompt in prompts], greedy
