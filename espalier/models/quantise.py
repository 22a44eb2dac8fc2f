"""Writes a quantised copy of a target, in the format of compressed-tensors, file by file.

fp8: E4M3 with a scale for each row of a matrix; inputs are rounded to FP8 token by token.
int4: groups of 128 columns with a symmetric scale; of a few scales, each group takes the one with the least squared
error.  No text is needed for either.

Linear layers are quantised, experts that are stored apart included.  The embedding, the head, routers and what a family
reads as a plain tensor stay as they are.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8, FP8_MAX, pack_nibbles
from espalier.models.config import read_json
from espalier.models.loading import read_config
from espalier.models.weight_formats import QUANTISATION_FIELDS
from espalier.models.weights import INDEX, PLAIN_DTYPES, shards_of

To = Literal["fp8", "int4"]
GROUP = 128
# A group's scale is the one that maps its largest magnitude to 7.5, times one of these.
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
# Values that are quantised at once.
BLOCK_VALUES = 2**24
# Matrices that stay as they are.
PLAIN = r"(.*\.)?(embed_tokens|lm_head|gate|router|shared_expert_gate|eh_proj|shared_head\.head)$"


@dataclass
class Written:
    """What was written.  dense: matrices that stay as they are and could have been quantised, by name."""

    num_matrices: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    dense: list[str] = field(default_factory=list)


def quantise(path: Path, out: Path, to: To, device: torch.device, advance: Callable[[], None]) -> Written:
    """Write a quantised copy of the target at `path` to `out`.

    Memory: one file of the checkpoint, quantised.  advance: called after each file.
    Raises EspalierError for a target that is quantised already or not supported, and if `out` is not empty.
    """
    config = read_json(path / "config.json")
    _refuse(path, out, config)
    out.mkdir(parents=True, exist_ok=True)
    written, places = Written(), dict[str, str]()
    for file in shards_of(path):
        tensors = dict(_quantised(file, to, device, written))
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
        written.written_bytes += sum(tensor.nbytes for tensor in tensors.values())
        advance()
    if (path / INDEX).exists():
        index = {"metadata": {"total_size": written.written_bytes}, "weight_map": places}
        (out / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for other in sorted(path.iterdir()):
        is_weights = other.suffix in (".safetensors", ".bin") or other.name == INDEX
        if other.is_file() and not is_weights:
            shutil.copyfile(other, out / other.name)
    full = {**config, "quantization_config": _config_of(to, written.dense)}
    (out / "config.json").write_text(json.dumps(full, indent=1), encoding="utf-8")
    return written


def _refuse(path: Path, out: Path, config: Mapping[str, Any]) -> None:
    for name in QUANTISATION_FIELDS:
        if config.get(name) is not None:
            raise EspalierError(f"{path} is quantised already ({name}); give the unquantised model (bfloat16)")
    experts = read_config(path).experts
    if experts is not None and experts.stored == "stacked":
        raise EspalierError(f"{path} stores its experts stacked, which quantize does not support; use another model")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EspalierError(f"--out={out} exists and is not an empty directory; give a new one")
    if not shards_of(path):
        raise EspalierError(f"{path} holds no *.safetensors; save it with safe_serialization=True")


def _quantised(file: Path, to: To, device: torch.device, written: Written) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the quantised copy of a file."""
    with safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118
            tensor = stored.get_tensor(name)
            written.read_bytes += tensor.nbytes
            module = name.removesuffix(".weight")
            is_matrix = tensor.ndim == 2 and module != name and tensor.dtype in PLAIN_DTYPES
            is_matrix = is_matrix and re.match(PLAIN, module) is None
            if is_matrix and _fits(tensor, to):
                written.num_matrices += 1
                for suffix, part in (_to_fp8 if to == "fp8" else _to_int4)(tensor, device).items():
                    yield f"{module}.{suffix}", part
            else:
                if is_matrix:
                    written.dense.append(module)
                # Cloned: a tensor that stands in the file's memory would keep all of it.
                yield name, tensor.clone()


def _fits(matrix: Tensor, to: To) -> bool:
    return to == "fp8" or matrix.shape[1] % GROUP == 0


def _blocks(matrix: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Blocks of rows, float32, on the device."""
    for block in matrix.split(max(BLOCK_VALUES // matrix.shape[1], 1)):
        yield block.to(device, torch.float32)


def _to_fp8(matrix: Tensor, device: torch.device) -> dict[str, Tensor]:
    codes, scales = [], []
    for block in _blocks(matrix, device):
        largest = block.abs().amax(1, keepdim=True)
        scale = torch.where(largest == 0, 1.0, largest / FP8_MAX)
        codes.append((block / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).cpu())
        scales.append(scale.cpu())
    return {"weight": torch.cat(codes), "weight_scale": torch.cat(scales)}


def _to_int4(matrix: Tensor, device: torch.device) -> dict[str, Tensor]:
    # Other engines expect the scales in the model's dtype.
    dtype = matrix.dtype if matrix.dtype in (torch.bfloat16, torch.float16) else torch.float32
    codes, scales = [], []
    for block in _blocks(matrix, device):
        groups = block.unflatten(1, (-1, GROUP))
        scale = _best_scales(groups, dtype)
        q = (groups / scale.float()).round().clamp(-8, 7) + 8
        codes.append(pack_nibbles(q.flatten(1).to(torch.uint8)).cpu())
        scales.append(scale.squeeze(2).cpu())
    packed = torch.cat(codes).contiguous().view(torch.int32)
    return {
        "weight_packed": packed,
        "weight_scale": torch.cat(scales),
        "weight_shape": torch.tensor(matrix.shape, dtype=torch.int64),
    }


def _best_scales(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """groups [rows, n, GROUP] -> the scales [rows, n, 1] with the least squared error."""
    largest = groups.abs().amax(2, keepdim=True)
    widest = torch.where(largest == 0, 1.0, largest / 7.5)
    best, least = widest.to(dtype), torch.full_like(largest, torch.inf)
    for shrink in SHRINK:
        scale = (widest * shrink).to(dtype)
        exact = scale.float()
        error = ((groups / exact).round().clamp(-8, 7) * exact - groups).square().sum(2, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _config_of(to: To, dense: list[str]) -> dict[str, Any]:
    """quantization_config, as compressed-tensors writes it."""
    common = {"symmetric": True, "dynamic": False, "block_structure": None, "actorder": None}
    weights: dict[str, Any] = {**common, "num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
    inputs: dict[str, Any] | None = {**common, "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    if to == "int4":
        weights = {**common, "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
        inputs = None
    stored = "float-quantized" if to == "fp8" else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": stored}},
        "ignore": [f"re:{PLAIN}", *dense],
        "kv_cache_scheme": None,
    }
