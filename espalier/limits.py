"""Limits on sampling parameters: on one value, on values that depend on each other, and on values for one model.

Each field of SamplingParams (espalier/request.py) names its check, which raises EspalierError with range and remedy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from espalier.errors import EspalierError, require_int, require_number, require_text, shown

# A function of (name, value) that refuses a value that no model supports.
Check = Callable[[str, Any], None]

MAX_BIASES = 512
MAX_STOP_IDS = 64
# After every token, the text is searched for each stop string.
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
MAX_INT32 = 2**31 - 1
# Within these limits, scaled logits stay finite and nonzero in float32.  A temperature below the lower limit is greedy.
TEMPERATURE_RANGE = (1e-4, 1e30)
REPETITION_PENALTY_RANGE = (0.01, 100.0)
MAX_ABS_BIAS = 10_000
MAX_SEED = 2**63 - 1


def number_check(is_supported: Callable[[float], bool], supported_values: str) -> Check:
    """Returns a check for finite numbers.  supported_values: the range in words, for the error text."""
    return lambda name, value: require_number(name, value, is_supported, supported_values)


def range_check(low: float, high: float, remark: str) -> Check:
    """Returns a check for finite numbers from low to high, both included.  remark: follows the range in the error."""
    return number_check(lambda value: low <= value <= high, f"{low} to {high} ({remark})")


def int_check(low: int, high: int = MAX_INT32, remark: str = "") -> Check:
    """Returns a check for integers from low to high, both included.  remark: follows the range in the error text."""
    remedy = f" ({remark})" if remark else ""
    return lambda name, value: require_int(name, value, low, high, remedy=remedy)


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise EspalierError(f"{name}={shown(value)} is not supported; use True or False")


def check_combinations(params: Any) -> None:
    """Refuse values that are allowed alone but not together.  params: SamplingParams."""
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        raise EspalierError(
            "max_tokens=0 is not supported without prompt_logprobs: nothing would come back; use 1 or more, or ask for "
            "prompt_logprobs"
        )
    if None not in (params.min_tokens, params.max_tokens) and params.min_tokens > params.max_tokens:
        raise EspalierError(
            f"min_tokens={params.min_tokens} is above max_tokens={params.max_tokens}; lower it or raise max_tokens"
        )
    if params.speculation is False and params.max_draft_depth:
        raise EspalierError("max_draft_depth excludes speculation=false; leave one of them out")
    if params.prediction and (params.speculation is False or params.max_draft_depth == 0):
        name = "speculation=false" if params.speculation is False else "max_draft_depth=0"
        raise EspalierError(f"prediction excludes {name}; leave one of them out")


def check_for_model(params: Any, vocab_size: int, has_tokenizer: bool) -> None:
    """Refuse values that this model does not support.  params: ResolvedParams.

    Raises EspalierError with the value, the range and the remedy.
    """
    if params.stop and not has_tokenizer:
        raise EspalierError("stop needs text and this model has no tokenizer; use stop_token_ids")
    for name, value in (("include_stop_str_in_output", False), ("skip_special_tokens", True)):
        if getattr(params, name) != value and not has_tokenizer:
            raise EspalierError(f"{name}={not value} needs text and this model has no tokenizer; leave it out")
    if params.grammar is not None:
        check_grammar_combinations(params, has_tokenizer)
    for token in params.stop_token_ids:
        require_int("stop_token_ids entry", token, 0, vocab_size - 1, remedy=" (the vocabulary)")
    for token in params.prediction:
        require_int("prediction token id", token, 0, vocab_size - 1, remedy=" (the vocabulary)")
    for token in params.logit_bias:
        require_int("logit_bias token", token, 0, vocab_size - 1, remedy=" (the vocabulary)")


def check_grammar_combinations(params: Any, has_tokenizer: bool) -> None:
    """Refuse parameters that cannot be combined with a grammar.  params: ResolvedParams."""
    if not has_tokenizer:
        raise EspalierError("a grammar needs text and this model has no tokenizer; leave it out")
    if params.ignore_eos:
        raise EspalierError("ignore_eos=True is not supported with a grammar, which says where the output ends")
    if params.min_tokens:
        raise EspalierError(
            f"min_tokens={params.min_tokens} is not supported with a grammar, which says where the output ends; set it "
            "to 0"
        )
    if not params.stop_token_ids:
        raise EspalierError("a grammar needs an end token and this model has none; give one as stop_token_ids")


def stop_strings_as_tuple(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns stop strings as a tuple.  stop: one string or several."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def check_stop_strings(name: str, stop: Any) -> None:
    if not isinstance(stop, str):
        _require_list(name, stop, "a string or a list of strings")
    texts = stop_strings_as_tuple(stop)
    if len(texts) > MAX_STOP_STRINGS:
        raise EspalierError(f"{name} with {len(texts)} strings is not supported; use {MAX_STOP_STRINGS} at most")
    if not all(isinstance(text, str) and text for text in texts):
        raise EspalierError(f"{name}={shown(list(texts))} is not supported; use strings of one character or more")
    for text in texts:
        require_text(name, text)


def check_stop_ids(name: str, tokens: Any) -> None:
    _require_list(name, tokens, "a list of token ids")
    if len(tokens) > MAX_STOP_IDS:
        raise EspalierError(
            f"{len(tokens)} stop token ids (the model's own included) are not supported; use {MAX_STOP_IDS} at most"
        )
    for token in tokens:
        require_int(f"{name} entry", token, 0, MAX_INT32)


def check_bias_values(name: str, bias: Any) -> None:
    if not isinstance(bias, Mapping):
        raise EspalierError(f"{name}={shown(bias)} is not supported; use a dict from token id to number")
    if len(bias) > MAX_BIASES:
        raise EspalierError(f"{name} with {len(bias)} entries is not supported; use {MAX_BIASES} at most")
    for token, added_logit in bias.items():
        require_int(f"{name} token", token, 0, MAX_INT32)
        require_number(
            f"{name}[{token}]",
            added_logit,
            lambda b: abs(b) <= MAX_ABS_BIAS,
            f"-{MAX_ABS_BIAS} to {MAX_ABS_BIAS}, such as -100 to ban a token",
        )


def check_prediction(name: str, prediction: Any) -> None:
    if isinstance(prediction, str):
        require_text(name, prediction)
        return
    _require_list(name, prediction, "text, or a list of token ids")
    for token in prediction:
        require_int(f"{name} token id", token, 0, MAX_INT32)


def _require_list(name: str, value: Any, supported_values: str) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise EspalierError(f"{name}={shown(value)} is not supported; use {supported_values}")
