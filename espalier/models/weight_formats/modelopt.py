"""FP8 as NVIDIA's ModelOpt exports it: E4M3, one scale for each matrix, and a stored scale for its inputs.

config.json describes it with quant_method "modelopt".  Older exports describe it in hf_quant_config.json only.
"""

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.model_files import read_json
from espalier.models.weight_formats.base import FormatOf
from espalier.models.weight_formats.fp8 import Fp8Format
from espalier.models.weight_formats.quantised import dense_if_skipped, module_names, read_field, read_object

MODELOPT = "modelopt"
HF_QUANT_CONFIG = "hf_quant_config.json"


def read_modelopt(quantisation: Mapping[str, Any]) -> FormatOf:
    """Raises EspalierError naming an algorithm that is not supported: NVFP4, W4A8_AWQ and others."""
    read_field(quantisation, "quant_algo", ("FP8",))
    names = module_names(quantisation, "ignore") + module_names(quantisation, "exclude_modules")
    skipped = [f"re:{fnmatch.translate(name)}" if "*" in name else name for name in names]
    return dense_if_skipped(skipped, Fp8Format((None, None), inputs="static"))


def read_hf_quant_config(path: Path) -> dict[str, Any]:
    """The fields for config.json from a directory's hf_quant_config.json; empty if there is none."""
    file = path / HF_QUANT_CONFIG
    if not file.exists():
        return {}
    return {"quantization_config": {"quant_method": MODELOPT, **read_object(read_json(file), "quantization")}}
