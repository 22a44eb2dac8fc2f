"""Weights from disk, tensor by tensor: each is read once, checked, cast and put where it belongs.

Every way a checkpoint can be wrong (missing, unused, misshapen, truncated) is an error that names the file and the
weight.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from espalier.errors import EspalierError
from espalier.models.config import ModelConfig
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.norm import RMSNorm

# Buffers that old exporters wrote beside the weights; every model here computes its own.
HARMLESS = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|self_attn\.(bias|masked_bias))$")
INDEX = "model.safetensors.index.json"


class Weights:
    """The tensors of one directory by name, each to be taken once.  `finish` refuses what nobody took.

    allow_bin: also read pytorch_model.bin (with weights_only), the form of many drafts.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str, allow_bin: bool = False) -> None:
        self.path = path
        self.dtype = dtype
        self.device = device
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
        """The weight, cast and on the device."""
        return self.stack([name], [shape])

    def stack(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Several weights in one tensor, one above the other along the first dimension."""
        rows = sum(shape[0] for shape in shapes)
        merged = torch.empty(rows, *shapes[0][1:], dtype=self.dtype, device=self.device)
        for part, name, shape in zip(merged.split([shape[0] for shape in shapes]), names, shapes, strict=True):
            part.copy_(self.take_raw(name, *shape))
        return merged

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

    def linear(self, prefix: str, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool) -> Linear:
        """prefix + name + .weight (and .bias) of each name, merged."""
        weight = self.stack([f"{prefix}{name}.weight" for name in names], [(count, columns) for count in rows])
        if not bias:
            return Linear(weight)
        return Linear(weight, self.stack([f"{prefix}{name}.bias" for name in names], [(count,) for count in rows]))

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
