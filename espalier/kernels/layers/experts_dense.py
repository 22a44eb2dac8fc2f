"""The inner loops of the expert product (experts.py) over dense weights."""

from __future__ import annotations

import triton.language as tl

from espalier.kernels.runtime.jit import kernel


@kernel
def dense_gate_up(
    x_ptrs, gate_ptrs, up_ptrs, inside, num_in,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(gate, up) [BLOCK_OUT, ROWS]: two products with the same rows of x [ROWS, num_in], where `inside` is set.

    The pointers are of the first BLOCK_IN columns: x_ptrs [BLOCK_IN, ROWS], the others [BLOCK_OUT, BLOCK_IN].
    """
    ks = tl.arange(0, BLOCK_IN)
    gate = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    up = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    for k in range(0, num_in, BLOCK_IN):
        # Weights are loaded first: their addresses do not depend on the rows, which are still being loaded.
        if EVEN_IN:
            w_gate = tl.load(gate_ptrs)
            w_up = tl.load(up_ptrs)
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        else:
            left = num_in - k
            w_gate = tl.load(gate_ptrs, mask=ks[None, :] < left, other=0.0)
            w_up = tl.load(up_ptrs, mask=ks[None, :] < left, other=0.0)
            x = tl.load(x_ptrs, mask=inside[None, :] & (ks[:, None] < left), other=0.0)
        gate = tl.dot(w_gate, x, gate, input_precision="ieee", out_dtype=EXACT)
        up = tl.dot(w_up, x, up, input_precision="ieee", out_dtype=EXACT)
        gate_ptrs += BLOCK_IN
        up_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    return gate, up


@kernel
def dense_product(
    x_ptrs, w_ptrs, inside, num_in, k_end,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """[BLOCK_OUT, ROWS], as dense_gate_up.  k_end: 0, for no product, or num_in."""
    ks = tl.arange(0, BLOCK_IN)
    acc = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    for k in range(0, k_end, BLOCK_IN):
        if EVEN_IN:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        else:
            left = num_in - k
            w = tl.load(w_ptrs, mask=ks[None, :] < left, other=0.0)
            x = tl.load(x_ptrs, mask=inside[None, :] & (ks[:, None] < left), other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee", out_dtype=EXACT)
        w_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    return acc
