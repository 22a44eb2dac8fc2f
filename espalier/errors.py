"""EspalierError, the exception for bad input, and the checks that raise it.

The error's message is one line with the value, the supported values and what to do.
"""

import difflib
import inspect
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from espalier import other_engines

T = TypeVar("T")
P = ParamSpec("P")
MAX_REPR_CHARS = 160
# int() and float() also read spaces, "+", "_", leading zeros and the digits of other scripts.  The patterns do not.
WHOLE_NUMBER_PATTERN = re.compile(r"0|-?[1-9][0-9]*")
# "nan" and "inf" match, because the check of the range refuses them later, with an error that names the range.
NUMBER_PATTERN = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|nan|-?inf")
# The least similarity for "did you mean".  Names such as presence_penalty and length_penalty are less similar.
MIN_SIMILARITY = 0.8


class EspalierError(ValueError):
    """Bad input or an unsupported combination."""


@contextmanager
def clear_error_frames() -> Iterator[None]:
    """Clears the frames of an EspalierError that leaves the block, because frames keep local variables alive.

    The variables may be models on a GPU.  Whoever catches the error may need the models' memory for another try."""
    try:
        yield
    except EspalierError as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        raise


def shown(value: Any) -> str:
    """Returns a value's repr in one line; a long repr is shortened in the middle."""
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= MAX_REPR_CHARS else f"{text[: MAX_REPR_CHARS // 2]} ... {text[-MAX_REPR_CHARS // 2 :]}"


def install_command(extra: str) -> str:
    """Returns the command that installs an extra of pyproject.toml.  Run it in a clone: PyPI lacks the package."""
    return f"pip install -e '.[{extra}]'"


class ContextOverflow(EspalierError):
    """The prompt is too long for max_context, alone or with the max_tokens or min_tokens after it."""


def prompt_too_long(size: str, max_context: int, max_position: int | None = None) -> ContextOverflow:
    """Returns the error for a prompt of `size`, a text such as "9 tokens".  Langchain and litellm recognise the error
    by the words "maximum context length is".

    max_position: the model's number of positions, which max_context cannot exceed; None if the caller does not know it.
    """
    limit, raise_advice = _context_limit(max_context, max_position)
    return ContextOverflow(
        f"the prompt is too long: it has {size}; {limit}; shorten the prompt to {max_context - 1} tokens{raise_advice}"
    )


def output_too_long(
    name: str, value: int, prompt_tokens: int, max_context: int, max_position: int | None = None
) -> ContextOverflow:
    """Returns the error for max_tokens or min_tokens of `value` that does not fit after the prompt.  name: the user's
    name for the parameter.  For the words of the message and for max_position, see `prompt_too_long`."""
    limit, raise_advice = _context_limit(max_context, max_position)
    return ContextOverflow(
        f"{name}={value} is more than fits after the prompt of {prompt_tokens} tokens; {limit}; use at most "
        f"{max_context - prompt_tokens}, or leave it out{raise_advice}"
    )


def _context_limit(max_context: int, max_position: int | None) -> tuple[str, str]:
    """Returns (a text with the limit, the advice to raise the limit; "" if the model has no more positions)."""
    length = f"this model's maximum context length is {max_context} tokens for prompt and output"
    if max_context == max_position:
        return f"{length} (it has no more positions)", ""
    positions = "" if max_position is None else f" (the model has {max_position} positions)"
    return f"{length} (the engine's max_context)", f", or raise max_context{positions}"


def without_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object_pairs_hook for json.loads, which passes the pairs (key, value) of an object.  Refuses a repeated key,
    of which json would keep only the last value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise EspalierError(f"{shown(name)} comes twice in one object; leave one out")
    return value


@contextmanager
def convert_tokenizer_panics() -> Iterator[None]:
    """Turns a panic of the tokenizers library into an EspalierError.

    The library panics if a match takes too long.  In Python, a panic is a BaseException but not an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        why = " ".join(str(error).split())[:MAX_REPR_CHARS]
        raise EspalierError(f"the text cannot be tokenized ({why}); give token ids, or another text") from None


def one_line(error: Exception) -> str:
    """Returns another library's error in one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return (text if len(text) <= 200 else f"{text[:196]} ...") or type(error).__name__


