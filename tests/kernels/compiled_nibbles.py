"""Compiles the linear layer of 4-bit weights for Hopper, and prints, as JSON, what its loop consists of.

A program of its own: where kernels are interpreted, nothing compiles.  Compiling needs no GPU.
"""

import json
import re
import sys
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from espalier.kernels.hopper import quantised_products as hopper_experts
from espalier.kernels.hopper.plans import BLOCK_IN, BLOCK_OUT, WARPS
from espalier.kernels.hopper.quantised_products import hopper_linear_kernel
from espalier.kernels.layers.linear_quantised import _linear_quantised_kernel
from espalier.kernels.layers.quantised_plans import nibble_plan_by_rule
from espalier.kernels.layers.quantised_tile import FORMAT_CODES
from tests.kernels.compiled import CHIP, machine_code

KINDS = {"x_ptr": "*bf16", "codes_ptr": "*i32", "zero_points_ptr": "*u8", "out_ptr": "*bf16"}
# Of experts, whose pairs are sorted.
TILE_KINDS = dict.fromkeys(("pair_order_ptr", "pair_ends_ptr", "tile_experts_ptr", "tile_begins_ptr"), "*i32")
TILE_KINDS |= {"live_ptr": "*i1", "weights_ptr": "*fp32", "bias_ptr": "*bf16"}
ALIGNED = (*KINDS, "scales_ptr", "num_out", "num_in", "x_stride")
SHAPE = (28672, 4096)


def compiled(code: str, group: int, rows: int, zeros: bool, even: bool) -> dict:
    plan = nibble_plan_by_rule(max(rows, 16), 1, *SHAPE, code, 1, CHIP)
    constants = {"x_scales_ptr": None, "bias_ptr": None, "CODE": FORMAT_CODES[code], "GROUP_SIZE": group}
    constants |= {"BLOCK_ROWS": max(rows, 16), "BLOCK_OUT": plan.block_out, "BLOCK_IN": plan.block_in}
    constants |= {"INPUT_GROUP_SIZE": 0, "EVEN_OUT": True, "EVEN_IN": even, "IS_GATED": True, "PREFETCHED_LINES": 4}
    constants |= {"ROWS_PER_SCALE": 1, "USE_PDL": True}
    constants |= {} if zeros else {"zero_points_ptr": None}
    function = _linear_quantised_kernel
    kinds = dict.fromkeys(constants, "constexpr") | {
        name: kind for name, kind in KINDS.items() if name not in constants
    }
    kinds["scales_ptr"] = {"mxfp4": "*u8", "nvfp4": "*i16"}.get(code, "*bf16")
    if code == "nvfp4":
        kinds["zero_points_ptr"] = "*fp64"
    source = ASTSource(
        fn=function,
        signature={name: kinds.get(name, "i32") for name in function.arg_names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in ALIGNED},
    )
    made = compiled_source(source, {"num_warps": plan.warps, "num_stages": plan.stages})
    return {"case": [code, group, rows, zeros, even]} | counts(made, plan.block_out * plan.block_in // plan.warps)


def compiled_hopper(function: JITFunction, code: str, rows: int, zeros: bool, even: bool) -> dict:
    """Of a kernel for few rows."""
    constants = {"CODE": code, "ROWS": rows, "STAGES": 3, "EVEN_IN": even, "USE_PDL": True}
    constants |= {} if zeros else {"zero_points_ptr": None}
    if function is hopper_linear_kernel:
        constants |= {"IS_GATED": True, "bias_ptr": None}
    else:
        of_experts = {
            "ACTIVATION_KIND": "silu",
            "ALPHA": 1.702,
            "UP_OFFSET": 1.0,
            "LIMIT": 7.0,
            "IS_SORTED": True,
            "HAS_LIVE": True,
        }
        constants |= {name: value for name, value in of_experts.items() if name in function.arg_names}
    kinds = KINDS | TILE_KINDS | {"words_ptr": "*i32", "scales_ptr": "*bf16" if code == "int4" else "*i32"}
    kinds["zero_points_ptr"] = "*fp64" if code == "nvfp4" else "*u8"
    source = GluonASTSource(
        fn=function,
        signature={name: "constexpr" if name in constants else kinds.get(name, "i32") for name in function.arg_names},
        constexprs=constants,
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(function.arg_names)
            if name in (*ALIGNED, "words_ptr") and name not in constants
        },
    )
    made = compiled_source(source, {"num_warps": WARPS})
    return {"case": [code, 128, rows, zeros, even]} | counts(made, BLOCK_OUT * BLOCK_IN // WARPS)


def compiled_source(source, options: dict) -> Any:
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options | {"launch_pdl": True})


def counts(made, weights: int) -> dict:
    """weights: of a warp in a step."""
    loop = Counter(inner_loop(machine_code(made.asm["cubin"])))
    return {
        "a_weight": sum(loop.values()) / (weights / 32),
        "stores": sum(count for name, count in loop.items() if name.startswith(("STS", "STL", "LDL"))),
        "copies": sorted(name for name in loop if name.startswith("LDGSTS")),
        "products": sum(count for name, count in loop.items() if name.startswith(("HGMMA", "HMMA"))),
    }


def inner_loop(lines: list[str]) -> list[str]:
    """The names of the instructions of the longest loop without another in it."""
    code = [(int(found[1], 16), found[2]) for line in lines if (found := re.match(r"\s+/\*(\w+)\*/\s+(.*?);", line))]
    jumps = ((re.search(r"\bBRA\b.*?(0x\w+)", text), at) for at, text in code)
    loops = [(int(to[1], 16), at) for to, at in jumps if to and int(to[1], 16) < at]
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    begin, end = max(inner, key=lambda loop: loop[1] - loop[0])
    return [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0] for at, text in code if begin <= at <= end]


# (code, group, rows, zero points or factors of rows, whether steps divide the columns)
CASES = [
    ("int4", 128, 64, True, True),
    ("int4", 32, 16, True, True),
    ("mxfp4", 32, 16, False, False),
    ("nvfp4", 16, 16, True, False),
]
# (kernel, code, rows of the tile, zero points, whether steps divide the columns)
HOPPER = [
    (hopper_linear_kernel, "int4", 16, True, False),
    (hopper_linear_kernel, "mxfp4", 8, False, True),
    (hopper_linear_kernel, "nvfp4", 8, True, False),
    (hopper_experts.hopper_gate_up_kernel, "mxfp4", 8, False, False),
    (hopper_experts.hopper_down_kernel, "int4", 16, True, True),
]
# Other products of the same values, for the marker `full`.
MORE_CASES = [("int4", 128, 16, False, True), ("mxfp4", 32, 64, False, True), ("nvfp4", 16, 64, True, True)]
MORE_HOPPER = [
    (hopper_linear_kernel, "int4", 8, False, True),
    (hopper_linear_kernel, "mxfp4", 16, False, False),
    (hopper_experts.hopper_down_kernel, "nvfp4", 16, True, True),
]


if __name__ == "__main__":
    if "full" in sys.argv:
        CASES, HOPPER = MORE_CASES, MORE_HOPPER
    print(
        json.dumps(
            {"plain": [compiled(*case) for case in CASES], "hopper": [compiled_hopper(*case) for case in HOPPER]}
        )
    )
