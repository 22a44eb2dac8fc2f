"""Launching a kernel before the one in front of it has ended (programmatic dependent launch; Hopper and later).

What a launch costs, some microseconds of an idle chip, then passes while the kernel before it still works.  A kernel
that is launched so
- lets the next one start, at once: that one waits in its turn;
- may read meanwhile what no kernel writes, weights;
- and waits, in every program, before it reads or writes anything else.

The launcher passes `**early(chip(x))`, which sets DEPENDENT, and the kernel begins with `after_previous(DEPENDENT)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from espalier.kernels.launch import Chip, kernel

if TYPE_CHECKING:
    import triton.language as tl

HOPPER = (9, 0)


def early(on: Chip) -> dict[str, Any]:
    """Arguments of a launch: whether the kernel is a dependent one, for the kernel and for Triton."""
    return {"DEPENDENT": True, "launch_pdl": True} if on.capability >= HOPPER else {"DEPENDENT": False}


@kernel
def let_next_start(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@kernel
def wait_for_previous(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@kernel
def after_previous(DEPENDENT: tl.constexpr):
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
