"""A user's sampling parameters, the engine's record of a request, and the outputs that the user gets.

This module holds values only and knows of no tokenizer, device or model.

SamplingParams and ResolvedParams are the only declaration of the sampling parameters.  Derived from them are
command-line flags, the server's fields, docs, checks of values, the slot table's columns, and offsets in kernels.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol

from espalier import limits
from espalier.errors import EspalierError, prompt_too_long, refuse_unknown_fields, require_int
from espalier.grammar.spec import Grammar, require_grammar
from espalier.grammar.token_masker import TokenMasker
from espalier.limits import MAX_BIASES, MAX_LOGPROBS, MAX_SAMPLES, MAX_SEED, TEMPERATURE_RANGE, int_check, number_check
from espalier.logprobs import PromptLogprobs, TokenLogprob, TokenLogprobs
from espalier.stats import SpeculationStats, Usage


def _param(help: str, check: limits.Check, generation_config: str | None = None, has_own_spelling: bool = False) -> Any:
    """Returns a field that is unset by default.

    help: for the command line, the server and docs.  check: refuses values that no model supports.
    generation_config: the field of generation_config.json that gives the default; None if that file has no such field.
    has_own_spelling: whether flag and body field are written by hand; otherwise, both are generated from this field."""
    metadata = {"help": help, "check": check, "generation_config": generation_config}
    return field(default=None, metadata={**metadata, "has_own_spelling": has_own_spelling})


@refuse_unknown_fields
@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    None means unset: the model's generation_config.json decides, then the defaults of ResolvedParams.
    Raises EspalierError for a value that no model supports."""

    temperature: float | None = _param(
        f"0 is greedy, as is any value below {TEMPERATURE_RANGE[0]}; higher is more varied",
        limits.range_check(0, TEMPERATURE_RANGE[1], "0 is greedy"),
        generation_config="temperature",
    )
    top_k: int | None = _param(
        "keep the k likeliest tokens; 0 or -1 keeps all",
        int_check(-1, remark="0 or -1 keeps all tokens"),
        generation_config="top_k",
    )
    top_p: float | None = _param(
        "keep the likeliest tokens that make up this share",
        number_check(lambda p: 0 < p <= 1, "more than 0 and up to 1 (1 keeps all tokens)"),
        generation_config="top_p",
    )
    min_p: float | None = _param(
        "keep tokens at least this share as likely as the likeliest",
        limits.range_check(0, 1, "0 keeps all tokens"),
        generation_config="min_p",
    )
    repetition_penalty: float | None = _param(
        "above 1 discourages tokens of the prompt and the output",
        limits.range_check(*limits.REPETITION_PENALTY_RANGE, "1 is no penalty"),
        generation_config="repetition_penalty",
    )
    presence_penalty: float | None = _param(
        "subtracted once from a token that is in the output",
        limits.range_check(-2, 2, "0 is no penalty"),
    )
    frequency_penalty: float | None = _param(
        "subtracted from a token once for each time it is in the output",
        limits.range_check(-2, 2, "0 is no penalty"),
    )
    logit_bias: Mapping[int, float] | None = _param(
        f"token id to added logit, at most {MAX_BIASES} of them", limits.check_bias_values
    )
    seed: int | None = _param(
        "same seed, same text; unset: drawn from the engine's seed and the order of requests",
        int_check(0, MAX_SEED),
    )
    max_tokens: int | None = _param(
        "tokens to generate at most, which must fit after the prompt; unset: up to the context's end",
        int_check(0, remark="0 only with prompt_logprobs"),
        generation_config="max_new_tokens",
    )
    min_tokens: int | None = _param(
        "no stop token is generated before this many tokens", int_check(0), generation_config="min_new_tokens"
    )
    stop: str | Sequence[str] | None = _param(
        f"text that ends the output, of a chat its content, and is left out; at most {limits.MAX_STOP_STRINGS} strings",
        limits.check_stop_strings,
    )
    stop_token_ids: Sequence[int] | None = _param(
        "token ids that end the output, in addition to the model's own", limits.check_stop_ids
    )
    include_stop_str_in_output: bool | None = _param(
        "true: keep the stop string or token in the text", limits.check_bool
    )
    skip_special_tokens: bool | None = _param(
        "false: special tokens appear in the text by name; by default true", limits.check_bool
    )
    ignore_eos: bool | None = _param("go on after the model's own end tokens", limits.check_bool)
    logprobs: int | None = _param(
        f"log-probabilities of the chosen token and of this many of the likeliest, 0 to {MAX_LOGPROBS}",
        int_check(0, MAX_LOGPROBS),
    )
    prompt_logprobs: int | None = _param(
        f"log-probabilities of the prompt's tokens except the first, and of this many of the likeliest, 0 to "
        f"{MAX_LOGPROBS}; max_tokens may then be 0",
        int_check(0, MAX_LOGPROBS),
    )
    n: int | None = _param("outputs per prompt", int_check(1, MAX_SAMPLES))
    speculation: bool | None = _param("false: plain decoding for this request", limits.check_bool)
    max_draft_depth: int | None = _param("accept at most this many draft tokens per round", int_check(0))
    prediction: str | Sequence[int] | None = _param(
        "text or token ids that the output is likely to be: where they agree, more of it is verified at once",
        limits.check_prediction,
        has_own_spelling=True,
    )
    grammar: Grammar | None = _param(  # noqa: RUF009  (it is a field)
        "the form that the output must have (espalier.Grammar)",
        require_grammar,
        has_own_spelling=True,
    )

    def __repr__(self) -> str:
        """Shows only the fields that are set."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in values if value is not None)})"

    def __post_init__(self) -> None:
        for name, check in PARAM_CHECKS.items():
            if (value := getattr(self, name)) is not None:
                check(name, value)
        if self.temperature is not None and 0 < self.temperature < TEMPERATURE_RANGE[0]:
            object.__setattr__(self, "temperature", 0.0)
        limits.check_combinations(self)

    def resolve(self, defaults: Mapping[str, Any], eos_token_ids: Iterable[int]) -> "ResolvedParams":
        """Returns the parameters with unset fields filled in.

        defaults: the model's generation_config.json ({} if it has none); do_sample false means temperature 0.
        eos_token_ids: added to stop_token_ids unless ignore_eos."""
        values = {
            field_name: defaults[config_name]
            for config_name, field_name in GENERATION_CONFIG_NAMES.items()
            if defaults.get(config_name) is not None
        }
        if defaults.get("do_sample") is False:
            values["temperature"] = 0.0
        values |= {name: value for name in PARAM_CHECKS if (value := getattr(self, name)) is not None}
        top_k = values.get("top_k")
        # -1.0 is kept, because the check refuses every float.
        if isinstance(top_k, int) and top_k == -1:
            values["top_k"] = 0
        values["stop"] = limits.stop_strings_as_tuple(values.get("stop", ()))
        # A prediction that is text is encoded later, by InputProcessor.with_prediction, which has the tokenizer.
        values["prediction"] = () if isinstance(self.prediction, str) else tuple(self.prediction or ())
        eos_ids = values["eos_token_ids"] = () if values.get("ignore_eos") else tuple(eos_token_ids)
        user_ids = tuple(values.get("stop_token_ids", ()))
        # Duplicates in the user's ids are kept.  True == 1, so removing duplicates might hide a True from the check.
        values["stop_token_ids"] = (*user_ids, *(token for token in eos_ids if token not in user_ids))
        return ResolvedParams(**values)


# The check of each field.  Every request runs all checks, so this mapping is built once.
PARAM_CHECKS: Mapping[str, limits.Check] = {f.name: f.metadata["check"] for f in fields(SamplingParams)}
# The fields for which flags and fields of request bodies are generated.
PARAMS_WITH_FLAGS: tuple[Field, ...] = tuple(f for f in fields(SamplingParams) if not f.metadata["has_own_spelling"])
GENERATION_CONFIG_NAMES = {
    f.metadata["generation_config"]: f.name for f in fields(SamplingParams) if f.metadata["generation_config"]
}


def _slot_column(neutral_value: float, stage: str | None = None) -> Any:
    """Declares a number that SlotTable holds in a column of the same name: int as int64, float as float32.

    neutral_value: the default, which changes no logit.  stage: the part of sampling that uses the number, "filters" or
    "penalties".  A launch skips the part if all numbers are neutral.  None for other parameters."""
    return field(default=neutral_value, metadata={"in_slot": True, "stage": stage})


@dataclass(frozen=True)
class OutputForm:
    """How to parse an output.  tool_format, reasoning_format: the names of the formats in which the model writes tool
    calls and reasoning, "" for none.  schemas: the JSON schemas of tools' arguments, by tool name.
    answer_start: the text at the end of the prompt that already begins the answer, or ""."""

    tool_format: str
    reasoning_format: str
    schemas: Mapping[str, Mapping[str, Any]]
    answer_start: str


@refuse_unknown_fields
@dataclass(frozen=True)
class ResolvedParams(SamplingParams):
    """SamplingParams with every field decided.

    The defaults are neutral: they leave the target's distribution as it is.  eos_token_ids: those of stop_token_ids
    that are the model's own.  shown_special_tokens: special tokens whose names are always in the text, because a parser
    of tool calls or reasoning reads them.  output_form: set if stop strings apply only to a message's content."""

    temperature: float = _slot_column(1.0)
    top_k: int = _slot_column(0, "filters")
    top_p: float = _slot_column(1.0, "filters")
    min_p: float = _slot_column(0.0, "filters")
    repetition_penalty: float = _slot_column(1.0, "penalties")
    presence_penalty: float = _slot_column(0.0, "penalties")
    frequency_penalty: float = _slot_column(0.0, "penalties")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    n: int = 1
    speculation: bool = True
    prediction: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    shown_special_tokens: tuple[int, ...] = ()
    output_form: OutputForm | None = None
    grammar: Grammar | None = None

    @cached_property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p is in force.  Greedy requests have no filters."""
        return self.temperature > 0 and self._changes_logits("filters")

    @cached_property
    def has_penalties(self) -> bool:
        """Whether a penalty is in force, so that the tokens seen so far must be counted."""
        return self._changes_logits("penalties")

    def _changes_logits(self, stage: str) -> bool:
        """Whether a number of one stage of sampling is not neutral.  stage: "filters" or "penalties"."""
        return any(getattr(self, f.name) != f.default for f in SLOT_PARAMS if f.metadata["stage"] == stage)

    def slot_values(self) -> dict[str, float | int]:
        """Returns the values that a slot holds, by column."""
        return {f.name: getattr(self, f.name) for f in SLOT_PARAMS} | {
            "has_filters": int(self.has_filters),
            "has_penalties": int(self.has_penalties),
        }

    def depth_limit(self, steps: int) -> int:
        """Returns how many draft tokens a round may accept for this request.  steps: RoundLayout.steps."""
        if not self.speculation:
            return 0
        return steps if self.max_draft_depth is None else min(steps, self.max_draft_depth)

    def validate(self, vocab_size: int, has_tokenizer: bool = True) -> None:
        """Refuse values that this model does not support.  Raises EspalierError with the value, range and remedy."""
        limits.check_for_model(self, vocab_size, has_tokenizer)


# The fields of ResolvedParams that are columns of the slot table.
SLOT_PARAMS: tuple[Field, ...] = tuple(f for f in fields(ResolvedParams) if "in_slot" in f.metadata)


def check_prompt(prompt: Sequence[int], vocab_size: int, max_context: int, max_position: int | None = None) -> None:
    """Refuse a prompt that is empty, too long or has tokens outside the vocabulary.  Raises EspalierError.

    max_position: the model's number of positions, for the message (errors.prompt_too_long)."""
    if len(prompt) == 0:
        raise EspalierError("the prompt is empty; give it at least one token (the bos token, if the model has one)")
    if len(prompt) >= max_context:
        raise prompt_too_long(f"{len(prompt)} tokens", max_context, max_position)
    # A prompt may have a million tokens.  Tokens are checked one by one only if the whole prompt fails this fast check.
    if {*map(type, prompt)} == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
        return
    for token in prompt:
        require_int("prompt token id", token, 0, vocab_size - 1, remedy=" (the vocabulary)")


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of sample `index` of a prompt.  Sample 0 has the prompt's seed, however many samples follow."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) & MAX_SEED


