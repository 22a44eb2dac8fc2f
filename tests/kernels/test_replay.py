"""Programs that repeat what others did (tests/replay.py) give what each gives alone, whatever it decides."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from espalier.kernels.runtime.jit import kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter, on the CPU")

IN_PYTHON: list[None] = []


def seen() -> None:
    """Called by a kernel's Python code, which repeated programs do not run."""
    IN_PYTHON.append(None)


@pytest.fixture
def in_python(kernel_device):
    IN_PYTHON.clear()
    return IN_PYTHON


@kernel
def _squared(x):
    return x * x


@kernel
def _rows_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    seen()
    row = tl.program_id(0)
    column = tl.arange(0, SIZE)
    x = tl.load(x_ptr + row * SIZE + column)
    best = tl.argmax(x, 0)
    running = tl.cumsum(_squared(x), 0)
    tl.store(out_ptr + row * SIZE + column, tl.where(column == best, -running, running))


def test_programs_that_decide_nothing_are_all_repeated(in_python):
    x = torch.arange(40.0).view(5, 8).roll(3, 1)
    out = torch.zeros(5, 8)
    _rows_kernel[(5,)](x, out, SIZE=8)
    expected = (x * x).cumsum(1)
    expected[torch.arange(5), x.argmax(1)] *= -1
    assert torch.equal(out, expected) and len(in_python) == 1


@kernel
def _decisions_kernel(lengths_ptr, out_ptr):
    """out: the sum of the numbers below a length; of long ones their number of halvings, as a negative number."""
    seen()
    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    total = tl.zeros((1,), tl.int64)
    if length > 10:
        while length > 1:
            length = length // 2
            total -= 1
    else:
        for i in range(length):
            total += i
    tl.store(out_ptr + row + tl.arange(0, 1), total)


def test_each_outcome_of_decisions_is_recorded_once(in_python):
    lengths = torch.tensor([3, 16, 0, 3, 5, 16, 17, 40, 0, 5, 32])
    out = torch.zeros_like(lengths)
    _decisions_kernel[(len(lengths),)](lengths, out)
    assert out.tolist() == [3, -4, 0, 3, 10, -4, -4, -5, 0, 10, -5]
    # 3, 16, 0, 5 and 40: 17 is halved as often as 16, and 32 as 40.
    assert len(in_python) == 5


@kernel
def _loop_kernel(starts_ptr, out_ptr):
    """Each program its own part of a row, from a start and in steps that it knows by its number alone."""
    seen()
    program = tl.program_id(0)
    for i in range(tl.load(starts_ptr + program), tl.load(starts_ptr + program + 1), 2):
        tl.store(out_ptr + i, program * 100 + i)


def test_loops_of_equal_lengths_are_the_same_whatever_their_starts(in_python):
    starts = torch.tensor([0, 4, 7, 11, 11], dtype=torch.int32)
    out = torch.full((12,), -1, dtype=torch.int32)
    _loop_kernel[(4,)](starts, out)
    assert out.tolist() == [0, -1, 2, -1, 104, -1, 106, 207, -1, 209, -1, -1]
    assert len(in_python) == 2


@kernel
def _chain_kernel(values_ptr, counts_ptr):
    """Reads what the program before wrote."""
    program = tl.program_id(0)
    tl.store(values_ptr + program + 1, tl.load(values_ptr + program) * 2 + tl.load(counts_ptr + 1))
    if tl.atomic_add(counts_ptr, 3) % 2 == 1:
        tl.store(values_ptr + program + 1, -tl.load(values_ptr + program + 1))
    tl.store(counts_ptr + 1, 100)
    tl.atomic_add(counts_ptr + 1, 10)


def test_memory_is_read_and_written_anew(kernel_device):
    values, counts = torch.tensor([1, 0, 0, 0, 0]), torch.zeros(2, dtype=torch.int32)
    _chain_kernel[(4,)](values, counts)
    assert values.tolist() == [1, 2, -114, -118, 126] and counts.tolist() == [12, 110]


@kernel
def _grid_kernel(out_ptr):
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(out_ptr + place, place + 1)


def test_programs_of_every_place_run_in_order(kernel_device):
    out = torch.zeros(24, dtype=torch.int32)
    _grid_kernel[(2, 3, 4)](out)
    assert out.tolist() == list(range(1, 25))


def outside(x):
    """A value that no operation of the interpreter made."""
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    return core.tensor(TensorHandle(x.handle.data + 5, x.handle.dtype), x.type)


@kernel
def _outside_kernel(out_ptr):
    seen()
    program = tl.program_id(0)
    tl.store(out_ptr + program, outside(program))


def test_what_is_not_recorded_is_run_each_time(in_python):
    out = torch.zeros(3, dtype=torch.int32)
    _outside_kernel[(3,)](out)
    assert out.tolist() == [5, 6, 7] and len(in_python) == 3
