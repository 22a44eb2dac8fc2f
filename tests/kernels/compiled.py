"""Compiles the attention kernels for Hopper and prints, as JSON, how their loops are pipelined and their shared memory.

It runs as its own process, because a process with TRITON_INTERPRET set does not compile.  Compiling needs no GPU.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from espalier.kernels.attention.kv_splits import _count_contiguous_blocks_kernel, _kv_splits_kernel
from espalier.kernels.attention.latent_attention import _constexpr_arguments as latent_constants
from espalier.kernels.attention.latent_attention import _latent_attention_kernel
from espalier.kernels.attention.merge import _merge_splits_kernel
from espalier.kernels.attention.tree_attention import _constexpr_arguments, _tree_attention_kernel
from espalier.kernels.attention.triton_config import choose_triton_config, choose_triton_latent_config
from espalier.kernels.attention.work_items import TMA_ALL, TMA_COUNTED, TMA_NONE
from espalier.kernels.hopper import gated as hopper_gated
from espalier.kernels.hopper.attention import hopper_attention_arguments, hopper_attention_kernel
from espalier.kernels.hopper.config import (
    FP8_RAW_STAGES,
    FP8_STAGES,
    LATENT_FEW_STAGES,
    HopperConfig,
    HopperLatentConfig,
    HopperLatentFewQueriesConfig,
)
from espalier.kernels.hopper.latent import hopper_latent_arguments, hopper_latent_kernel
from espalier.kernels.hopper.latent_few import hopper_latent_few_arguments, hopper_latent_few_kernel
from espalier.kernels.runtime.launch import Chip
from tests.kernels.machine_code import disassembled

CHIP = Chip(227 * 1024, 132, (9, 0))
BFLOAT16 = ("q_ptr", "k_ptr", "v_ptr", "staged_k_ptr", "staged_v_ptr", "out_ptr")
FLOAT32 = ("lse_ptr", "partial_ptr", "partial_lse_ptr", "sink_ptr", "k_scale_ptr", "v_scale_ptr", "row_scale_ptr")
ROWS = ("k_ptr", "v_ptr", "staged_k_ptr", "staged_v_ptr", "row_ptr", "staged_ptr")
FP8_ROWS = dict.fromkeys(ROWS, "*fp8e4nv")
INT32 = ("page_table_ptr", "splits_ptr", "split_starts_ptr")
INT64 = ("length_ptr", "position_ptr", "row_position_ptr", "ancestor_bits_ptr")
STRIDES = ("q_stride_b", "q_stride_q", "q_stride_h", "k_stride_row", "k_stride_h", "v_stride_row", "v_stride_h")
STRIDES += (
    *(f"staged_{x}_stride_{d}" for x in "kv" for d in "brh"),
    "row_stride",
    "staged_stride_b",
    "staged_stride_r",
)
# The instruction that makes the writes of threads to shared memory visible to the tensor cores.
FENCE = "FENCE.VIEW.ASYNC"


def compiled(
    queries: int,
    nodes: int,
    page_size: int,
    window: int,
    size: int = 128,
    group_size: int = 4,
    sink: bool = False,
    fp8: bool = False,
    softcap: float = 0.0,
) -> dict:
    config = choose_triton_config(CHIP, queries * group_size, queries, size, size, torch.bfloat16)
    longest_first = nodes == 1 and queries * group_size >= 8 * config.block_m
    constants = problem_constants(nodes, page_size, window, group_size, longest_first, sink)
    constants |= {"SOFTCAP": softcap} | _constexpr_arguments(config, size, size, torch.bfloat16)
    constants |= {} if fp8 else dict.fromkeys(("k_scale_ptr", "v_scale_ptr"))
    options = {"num_warps": constants.pop("num_warps")}
    kinds = {name: kind for name, kind in FP8_ROWS.items() if fp8 and name in BFLOAT16}
    made = compile_for_hopper(_tree_attention_kernel, ASTSource, constants, options, kinds)
    shared = made.metadata.shared
    return {"config": vars(config), "shared": shared, "in_flight": list(in_flight(made.asm["ttgir"].splitlines()))}


def compiled_latent(heads: int, queries: int, nodes: int, page_size: int) -> dict:
    """Rows of 512 latent and 64 RoPE values, as in DeepSeek's models."""
    config = choose_triton_latent_config(CHIP, heads * queries, queries, 2 * 576, torch.bfloat16)
    longest_first = nodes == 1 and queries * heads >= 8 * config.block_m
    constants = latent_constants(config, 576, 512, torch.bfloat16) | {"HEADS": heads, "PAGE_SIZE": page_size}
    constants |= {"STAGED_KIND": nodes, "LONGEST_FIRST": longest_first, "USE_PDL": True, "row_scale_ptr": None}
    options = {"num_warps": constants.pop("num_warps")}
    kinds = dict.fromkeys(("row_ptr", "staged_ptr"), "*bf16")
    made = compile_for_hopper(_latent_attention_kernel, ASTSource, constants, options, kinds)
    return {
        "config": vars(config),
        "shared": made.metadata.shared,
        "expected_shared": config.shared_bytes(CHIP, 2 * 576, 0),
        "in_flight": list(in_flight(made.asm["ttgir"].splitlines())),
    }


