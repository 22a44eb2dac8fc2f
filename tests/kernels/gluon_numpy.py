"""Runs Hopper's kernels of few rows in NumPy, from their own functions: Triton's interpreter does not run Gluon.

Layouts are left out, as no value depends on them; that values need not move between threads, the compiler checks.
Copies to shared memory land either at once or as late as a wait allows, so a wait or a stage that is wrong shows.
"""

import re
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental.gluon import language as gl

from espalier.kernels.hopper import nibbles, quantised_products
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.runtime.jit import GluonKernelFunction

# What shared memory holds before a copy: NaN, also as the halves of a word.
UNWRITTEN = 0x7FFF7FFF
BFLOAT16 = "bfloat16"


def rounded(values: np.ndarray) -> np.ndarray:
    """To bfloat16, in float32."""
    return torch.from_numpy(np.asarray(values, np.float32)).bfloat16().float().numpy()


class Values(np.ndarray):
    """A tensor of Gluon.  bfloat16 is float32 here."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> "Values":
        if bitcast and dtype is BFLOAT16:
            return values((np.asarray(self, np.uint32) << 16).view(np.float32))
        if bitcast and dtype is np.uint16:
            return values((np.ascontiguousarray(self, np.float32).view(np.uint32) >> 16).astype(np.uint16))
        return values(rounded(self)) if dtype is BFLOAT16 else self.astype(dtype)

    def permute(self, *dims: Any) -> "Values":
        return self.transpose(*dims)

    def index(self, stage: int) -> "Values":
        return self[stage]

    def slice(self, start: int, length: int, dim: int) -> "Values":
        return self.take(range(start, start + length), dim)

    def load(self, layout: Any = None) -> "Values":
        return self.copy()


def values(array: Any) -> Values:
    return np.asarray(array).view(Values)


class Pointer:
    """Pointers into a flat array, at offsets."""

    def __init__(self, array: np.ndarray, offsets: Any = 0, element: Any = BFLOAT16) -> None:
        self.array, self.offsets, self.dtype = array, np.asarray(offsets), SimpleNamespace(element_ty=element)

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.array, self.offsets + np.asarray(offsets), self.dtype.element_ty)

    def read(self, mask: Any = True) -> np.ndarray:
        return np.where(mask, self.array[np.where(mask, self.offsets, 0)], self.array.dtype.type(0))


class Copies:
    """Asynchronous copies to shared memory, by groups."""

    def __init__(self, is_late: bool) -> None:
        self.is_late, self.open, self.groups = is_late, list[Callable[[], None]](), list[list[Callable[[], None]]]()

    def async_copy_global_to_shared(self, memory: np.ndarray, source: Pointer, mask: Any = True) -> None:
        copied = np.broadcast_to(source.read(mask), memory.shape)
        memory[...] = np.array(UNWRITTEN, np.uint32).view(memory.dtype)
        self.open.append(lambda: np.copyto(memory, copied))
        if not self.is_late:
            self.open.pop()()

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, pending: int) -> None:
        while len(self.groups) > pending:
            for land in self.groups.pop(0):
                land()


def _assembly(text: str, _: str, given: list[Values], *__: Any, **___: Any) -> Values:
    """The two instructions of nibbles.py: a choice of bytes, and a multiply-add of pairs of bfloat16."""
    if selected := re.match(r"prmt.b32 \$0, \$1, 0, 0x(\w+);$", text):
        digits = [int(digit, 16) for digit in reversed(selected[1])]
        found = [(given[0] >> 8 * digit & 0xFF) << 8 * to for to, digit in enumerate(digits) if digit < 4]
        return values(np.bitwise_or.reduce(found))
    pair = re.search(r"\{low, high\}, \$2; mov.b32 f, \{(\w+), (\w+)\};fma.rn.bf16x2 \$0, \$1, f, \$3;", text)
    assert pair is not None, text
    bits, factors, offset = ([(each >> by).to(BFLOAT16, bitcast=True) for by in (0, 16)] for each in given)
    halves = [bits[half] * factors[pair[half + 1] == "high"] + offset[half] for half in (0, 1)]
    low, high = (values(rounded(half)).to(np.uint16, bitcast=True).astype(np.uint32) for half in halves)
    return low | high << 16


def _unwritten(dtype: Any, shape: list[int], _: Any) -> Values:
    return values(np.full(shape, UNWRITTEN, np.uint32)).view(np.float32 if dtype is BFLOAT16 else dtype)


def _store(target: Pointer, given: Values, mask: np.ndarray) -> None:
    mask = np.broadcast_to(mask, given.shape)
    target.array[np.broadcast_to(target.offsets, given.shape)[mask]] = given[mask]


def _language(program: tuple[int, int], programs: tuple[int, int]) -> SimpleNamespace:
    layouts = [name for name in dir(gl) if name.endswith("Layout")]
    return SimpleNamespace(
        **dict.fromkeys(layouts, lambda *_: None),
        bfloat16=BFLOAT16,
        float32=np.float32,
        int64=np.int64,
        uint16=np.uint16,
        uint32=np.uint32,
        static_range=range,
        inline_asm_elementwise=_assembly,
        program_id=lambda dim: values(program[dim]),
        num_programs=lambda dim: programs[dim],
        cdiv=lambda a, b: -(-a // b),
        minimum=lambda a, b: values(np.minimum(a, b)),
        where=lambda condition, a, b: values(np.where(condition, a, b)),
        arange=lambda begin, end, layout: values(np.arange(begin, end)),
        expand_dims=lambda given, dim: values(np.expand_dims(given, dim)),
        zeros=lambda shape, dtype, layout: values(np.zeros(shape, dtype)),
        full=lambda shape, value, dtype, layout: values(np.full(shape, value, dtype)),
        split=lambda given: (given[..., 0], given[..., 1]),
        join=lambda a, b: values(np.stack([a, b], -1)),
        convert_layout=lambda given, layout, assert_trivial=False: given,
        load=lambda pointer: values(pointer.read()),
        store=_store,
        allocate_shared_memory=_unwritten,
    )


def _functions(language: SimpleNamespace, copies: Copies) -> dict[str, Any]:
    """The functions of the kernels' modules, with NumPy in place of Gluon."""
    found: dict[str, Any] = {}
    for name, value in (vars(nibbles) | vars(quantised_products)).items():
        is_kernel = isinstance(value, GluonKernelFunction)
        found[name] = FunctionType(value.fn.__code__, found, name) if is_kernel else value
    found |= {"gl": language, "pdl_wait": lambda _: None, "pdl_trigger": lambda _: None}
    found["hopper"] = SimpleNamespace(async_copy=copies, mma_v2=lambda a, x, part: values(part + a @ x))
    found["silu_and_multiply"] = lambda gate, up: values(F.silu(torch.from_numpy(np.asarray(gate))).numpy() * up)
    return found


def _pointer(tensor: Tensor | None) -> Pointer | None:
    if tensor is None:
        return None
    array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().ravel()
    return Pointer(array.view(np.uint32) if tensor.dtype == torch.int32 else array)


def hopper_linear(
    x: Tensor, weight: QuantisedMatrix, bias: Tensor | None, splits: int, gated: bool, stages: int, is_late: bool
) -> Tensor:
    """hopper_linear_kernel: [splits, rows, out], in float32 or, without splits, bfloat16."""
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    blocks, tile = -(-num_out // (32 if gated else 64)), 8 if len(x) <= 8 else 16
    out = Pointer(np.full(splits * len(x) * num_out, np.nan, np.float32), 0, BFLOAT16 if splits == 1 else np.float32)
    given = [_pointer(each) for each in (x, *quantised_products.weight_pointers(weight), bias)]
    for program in np.ndindex(blocks, splits):
        kernel = _functions(_language(program, (blocks, splits)), Copies(is_late))["hopper_linear_kernel"]
        sizes = (len(x), num_out, x.shape[1], x.stride(0))
        kernel(*given, out, *sizes, weight.code, tile, stages, gated, x.shape[1] % 256 == 0, True)
    return torch.from_numpy(out.array).view(splits, len(x), num_out)
