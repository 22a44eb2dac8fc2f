"""The files of weights in a model's directory: which they are, their bytes in memory, how they are read and written."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from espalier.errors import EspalierError, one_line
from espalier.gguf_file import is_gguf
from espalier.model_files import MAX_BYTES, file_named, read_json, require_regular
from espalier.models.gguf_config import PLAIN
from espalier.models.gguf_tensors import GGUFTensors
from espalier.models.stored_names import AS_OWN, StoredNames
from espalier.models.weight_formats import FormatOf

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


EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class WeightCount:
    """num_cast: values that are cast to the model's dtype; kept_bytes: bytes of tensors that keep their dtype."""

    num_cast: int = 0
    kept_bytes: int = 0

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights in a model of this dtype."""
        return self.num_cast * dtype.itemsize + self.kept_bytes

    def of_rank(self, count: int, whole: int) -> "WeightCount":
        """What one of `count` ranks holds, of which each holds `whole` values whole and a part of the others."""
        return WeightCount(whole + -(-max(self.num_cast - whole, 0) // count), -(-self.kept_bytes // count))

    def __add__(self, other: "WeightCount") -> "WeightCount":
        return WeightCount(self.num_cast + other.num_cast, self.kept_bytes + other.kept_bytes)


def stored_weights(
    path: Path, formats: FormatOf, unread: tuple[str, ...] = (), stored: StoredNames = AS_OWN
) -> WeightCount:
    """The size of the weights that `Weights` reads from a directory, without those whose names begin with `unread`.

    An unreadable safetensors file counts as 0 here; loading reports it.  Raises EspalierError for an unreadable index
    or pytorch_model.bin.
    """
    if is_gguf(path):
        return _of_blocks(path)
    count, shards = WeightCount(), shards_of(path)
    if not shards and (path / BIN).exists():
        count = sum((_count(name, tensor, formats) for name, tensor in read_bin(path, True).items()), count)
    for file in shards:
        try:
            require_regular(file)
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    own = stored.own(name)
                    if own is None or own.startswith(unread):
                        continue
                    # get_tensor maps the file into memory and reads no data.
                    count += _count(name, tensors.get_tensor(name), formats)
        except (OSError, SafetensorError):
            continue
    return count


def _of_blocks(path: Path) -> WeightCount:
    """Blocks are kept.  An embedding in blocks becomes a table."""
    tensors, count = GGUFTensors(path), WeightCount()
    for name, place in tensors.places.items():
        if name == EMBEDDING or place.type in PLAIN:
            count += WeightCount(prod(place.shape), 0)
        else:
            count += WeightCount(0, tensors[name].nbytes)
    return count


def _count(name: str, tensor: Tensor, formats: FormatOf) -> WeightCount:
    keeps = formats(name.rpartition(".")[0]).keeps(name, tensor.dtype)
    return WeightCount(0, tensor.nbytes) if keeps else WeightCount(tensor.numel(), 0)
