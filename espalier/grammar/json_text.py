"""Reads the JSON text of a grammar."""

import json
import math
from typing import Any

from espalier.errors import EspalierError, once_each, shown

# Integers that xgrammar keeps whole.
INTEGERS = range(-(2**63), 2**63)


def read_json(what: str, text: str) -> Any:
    """The value of a JSON text whose numbers and texts xgrammar reads as they are.

    what: names the text in the EspalierError that is raised for any other.
    """
    try:
        value = json.loads(
            text, parse_int=_whole, parse_float=_finite, parse_constant=_refuse, object_pairs_hook=once_each
        )
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        reason = "a text in it has half of a surrogate pair"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise EspalierError(f"the {what} cannot be read: {reason}; send other JSON")


def _whole(digits: str) -> int:
    # Python reads a long number slowly.
    if len(digits) > 20 or int(digits) not in INTEGERS:
        raise ValueError(f"{shown(digits)} has more than 64 bits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{shown(digits)} is too large")
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
