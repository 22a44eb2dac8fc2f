"""The values that SamplingParams may have: those that no model honours, and those that a certain model does not.

request.py calls these for its SamplingParams and ResolvedParams, the `params` here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from espalier.errors import EspalierError, require_int, require_number, shown

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


def check_values(params: Any) -> None:
    """Refuse the first value that no model can honour; None is unset.  Raises EspalierError: value, range, remedy."""
    _check_distribution(params)
    _check_ends(params)
    if params.logit_bias is not None:
        _check_bias(params.logit_bias)
    require_int("seed", params.seed, 0, MAX_SEED, optional=True)
    for name in ("logprobs", "prompt_logprobs"):
        require_int(name, getattr(params, name), 0, MAX_LOGPROBS, optional=True)
    require_int("n", params.n, 1, MAX_SAMPLES, optional=True)
    require_int("max_draft_depth", params.max_draft_depth, 0, MAX_COUNT, optional=True)
    for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "speculation"):
        value = getattr(params, name)
        if value is not None and not isinstance(value, bool):
            raise EspalierError(f"{name}={shown(value)} is not supported; use True or False")


def check_for_model(params: Any, vocab_size: int, has_tokenizer: bool) -> None:
    """Refuse what this model cannot honour.  Raises EspalierError: value, range, remedy."""
    if params.stop and not has_tokenizer:
        raise EspalierError("stop needs text and this model has no tokenizer; use stop_token_ids")
    for name, value in (("include_stop_str_in_output", False), ("skip_special_tokens", True)):
        if getattr(params, name) != value and not has_tokenizer:
            raise EspalierError(f"{name}={not value} needs text and this model has no tokenizer; leave it out")
    for token in params.stop_token_ids:
        require_int("stop_token_ids entry", token, 0, vocab_size - 1, remedy=" (the vocabulary)")
    for token in params.logit_bias:
        require_int("logit_bias token", token, 0, vocab_size - 1, remedy=" (the vocabulary)")


def texts_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple; one alone may stand for itself."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _check_distribution(params: Any) -> None:
    def zero_or_more(value: float) -> bool:
        return value == 0 or value >= MIN_TEMPERATURE

    def up_to_two(value: float) -> bool:
        return -2 <= value <= 2

    def penalty(value: float) -> bool:
        return low <= value <= high

    low, high = REPETITION_PENALTIES
    require_int("top_k", params.top_k, -1, MAX_COUNT, optional=True, remedy=" (0 or -1 keeps all tokens)")
    for name, inside, supported in (
        ("temperature", zero_or_more, f"0 (greedy), or {MIN_TEMPERATURE} and more"),
        ("top_p", lambda p: 0 < p <= 1, "more than 0 and up to 1 (1 keeps all tokens)"),
        ("min_p", lambda p: 0 <= p <= 1, "0 to 1 (0 keeps all tokens)"),
        ("repetition_penalty", penalty, f"{low} to {high} (1 is no penalty)"),
        ("presence_penalty", up_to_two, "-2 to 2 (0 is no penalty)"),
        ("frequency_penalty", up_to_two, "-2 to 2 (0 is no penalty)"),
    ):
        require_number(name, getattr(params, name), inside, supported, optional=True)


def _check_ends(params: Any) -> None:
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        raise EspalierError(
            "max_tokens=0 is not supported without prompt_logprobs: nothing would come back; use 1 or more, or ask for "
            "prompt_logprobs"
        )
    require_int("max_tokens", params.max_tokens, 0, MAX_COUNT, optional=True)
    require_int("min_tokens", params.min_tokens, 0, MAX_COUNT, optional=True)
    if None not in (params.min_tokens, params.max_tokens) and params.min_tokens > params.max_tokens:
        raise EspalierError(
            f"min_tokens={params.min_tokens} is above max_tokens={params.max_tokens}; lower it or raise max_tokens"
        )
    if params.stop is not None:
        _check_stop(params.stop)
    if params.stop_token_ids is not None:
        _check_stop_ids(params.stop_token_ids)


def _check_stop(stop: str | Sequence[str]) -> None:
    if not isinstance(stop, str):
        _require_list("stop", stop)
    texts = texts_of(stop)
    if len(texts) > MAX_STOP_STRINGS:
        raise EspalierError(f"stop with {len(texts)} strings is not supported; use {MAX_STOP_STRINGS} at most")
    if not all(isinstance(text, str) and text for text in texts):
        raise EspalierError(f"stop={shown(list(texts))} is not supported; use strings of one character or more")


def _check_stop_ids(tokens: Sequence[int]) -> None:
    _require_list("stop_token_ids", tokens)
    if len(tokens) > MAX_STOP_IDS:
        raise EspalierError(
            f"{len(tokens)} stop token ids (the model's own included) are not supported; use {MAX_STOP_IDS} at most"
        )
    for token in tokens:
        require_int("stop_token_ids entry", token, 0, MAX_COUNT)


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(bias, Mapping):
        raise EspalierError(f"logit_bias={shown(bias)} is not supported; use a dict from token id to number")
    if len(bias) > MAX_BIAS:
        raise EspalierError(f"logit_bias with {len(bias)} entries is not supported; use {MAX_BIAS} at most")
    for token, added in bias.items():
        require_int("logit_bias token", token, 0, MAX_COUNT)
        require_number(
            f"logit_bias[{token}]",
            added,
            lambda b: abs(b) <= MAX_ABS_BIAS,
            f"-{MAX_ABS_BIAS} to {MAX_ABS_BIAS}, such as -100 to ban a token",
        )


def _require_list(name: str, value: Any) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise EspalierError(f"{name}={shown(value)} is not supported; use a list")
