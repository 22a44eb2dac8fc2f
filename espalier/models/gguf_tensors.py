"""The tensors of a GGUF file under the names that they have in a Hugging Face checkpoint.

Tensors in blocks are bytes [rows, blocks of a row, bytes of a block].  What llama.cpp's converter changed is undone:
the order of rows of q and k, and the 1 that it adds to Gemma's norms.
"""

import mmap
from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from espalier.errors import EspalierError, shown
from espalier.gguf_file import Place, read_gguf
from espalier.models.gguf_config import (
    BY_NUMBER,
    EMBEDDING,
    FREQUENCIES,
    HEAD,
    PLAIN,
    architecture_of_gguf,
    gguf_config,
)

DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


class GGUFTensors(Mapping[str, Tensor]):
    """By name.  A tensor is read from the file when it is asked for.

    Raises EspalierError for a file that is cut short, and for what `gguf_config` refuses.
    """

    def __init__(self, path: Path) -> None:
        gguf, config = read_gguf(path), gguf_config(path)
        self.architecture = architecture_of_gguf(gguf)
        self.heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        stored = {name: place for name, place in gguf.tensors.items() if name != FREQUENCIES}
        if HEAD not in stored and not config["tie_word_embeddings"]:
            stored[HEAD] = stored[EMBEDDING]
        self.places = {self.architecture.name(name): place for name, place in stored.items()}
        self._content = cache(_mapped)
        for name, place in self.places.items():
            if place.begin + _nbytes(place) > place.file.stat().st_size:
                raise EspalierError(f"{place.file} is cut short in tensor {shown(name)}; download the file again")

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        content = self._content(place.file)
        raw = torch.frombuffer(content, dtype=torch.uint8, count=_nbytes(place), offset=place.begin)
        if place.type in PLAIN:
            # Copied, as the place in the file need not be a multiple of the numbers' size.
            tensor = raw.clone().view(DTYPES[place.type]).reshape(place.shape)
        else:
            tensor = raw.reshape(*place.shape[:-1], -1, BY_NUMBER[place.type].nbytes)
        return self._changed_back(name, tensor)

    def _changed_back(self, name: str, tensor: Tensor) -> Tensor:
        module = name.rpartition(".")[0].rpartition(".")[2]
        if self.architecture.norm_offset and module.endswith("norm"):
            return tensor - self.architecture.norm_offset
        if self.architecture.permuted and module in self.heads:
            return rows_in_halves(tensor, self.heads[module])
        return tensor


def rows_in_halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows in which the two values of a rotated pair are neighbours -> the first values of all pairs, then the second.

    tensor: [heads · size, ...].
    """
    if len(tensor) % (2 * heads):
        return tensor  # its shape is wrong, which loading says
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def _nbytes(place: Place) -> int:
    if place.type in PLAIN:
        return prod(place.shape) * DTYPES[place.type].itemsize
    return prod(place.shape[:-1]) * BY_NUMBER[place.type].row_bytes(place.shape[-1])


def _mapped(file: Path) -> mmap.mmap:
    # Copy on write: PyTorch asks for memory that may be written to.
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
