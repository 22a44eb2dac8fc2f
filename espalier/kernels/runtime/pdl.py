"""Programmatic dependent launch (PDL; Hopper and later): a kernel starts before its predecessor has ended.

Without PDL, the chip idles for some microseconds at each launch.  With PDL, a kernel is launched during the
predecessor's work.  A kernel that is launched with PDL does three things:
- trigger: the kernel lets the next kernel start.  The next kernel's programs begin when SMs are free, and then wait.
- prefetch (optional): before its wait, the kernel may prefetch weights into the L2.  No kernel writes weights.
- wait: every program waits before it reads or writes anything else.

The wait ends when every program of the predecessor has ended and its writes are visible.  The predecessor has waited in
the same way for the kernel before it.  So after its wait, a kernel may rely on all earlier kernels.  Kernels with and
without PDL can be mixed in any order (tests/kernels/test_pdl.py).

If a kernel triggers only after its wait, all kernels before it have ended by then.  So the next kernel may read their
results before its own wait (kernels/layers/experts.py, kernels/attention/merge.py).

The launcher passes `**pdl_arguments(chip(x))`, which sets the constexpr argument USE_PDL.  Most kernels begin with
`pdl_trigger_and_wait(USE_PDL)`.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import HOPPER, Chip


def pdl_arguments(gpu: Chip) -> dict[str, Any]:
    """Returns the launch arguments that turn PDL on or off: USE_PDL for the kernel, launch_pdl for Triton."""
    return {"USE_PDL": True, "launch_pdl": True} if gpu.capability >= HOPPER else {"USE_PDL": False}


@kernel
def prefetch(pointers):
    """Prefetch the L2 lines of `pointers`, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@kernel
def pdl_trigger(USE_PDL: tl.constexpr):
    """Let the next kernel start."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@kernel
def pdl_wait(USE_PDL: tl.constexpr):
    """Wait until the previous kernel has ended."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@kernel
def pdl_trigger_and_wait(USE_PDL: tl.constexpr):
    """Let the next kernel start, then wait until the previous kernel has ended."""
    pdl_trigger(USE_PDL)
    pdl_wait(USE_PDL)
