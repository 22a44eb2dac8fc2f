"""Weights from disk, tensor by tensor: each is read once, checked, cast and put where it belongs.

Every way a checkpoint can be wrong (missing, unused, misshapen, truncated) is an error that names the file and the
weight.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from espalier.errors import EspalierError
from espalier.models.config import ModelConfig
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_formats import WHOLE, FormatOf, Shard, StoredTensor, Weight, all_dense

# Buffers that old exporters wrote beside the weights; every model here computes its own.
HARMLESS = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|self_attn\.(bias|masked_bias))$")
INDEX = "model.safetensors.index.json"
# What is cast to the model's dtype.  Numbers in fewer bits mean nothing without their scales.
PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Weights:
    """The tensors of one directory by name, each to be taken once.  `finish` refuses what nobody took.

    formats: what each matrix is stored in; all else is plain tensors.
    allow_bin: also read pytorch_model.bin (with weights_only), the form of many drafts.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        formats: FormatOf = all_dense,
        allow_bin: bool = False,
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.device = device
        self.formats = formats
        self._loaded: Mapping[str, Tensor] = {}
        self._files: dict[str, safe_open] = {}
        shards = _shards(path)
        for shard in shards:
            self._open(shard)
        if not shards:
            self._loaded = _read_bin(path, allow_bin)
        self._left = {*self._files, *self._loaded}

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._loaded

    def shape(self, name: str) -> tuple[int, ...]:
        """A stored weight's shape, without reading it."""
        if name in self._loaded:
            return tuple(self._loaded[name].shape)
        return tuple(self._files[name].get_slice(name).get_shape())

    def take(self, name: str, *shape: int) -> Tensor:
        """A plain tensor, cast and on the device."""
        return self._stack([name], [StoredTensor("", shape, row_dim=0)], [tuple(map(slice, shape))])

    def take_raw(self, name: str, *shape: int) -> Tensor:
        """The weight as it is stored, on the CPU."""
        if name not in self:
            raise EspalierError(
                f"weight {name!r} {list(shape)} is missing from {self.path}; the checkpoint is incomplete or its "
                "config.json is another model's: download it again"
            )
        if self.shape(name) != shape:
            raise EspalierError(
                f"weight {name!r} in {self.path} has shape {list(self.shape(name))}, its config asks for "
                f"{list(shape)}; config.json and weights do not belong together: download both again"
            )
        self._left.discard(name)
        return self._loaded[name] if name in self._loaded else self._read(name)

    def linear(
        self,
        prefix: str,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        bias: bool,
        shard: Shard = WHOLE,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> Linear:
        """The matrices prefix + name, [rows, columns] each, and their biases, stacked; of them one shard."""
        weight = self.weight([f"{prefix}{name}" for name in names], rows, columns, shard)
        # The results of a cut along columns are summed: the bias is to come in once.
        if not bias or (shard.along == "columns" and shard.index > 0):
            return Linear(weight, None, reduce)
        stored = [StoredTensor(".bias", (count,), row_dim=0) for count in rows]
        cuts = [self.formats(f"{prefix}{name}").cut(part, shard) for name, part in zip(names, stored, strict=True)]
        return Linear(weight, self._stack([f"{prefix}{name}.bias" for name in names], stored, cuts), reduce)

    def weight(self, names: Sequence[str], rows: Sequence[int], columns: int, shard: Shard = WHOLE) -> Weight:
        """Matrices [rows, columns] by name, stacked in one weight of their format; of it one shard."""
        format = self.formats(names[0])
        if other := next((name for name in names if self.formats(name) != format), None):
            raise EspalierError(
                f"{names[0]!r} and {other!r} in {self.path} are stored in different formats ({format.name} and "
                f"{self.formats(other).name}) but computed as one; use a checkpoint that stores them alike"
            )
        tensors = {}
        for stored in zip(*(format.tensors(count, columns) for count in rows), strict=True):
            suffix = stored[0].suffix
            cuts = [format.cut(part, shard) for part in stored]
            tensors[suffix] = self._stack([f"{name}{suffix}" for name in names], stored, cuts)
        cut_rows = [shard.cut(count, columns)[0] for count in rows]
        return format.build(tensors, cut_rows, shard.cut(0, columns)[1])

    def _stack(self, names: Sequence[str], stored: Sequence[StoredTensor], cuts: Sequence[tuple[slice, ...]]) -> Tensor:
        """The cuts of some stored tensors in one, each read straight to its place."""
        sizes = [[part.stop - (part.start or 0) for part in cut] for cut in cuts]
        dim, dtype = stored[0].row_dim, stored[0].dtype or self.dtype
        if dim is None:
            merged = torch.empty(len(names), *sizes[0], dtype=dtype, device=self.device)
            places = merged.unbind(0)
        else:
            joined = [size[dim] for size in sizes]
            shape = [*sizes[0][:dim], sum(joined), *sizes[0][dim + 1 :]]
            merged = torch.empty(shape, dtype=dtype, device=self.device)
            places = merged.split(joined, dim)
        for place, name, part, cut in zip(places, names, stored, cuts, strict=True):
            place.copy_(self._checked(name, part)[cut])
        return merged

    def _checked(self, name: str, stored: StoredTensor) -> Tensor:
        tensor = self.take_raw(name, *stored.shape)
        expected = PLAIN_DTYPES if stored.dtype is None else (stored.dtype,)
        if tensor.dtype not in expected:
            needed = ", ".join(str(dtype).removeprefix("torch.") for dtype in expected)
            raise EspalierError(
                f"weight {name!r} in {self.path} is stored as {str(tensor.dtype).removeprefix('torch.')}, its format "
                f"asks for {needed}; config.json and weights do not belong together: download both again"
            )
        return tensor

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.take(f"{name}.weight", size), eps)

    def mlp(self, prefix: str, config: ModelConfig) -> GatedMLP:
        hidden, inner = config.hidden_size, config.intermediate_size
        gate_up = self.linear(prefix, ("gate_proj", "up_proj"), (inner, inner), hidden, config.mlp_bias)
        return GatedMLP(gate_up, self.linear(prefix, ("down_proj",), (hidden,), inner, config.mlp_bias))

    def ignore(self, names: Iterable[str]) -> None:
        """Weights that inform but are not needed."""
        self._left.difference_update(names)

    def finish(self) -> None:
        """Every weight that no parameter took is an error: silently dropping one changes the model."""
        unused = sorted(name for name in self._left if not HARMLESS.search(name))
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise EspalierError(
                f"weight {unused[0]!r}{more} in {self.path} is used by no parameter of this architecture; config.json "
                "is another model's or asks for a feature that is not supported: check its architectures field"
            )

    def _open(self, shard: Path) -> None:
        try:
            file = safe_open(shard, framework="pt")
            names = list(file.keys())
        except FileNotFoundError:
            raise EspalierError(f"shard {shard} is missing; download the checkpoint again") from None
        except (SafetensorError, OSError) as error:
            raise EspalierError(
                f"{shard} is truncated or corrupt ({_first_line(error)}); download the file again"
            ) from None
        for name in names:
            if name in self._files:
                raise EspalierError(f"weight {name!r} stands in two files of {self.path}; keep one of them")
            self._files[name] = file

    def _read(self, name: str) -> Tensor:
        try:
            return self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise EspalierError(
                f"weight {name!r} in {self.path} is truncated or corrupt ({_first_line(error)}); download it again"
            ) from None


