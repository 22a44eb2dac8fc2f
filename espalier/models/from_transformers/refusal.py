"""What a class of transformers raises becomes a refusal with a reason: it is another's code, and may raise anything."""

from collections.abc import Iterator
from contextlib import contextmanager

from espalier.errors import EspalierError, one_line


@contextmanager
def refusing(reason: str, *, with_kind: bool = False) -> Iterator[None]:
    """Raise any error as EspalierError: the reason, and in brackets the error's text, behind its kind if asked."""
    try:
        yield
    except EspalierError:
        raise
    except Exception as error:
        kind = f"{type(error).__name__}: " if with_kind else ""
        raise EspalierError(f"{reason} ({kind}{one_line(error)})") from None