class IncrementalDetokenizer(Protocol):
    """Turns a request's tokens into text as they arrive.  espalier.text implements the interface."""

    def push_token(self, token_id: int) -> str | None:
        """Add a token.  Returns the stop string once it is complete.  No token may be pushed after a stop string."""
        ...

    def take_text(self, final: bool) -> str:
        """Returns the text that no earlier call returned.  The text never ends inside a character or a stop string.

        final: whether no more tokens follow.  Until then, a possible beginning of a stop string is held back."""
        ...


@dataclass(eq=False)
class Request:
    """One sequence that the engine runs, from arrival to its last token.  Mutable: only the scheduler writes it.

    prompt: token ids.  seed: the sample's seed.  arrival_index: number in the order of arrival.
    stop_ids: tokens that end the request.  masker: makes the masks of the request's grammar; None without a grammar.
    detokenizer: None if no text is wanted.  streamed: whether the user reads tokens as they come.
    index: the sample's number among the n samples of a prompt.  prefix_leader: None for sample 0; for the other samples
    the request of sample 0, which prefills the prompt.  Its pages are then shared.
    priority: a lower number runs first and is preempted last; equal priorities go by client in turn, then by arrival.
    prompt_logprobs: log-probabilities of the prompt's tokens from the second on, as far as the host has read them.
    num_predicted: how many tokens of params.prediction are in output.  generation: how often the request left a slot.
    prompt_cached: whether the prompt has been prefilled, so that other requests can share its pages.
    The next fields are valid only while the request has a slot.
    prefill_len: rows to prefill before rounds begin.  num_prefilled: how many of these rows are launched so far.
    num_known: index of the last decided token that the host has read.  K/V rows below this index are in pages.
    rounds_in_flight: number of launched rounds whose results the host has not read."""

    id: str
    prompt: list[int]
    params: ResolvedParams
    seed: int
    arrival_index: int
    stop_ids: frozenset[int] = frozenset()
    detokenizer: IncrementalDetokenizer | None = None
    masker: TokenMasker | None = None
    index: int = 0
    prefix_leader: "Request | None" = None
    priority: int = 0
    streamed: bool = False
    client: str = ""

    output: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    logprobs: TokenLogprobs[TokenLogprob] = field(default_factory=TokenLogprobs)
    prompt_logprobs: TokenLogprobs[TokenLogprob] = field(default_factory=TokenLogprobs)
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    generation: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    aborted: bool = False
    prefill_len: int = 0
    num_prefilled: int = 0
    num_known: int = 0
    rounds_in_flight: int = 0
    prompt_cached: bool = False
    num_predicted: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def queue_key(self) -> tuple[int, int]:
        """The key by which the scheduler sorts running requests."""
        return self.priority, self.arrival_index

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def usage(self) -> Usage:
        rejected = len(self.params.prediction) - self.num_predicted
        return Usage(len(self.prompt), len(self.output), self.cached_tokens, self.num_predicted, rejected)

    def max_num_tokens(self, max_context: int) -> int:
        """Returns the number of tokens, prompt included, after which the request is finished.

        A prefill always picks a token.  With max_tokens=0, the scheduler drops that token, but it is counted here."""
        limit = self.params.max_tokens
        return max_context if limit is None else min(len(self.prompt) + max(limit, 1), max_context)

    def ends_in_flight(self, max_context: int) -> bool:
        """Whether the launches in flight surely finish the request.  A prefill or round decides at least one token."""
        return self.num_known + 1 + self.rounds_in_flight >= self.max_num_tokens(max_context)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens to report for each prompt token.  None: no report.  Only sample 0 reports."""
        return None if self.index else self.params.prompt_logprobs

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.num_prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def prompt_logprobs_to_report(self) -> PromptLogprobs | None:
        """The prompt's log-probabilities as far as they have been read; None if the request does not report them."""
        return None if self.num_prompt_logprobs is None else TokenLogprobs(self.prompt_logprobs.rows, of_prompt=True)


