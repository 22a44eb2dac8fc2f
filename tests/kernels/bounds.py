"""A memory checker for kernels in Triton's interpreter: every unmasked access must be inside a tensor argument.

Without it a wrong address reads or writes other memory of the process without an error, as it mostly does on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor


class OutOfBounds(AssertionError):
    """An access to an address outside of all arguments of the launch."""


class Arguments:
    """The address ranges of a launch's tensor arguments: starts, ascending, and ends, in bytes."""

    def __init__(self, values: Any):
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in _storages(values) if s.nbytes()})
        self.starts, self.ends = np.array(spans, dtype=np.uint64).reshape(-1, 2).T

    def check(self, access: str, pointers: Any, mask: Any) -> None:
        """access: for the error text; pointers, mask: the interpreter's handles.  Raises OutOfBounds."""
        unmasked = mask.data.astype(bool, copy=False)
        if unmasked.shape != pointers.data.shape:
            unmasked = np.broadcast_to(unmasked, pointers.data.shape)
        addresses = pointers.data[unmasked].astype(np.uint64, copy=False)
        size = np.uint64(max(pointers.get_element_ty().primitive_bitwidth // 8, 1))
        index = np.searchsorted(self.starts, addresses, side="right") - 1
        outside = (index < 0) | (addresses + size > self.ends[index])
        if outside.any():
            raise OutOfBounds(f"{access} outside of all arguments: {int(outside.sum())} of {addresses.size} addresses")


def _storages(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage()
        elif isinstance(value, tuple):
            yield from _storages(value)


@contextmanager
def checked() -> Iterator[None]:
    """Inside this context every launch in the interpreter is checked."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    arguments: list[Arguments] = []
    init_args, load, store = (
        GridExecutor._init_args_hst,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def record_args(self: Any, args: Any, kwargs: Any) -> Any:
        host_args, host_kwargs = init_args(self, args, kwargs)
        arguments[:] = [Arguments([*host_args, *host_kwargs.values()])]
        return host_args, host_kwargs

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        arguments[0].check("a load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        arguments[0].check("a store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "_init_args_hst", record_args)
        patch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
        yield
