"""The files of weights in a model's directory: which they are, how an old one is read, and how a new one is written."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from espalier.errors import EspalierError, one_line
from espalier.model_files import MAX_BYTES, file_named, read_json, require_regular

INDEX = "model.safetensors.index.json"
BIN = "pytorch_model.bin"


def shards_of(path: Path) -> list[Path]:
    """The model's safetensors files: those of the index, else model.safetensors, else all of the directory."""
    index = path / INDEX
    if index.exists():
        files = read_json(index, MAX_BYTES).get("weight_map")
        if not isinstance(files, dict):
            raise EspalierError(f"{index} has no weight_map; download the file again")
        return sorted({file_named(path, file, index) for file in files.values()})
    whole = path / "model.safetensors"
    return [whole] if whole.exists() else sorted(path.glob("*.safetensors"))


def read_bin(path: Path, allowed: bool) -> Mapping[str, Tensor]:
    file = path / BIN
    if not file.exists():
        kinds = f"*.safetensors or {BIN}" if allowed else "*.safetensors"
        raise EspalierError(f"{path} holds no weights; {kinds} is needed: download the checkpoint again")
    if not allowed:
        raise EspalierError(f"{file}: a target is read from safetensors only; save it with safe_serialization=True")
    require_regular(file)
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many exception types for a bad archive
        raise EspalierError(f"{file} is truncated or corrupt ({first_line(error)}); download the file again") from None
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def write_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a *.safetensors file.  Raises EspalierError, for example if the disk is full."""
    try:
        file.touch()  # with the user's usual permissions: safetensors' own file is for its owner alone
        mode = file.stat().st_mode
        save_file(dict(tensors), file, metadata={"format": "pt"})
        file.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise EspalierError(
            f"{file} cannot be written ({one_line(error)}); free some space, or name another directory"
        ) from None
