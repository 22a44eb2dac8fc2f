"""The one exception that users see for what they asked, one line with the value, what is supported and the remedy; and
the checks that raise it wherever a name or a number is given."""

import difflib
import math
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


class EspalierError(ValueError):
    """Bad input or an unsupported combination, refused by name before anything is lost."""


def prompt_too_long(size: str, max_context: int) -> EspalierError:
    """The error for a prompt that leaves no room for an output."""
    return EspalierError(
        f"a prompt of {size} is not supported at max_context={max_context}, which holds prompt and output; "
        f"shorten it to {max_context - 1} tokens or raise max_context"
    )


def unknown_name(what: str, name: str, known: Collection[str]) -> EspalierError:
    """The error for a name that is not among `known`, with the nearest that is, or all of them where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
    return EspalierError(f"{what} has no {name!r}; {remedy}")


def require_number(name: str, value: Any, inside: Callable[[Any], bool], supported: str) -> None:
    """Refuse what is no finite number, or not inside.  Raises EspalierError."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (number and inside(value)):
        raise EspalierError(f"{name}={value!r} is not supported; use {supported}")


def require_int(
    name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False, remedy: str = ""
) -> None:
    """Refuse what is no whole number of low to high; None is one where it is optional.  Raises EspalierError."""
    if optional and value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and value >= low and (high is None or value <= high)):
        allowed = f"a whole number, {low} or more" if high is None else f"a whole number, {low} to {high}"
        raise EspalierError(f"{name}={value!r} is not supported; use {allowed}{remedy}")


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
