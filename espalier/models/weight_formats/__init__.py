"""The storage formats of weights, chosen by config.json.

To add a format, add a file to this package and an entry to FORMATS.
"""

from collections.abc import Callable, Mapping
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.models.weight_formats.base import (
    FormatLookup,
    StoredTensor,
    Weight,
    WeightFormat,
)
from espalier.models.weight_formats.compressed_tensors import read_compressed_tensors
from espalier.models.weight_formats.dense import DENSE_FORMAT, dense_weight
from espalier.models.weight_formats.e2m1 import MODELOPT, read_kv_dtype, read_modelopt, read_mxfp4
from espalier.models.weight_formats.fp8 import read_fp8
from espalier.models.weight_formats.gguf import GGUF_METHOD, read_gguf_types
from espalier.models.weight_formats.gptq import read_awq, read_gptq

__all__ = [
    "FORMATS",
    "QUANTISATION_FIELDS",
    "FormatLookup",
    "StoredTensor",
    "Weight",
    "WeightFormat",
    "all_dense",
    "declared_kv_dtype",
    "dense_weight",
    "quantisation_of",
    "read_formats",
]

# The fields of config.json that describe quantised weights.
QUANTISATION_FIELDS = ("quantization_config", "compression_config")


def all_dense(name: str) -> WeightFormat:
    return DENSE_FORMAT


# For each quant_method (None if config.json has none), the function that reads the quantisation field of config.json.
FORMATS: Mapping[str | None, Callable[[Mapping[str, Any]], FormatLookup]] = {
    None: lambda quantisation: all_dense,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    GGUF_METHOD: read_gguf_types,
    "gptq": read_gptq,
    MODELOPT: read_modelopt,
    "mxfp4": read_mxfp4,
}


def quantisation_of(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config.json that describe quantised weights.
    A draft in the format of speculators has these fields at the top level, not in `transformer_layer_config`."""
    return {name: config_json[name] for name in QUANTISATION_FIELDS if config_json.get(name) is not None}


def declared_kv_dtype(fields: Mapping[str, Any]) -> str | None:
    """Returns the kv_dtype that a config.json declares; None if there is no declaration.
    Raises EspalierError for a kv_cache_scheme that is not supported."""
    return read_kv_dtype(fields, QUANTISATION_FIELDS)


def read_formats(fields: Mapping[str, Any]) -> FormatLookup:
    """Returns a function from a matrix's name in the checkpoint to its format.  fields: config.json with defaults
    added.  Raises EspalierError naming a format that is not in FORMATS."""
    field = next((name for name in QUANTISATION_FIELDS if fields.get(name) is not None), QUANTISATION_FIELDS[0])
    quantisation = fields.get(field)
    if not isinstance(quantisation, Mapping | None):
        raise EspalierError(f'{field} = {shown(quantisation)}; an object with "quant_method" is needed; correct it')
    method = None if quantisation is None else quantisation.get("quant_method", "?")
    if not isinstance(method, str | None) or method not in FORMATS:
        supported = " or ".join(repr(name) for name in FORMATS)
        raise EspalierError(
            f"{field} = {method!r} is not supported, only {supported}; use an unquantised copy of the model (bfloat16)"
        )
    return FORMATS[method](quantisation or {})
