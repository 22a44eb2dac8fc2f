"""Which of its own flags each way of `espalier bench round` takes; one that would have no effect is refused by name."""

from argparse import Namespace
from types import MappingProxyType
from typing import Any

from espalier.cli.flags import flag_of
from espalier.errors import EspalierError

# By the flag that chooses it, the first of those that are given; None: rounds beside plain tokens.
TAKES = MappingProxyType(
    {
        "figures": ("plot",),
        "shape": ("cells", "rounds", "all_buckets", "accept_length", "page_size", "json", "plot"),
        "choose": ("context", "tokens", "repeats", "out", "accept_length", "candidates", "page_size", "json"),
        "memory": ("page_size", "json"),
        "acceptance": ("prompts", "tokens", "page_size", "json"),
        None: ("batch", "context", "tokens", "repeats", "compare", "page_size", "json", "plot"),
    }
)


def refuse_of_others(asked: Namespace) -> None:
    """Raises EspalierError for a flag that the way which is asked for does not take."""
    chosen = next(mode for mode in TAKES if mode is None or _is_given(getattr(asked, mode)))
    own = dict.fromkeys(name for mode, taken in TAKES.items() for name in (mode, *taken) if name is not None)
    for name in own:
        if name == chosen or name in TAKES[chosen] or not _is_given(getattr(asked, name)):
            continue
        if chosen is not None:
            raise EspalierError(f"{flag_of(name)} is not for {flag_of(chosen)}; leave one out")
        takers = " or ".join(flag_of(mode) for mode, taken in TAKES.items() if mode is not None and name in taken)
        raise EspalierError(f"{flag_of(name)} is for {takers}; give that, or leave it out")


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value != []
