"""Reads pytorch_model.bin, and writes safetensors files."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from espalier.errors import EspalierError, one_line
from espalier.model_files import require_regular

BIN = "pytorch_model.bin"


def read_bin(path: Path, allowed: bool) -> Mapping[str, Tensor]:
    """The tensors of pytorch_model.bin.  Raises EspalierError if it is missing, not `allowed`, or unreadable."""
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
    """What an error says first, or its kind."""
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
