"""Checks of a bench's flags and of its results."""

from argparse import Namespace
from collections.abc import Sequence

from espalier.config import SpeculationConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.layout import MAX_ROUNDS_IN_FLIGHT
from espalier.request import Output
from espalier.terminal.flags import flag_of, given_flags


def refuse_tree_flags(args: Namespace, flag: str) -> None:
    """Raises EspalierError if a flag of SpeculationConfig is given beside `flag`, which names the tree."""
    if given := [name for name in given_flags(args) if name in SpeculationConfig.__dataclass_fields__]:
        raise EspalierError(f"{flag_of(given[0])} is not for {flag}, which names the tree; leave one out")


def positive_numbers(flag: str, text: str, example: str) -> list[int]:
    """Parse N,N into numbers of 1 or more.  Raises EspalierError, which names the flag."""
    numbers = [int(part) for part in text.split(",") if part.isdecimal()]
    if not numbers or min(numbers) < 1 or ",".join(map(str, numbers)) != text:
        raise EspalierError(f"{flag}={text} is not supported; use whole numbers, 1 or more, such as {example}")
    return numbers


def require_pages(engine: Engine, measurement: str, batch: int, num_tokens: int) -> None:
    """Check that the engine's pages hold `batch` requests of num_tokens tokens, prompt and output, at the same time.

    measurement: its name in the EspalierError that is raised if they do not.
    """
    layout, usable = engine.layout, engine.pool.num_pages - 1
    needed = batch * layout.pages_for(num_tokens + layout.max_tokens_ahead(MAX_ROUNDS_IN_FLIGHT))
    if needed > usable:
        raise EspalierError(
            f"{measurement} needs {needed} pages of {layout.page_size} tokens, and the engine has {usable}; measure a "
            "smaller batch or context"
        )


def require_success(outputs: Sequence[Output]) -> None:
    """Raises EspalierError if a request failed: its time would be that of less work."""
    if failed := next((output.error for output in outputs if output.error is not None), None):
        raise EspalierError(f"a request failed: {failed}")
