"""Checks the server's options, which come from flags or from a Serve config file."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from espalier.errors import require_int, require_number
from espalier.limits import true_or_false

# The least value of each number.
LEAST = MappingProxyType(
    {
        "port": 0,
        "max_queue": 0,
        "request_timeout": 0,
        "body_timeout": 0,
        "send_timeout": 0,
        "load_timeout": 0,
        "drain_timeout": 0,
        "engine_timeout": 1,
        "max_body_bytes": 1,
        "max_file_bytes": 1,
        "tokens_per_replica": 1,
        "fronts": 1,
    }
)
SWITCHES = ("strict_fields", "allow_special_tokens_in_messages", "log_json")


def check_options(options: Mapping[str, Any], spelled: Callable[[str], str] = str) -> None:
    """options: by the name of the flag; None is one that was not given.  spelled: from a name to what errors call it.

    Raises EspalierError.
    """
    for name, low in LEAST.items():
        if name.endswith("_timeout"):
            _check_seconds(spelled(name), options.get(name), low)
        else:
            require_int(spelled(name), options.get(name), low, optional=True)
    for name in SWITCHES:
        if (value := options.get(name)) is not None:
            true_or_false(spelled(name), value)


def _check_seconds(name: str, value: Any, low: int) -> None:
    require_number(name, value, lambda seconds: seconds >= low, f"seconds, {low} or more", optional=True)
