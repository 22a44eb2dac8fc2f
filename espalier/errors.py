"""The one exception that users see for what they asked, one line with the value, what is supported and the remedy; and
the checks that raise it wherever a name or a number is given."""

import difflib
import math
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from espalier import counterparts

T = TypeVar("T")
MAX_SHOWN = 160


class EspalierError(ValueError):
    """Bad input or an unsupported combination, refused by name before anything is lost."""


def shown(value: Any) -> str:
    """A value in one line, its middle left out where it is long."""
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 2 :]}"


class ContextOverflow(EspalierError):
    """A prompt that leaves no room for an answer."""


def prompt_too_long(size: str, max_context: int) -> ContextOverflow:
    """The error for a prompt of that size.  langchain and litellm know it by its words."""
    return ContextOverflow(
        f"the prompt is too long: a prompt of {size} is not supported at max_context={max_context}; this model's "
        f"maximum context length is {max_context} tokens, prompt and output: shorten it to {max_context - 1} tokens "
        "or raise max_context"
    )


def one_line(error: Exception) -> str:
    """What another library says, short enough for a line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def unknown_name(what: str, name: str, known: Collection[str]) -> EspalierError:
    """The error for a name that is not among `known`: what another engine means by it, else the nearest, else all."""
    near = difflib.get_close_matches(name, known, n=1)
    nearest = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
    return EspalierError(f"{what} has no {name!r}; {counterparts.keyword(name, known) or nearest}")


def require_number(
    name: str, value: Any, inside: Callable[[Any], bool], supported: str, *, optional: bool = False
) -> None:
    """Refuse what is no finite number, or not inside; None is one where it is optional.  Raises EspalierError."""
    if optional and value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (number and inside(value)):
        raise EspalierError(f"{name}={shown(value)} is not supported; use {supported}")


def require_int(
    name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False, remedy: str = ""
) -> None:
    """Refuse what is no whole number of low to high; None is one where it is optional.  Raises EspalierError."""
    if optional and value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and value >= low and (high is None or value <= high)):
        allowed = f"a whole number, {low} or more" if high is None else f"a whole number, {low} to {high}"
        raise EspalierError(f"{name}={shown(value)} is not supported; use {allowed}{remedy}")


def refuses_unknown(cls: type[T]) -> type[T]:
    """Decorate a dataclass: a keyword that is no field is an EspalierError with its nearest neighbour."""
    init: Any = cls.__init__
    known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]

    @wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise unknown_name(cls.__name__, name, known)
        init(self, *args, **kwargs)

    setattr(cls, "__init__", checked)  # noqa: B010  (assigned plainly, type checkers would lose the signature)
    return cls
