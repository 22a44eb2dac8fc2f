"""FP8 and NVFP4 as NVIDIA's ModelOpt exports them, with a stored scale for the inputs.

config.json describes them with quant_method "modelopt".  Older exports describe them in hf_quant_config.json only.
"""

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.config import FP8_KV
from espalier.errors import EspalierError
from espalier.model_files import read_json
from espalier.models.weight_formats.base import FormatOf, WeightFormat
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.models.weight_formats.e2m1 import GROUP, MODELOPT_NAMES, Nvfp4Format
from espalier.models.weight_formats.fp8 import Fp8Format
from espalier.models.weight_formats.quantised import dense_if_skipped, module_names, read_field, read_object

MODELOPT = "modelopt"
HF_QUANT_CONFIG = "hf_quant_config.json"
FORMATS: Mapping[str, WeightFormat] = {
    "FP8": Fp8Format((None, None), inputs="static"),
    "NVFP4": Nvfp4Format(MODELOPT_NAMES, has_inputs=True),
    "W4A16_NVFP4": Nvfp4Format(MODELOPT_NAMES),
}
# Its `quantized_layers` name each matrix and its own algorithm.
MIXED = "MIXED_PRECISION"


def read_modelopt(quantisation: Mapping[str, Any]) -> FormatOf:
    """Raises EspalierError naming an algorithm that is not supported: W4A8_AWQ, NVFP4_AWQ and others."""
    if quantisation.get("quant_algo") == MIXED:
        layers = read_object(quantisation, "quantized_layers")
        if not layers:
            raise EspalierError(
                f"quantization_config: quant_algo = {MIXED!r} needs quantized_layers; download it again"
            )
        formats = {name: _format(read_object(layers, name)) for name in layers}
        return lambda name: formats.get(name, DENSE_FORMAT)
    names = module_names(quantisation, "ignore") + module_names(quantisation, "exclude_modules")
    skipped = [f"re:{fnmatch.translate(name)}" if "*" in name else name for name in names]
    # A head that is not among these names is quantised.
    return dense_if_skipped(skipped, _format(quantisation), lm_head=True)


def _format(described: Mapping[str, Any]) -> WeightFormat:
    format = FORMATS[read_field(described, "quant_algo", tuple(FORMATS))]
    if isinstance(format, Nvfp4Format):
        read_field(described, "group_size", (GROUP, None))
    return format


def read_hf_quant_config(path: Path) -> dict[str, Any]:
    """The fields for config.json from a directory's hf_quant_config.json; empty if there is none."""
    file = path / HF_QUANT_CONFIG
    if not file.exists():
        return {}
    return {"quantization_config": {"quant_method": MODELOPT, **read_object(read_json(file), "quantization")}}


STRATEGIES = ("tensor", "attn_head")


def kv_scheme(full: Mapping[str, Any], fields: tuple[str, ...]) -> str | None:
    """The kv_dtype that a config.json declares; None if it declares none.

    fields: those that may hold the quantisation.  Raises EspalierError for a scheme that is not supported.
    """
    quantisation: Any = next((full[name] for name in fields if full.get(name) is not None), None)
    if not isinstance(quantisation, Mapping):
        return None
    scheme, algorithm = quantisation.get("kv_cache_scheme"), quantisation.get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        raise EspalierError(
            f"quantization_config: kv_cache_quant_algo {algorithm!r} is not supported, only 'FP8'; set kv_dtype to the "
            "model's dtype"
        )
    if algorithm is not None:
        return FP8_KV
    if scheme is None or scheme == "static":
        return FP8_KV if scheme else None
    wanted = {"type": ("float",), "num_bits": (8,), "dynamic": (False, None), "symmetric": (True, None)}
    read = scheme if isinstance(scheme, Mapping) else {}
    wrong = [name for name, values in wanted.items() if read.get(name) not in values]
    # ModelOpt has one scale for a layer and does not say so.
    strategy = read.get("strategy", "tensor" if quantisation.get("quant_method") == MODELOPT else None)
    if wrong or strategy not in STRATEGIES:
        raise EspalierError(
            f"quantization_config: kv_cache_scheme {scheme!r} is not supported, only static FP8 by "
            f"{' or '.join(map(repr, STRATEGIES))}; set kv_dtype to the model's dtype"
        )
    return FP8_KV
