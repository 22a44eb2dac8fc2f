"""Writes a quantised copy of a target or a draft, in the format of compressed-tensors, file by file.

fp8: E4M3 with a scale for each row of a matrix; inputs are rounded to FP8 token by token.
int4: groups of 128 columns, or of 64 or 32 where 128 does not divide, with a symmetric scale; each group tries a few
scales and takes the one with the least squared error.  Neither needs calibration text.

Linear layers are quantised, also experts that are stored one by one, and a draft's own head.  The embedding, a target's
head, routers and what a family reads as a plain tensor stay as they are.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from espalier.errors import EspalierError
from espalier.models.loading import read_config, read_raw
from espalier.models.quantisers import QUANTISERS, Quantiser
from espalier.models.weight_files import INDEX, shards_of, write_weights
from espalier.models.weight_formats import QUANTISATION_FIELDS
from espalier.models.weights import PLAIN_DTYPES

To = Literal["fp8", "int4"]


@dataclass
class QuantiseReport:
    """What was written.

    dense: names of matrices that stay as they are because of the number of their columns; small_groups: by their size,
    matrices that the format's usual group does not divide.
    """

    num_matrices: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    dense: list[str] = field(default_factory=list)
    small_groups: dict[int, int] = field(default_factory=dict)


def quantise(
    path: Path, out: Path, to: To, device: torch.device, advance: Callable[[], None], is_draft: bool = False
) -> QuantiseReport:
    """Write a quantised copy of the target or draft at `path` to `out`.

    Memory: one file of the checkpoint, quantised.  advance: called after each file.  An error or Ctrl-C leaves `out`
    empty, so that the same command can run again.
    Raises EspalierError for a model that is quantised already or not supported, and if `out` is not empty or cannot be
    written.
    """
    config, quantiser = read_raw(path), QUANTISERS[to]
    _refuse(path, out, config, is_draft)
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _write(path, out, quantiser.of(is_draft), device, config, advance)
    except BaseException as error:
        for file in out.iterdir() if out.is_dir() else ():
            file.unlink()
        if isinstance(error, OSError):
            raise EspalierError(f"--out={out} cannot be written ({error.strerror}); name another directory") from None
        raise


def _write(
    path: Path,
    out: Path,
    quantiser: Quantiser,
    device: torch.device,
    config: Mapping[str, Any],
    advance: Callable[[], None],
) -> QuantiseReport:
    """See quantise.  config.json is written last: without it a directory is no model."""
    written, places, columns = QuantiseReport(), dict[str, str](), dict[str, int]()
    for file in shards_of(path):
        tensors = dict(_quantised(file, quantiser, device, written, columns))
        write_weights(out / file.name, tensors)
        places |= dict.fromkeys(tensors, file.name)
        written.written_bytes += sum(tensor.nbytes for tensor in tensors.values())
        advance()
    if (path / INDEX).exists():
        index = {"metadata": {"total_size": written.written_bytes}, "weight_map": places}
        (out / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for other in sorted(path.iterdir()):
        is_weights = other.suffix in (".safetensors", ".bin") or other.name == INDEX
        if other.is_file() and not is_weights and other.name != "config.json":
            shutil.copyfile(other, out / other.name)
    full = {**config, "quantization_config": quantiser.config(columns)}
    (out / "config.json").write_text(json.dumps(full, indent=1), encoding="utf-8")
    return written


def _refuse(path: Path, out: Path, config: Mapping[str, Any], is_draft: bool) -> None:
    for name in QUANTISATION_FIELDS:
        if config.get(name) is not None:
            raise EspalierError(f"{path} is quantised already ({name}); give the unquantised model (bfloat16)")
    target = None if is_draft else read_config(path, model_impl="native")
    if target is not None and target.text_part_of is not None:
        raise EspalierError(f"{path} is multimodal ({target.text_part_of}), which quantize does not support")
    experts = None if target is None else target.experts
    is_stacked = experts is not None and experts.stored != "apart"
    if is_stacked or (is_draft and _stacks_experts(path)):
        raise EspalierError(f"{path} stores its experts stacked, which quantize does not support; use another model")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EspalierError(f"--out={out} exists and is not an empty directory; give a new one")
    if not shards_of(path):
        raise EspalierError(f"{path} holds no *.safetensors; save it with safe_serialization=True")


def _stacks_experts(path: Path) -> bool:
    """Whether a draft's layers have stacked experts.  Its config.json says so only beside its target's."""
    for file in shards_of(path):
        with safe_open(file, framework="pt") as stored:
            names = [name for name in stored.keys() if ".experts." in name]  # noqa: SIM118
            if any(len(stored.get_slice(name).get_shape()) > 2 for name in names):
                return True
    return False


def _quantised(
    file: Path, quantiser: Quantiser, device: torch.device, written: QuantiseReport, columns: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the quantised copy of a file.  columns: of matrices, added by name."""
    with safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118
            tensor = stored.get_tensor(name)
            written.read_bytes += tensor.nbytes
            module = name.removesuffix(".weight")
            is_matrix = tensor.ndim == 2 and module != name and tensor.dtype in PLAIN_DTYPES
            is_matrix = is_matrix and not quantiser.keeps(module)
            if is_matrix:
                columns[module] = tensor.shape[1]
            if is_matrix and (group := quantiser.group_of(tensor.shape[1])) is not None:
                written.num_matrices += 1
                if group != quantiser.groups[0]:
                    written.small_groups[group] = written.small_groups.get(group, 0) + 1
                for suffix, part in quantiser.stored(tensor, device).items():
                    yield f"{module}{suffix}", part
            else:
                if is_matrix:
                    written.dense.append(module)
                # Cloned: a tensor that stands in the file's memory would keep all of it.
                yield name, tensor.clone()
