"""What launchers need for TMA, Hopper's copies of blocks between global and shared memory."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def aligned_for_copies(tensor: Tensor) -> bool:
    """Whether a kernel can copy 16 bytes at a time: Triton must see an address and strides divisible by 16."""
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])


def tma_descriptor(rows: Tensor, block_rows: int, size: int) -> Any:
    """The TMA descriptor for blocks of `block_rows` rows and `size` columns of rows [R, values].

    Places past the end are zeros when they are read, and are not written.
    """
    descriptor_class, layout = _descriptor_class(rows.dtype, block_rows, size)
    return descriptor_class.from_tensor(rows, [block_rows, size], layout)


@cache
def _descriptor_class(dtype: torch.dtype, block_rows: int, size: int) -> tuple[Any, Any]:
    """Triton's descriptor class, and the shared-memory layout of a block."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    elements = {
        torch.bfloat16: language.bfloat16,
        torch.float16: language.float16,
        torch.float8_e4m3fn: language.float8e4nv,
    }
    return TensorDescriptor, language.NVMMASharedLayout.get_default_for([block_rows, size], elements[dtype])
