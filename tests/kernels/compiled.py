"""Prints, as JSON, how deep the attention kernel's loops are pipelined for Hopper and the shared memory that it needs.

A program of its own: where kernels are interpreted, nothing compiles.  Compiling needs no GPU.
"""

import json
import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from espalier.kernels.launch import Chip
from espalier.kernels.tree_attention import _tree_attention_kernel, choose

HOPPER = Chip(227 * 1024, 132, (9, 0))
VALUES = ("q_ptr", "k_ptr", "v_ptr", "new_k_ptr", "new_v_ptr", "out_ptr")
FLOATS = ("lse_ptr", "part_ptr", "part_lse_ptr")
WIDE = ("table_ptr", "position_ptr", "row_position_ptr", "word_ptr")
STRIDES = ("q_b", "q_q", "q_h", "k_row", "k_h", "v_row", "v_h", *(f"new_{x}_{d}" for x in "kv" for d in "brh"))


def compiled(queries: int, nodes: int, page_size: int, window: int, size: int = 128, groups: int = 4) -> dict:
    blocks = choose(HOPPER, queries * groups, queries, size, size, torch.bfloat16)
    constants = {
        "KV_HEADS": 8,
        "GROUPS": groups,
        "K_SIZE": size,
        "V_SIZE": size,
        "PAGE_SIZE": page_size,
        "WINDOW": window,
        "NODES": nodes,
        "DIRECT": True,
        "WIDE": nodes == 1 and queries * groups >= 8 * blocks.m,
        "PRECISION": "tf32",
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_R": blocks.r,
        "BLOCK_K": size,
        "BLOCK_V": size,
        "STAGES": blocks.stages,
        "DEPENDENT": True,
    }
    function = _tree_attention_kernel.compiled
    kinds = dict.fromkeys(constants, "constexpr") | dict.fromkeys(VALUES, "*bf16") | dict.fromkeys(FLOATS, "*fp32")
    kinds |= dict.fromkeys(WIDE, "*i64") | {"item_ptr": "*i32", "start_ptr": "*i32", "scale": "fp32"}
    aligned = [i for i, name in enumerate(function.arg_names) if name.endswith("_ptr") or name in STRIDES]
    source = ASTSource(
        fn=function,
        signature={name: kinds.get(name, "i32") for name in function.arg_names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": blocks.warps, "launch_pdl": True}
    )
    shared = made.metadata.shared
    return {"blocks": vars(blocks), "shared": shared, "in_flight": list(in_flight(made.asm["ttgir"].splitlines()))}


def in_flight(lines: list[str]):
    """Copies that each innermost loop leaves under way while it works."""
    for i, line in enumerate(lines):
        if "scf.for" in line and not any("scf.for" in inner for inner in body(lines, i)[1:]):
            yield [int(n) for n in re.findall(r"async_wait[^{]*\{num = (\d+)", "\n".join(body(lines, i)))]


def body(lines: list[str], at: int) -> list[str]:
    indent = len(lines[at]) - len(lines[at].lstrip())
    end = next(i for i in range(at, len(lines)) if lines[i].startswith(" " * indent + "}"))
    return lines[at:end]


if __name__ == "__main__":
    cases = [(8, 2, 16, 0), (8, 2, 256, 0), (1, 1, 16, 0), (64, 2, 1, 0), (2048, 1, 16, 0), (8, 2, 16, 4096)]
    print(json.dumps([compiled(*case) for case in cases]))