def unknown_name_error(
    owner: str, name: str, known_names: Collection[str], where_listed: str | None = None, python: bool = True
) -> EspalierError:
    """Returns the error for a name that is not in `known_names`.

    If `name` is a setting of another engine, the error gives Espalier's name for the setting.  Otherwise it gives the
    most similar known name, or all known names.  owner: what lacks the name, such as a class or "the body".
    where_listed: a text that says where to find the known names; it replaces the list of all names.
    python: whether the advice may contain Python code."""
    similar_names = difflib.get_close_matches(name, known_names, n=1, cutoff=MIN_SIMILARITY)
    fallback = (
        f"did you mean {similar_names[0]!r}?"
        if similar_names
        else where_listed or f"use {'one of ' * (len(known_names) > 1)}{', '.join(known_names)}"
    )
    advice = other_engines.keyword_advice(name, known_names, python) or fallback
    return EspalierError(f"{owner} has no {name!r}; {advice}")


def whole_number(text: str) -> int:
    """Parses a whole number that is written in digits alone, such as 27 or -27.  Raises ValueError for other text."""
    if not WHOLE_NUMBER_PATTERN.fullmatch(text):
        raise ValueError(f"{shown(text)} is no whole number; write its digits alone, such as 27")
    return int(text)


def plain_number(text: str) -> float:
    """Parses a number in decimal digits, with or without an exponent.  Raises ValueError for other text."""
    if not NUMBER_PATTERN.fullmatch(text):
        raise ValueError(f"{shown(text)} is no number; write it in digits, such as 0.5")
    return float(text)


NUMBER_PARSERS: Mapping[type, Callable[[str], Any]] = MappingProxyType({int: whole_number, float: plain_number})


def require_number(
    name: str, value: Any, is_supported: Callable[[Any], bool], supported_values: str, *, optional: bool = False
) -> None:
    """Refuse a value unless it is a finite number and is_supported(value) is true.  `optional` allows None.

    name: of the value.  supported_values: in words, for the end of the message.  Raises EspalierError."""
    if optional and value is None:
        return
    # math.isfinite would raise for an integer that no float can hold.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    if not (is_number and is_supported(value)):
        raise EspalierError(f"{name}={shown(value)} is not supported; use {supported_values}")


def require_int(
    name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False, remedy: str = ""
) -> None:
    """Refuse a value that is not a whole number from low to high; None is allowed if `optional`.

    name: the value's, for the message.  remedy: what the user can do, at the message's end.  Raises EspalierError."""
    if optional and value is None:
        return
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not (is_integer and value >= low and (high is None or value <= high)):
        supported_values = f"a whole number, {low} or more" if high is None else f"a whole number, {low} to {high}"
        raise EspalierError(f"{name}={shown(value)} is not supported; use {supported_values}{remedy}")


def require_text(subject: str, text: str) -> None:
    """Refuse text with a lone surrogate, which UTF-8 cannot encode.  subject: the text's name in the EspalierError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EspalierError(
            f"{subject} contains a lone surrogate ({text[error.start]!r} at character {error.start}), which is not "
            "valid text; decode its bytes with errors='replace'"
        ) from None


def require_fields(subject: str, cls: type, names: Iterable[str]) -> None:
    """Refuse a name that is not a field of a dataclass's constructor.  Raises EspalierError.

    subject: names the function or class that takes the fields as keywords."""
    field_names = [f.name for f in fields(cls) if f.init]
    for name in names:
        if name not in field_names:
            raise unknown_name_error(subject, name, field_names)


def refuse_unknown_fields(cls: type[T]) -> type[T]:
    """Class decorator for dataclasses: an unknown keyword raises EspalierError (require_fields)."""
    init: Any = cls.__init__
    field_names = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]

    @wraps(init)
    def call_checked(self: T, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= field_names:  # every request makes SamplingParams, so this test must be fast
            require_fields(cls.__name__, cls, kwargs)
        init(self, *args, **kwargs)

    setattr(cls, "__init__", call_checked)  # noqa: B010  (with a plain assignment type checkers lose the signature)
    return cls


def refuse_unknown_keywords(method_name: str, options: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator for the method `method_name`: an unknown keyword raises EspalierError with the most similar keyword.

    options: a dataclass.  The method takes an object of this class, so the class's fields are refused as keywords."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        parameters = list(inspect.signature(method).parameters)
        option_names = {f.name for f in fields(options)}

        @wraps(method)
        def call_checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name in option_names:
                    raise EspalierError(f"{method_name} has no {name!r}; put it into {options.__name__}")
                if name not in parameters:
                    raise unknown_name_error(method_name, name, parameters[1:])
            return method(*args, **kwargs)

        return call_checked

    return decorate