@dataclass(frozen=True)
class OutputChunk:
    """The output of one engine step for one request.

    index: the sample's number among the n samples of a prompt.
    text: may lack the end of the text of token_ids, because the last characters can still change.
    from_draft: for each token, whether it is an accepted draft token.  The target alone picked the other tokens.
    prompt_logprobs: set in the chunk of the first token, for the whole prompt.  If a request ends without a token, its
    last chunk has those known so far.  finish_reason, stop_reason, error: set in a request's last chunk."""

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    from_draft: list[bool] = field(default_factory=list)
    logprobs: TokenLogprobs[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Output:
    """A finished continuation.

    token_ids: all generated tokens, the end token included.  from_draft: see OutputChunk.
    logprobs: one entry for each token; None if the request did not ask for log-probabilities.
    finish_reason: "stop" (an end token or a stop string), "length" (max_tokens or the context's end) or "abort" (error
    says why, unless the user aborted).
    stop_reason: the stop string or the id of stop_token_ids that ended the output; None for the model's own end tokens.
    prompt_logprobs: only in the first of n outputs; an aborted output has the entries that were read.
    choices: when n > 1, all n outputs, this one first.  speculation: counts over the rounds of this output."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    from_draft: list[bool] = field(default_factory=list)
    choices: list["Output"] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    error: str | None = None
