"""Launching a kernel before the one in front of it has ended (programmatic dependent launch; Hopper and later).

What a launch costs, some microseconds of an idle chip, then passes while the kernel before it still works.  A kernel
that is launched so
- lets the next one start, at once where its own programs are few: that one waits in its turn;
- may meanwhile ask for what it will read, weights, to come into the L2;
- and waits, in every program, before it reads or writes anything.

To wait is to wait until the kernel in front has ended, every program of it and what it wrote.  That one has waited for
its own predecessor, or, launched the ordinary way, started after it: so what ran before it has ended as well, and it
does not matter who among the neighbours is dependent (tests/kernels/test_pdl.py).

The launcher passes `**early(chip(x))`, which sets DEPENDENT, and the kernel begins with `pdl_wait_if(DEPENDENT)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from espalier.kernels.runtime.launch import Chip, kernel

if TYPE_CHECKING:
    import triton.language as tl

HOPPER = (9, 0)


def early(on: Chip) -> dict[str, Any]:
    """Arguments of a launch: whether the kernel is a dependent one, for the kernel and for Triton."""
    return {"DEPENDENT": True, "launch_pdl": True} if on.capability >= HOPPER else {"DEPENDENT": False}


@kernel
def ask_for(pointers):
    """Bring lines into the L2; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@kernel
def pdl_trigger(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@kernel
def pdl_wait(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@kernel
def pdl_wait_if(DEPENDENT: tl.constexpr):
    pdl_trigger(DEPENDENT)
    pdl_wait(DEPENDENT)
