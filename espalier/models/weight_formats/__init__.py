"""The formats that weights are stored in, by what config.json says of them.

A format is a file in this package and an entry in FORMATS.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError
from espalier.models.weight_formats.base import (
    WHOLE,
    FormatOf,
    Shard,
    StoredTensor,
    Weight,
    WeightFormat,
)
from espalier.models.weight_formats.dense import DenseFormat, dense_weight

__all__ = [
    "FORMATS",
    "QUANTISATION_FIELDS",
    "WHOLE",
    "FormatOf",
    "Shard",
    "StoredTensor",
    "Weight",
    "WeightFormat",
    "all_dense",
    "dense_weight",
    "read_formats",
]

# The fields of config.json that describe quantised weights.
QUANTISATION_FIELDS = ("quantization_config", "compression_config")
DENSE_FORMAT = DenseFormat()


def all_dense(name: str) -> WeightFormat:
    return DENSE_FORMAT


# By quant_method (None where config.json names none): from that field of config.json, what each matrix is stored in.
FORMATS: Mapping[str | None, Callable[[Mapping[str, Any]], FormatOf]] = {None: lambda quantisation: all_dense}


def read_formats(full: Mapping[str, Any], path: Path) -> FormatOf:
    """Of a completed config.json.  Raises EspalierError naming a format that is not in FORMATS."""
    field = next((name for name in QUANTISATION_FIELDS if full.get(name) is not None), QUANTISATION_FIELDS[0])
    quantisation = full.get(field)
    method = quantisation.get("quant_method", "?") if isinstance(quantisation, Mapping) else quantisation
    if not isinstance(method, str | None) or method not in FORMATS:
        known = " or ".join(repr(name) for name in FORMATS)
        raise EspalierError(
            f"{path}: {field} = {method!r} is not supported, only {known}; use the unquantised checkpoint"
        )
    return FORMATS[method](quantisation or {})
