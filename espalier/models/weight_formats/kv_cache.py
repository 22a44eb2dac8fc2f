"""What config.json says about the KV cache: `kv_cache_scheme` of quantization_config.

compressed-tensors writes an object with the fields of its other schemes.  ModelOpt writes some of these fields, or
`kv_cache_quant_algo`.  Older checkpoints of quant_method "fp8" write "static".  The scales, one for each layer or each
head, are stored with the weights (weights.py:Weights.kv_scales).
"""

from collections.abc import Mapping
from typing import Any

from espalier.config import FP8_KV
from espalier.errors import EspalierError
from espalier.models.weight_formats.modelopt import MODELOPT

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
