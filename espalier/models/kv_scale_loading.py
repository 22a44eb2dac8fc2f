"""Reads the scales of K and V in FP8 that a checkpoint has."""

from math import prod

import torch
from torch import Tensor

from espalier.cache.layer_spec import Keeps, LatentKV
from espalier.kernels.state.kv_scales import KVScales
from espalier.models.weights import Weights
from espalier.shards import part_of

# The names, under a layer's attention, of the scales of K and V in FP8: in compressed-tensors, ModelOpt, the first FP8
# checkpoints, and the first compressed-tensors.
KV_SCALES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("kv_scale", "kv_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
)


def load_kv_scales(weights: Weights, prefix: str, keeps: Keeps) -> KVScales | None:
    """The scales of K and V under an attention's prefix, one for each head or for all; None if there are none.

    keeps: what the layer keeps on all ranks; the scales are those of this rank's heads.
    Raises EspalierError for one without the other, and for another shape.
    """
    own = part_of(1) if isinstance(keeps, LatentKV) else weights.shards.kv_heads(keeps.kv_heads)
    for names in KV_SCALES:
        if any(f"{prefix}{name}" in weights for name in names):
            k, v = (_scale_of_heads(weights, f"{prefix}{name}", keeps.kv_heads)[own.slice] for name in names)
            # A latent row is stored once, with K's scale.
            return KVScales(k, k if isinstance(keeps, LatentKV) else v, weights.dtype)
    return None


def _scale_of_heads(weights: Weights, name: str, kv_heads: int) -> Tensor:
    shape = weights.shape(name) if name in weights else (1,)
    size = kv_heads if prod(shape) == kv_heads else 1
    # Those of heads are [kv_heads, 1, 1] in compressed-tensors.
    stored = shape if prod(shape) == kv_heads else (size,)
    scale = weights.take_exact(name, *stored).to(torch.float32)
    return scale.reshape(size).expand(kv_heads).contiguous()
