"""Helpers of launchers: the properties of a chip, the checks of arguments, and the launch hook.

`import espalier` and every CPU path work without Triton, so this module does not import Triton.
"""

import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError

# Environment variable: an upper bound, in bytes, of the shared memory that launchers use.  `make test-gpu` sets
# it to imitate a smaller GPU.
SHARED_MEMORY_LIMIT_ENV = "ESPALIER_SHARED_MEMORY"
# Bytes of shared memory per block on the smallest supported GPU.  In Triton's interpreter, launchers assume this size.
SMALLEST_GPU_SHARED_MEMORY = 99 * 1024
# Bytes of a multiprocessor's shared memory that the driver keeps for each program.
DRIVER_SHARED_MEMORY_BYTES = 1024
# The compute capability of Hopper, the first chip with PDL, TMA and products of warpgroups.
HOPPER = (9, 0)
# Above this many programs per SM, starting the programs takes longer than running them (see `is_oversubscribed`).
MAX_PROGRAMS_PER_PROCESSOR = 12

# If set, a launch calls hook(jit_function, grid, *arguments) instead.  kernels/runtime/precompile.py sets it.
launch_hook: ContextVar[Callable[..., None] | None] = ContextVar("launch_hook", default=None)


def is_precompiling() -> bool:
    """Returns whether launches of this thread only compile.  If so, launchers compile for other row numbers too."""
    return launch_hook.get() is not None


def require_triton() -> Any:
    """Returns the triton module.  Raises EspalierError if Triton is not installed."""
    try:
        import triton
        import triton.language.extra.libdevice
    except ImportError:
        raise EspalierError(
            "device=cuda needs Triton, which is not installed: pip install triton, in the version that your PyTorch "
            "requires, or use device=cpu"
        ) from None
    return triton


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU on which launch parameters depend.

    shared_memory: bytes that one thread block may use.  processors: number of SMs.  capability: compute capability,
    (9, 0) for Hopper."""

    shared_memory: int
    processors: int
    capability: tuple[int, int]

    def shared_memory_per_program(self, programs: int) -> int:
        """Returns the bytes of shared memory that a program may use if `programs` programs share a multiprocessor."""
        return (self.shared_memory + DRIVER_SHARED_MEMORY_BYTES) // programs - DRIVER_SHARED_MEMORY_BYTES

    def programs_fitting_per_processor(self, shared_memory: int) -> int:
        """Returns how many programs fit on a multiprocessor if each takes `shared_memory` bytes."""
        return (self.shared_memory + DRIVER_SHARED_MEMORY_BYTES) // (shared_memory + DRIVER_SHARED_MEMORY_BYTES)


def chip(tensor: Tensor) -> Chip:
    """Returns the chip of a tensor's device.  For a CPU tensor (Triton's interpreter): the smallest supported GPU."""
    return _chip(tensor.device)


@cache
def _chip(device: torch.device) -> Chip:
    limit = int(os.environ.get(SHARED_MEMORY_LIMIT_ENV, 2**31))
    if device.type != "cuda":
        return Chip(min(SMALLEST_GPU_SHARED_MEMORY, limit), 4, (8, 0))
    # Any: some supported versions of PyTorch lack type annotations for these properties.
    properties: Any = torch.cuda.get_device_properties(device)
    shared_memory = min(properties.shared_memory_per_block_optin, limit)
    return Chip(shared_memory, properties.multi_processor_count, (properties.major, properties.minor))


def is_oversubscribed(num_programs: int, gpu: Chip) -> bool:
    """Returns whether a grid of `num_programs` small programs should become fewer and larger programs.

    A chip starts about one program per nanosecond, however short the programs are (H200, docs/log.md)."""
    return num_programs > MAX_PROGRAMS_PER_PROCESSOR * gpu.processors


def choose_split_size(size: int, rows: int, gpu: Chip, min_size: int, max_size: int) -> int:
    """Returns how many of `size` columns a program takes (a split): `min_size` times a power of two.

    With few rows, splits are small, so that there are enough programs to fill the chip.  With many rows, splits are
    larger, up to `max_size`, because starting a program takes time."""
    while min_size < min(max_size, size) and is_oversubscribed(rows * -(-size // min_size), gpu):
        min_size *= 2
    return min_size


def require(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, same_device: Tensor) -> None:
    """Check a launcher's tensor argument on the host: its shape (-1: any size), its dtype (None: any), and that it is
    on the device of `same_device`.

    name: the argument's name in the error text.  Raises EspalierError with the required and the actual properties."""
    size = tensor.shape
    # A prefill pass calls this function hundreds of times, so equal shapes are compared in one step.
    fits = size == shape or (len(size) == len(shape) and all(n in (-1, m) for n, m in zip(shape, size, strict=True)))
    if not fits or (dtype is not None and tensor.dtype != dtype) or tensor.device != same_device.device:
        raise EspalierError(
            f"{name} needs shape {list(shape)}, {dtype or tensor.dtype} on {same_device.device}, but has "
            f"{list(tensor.shape)}, {tensor.dtype} on {tensor.device}: allocate and launch from the same layout"
        )


def warps_for(num_values: int, values_per_warp: int, max_warps: int = 16) -> int:
    """Returns the number of warps, 1 to `max_warps`, for a program that computes `num_values` values."""
    return min(max(num_values // values_per_warp, 1), max_warps)


def acc_dtype(dtype: torch.dtype) -> object:
    """Returns the Triton dtype that a kernel computes in: float64 for float64, else float32."""
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def next_power_of_2(count: int) -> int:
    """Returns the smallest power of two that is at least `count`.  Triton's block sizes are powers of two."""
    return 1 << max(count - 1, 0).bit_length()


def is_aligned_for_copies(tensor: Tensor) -> bool:
    """Returns whether a kernel can copy 16 bytes at a time: Triton must see an address and strides divisible by 16."""
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])


def tma_descriptor(rows: Tensor, block_rows: int, size: int) -> Any:
    """Returns the TMA descriptor of rows [R, values], for blocks of `block_rows` rows and `size` columns.
    Elements past the end are read as zeros, and are not written."""
    descriptor_class, layout = _descriptor_class(rows.dtype, block_rows, size)
    return descriptor_class.from_tensor(rows, [block_rows, size], layout)


@cache
def _descriptor_class(dtype: torch.dtype, block_rows: int, size: int) -> tuple[Any, Any]:
    """Returns (Triton's descriptor class, the shared-memory layout of a block [block_rows, size])."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    elements = {
        torch.bfloat16: language.bfloat16,
        torch.float16: language.float16,
        torch.float8_e4m3fn: language.float8e4nv,
    }
    return TensorDescriptor, language.NVMMASharedLayout.get_default_for([block_rows, size], elements[dtype])
