"""Finds, reads and writes the weight files of a model, and computes the memory that the weights take.

The tensors of a GGUF file get the names that they have in a Hugging Face checkpoint.  A quantised tensor is read as
bytes [rows, blocks of a row, bytes of a block].  Two changes of llama.cpp's converter are undone: it reorders rows of q
and k, and it adds 1 to the weights of Gemma's norms.
"""

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from espalier.errors import EspalierError, one_line, shown
from espalier.model_files import MAX_FILE_BYTES, TensorInfo, is_gguf, named_file, read_gguf, read_json, require_regular
from espalier.models.gguf_config import (
    BLOCK_TYPES_BY_NUMBER,
    EMBEDDING_TENSOR,
    FREQUENCY_TENSOR,
    HEAD_TENSOR,
    PLAIN_TYPES,
    architecture_of_gguf,
    gguf_config,
)
from espalier.models.stored_names import SAME_NAMES, StoredNames
from espalier.models.weight_formats import FormatLookup

PLAIN_TORCH_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


class GGUFTensors(Mapping[str, Tensor]):
    """The tensors of a GGUF file, by name.  A tensor is read from the file when it is looked up.
    Raises EspalierError for a file that is cut short, and for a model that `gguf_config` refuses."""

    def __init__(self, path: Path) -> None:
        gguf, config = read_gguf(path), gguf_config(path)
        self.architecture = architecture_of_gguf(gguf)
        self.heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        infos = {name: info for name, info in gguf.tensors.items() if name != FREQUENCY_TENSOR}
        if HEAD_TENSOR not in infos and not config["tie_word_embeddings"]:
            infos[HEAD_TENSOR] = infos[EMBEDDING_TENSOR]
        self.tensor_infos = {self.architecture.hf_name(name): info for name, info in infos.items()}
        self._mapped_file = cache(_map_file)
        for name, info in self.tensor_infos.items():
            if info.begin + _nbytes(info) > info.file.stat().st_size:
                raise EspalierError(f"{info.file} is cut short in tensor {shown(name)}; download the file again")

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensor_infos)

    def __len__(self) -> int:
        return len(self.tensor_infos)

    def __getitem__(self, name: str) -> Tensor:
        """Reads the tensor `name`, in Hugging Face's spelling; a quantised one as uint8 [..., blocks, block bytes]."""
        info = self.tensor_infos[name]
        content = self._mapped_file(info.file)
        stored_bytes = torch.frombuffer(content, dtype=torch.uint8, count=_nbytes(info), offset=info.begin)
        if info.type in PLAIN_TYPES:
            # The bytes are copied, because a tensor's offset in the file need not be a multiple of its item size.
            tensor = stored_bytes.clone().view(PLAIN_TORCH_DTYPES[info.type]).reshape(info.shape)
        else:
            tensor = stored_bytes.reshape(*info.shape[:-1], -1, BLOCK_TYPES_BY_NUMBER[info.type].block_bytes)
        return self._undo_conversion(name, tensor)

    def _undo_conversion(self, name: str, tensor: Tensor) -> Tensor:
        """Undoes changes of llama.cpp's converter: it adds an offset to norms, and reorders the rows of q and k."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        if self.architecture.norm_offset and module.endswith("norm"):
            return tensor - self.architecture.norm_offset
        if self.architecture.permutes_q_and_k and module in self.heads:
            return rows_in_halves(tensor, self.heads[module])
        return tensor


def rows_in_halves(tensor: Tensor, heads: int) -> Tensor:
    """Reorders the rows of each head of a tensor [heads · size, ...].
    RoPE rotates pairs of rows.  In the input, the two rows of a pair are adjacent.  In the result, the first rows of
    all pairs come before the second rows."""
    if len(tensor) % (2 * heads):
        return tensor  # loading refuses this wrong shape later
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def _nbytes(info: TensorInfo) -> int:
    if info.type in PLAIN_TYPES:
        return prod(info.shape) * PLAIN_TORCH_DTYPES[info.type].itemsize
    return prod(info.shape[:-1]) * BLOCK_TYPES_BY_NUMBER[info.type].row_bytes(info.shape[-1])


def _map_file(file: Path) -> mmap.mmap:
    # The mapping is copy-on-write, because PyTorch requires writable memory.
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


INDEX_FILE = "model.safetensors.index.json"
BIN_FILE = "pytorch_model.bin"


def safetensors_files(path: Path) -> list[Path]:
    """Returns the model's safetensors files: the files in the index, else model.safetensors, else all files."""
    index = path / INDEX_FILE
    if index.exists():
        files = read_json(index, MAX_FILE_BYTES).get("weight_map")
        if not isinstance(files, dict):
            raise EspalierError(f"{index} has no weight_map; download the file again")
        return sorted({named_file(path, file, index) for file in files.values()})
    single_file = path / "model.safetensors"
    return [single_file] if single_file.exists() else sorted(path.glob("*.safetensors"))