@dataclass(frozen=True)
class WeightCount:
    """num_cast: numbers that are cast to the model's dtype; kept_bytes: of tensors that stay as they are stored."""

    num_cast: int = 0
    kept_bytes: int = 0

    def nbytes(self, dtype: torch.dtype) -> int:
        """Memory that the weights take in a model of this dtype."""
        return self.num_cast * dtype.itemsize + self.kept_bytes

    def __add__(self, other: "WeightCount") -> "WeightCount":
        return WeightCount(self.num_cast + other.num_cast, self.kept_bytes + other.kept_bytes)


def stored_weights(path: Path, formats: FormatOf) -> WeightCount:
    """What a directory's safetensors files hold, by their headers.  An unreadable file counts 0: loading names it."""
    count = WeightCount()
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    count += _count(name, tensors.get_tensor(name), formats)  # maps the file, reads nothing
        except (OSError, SafetensorError):
            continue
    return count


def _count(name: str, tensor: Tensor, formats: FormatOf) -> WeightCount:
    keeps = formats(name.rpartition(".")[0]).keeps(name, tensor.dtype)
    return WeightCount(0, tensor.nbytes) if keeps else WeightCount(tensor.numel(), 0)


def _shards(path: Path) -> list[Path]:
    """The safetensors files that make up the model: those of the index, else the one file, else all of them."""
    index = path / INDEX
    if index.exists():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise EspalierError(f"{index} is not a readable index ({error!r}); download the file again") from None
        return [path / file for file in sorted(files)]
    whole = path / "model.safetensors"
    return [whole] if whole.exists() else sorted(path.glob("*.safetensors"))


def _read_bin(path: Path, allowed: bool) -> Mapping[str, Tensor]:
    file = path / "pytorch_model.bin"
    if not file.exists():
        kinds = "*.safetensors or pytorch_model.bin" if allowed else "*.safetensors"
        raise EspalierError(f"{path} holds no weights; {kinds} is needed: download the checkpoint again")
    if not allowed:
        raise EspalierError(f"{file}: a target is read from safetensors only; save it with safe_serialization=True")
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises half a dozen kinds for a bad archive
        raise EspalierError(f"{file} is truncated or corrupt ({_first_line(error)}); download the file again") from None
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
