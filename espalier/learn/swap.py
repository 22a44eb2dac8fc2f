"""Puts the weights of one loaded draft into another draft of the same form, in place, while the engine runs nothing.

CUDA graphs keep the addresses of tensors, so values are copied into the existing tensors.  Weights in oneDNN's layout,
which only a CPU has, are replaced.  Tensors that a draft shares with its target stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.models.draft import DraftModel

PACKAGE_PREFIX = "espalier."


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of a model.  holder: the object, list or dict that has the tensor under the name or index `key`.  path:
    the names from the draft to the tensor, joined by dots, for messages."""

    path: str
    holder: Any
    key: Any
    tensor: Tensor


def held_tensors(model: Any, path: str = "draft") -> Iterator[HeldTensor]:
    """Yields every tensor in a model, in the order of its objects' fields.  path: the start of HeldTensor.path."""
    return _walk_tensors(model, path, set())


def _walk_tensors(value: Any, path: str, visited_ids: set[int]) -> Iterator[HeldTensor]:
    """Yields the tensors in `value`, an object at `path`.  visited_ids: the id() of objects seen before."""
    if id(value) in visited_ids:
        return
    visited_ids.add(id(value))
    for key, member in _named_members(value):
        member_path = f"{path}.{key}"
        if isinstance(member, Tensor):
            yield HeldTensor(member_path, value, key, member)
        else:
            yield from _walk_tensors(member, member_path, visited_ids)


def _named_members(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (key, member) of a list, a dict or an object of this package."""
    if isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    elif type(value).__module__.startswith(PACKAGE_PREFIX) and not isinstance(value, type):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in dict.fromkeys([*getattr(value, "__dict__", ()), *slots]):
            if hasattr(value, name):
                yield name, getattr(value, name)


class Swap:
    """Replaces the weights of the served draft by those of a learned draft.  pairs: (HeldTensor of the served draft,
    learned tensor).  Raises EspalierError if the drafts differ in more than the values of weights."""

    def __init__(self, served: DraftModel, learned: DraftModel) -> None:
        old, new = list(held_tensors(served)), list(held_tensors(learned))
        if [place.path for place in old] != [place.path for place in new]:
            raise EspalierError("a draft with other parts than the served one cannot be swapped in")
        self.pairs = [(a, b.tensor) for a, b in zip(old, new, strict=True) if a.tensor is not b.tensor]
        for place, tensor in self.pairs:
            _require_fitting(place, tensor)

    def copy_weights(self) -> None:
        """Swaps the weights.  Waits for queued device work.  Call it only between Engine.drain and the next step."""
        _synchronize()
        with torch.no_grad():
            for place, tensor in self.pairs:
                if place.tensor.is_mkldnn:
                    setattr(place.holder, place.key, tensor)
                else:
                    place.tensor.copy_(tensor)
        _synchronize()


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _require_fitting(place: HeldTensor, tensor: Tensor) -> None:
    """Raises EspalierError unless the learned `tensor` can replace the tensor at `place`."""
    old = place.tensor
    is_equal = (old.shape, old.dtype, old.is_mkldnn) == (tensor.shape, tensor.dtype, tensor.is_mkldnn)
    if not is_equal or (old.is_mkldnn and isinstance(place.key, int)):
        raise EspalierError(
            f"{place.path} is {old.dtype} {list(old.shape)}, in the new draft {tensor.dtype} {list(tensor.shape)}: "
            "weights that are quantised or packed for the device cannot be swapped"
        )