def compiled_hopper(
    config: HopperConfig,
    nodes: int,
    page_size: int,
    window: int = 0,
    size: int = 128,
    group_size: int = 4,
    sink: bool = False,
) -> dict:
    fp8 = config.raw_stages > 0
    constants = problem_constants(nodes, page_size, window, group_size, nodes == 1, sink)
    constants |= {} if fp8 else dict.fromkeys(("k_scale_ptr", "v_scale_ptr"))
    constants |= hopper_attention_arguments(config, size, True)
    rows_of_block = constants["BLOCK_N"]
    kind = TMA_COUNTED if page_size % rows_of_block else TMA_ALL
    if window or config.warpgroups == 1:
        kind = TMA_NONE
    constants |= {"TMA_BLOCKS": kind}
    constants |= {} if kind else dict.fromkeys(("k_descriptor", "v_descriptor", "contiguous_ptr"))
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg")}
    layout = gl.NVMMASharedLayout.get_default_for([rows_of_block, size], gl.float8e4nv if fp8 else gl.bfloat16)
    rows = f"tensordesc<{'fp8e4nv' if fp8 else 'bf16'}[{rows_of_block}, {size}],{layout!r}>"
    kinds = {"k_descriptor": rows, "v_descriptor": rows, "contiguous_ptr": "*i32"} if kind else {}
    kinds |= {name: of_rows for name, of_rows in FP8_ROWS.items() if fp8 and name in BFLOAT16}
    made = compile_for_hopper(hopper_attention_kernel, GluonASTSource, constants, options, kinds)
    lines = machine_code(made.asm["cubin"])
    return {
        "config": vars(config),
        "window": window,
        "exponentials": rows_of_block // 2,
        "shared": made.metadata.shared,
        "expected_shared": config.shared_bytes(size),
        "overlapping": list(overlapping(lines)),
        "fences": list(fences(lines)),
        "fenced_by_writers": kind == TMA_ALL or fp8,
        "converted": converted(lines),
        "contiguous": kind != TMA_NONE,
        "tma_loop_barriers": list(tma_loop_barriers(made.asm["ptx"])),
    }


def compiled_hopper_latent(config: HopperLatentConfig, heads: int, nodes: int, page_size: int) -> dict:
    dtype, kind = (torch.float8_e4m3fn, "fp8e4nv") if config.raw_stages else (torch.bfloat16, "bf16")
    constants = hopper_latent_arguments(config, torch.zeros(64, 1, 576, dtype=dtype), page_size)
    kinds = dict.fromkeys(("row_ptr", "staged_ptr"), f"*{kind}") | described(constants, kind)
    constants |= {"HEADS": heads, "PAGE_SIZE": page_size, "STAGED_KIND": nodes, "LONGEST_FIRST": nodes == 1}
    constants |= {"USE_PDL": True} | ({} if config.raw_stages else {"row_scale_ptr": None})
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg")}
    made = compile_for_hopper(hopper_latent_kernel, GluonASTSource, constants, options, kinds)
    lines = machine_code(made.asm["cubin"])
    return {
        "config": vars(config),
        "shared": made.metadata.shared,
        "expected_shared": config.shared_bytes,
        "overlapping": list(overlapping(lines)),
        "fences": latent_fences(lines),
        "fenced_by_writers": constants["TMA_BLOCKS"] == TMA_ALL or config.raw_stages > 0,
        "contiguous": constants["TMA_BLOCKS"] != TMA_NONE,
        "tma_loop_barriers": list(tma_loop_barriers(made.asm["ptx"])),
    }


