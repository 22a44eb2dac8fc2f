"""What a user asks for, the record that the engine keeps of it, and what comes back.

Values only: nothing here knows of a tokenizer, a device or a model.  Text reaches a request as a TextSink.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from espalier.errors import EspalierError, refuses_unknown, require_int, require_number

MAX_BIAS = 512
MAX_STOP_IDS = 64
# Each is looked for at every token.
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
MAX_COUNT = 2**31 - 1
# Numbers that stay finite and nonzero in float32, whatever the temperature.
MIN_TEMPERATURE = 1e-4
REPETITION_PENALTIES = (0.01, 100.0)
MAX_ABS_BIAS = 10_000
MAX_SEED = 2**63 - 1

GENERATION_CONFIG_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}


def _option(text: str) -> Any:
    return field(default=None, metadata={"help": text})


@refuses_unknown
@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued.

    None is unset: the model's generation_config.json decides, then the defaults of ResolvedParams.
    """

    temperature: float | None = _option("0 is greedy; higher is more varied")
    top_k: int | None = _option("keep the k likeliest tokens; 0 or -1 keeps all")
    top_p: float | None = _option("keep the likeliest tokens that make up this share")
    min_p: float | None = _option("keep tokens at least this share as likely as the likeliest")
    repetition_penalty: float | None = _option("above 1 discourages tokens of the prompt and the output")
    presence_penalty: float | None = _option("subtracted once from tokens that are in the output")
    frequency_penalty: float | None = _option("subtracted from tokens for each time they are in the output")
    logit_bias: Mapping[int, float] | None = _option(f"token id to added logit, at most {MAX_BIAS} of them")
    seed: int | None = _option("same seed, same text; unset: drawn from the engine's seed and the order of requests")
    max_tokens: int | None = _option("tokens to generate at most; unset: up to the context's end")
    min_tokens: int | None = _option("tokens before which no stop token is generated")
    stop: str | Sequence[str] | None = _option("text that ends the output, itself left out; several, at most 64")
    stop_token_ids: Sequence[int] | None = _option("token ids that end the output, beside the model's own")
    include_stop_str_in_output: bool | None = _option("true: the stop string or token that ends the output is text")
    skip_special_tokens: bool | None = _option("false: special tokens are text, by their names; true unless set")
    ignore_eos: bool | None = _option("go on after the model's own end tokens")
    logprobs: int | None = _option(f"log-probabilities of the chosen token and of so many others, 0 to {MAX_LOGPROBS}")
    n: int | None = _option("outputs for each prompt")
    speculation: bool | None = _option("false: plain decoding for this request")
    max_draft_depth: int | None = _option("accept at most so many draft tokens a round")

    def resolve(self, defaults: Mapping[str, Any], eos_token_ids: Iterable[int]) -> "ResolvedParams":
        """Fill what is unset.

        defaults: the model's generation_config.json ({} if it has none), where do_sample false is temperature 0.
        eos_token_ids: join stop_token_ids unless ignore_eos.
        """
        values = {
            ours: defaults[theirs]
            for theirs, ours in GENERATION_CONFIG_NAMES.items()
            if defaults.get(theirs) is not None
        }
        if defaults.get("do_sample") is False:
            values["temperature"] = 0.0
        values |= {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        top_k = values.get("top_k")
        # -1.0 is left as it is, and refused like any other number with a point.
        if isinstance(top_k, int) and top_k == -1:
            values["top_k"] = 0
        values["stop"] = _strings(values.get("stop", ()))
        eos = values["eos_token_ids"] = () if values.get("ignore_eos") else tuple(eos_token_ids)
        own = _sequence("stop_token_ids", values.get("stop_token_ids", ()))
        # The user's own stay as they are: of 1 and True one would go, and it is for validate to see both.
        values["stop_token_ids"] = (*own, *(token for token in eos if token not in own))
        return ResolvedParams(**values)


@refuses_unknown
@dataclass(frozen=True)
class ResolvedParams(SamplingParams):
    """SamplingParams with nothing left open.  The defaults are neutral: they leave the target's law as it is.

    eos_token_ids: those of stop_token_ids that are the model's own.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    n: int = 1
    speculation: bool = True
    eos_token_ids: tuple[int, ...] = ()

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty is in force, so that tokens seen so far matter."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def depth_limit(self, steps: int) -> int:
        """Draft tokens that a round may accept for this request."""
        if not self.speculation:
            return 0
        return steps if self.max_draft_depth is None else min(steps, self.max_draft_depth)

    def validate(self, vocab_size: int, has_tokenizer: bool = True) -> None:
        """Refuse the first value that cannot be honoured.  Raises EspalierError: value, range, remedy."""
        self._validate_distribution()
        self._validate_ends(vocab_size, has_tokenizer)
        self._validate_bias(vocab_size)
        require_int("seed", self.seed, 0, MAX_SEED, optional=True)
        require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        require_int("n", self.n, 1, MAX_SAMPLES)
        require_int("max_draft_depth", self.max_draft_depth, 0, MAX_COUNT, optional=True)
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "speculation"):
            if not isinstance(getattr(self, name), bool):
                raise EspalierError(f"{name}={getattr(self, name)!r} is not supported; use True or False")

    def _validate_distribution(self) -> None:
        def zero_or_more(value: float) -> bool:
            return value == 0 or value >= MIN_TEMPERATURE

        require_number("temperature", self.temperature, zero_or_more, f"0 (greedy), or {MIN_TEMPERATURE} and more")
        require_int("top_k", self.top_k, 0, MAX_COUNT, remedy=" (0 or -1 keeps all tokens)")
        require_number("top_p", self.top_p, lambda p: 0 < p <= 1, "more than 0 and up to 1 (1 keeps all tokens)")
        require_number("min_p", self.min_p, lambda p: 0 <= p <= 1, "0 to 1 (0 keeps all tokens)")
        low, high = REPETITION_PENALTIES
        require_number(
            "repetition_penalty",
            self.repetition_penalty,
            lambda p: low <= p <= high,
            f"{low} to {high} (1 is no penalty)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            require_number(name, getattr(self, name), lambda p: -2 <= p <= 2, "-2 to 2 (0 is no penalty)")

    def _validate_ends(self, vocab_size: int, has_tokenizer: bool) -> None:
        require_int("max_tokens", self.max_tokens, 1, MAX_COUNT, optional=True)
        require_int("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise EspalierError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it or raise max_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise EspalierError(f"stop with {len(self.stop)} strings is not supported; use {MAX_STOP_STRINGS} at most")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise EspalierError(f"stop={list(self.stop)!r} is not supported; use strings of one character or more")
        if self.stop and not has_tokenizer:
            raise EspalierError("stop needs text and this model has no tokenizer; use stop_token_ids")
        for name, value in (("include_stop_str_in_output", False), ("skip_special_tokens", True)):
            if getattr(self, name) != value and not has_tokenizer:
                raise EspalierError(f"{name}={not value} needs text and this model has no tokenizer; leave it out")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise EspalierError(
                f"{len(self.stop_token_ids)} stop token ids (the model's own included) are not supported; "
                f"use {MAX_STOP_IDS} at most"
            )
        for token in self.stop_token_ids:
            require_int("stop_token_ids entry", token, 0, vocab_size - 1, remedy=" (the vocabulary)")

    def _validate_bias(self, vocab_size: int) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise EspalierError(f"logit_bias={self.logit_bias!r} is not supported; use a dict from token id to number")
        if len(self.logit_bias) > MAX_BIAS:
            raise EspalierError(
                f"logit_bias with {len(self.logit_bias)} entries is not supported; use {MAX_BIAS} at most"
            )
        for token, bias in self.logit_bias.items():
            require_int("logit_bias token", token, 0, vocab_size - 1, remedy=" (the vocabulary)")
            require_number(
                f"logit_bias[{token}]",
                bias,
                lambda b: abs(b) <= MAX_ABS_BIAS,
                f"-{MAX_ABS_BIAS} to {MAX_ABS_BIAS}, such as -100 to ban a token",
            )


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(_sequence("stop", value))


def _sequence(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise EspalierError(f"{name}={value!r} is not supported; use a list")
    return tuple(value)


def check_prompt(prompt: Sequence[int], vocab_size: int, max_context: int) -> None:
    """Refuse a prompt that no request can start from.  Raises EspalierError."""
    if len(prompt) == 0:
        raise EspalierError("the prompt is empty; give it at least one token (the bos token, if the model has one)")
    if len(prompt) >= max_context:
        raise EspalierError(
            f"a prompt of {len(prompt)} tokens is not supported at max_context={max_context}, which holds prompt and "
            f"output; shorten it to {max_context - 1} or raise max_context"
        )
    for token in prompt:
        require_int("prompt token id", token, 0, vocab_size - 1, remedy=" (the vocabulary)")


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of n.  The first has the request's own, so that it does not depend on n."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) & MAX_SEED


class TextSink(Protocol):
    """Turns a request's tokens into text as they come.  espalier.text implements it."""

    def push(self, token_id: int) -> str | None:
        """Take a token in; the stop string, once one is complete, after which nothing more is pushed."""
        ...

    def take(self, final: bool) -> str:
        """Text that is safe to hand out since the last take.

        Never splits a character; holds back what may begin a stop string unless final; ends at a stop string.
        """
        ...


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of a token, before temperature and masks, and the likeliest tokens at its place."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class SpeculationStats:
    """What rounds brought.  The prompt pass's token and a discarded last round are not counted.

    histogram[i]: rounds that emitted i tokens; drafted: draft tokens verified;
    reached[d-1], taken[d-1]: rounds in which depth d was tried (its parent accepted, its depth allowed), and accepted.
    """

    drafted: int = 0
    histogram: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def emitted(self) -> int:
        return sum(length * rounds for length, rounds in enumerate(self.histogram))

    @property
    def accepted(self) -> int:
        """Draft tokens that were emitted."""
        return sum(self.taken)

    @property
    def accept_length(self) -> float:
        """Tokens a round, 1.0 being plain decoding; 0.0 before the first round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[tuple[int, int]]:
        """(tried, accepted) rounds for each depth from 1."""
        return list(zip(self.reached, self.taken, strict=True))

    def add(self, emitted: int, accepted: int, drafted: int, depth: int) -> None:
        """Count one round of one request.

        emitted: tokens it kept, `accepted` of them from the draft (all of them where an end token cut the round short);
        depth: of the deepest node that it could have accepted.
        """
        self.drafted += drafted
        _count(self.histogram, [emitted])
        _count(self.reached, range(min(emitted, depth)))
        _count(self.taken, range(accepted))
        self.taken += [0] * (len(self.reached) - len(self.taken))

    def merge(self, other: "SpeculationStats") -> None:
        """Add another's counts to these."""
        self.drafted += other.drafted
        for mine, theirs in (
            (self.histogram, other.histogram),
            (self.reached, other.reached),
            (self.taken, other.taken),
        ):
            mine += [0] * (len(theirs) - len(mine))
            mine[: len(theirs)] = [a + b for a, b in zip(mine, theirs, strict=False)]

    def as_dict(self) -> dict[str, Any]:
        """Counts and what follows from them, as JSON takes them."""
        names = ("rounds", "drafted", "accepted", "accept_length", "histogram", "acceptance_by_depth")
        return {name: getattr(self, name) for name in names}


def _count(counters: list[int], indices: Iterable[int]) -> None:
    for index in indices:
        counters += [0] * (index + 1 - len(counters))
        counters[index] += 1


@dataclass(frozen=True)
class Usage:
    """Tokens of one request; cached_tokens are those of the prompt that were found in the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(eq=False)
class Request:
    """One sequence that the engine runs, from arrival to its last token.  Mutable: the scheduler alone writes it.

    prompt: token ids; params: resolved; seed: of this very sample; arrival: place in the order of requests, among
    those of equal priority, of which the lower goes first and is preempted last; stop_ids: tokens that end it;
    text: None if nobody reads text; index: which of n samples; after: a sibling whose prompt this one shares, and so
    waits for; cache_salt: only requests of the same one share cached pages.

    In its slot: enter_end, rows to enter before rounds begin; entered, those launched so far; num_seen, index of the
    last root that the host knows of; unread, rounds launched and not yet read.  generation tells one stay in a slot
    from the next.
    """

    id: str
    prompt: list[int]
    params: ResolvedParams
    seed: int
    arrival: int
    stop_ids: frozenset[int] = frozenset()
    text: TextSink | None = None
    index: int = 0
    after: "Request | None" = None
    priority: int = 0
    cache_salt: str | None = None

    output: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    generation: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    aborted: bool = False
    enter_end: int = 0
    entered: int = 0
    num_seen: int = 0
    unread: int = 0
    prompt_cached: bool = False
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def place(self) -> tuple[int, int]:
        """Its place in every order of requests."""
        return self.priority, self.arrival

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), len(self.output), self.cached_tokens)

    def end(self, max_context: int) -> int:
        """Tokens, prompt included, after which the request is finished."""
        limit = self.params.max_tokens
        return max_context if limit is None else min(len(self.prompt) + limit, max_context)


@dataclass(frozen=True)
class Piece:
    """What one engine step hands out for one request.

    text may lag behind token_ids, by what could still change; a request's last piece has its finish_reason, stop_reason
    and error.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Output:
    """A finished continuation.

    finish_reason: "stop" (an end token or a stop string), "length" (max_tokens or the context's end) or "abort" (then
    error says why, unless the user asked for it).  stop_reason: the stop string that ended it, or the token id of
    stop_token_ids; None for the model's own end tokens.  choices: all n outputs, this one first, when n > 1.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    from_draft: list[bool] = field(default_factory=list)
    choices: list["Output"] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    error: str | None = None