def read_bin(path: Path, is_allowed: bool) -> Mapping[str, Tensor]:
    """Reads pytorch_model.bin.  is_allowed: false for a target, for which the file is refused."""
    file = path / BIN_FILE
    if not file.exists():
        kinds = f"*.safetensors or {BIN_FILE}" if is_allowed else "*.safetensors"
        raise EspalierError(f"{path} holds no weights; {kinds} is needed: download the checkpoint again")
    if not is_allowed:
        raise EspalierError(f"{file}: a target is read from safetensors only; save it with safe_serialization=True")
    require_regular(file)
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many exception types for a bad archive
        raise EspalierError(f"{file} is truncated or corrupt ({one_line(error)}); download the file again") from None
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}


def write_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a *.safetensors file.  Raises EspalierError, for example if the disk is full."""
    try:
        # `touch` creates the file with the umask's permissions; `save_file` alone would give only the owner access.
        file.touch()
        mode = file.stat().st_mode
        save_file(dict(tensors), file, metadata={"format": "pt"})
        file.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise EspalierError(
            f"{file} cannot be written ({one_line(error)}); free some space, or name another directory"
        ) from None


# The name of the embedding, which is always dense in memory, even if a GGUF file stores quantised blocks.
EMBEDDING_NAME = "model.embed_tokens.weight"


@dataclass(frozen=True)
class WeightSize:
    """The size of a model's weights in memory.
    num_cast_values: values that are cast to the model's dtype.  uncast_bytes: bytes of tensors that are not cast."""

    num_cast_values: int = 0
    uncast_bytes: int = 0

    def nbytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of the weights in a model of this dtype."""
        return self.num_cast_values * dtype.itemsize + self.uncast_bytes

    def of_rank(self, num_ranks: int, replicated_values: int) -> "WeightSize":
        """Returns the size of the weights on one of `num_ranks` ranks.  replicated_values: the number of values that
        every rank holds; all other values are divided among the ranks."""
        return WeightSize(
            replicated_values + -(-max(self.num_cast_values - replicated_values, 0) // num_ranks),
            -(-self.uncast_bytes // num_ranks),
        )

    def __add__(self, other: "WeightSize") -> "WeightSize":
        return WeightSize(self.num_cast_values + other.num_cast_values, self.uncast_bytes + other.uncast_bytes)


def count_weights_in(
    path: Path, formats: FormatLookup, ignored_prefixes: tuple[str, ...] = (), stored_names: StoredNames = SAME_NAMES
) -> WeightSize:
    """Returns the size of the weights that `Weights` reads from a directory, except those under `ignored_prefixes`.

    An unreadable safetensors file is not counted; loading reports the error later.  Raises EspalierError for an
    unreadable index or pytorch_model.bin."""
    if is_gguf(path):
        return _size_of_gguf(path)
    size, files = WeightSize(), safetensors_files(path)
    if not files and (path / BIN_FILE).exists():
        size = sum((_size_of_tensor(name, tensor, formats) for name, tensor in read_bin(path, True).items()), size)
    for file in files:
        try:
            require_regular(file)
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    own_name = stored_names.own_name(name)
                    if own_name is None or own_name.startswith(ignored_prefixes):
                        continue
                    # get_tensor maps the file into memory without reading data.
                    size += _size_of_tensor(name, tensors.get_tensor(name), formats)
        except (OSError, SafetensorError):
            continue
    return size


def _size_of_gguf(path: Path) -> WeightSize:
    """Returns the size of the weights of a GGUF file.  Quantised matrices keep their bytes; a quantised embedding
    becomes a table in the model's dtype."""
    tensors, size = GGUFTensors(path), WeightSize()
    for name, info in tensors.tensor_infos.items():
        if name == EMBEDDING_NAME or info.type in PLAIN_TYPES:
            size += WeightSize(prod(info.shape), 0)
        else:
            size += WeightSize(0, tensors[name].nbytes)
    return size


def _size_of_tensor(name: str, tensor: Tensor, formats: FormatLookup) -> WeightSize:
    keeps_stored_dtype = formats(name.rpartition(".")[0]).keeps_stored_dtype(name, tensor.dtype)
    return WeightSize(0, tensor.nbytes) if keeps_stored_dtype else WeightSize(tensor.numel(), 0)