def compiled_hopper_latent_few(heads: int, nodes: int, page_size: int) -> dict:
    config = HopperLatentFewQueriesConfig(LATENT_FEW_STAGES)
    constants = hopper_latent_few_arguments(config, torch.zeros(64, 1, 576, dtype=torch.bfloat16), page_size)
    kinds = dict.fromkeys(("row_ptr", "staged_ptr"), "*bf16") | described(constants, "bf16")
    constants |= {"HEADS": heads, "PAGE_SIZE": page_size, "STAGED_KIND": nodes, "LONGEST_FIRST": True, "USE_PDL": True}
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg")}
    made = compile_for_hopper(
        hopper_latent_few_kernel, GluonASTSource, constants | {"row_scale_ptr": None}, options, kinds
    )
    lines = machine_code(made.asm["cubin"])
    stored, products = (
        [i for i, line in enumerate(lines) if re.search(opcode, line)] for opcode in (r"\bSTSM", r"HGMMA\S*.*tnspA")
    )
    between = lines[stored[0] : products[0]]
    return {
        "config": vars(config),
        "shared": made.metadata.shared,
        "expected_shared": config.shared_bytes,
        "spills": sum(re.search(r"\b(LDL|STL)\b", line) is not None for line in lines),
        "products": sum("HGMMA.64x16" in line for line in lines),
        "weights": [sum(FENCE in line for line in between), sum("BAR.SYNC" in line for line in between)],
        "contiguous": constants["TMA_BLOCKS"] != TMA_NONE,
        "tma_loop_barriers": list(tma_loop_barriers(made.asm["ptx"])),
    }


