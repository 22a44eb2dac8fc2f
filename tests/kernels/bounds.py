"""What a memory checker does, for kernels in Triton's interpreter: every access that a mask lets through must lie
within a tensor that the launch was given.

A NumPy array or a tensor beside it would answer a wrong address without a word, as a GPU's memory mostly does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor


class OutOfBounds(AssertionError):
    """An address that belongs to no argument of the launch."""


class Arguments:
    """Where the memory of a launch's tensors lies: starts, ascending, and ends, in bytes."""

    def __init__(self, values: Any):
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in _storages(values) if s.nbytes()})
        self.starts, self.ends = np.array(spans, dtype=np.uint64).reshape(-1, 2).T

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """pointers, mask: handles of the interpreter, of any one shape."""
        held = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        asked = pointers.data[held].astype(np.uint64)
        size = np.uint64(max(pointers.get_element_ty().primitive_bitwidth // 8, 1))
        place = np.searchsorted(self.starts, asked, side="right") - 1
        outside = (place < 0) | (asked + size > self.ends[place])
        if outside.any():
            raise OutOfBounds(f"{what} of {int(outside.sum())} of {asked.size} places that no argument holds")


def _storages(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage()
        elif isinstance(value, tuple):
            yield from _storages(value)


@contextmanager
def checked() -> Iterator[None]:
    """Every launch in the interpreter is checked."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    arguments: list[Arguments] = []
    take, load, store = (
        GridExecutor._init_args_hst,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def take_in(self: Any, args: Any, kwargs: Any) -> Any:
        on_host, named = take(self, args, kwargs)
        arguments[:] = [Arguments([*on_host, *named.values()])]
        return on_host, named

    def load_in(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        arguments[0].check("a load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def store_in(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        arguments[0].check("a store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "_init_args_hst", take_in)
        patch.setattr(InterpreterBuilder, "create_masked_load", load_in)
        patch.setattr(InterpreterBuilder, "create_masked_store", store_in)
        yield
