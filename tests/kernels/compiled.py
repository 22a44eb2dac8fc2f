"""Prints, as JSON, how deep the attention kernels' loops are pipelined for Hopper and the shared memory that they need.

A program of its own: where kernels are interpreted, nothing compiles.  Compiling needs no GPU.
"""

import json
import re
import subprocess
from itertools import pairwise
from tempfile import NamedTemporaryFile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from espalier.kernels.attention.hopper import HopperBlocks, _hopper_attention_kernel, hopper_constants
from espalier.kernels.attention.latent_attention import _constants as latent_constants
from espalier.kernels.attention.latent_attention import _latent_attention_kernel, choose_latent
from espalier.kernels.attention.tree_attention import _constants, _tree_attention_kernel, choose
from espalier.kernels.attention.work_items import ALL, COUNTED, NONE
from espalier.kernels.runtime.launch import Chip, Kernel

HOPPER = Chip(227 * 1024, 132, (9, 0))
VALUES = ("q_ptr", "k_ptr", "v_ptr", "new_k_ptr", "new_v_ptr", "out_ptr")
FLOATS = ("lse_ptr", "part_ptr", "part_lse_ptr")
NARROW = ("table_ptr", "item_ptr", "start_ptr")
WIDE = ("position_ptr", "row_position_ptr", "word_ptr")
STRIDES = ("q_b", "q_q", "q_h", "k_row", "k_h", "v_row", "v_h", *(f"new_{x}_{d}" for x in "kv" for d in "brh"))
STRIDES += ("row_stride", "new_b", "new_r")


def compiled(queries: int, nodes: int, page_size: int, window: int, size: int = 128, groups: int = 4) -> dict:
    blocks = choose(HOPPER, queries * groups, queries, size, size, torch.bfloat16)
    wide = nodes == 1 and queries * groups >= 8 * blocks.m
    constants = asked(nodes, page_size, window, groups, wide) | _constants(blocks, size, size, torch.bfloat16)
    options = {"num_warps": constants.pop("num_warps")}
    made = compile_for_hopper(_tree_attention_kernel, ASTSource, constants, options)
    shared = made.metadata.shared
    return {"blocks": vars(blocks), "shared": shared, "in_flight": list(in_flight(made.asm["ttgir"].splitlines()))}


def compiled_latent(heads: int, queries: int, nodes: int, page_size: int) -> dict:
    """Rows of 512 values and 64 rotated ones, as DeepSeek's models keep."""
    blocks = choose_latent(HOPPER, heads * queries, queries, 2 * 576, torch.bfloat16)
    wide = nodes == 1 and queries * heads >= 8 * blocks.m
    constants = latent_constants(blocks, 576, 512, torch.bfloat16) | {"HEADS": heads, "PAGE_SIZE": page_size}
    constants |= {"NODES": nodes, "WIDE": wide, "DEPENDENT": True}
    options = {"num_warps": constants.pop("num_warps")}
    made = compile_for_hopper(
        _latent_attention_kernel, ASTSource, constants, options, dict.fromkeys(("row_ptr", "new_ptr"), "*bf16")
    )
    return {
        "blocks": vars(blocks),
        "shared": made.metadata.shared,
        "held": blocks.held(HOPPER, 2 * 576),
        "in_flight": list(in_flight(made.asm["ttgir"].splitlines())),
    }


def compiled_hopper(
    blocks: HopperBlocks, nodes: int, page_size: int, window: int = 0, size: int = 128, groups: int = 4
) -> dict:
    constants = asked(nodes, page_size, window, groups, nodes == 1) | hopper_constants(blocks, size, True)
    known = NONE if window or blocks.groups == 1 else COUNTED if page_size % 64 else ALL
    constants |= {"STRAIGHT": known} | ({} if known else dict.fromkeys(("k_rows", "v_rows", "straight_ptr")))
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg")}
    layout = gl.NVMMASharedLayout.get_default_for([64, size], gl.bfloat16)
    rows = f"tensordesc<bf16[64, {size}],{layout!r}>"
    kinds = {"k_rows": rows, "v_rows": rows, "straight_ptr": "*i32"} if known else {}
    made = compile_for_hopper(_hopper_attention_kernel, GluonASTSource, constants, options, kinds)
    return {
        "blocks": vars(blocks),
        "window": window,
        "shared": made.metadata.shared,
        "held": blocks.held(size),
        "overlapping": list(overlapping(machine_code(made.asm["cubin"]))),
        "straight": known != NONE,
        "in_one_go": list(in_one_go(made.asm["ptx"])),
    }


def asked(nodes: int, page_size: int, window: int, groups: int, wide: bool) -> dict:
    """Constants that say what is computed, not how."""
    return {
        "KV_HEADS": 8,
        "GROUPS": groups,
        "PAGE_SIZE": page_size,
        "WINDOW": window,
        "NODES": nodes,
        "DIRECT": True,
        "WIDE": wide,
        "DEPENDENT": True,
    }


def compile_for_hopper(
    kernel: Kernel, source: type, constants: dict, options: dict, more: dict[str, str] | None = None
):
    function = kernel.compiled
    kinds = dict.fromkeys(constants, "constexpr") | dict.fromkeys(VALUES, "*bf16") | dict.fromkeys(FLOATS, "*fp32")
    kinds |= (
        dict.fromkeys(WIDE, "*i64")
        | {"table_ptr": "*i32", "item_ptr": "*i32", "start_ptr": "*i32", "scale": "fp32"}
        | (more or {})
    )
    handed = [(i, name) for i, name in enumerate(function.arg_names) if name not in constants]
    aligned = [i for i, name in handed if name.endswith("_ptr") or name in STRIDES]
    made = source(
        fn=function,
        signature={name: kinds.get(name, "i32") for name in function.arg_names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options | {"launch_pdl": True})


def machine_code(cubin: bytes) -> list[str]:
    """All of it, in the order of its addresses; what Triton itself hands out ends at 64 KB."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        lines = subprocess.run(dump, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]


def overlapping(lines: list[str]):
    """Exponentials that stand, in each loop over blocks, between the wait for scores and the wait for values."""
    waits = [i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line]
    for wait, following in pairwise([*waits, len(lines)]):
        if re.search(r"gsb0, 0x1\b", lines[wait]):
            yield sum("MUFU.EX2" in line for line in lines[wait:following])


def in_one_go(ptx: str):
    """Barriers of all loading warps in each loop that copies blocks in one go."""
    for piece in re.split(r"^\$L__BB\d+_\d+:", ptx, flags=re.MULTILINE):
        if "cp.async.bulk.tensor" in piece:
            yield len(re.findall(r"\bbar\.sync\b", piece))


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
    plain = [compiled(*case) for case in cases]
    one, two = HopperBlocks(1, 3, 2), HopperBlocks(2, 6, 1)
    hopper = [
        (one, 2, 256),
        (two, 2, 1),
        (two, 1, 16),
        (one, 2, 48),
        (HopperBlocks(1, 6, 1), 0, 64, 0, 64),
        (two, 2, 16, 4096),
        (two, 2, 64),
    ]
    latent = [(16, 1, 1, 64), (16, 2, 2, 1), (16, 16, 2, 16), (128, 1, 2, 64), (128, 64, 2, 256), (128, 512, 1, 64)]
    report = {
        "plain": plain,
        "hopper": [compiled_hopper(*case) for case in hopper],
        "latent": [compiled_latent(*case) for case in latent],
    }
    print(json.dumps(report))