def compiled_hopper_gated() -> dict:
    gated = hopper_gated
    block = gated.BLOCK_ROWS, gated.BLOCK_OUT, gated.BLOCK_IN
    constants = dict(zip(("BLOCK_ROWS", "BLOCK_OUT", "BLOCK_IN"), block, strict=True))
    constants |= {"STAGES": gated.STAGES, "ROW_BLOCKS": gated.GROUP_ROW_BLOCKS, "USE_PDL": True}
    constants |= {"MULTIPLY_REGISTERS": gated.MULTIPLY_REGISTERS, "LOAD_REGISTERS": gated.LOAD_REGISTERS}
    blocks = {"x": (block[0], block[2]), "weight": (block[1], block[2]), "out": (block[0] // 2, block[1])}
    kinds = {
        f"{name}_descriptor": f"tensordesc<bf16[{rows}, {columns}],"
        f"{gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)!r}>"
        for name, (rows, columns) in blocks.items()
    }
    options = {"num_warps": 4, "maxnreg": gated.LAUNCH_REGISTERS}
    made = compile_for_hopper(gated._hopper_gated_kernel, GluonASTSource, constants, options, kinds)
    lines = machine_code(made.asm["cubin"])
    products = [i for i, line in enumerate(lines) if "HGMMA.64x256x16" in line]
    loops = {innermost_loop(lines, i) for i in products}
    return {
        "shared": made.metadata.shared,
        "spills": sum(re.search(r"\b(LDL|STL)\b", line) is not None for line in lines),
        "products": len(products),
        # The products that may be in flight at each wait inside a loop.
        "in_flight": [
            int(wait[1], 16)
            for start, end in loops
            for line in lines[start:end]
            if (wait := re.search(r"WARPGROUP.DEPBAR.LE gsb0, (0x\d+)", line))
        ],
        # Rounding one value at a time takes an eighth of the rate.
        "slow_conversions": sum(re.search(r"\bF2F\b", line) is not None for line in lines),
        "contiguous": True,
        "tma_loop_barriers": list(tma_loop_barriers(made.asm["ptx"])),
    }


def described(constants: dict, kind: str) -> dict[str, str]:
    """Take the TMA descriptors out of the constants.  Returns their types, by name."""
    kinds = {}
    for name in ("half_descriptor", "rope_descriptor"):
        if constants["TMA_BLOCKS"]:
            descriptor = constants.pop(name)
            shape = ", ".join(map(str, descriptor.block_shape))
            kinds[name] = f"tensordesc<{kind}[{shape}],{descriptor.layout!r}>"
    return kinds


# Of the merge: room for 4 of 32 splits, and for 8 of 8.
FEW = {"PAIRS": 4, "SMALL_BLOCK_SPLITS": 4, "BLOCK_SPLITS": 32}
FEW_ALONE = {"PAIRS": 2, "SMALL_BLOCK_SPLITS": 8, "BLOCK_SPLITS": 8}


def errors_of_small_kernels() -> dict[str, str]:
    """The error, if any, of compiling each kernel that plans or merges.  Triton's interpreter does not check types."""
    splits = {"STEP": 64, "MIN_ROWS": 128, "MAX_ROWS": 2048, "BLOCK_B": 4, "BLOCK_Q": 16}
    merge = {"HEADS": 32, "V_SIZE": 128, "BLOCK_V": 128, "USE_PDL": True}
    count = {"PAGE_SIZE": 16, "BLOCK_N": 64, "BLOCKS_PER_STEP": 64, "USE_PDL": True}
    cases = [
        *((_kv_splits_kernel, splits | {"WINDOW": window}, {}) for window in (0, 100)),
        # With a branch for few splits, and without.
        *(
            (_merge_splits_kernel, merge | few | {"HAS_SINK": sink}, {})
            for few in (FEW, FEW_ALONE)
            for sink in (False, True)
        ),
        (_count_contiguous_blocks_kernel, count, {"out_ptr": "*i32"}),
    ]
    errors = {}
    for kernel, constants, kinds in cases:
        try:
            compile_for_hopper(kernel, ASTSource, constants, {}, kinds)
        except CompilationError as error:
            errors[kernel.fn.__name__] = str(error)
    return errors


def problem_constants(
    nodes: int, page_size: int, window: int, group_size: int, longest_first: bool, sink: bool
) -> dict:
    """Constants of the problem, not of the launch configuration."""
    return {
        "KV_HEADS": 8,
        "GROUP_SIZE": group_size,
        "PAGE_SIZE": page_size,
        "WINDOW": window,
        "STAGED_KIND": nodes,
        "HAS_SINK": sink,
        "LONGEST_FIRST": longest_first,
        "USE_PDL": True,
    }


@contextmanager
def lowered_only() -> Iterator[None]:
    """Inside, kernels are lowered to LLVM IR, which fixes their loops and shared memory.  LLVM's own passes and ptxas,
    which take most of the time, are left out."""

    def without_machine_code(backend=None, stages=None, *_: object) -> tuple[str, str] | None:
        if stages is None:
            return ("lowered only", "lowered only")
        stages["ptx"] = named
        stages["cubin"] = lambda *_: b"\x7fELF"
        return None

    def named(llvm_ir: str, metadata: dict) -> str:
        metadata["name"] = re.search(r"^define ptx_kernel void @(\w+)", llvm_ir, re.MULTILINE)[1]
        return ""

    os.environ["DISABLE_LLVM_OPT"] = "1"
    triton.knobs.runtime.add_stages_inspection_hook = without_machine_code
    try:
        yield
    finally:
        del os.environ["DISABLE_LLVM_OPT"]
        triton.knobs.runtime.add_stages_inspection_hook = None


def compile_for_hopper(
    function: JITFunction, source: type, constants: dict, options: dict, more: dict[str, str] | None = None
):
    kinds = dict.fromkeys(constants, "constexpr") | dict.fromkeys(BFLOAT16, "*bf16") | dict.fromkeys(FLOAT32, "*fp32")
    kinds |= dict.fromkeys(INT64, "*i64") | dict.fromkeys(INT32, "*i32") | {"scale": "fp32"} | (more or {})
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
    """The SASS instructions in address order.  Triton's own disassembly ends at 64 KB."""
    lines = disassembled(cubin, triton.knobs.nvidia.cuobjdump, "-sass").splitlines()
    return [line for line in lines if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]


def overlapping(lines: list[str]):
    """For each loop over blocks, the number of exponentials between the wait for scores and the wait for `out`."""
    waits = [i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line]
    for wait, following in pairwise([*waits, len(lines)]):
        if re.search(r"gsb0, 0x1\b", lines[wait]):
            yield sum("MUFU.EX2" in line for line in lines[wait:following])


def fences(lines: list[str]):
    """For each loop over blocks, the number of fences that make the writes of threads visible to the tensor cores."""
    for start, end in loops_over_blocks(lines):
        yield sum(FENCE in inner for inner in lines[start:end])


def latent_fences(lines: list[str]) -> dict:
    """The numbers of such fences, by what threads have written; `converted` as the function of this name.

    queries: from the wait for their copy to the first product (Triton puts a fence there too); rows: from the start of
    each loop over blocks to its first product; values: the same in the second warpgroup's loop, and how many of these
    some blocks skip; weights: from each store to the arrival that hands them over.
    """

    def between(start: int, opcode: str) -> int:
        end = next(i for i in range(start, len(lines)) if opcode in lines[i])
        return sum(FENCE in line for line in lines[start:end])

    def where(opcode: str, start: int = 0, end: int | None = None) -> list[int]:
        return [i for i in range(start, end or len(lines)) if re.search(opcode, lines[i])]

    # Both operands are in shared memory.  The first warpgroup has its weights in registers.
    value_loop = innermost_loop(lines, where(r"HGMMA\.64x256\S* R\d+, gdesc")[0])
    skips = [(at, to) for at, to in jumps(lines) if value_loop[0] <= at < to <= value_loop[1]]
    skipped = [i for i in where(FENCE, *value_loop) if any(at < i < to for at, to in skips)]
    return {
        "queries": [between(i, "HGMMA") for i in where(r" DEPBAR\.LE SB0, 0x0\b")],
        "rows": [between(start, "HGMMA") for start, _ in loops_over_blocks(lines)],
        "values": [between(value_loop[0], "HGMMA"), len(skipped)],
        "weights": [between(i, "SYNCS.ARRIVE") for i in where(r"\bSTSM")],
        "converted": converted(lines),
    }


def converted(lines: list[str]) -> list[list[int]]:
    """For each store of converted FP8 rows, [the fences until the arrival that hands them over, barriers after it]."""
    found = []
    for unpack in [i for i, line in enumerate(lines) if "E4M3.UNPACK" in line][:1]:
        start, end = innermost_loop(lines, unpack)
        for store in [i for i in range(start, end) if re.search(r"\bSTS", lines[i])]:
            inner = lines[store : next(i for i in range(store, end) if "SYNCS.ARRIVE" in lines[i])]
            fences = [i for i, line in enumerate(inner) if FENCE in line]
            found.append([len(fences), sum("BAR.SYNC" in line for line in inner[max(fences, default=0) :])])
    return found


def jumps(lines: list[str]) -> list[tuple[int, int]]:
    """(from, to) of each branch."""
    at = {re.search(r"/\*([0-9a-f]{4,})\*/", line)[1].lstrip("0"): i for i, line in enumerate(lines)}
    branches = ((i, re.search(r"\bBRA 0x([0-9a-f]+)", line)) for i, line in enumerate(lines))
    return [(i, at[to[1]]) for i, to in branches if to and to[1] in at]


def innermost_loop(lines: list[str], i: int) -> tuple[int, int]:
    loops = [(to, at) for at, to in jumps(lines) if to <= i <= at and to < at]
    return min(loops, key=lambda loop: loop[1] - loop[0])


def loops_over_blocks(lines: list[str]) -> list[tuple[int, int]]:
    """(start, end) of each."""
    waits = [i for i, line in enumerate(lines) if re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x1\b", line)]
    return [innermost_loop(lines, i) for i in waits]


def tma_loop_barriers(ptx: str):
    """For each loop that loads by TMA, the number of barriers of all loading warps."""
    for piece in re.split(r"^\$L__BB\d+_\d+:", ptx, flags=re.MULTILINE):
        if re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared", piece):
            yield len(re.findall(r"\bbar\.sync\b", piece))


def in_flight(lines: list[str]):
    """For each innermost loop, the numbers of copies that stay in flight at its waits."""
    for i, line in enumerate(lines):
        if "scf.for" in line and not any("scf.for" in inner for inner in body(lines, i)[1:]):
            yield [int(n) for n in re.findall(r"async_wait[^{]*\{num = (\d+)", "\n".join(body(lines, i)))]


def body(lines: list[str], at: int) -> list[str]:
    indent = len(lines[at]) - len(lines[at].lstrip())
    end = next(i for i in range(at, len(lines)) if lines[i].startswith(" " * indent + "}"))
    return lines[at:end]


ONE, TWO = HopperConfig(1, 3, 2), HopperConfig(2, 6, 1)
# Few and many queries, chains and trees, small and large pages, a window; for Hopper, blocks that are never, sometimes
# and always contiguous.
# GPT-OSS: 64 heads of 64 over 8 KV heads, a sink, and a window in every second layer.
PLAIN = [(1, 1, 16, 0), (2048, 1, 256, 0), (8, 2, 16, 128, 64, 8, True)]
PLAIN += [(8, 2, 16, 1024, 256, 2, False, False, 50.0)]
HOPPER = [(TWO, 1, 16), (ONE, 2, 16, 128, 64, 8, True), (HopperConfig(2, 5, 1), 1, 64, 0, 256, 8)]
# FP8 rows.
PLAIN += [(64, 2, 1, 0, 128, 4, False, True)]
ONE_FP8, TWO_FP8 = (HopperConfig(warpgroups, FP8_STAGES, 1, FP8_RAW_STAGES) for warpgroups in (1, 2))
HOPPER += [(ONE_FP8, 2, 16), (TWO_FP8, 1, 64)]
LATENT = [(16, 2, 2, 1), (128, 512, 1, 16)]
# ((stages, raw stages), (heads, nodes, page size)).
HOPPER_LATENT = [((4,), (128, 2, 64)), ((4,), (16, 1, 1)), ((2, 4), (128, 2, 64))]
# (heads, nodes, page size).
HOPPER_LATENT_FEW = [(16, 2, 64), (12, 1, 1)]
# Other products of the same values, for the marker `full`.
MORE_PLAIN = [(8, 2, 16, 0), (8, 2, 256, 0), (2048, 1, 16, 0), (8, 2, 16, 0, 64, 8, True)]
MORE_PLAIN += [
    (8, 2, 16, 0, 512, 8),
    (1, 1, 1, 0, 512, 8),
    (64, 2, 1, 0),
    (8, 2, 16, 4096),
    (64, 2, 16, 0, 128, 4, False, True),
]
MORE_HOPPER = [(ONE, 2, 48), (TWO, 2, 64), (TWO, 2, 256), (TWO, 2, 1), (ONE, 2, 16, 0, 64, 8, True), (TWO, 2, 16, 4096)]
MORE_HOPPER += [(HopperConfig(2, 4, 1), 2, 16, 0, 256, 6), (HopperConfig(1, 6, 1), 2, 16, 1024, 256, 2)]
MORE_HOPPER += [(HopperConfig(1, 6, 1), 0, 64, 0, 64), (ONE_FP8, 2, 64, 128, 64, 8, True), (TWO_FP8, 2, 16)]
MORE_LATENT = [(128, 64, 2, 256), (16, 1, 1, 64), (16, 16, 2, 16), (128, 1, 2, 64), (128, 512, 1, 64)]
MORE_HOPPER_LATENT = [((2, 4), (16, 1, 1)), ((3,), (16, 0, 64))]


if __name__ == "__main__":
    lowered = lowered_only
    if "full" in sys.argv:
        PLAIN, HOPPER, LATENT, HOPPER_LATENT = MORE_PLAIN, MORE_HOPPER, MORE_LATENT, MORE_HOPPER_LATENT
        lowered = nullcontext
    with lowered():
        report = {
            "plain": [compiled(*case) for case in PLAIN],
            "latent": [compiled_latent(*case) for case in LATENT],
            "errors_of_small_kernels": errors_of_small_kernels(),
        }
    report["hopper"] = [compiled_hopper(*case) for case in HOPPER]
    report["hopper_latent"] = [
        compiled_hopper_latent(HopperLatentConfig(*stages), *case) for stages, case in HOPPER_LATENT
    ]
    report["hopper_latent_few"] = [compiled_hopper_latent_few(*case) for case in HOPPER_LATENT_FEW]
    report["hopper_gated"] = compiled_hopper_gated()
    print(json.dumps(report))
