"""The launch configurations of Hopper's attention kernels, over K and V heads and over latent rows."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import FP8
from espalier.kernels.runtime.launch import HOPPER, Chip, is_aligned_for_copies

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128, 256)
# The largest head size whose queries fit in registers.  Products read larger queries from shared memory.
MAX_REGISTER_HEAD_SIZE = 128
# Packed queries of one attending warpgroup (four warps).
WARPGROUP_QUERIES = 64
# The fewest stages (blocks of rows in shared memory), because an attending warpgroup waits for a third block while it
# holds two.
MIN_STAGES = 3
MAX_STAGES = 6
# For an FP8 cache: stages of converted rows, which hide the time of the conversion, and stages of FP8 rows, which hide
# the memory latency.
FP8_STAGES, FP8_RAW_STAGES = 4, 4
# Shared memory, in bytes, for barriers and for the arguments that Triton passes to the warps.
RESERVED_SHARED_MEMORY = 1024
# Registers per multiprocessor, and the most registers per thread.
REGISTERS, MAX_REGISTERS = 2**16, 240
# Registers per thread at launch that ptxas needs for a product with 256 columns.
WIDE_PRODUCT_REGISTERS = 160
# The sizes of the two parts of a latent row: the latent, which is also V, and the RoPE part.
V_SIZE, ROPE_SIZE = 512, 64
# Packed queries per tile of hopper/latent.py.
BLOCK_M = 64
# Latent rows per block.  Blocks of 64 rows would leave room for only two stages, and are slower (docs/log.md).
LATENT_BLOCK_N = 32
LATENT_STAGES = 4
# Buffers in shared memory through which the first attending warpgroup sends a block's weights to the second.
WEIGHT_SLOTS = 2
# Pipeline stages for an FP8 cache: blocks of converted rows, and blocks of FP8 rows.
LATENT_FP8_STAGES, LATENT_FP8_RAW_STAGES = 2, 4
# The most packed queries (query heads) per request in hopper/latent_few.py: the columns of the kernel's products.
LATENT_FEW_MAX_QUERIES = 16
# Rows per block in hopper/latent_few.py.  They are the rows of the product.  Two blocks fill shared memory.
LATENT_FEW_BLOCK_N = 64
LATENT_FEW_STAGES = 2


def kv_block_rows(head_size: int) -> int:
    """Returns the rows of K and V per block: so many that shared memory holds at least MIN_STAGES blocks."""
    return 64 if head_size <= MAX_REGISTER_HEAD_SIZE else 32


@dataclass(frozen=True)
class HopperConfig:
    """Launch configuration of the kernel for K and V heads.

    warpgroups: attending warpgroups, each with 64 packed queries.  num_stages: blocks of K and V in shared memory.
    raw_stages: blocks of FP8 rows in shared memory; 0 for two-byte rows.  programs_per_processor: programs of the
    persistent grid per multiprocessor."""

    warpgroups: int
    num_stages: int
    programs_per_processor: int
    raw_stages: int = 0

    def shared_bytes(self, head_size: int) -> int:
        """Shared memory of a program, in bytes, for heads of `head_size`."""
        two_byte_rows = self.block_m + 2 * self.num_stages * kv_block_rows(head_size)
        return head_size * (2 * two_byte_rows + 2 * self.raw_stages * kv_block_rows(head_size)) + RESERVED_SHARED_MEMORY

    @property
    def block_m(self) -> int:
        """Packed queries of a tile."""
        return self.warpgroups * WARPGROUP_QUERIES

    def load_warps(self, head_size: int) -> tuple[int, int]:
        """Returns (number of loading warps, registers per thread in these warps), for heads of `head_size`."""
        if self.raw_stages:
            return 4, 56
        return (8, 40) if self.programs_per_processor == 1 and head_size <= MAX_REGISTER_HEAD_SIZE else (4, 72)

    @property
    def convert_warps(self) -> tuple[int, int]:
        """(number of warps that convert FP8 rows, registers per thread in these warps)."""
        if not self.raw_stages:
            return 0, 0
        return (8, 64) if self.warpgroups == 1 else (4, 80)

    def registers(self, head_size: int) -> tuple[int, int]:
        """Returns registers per thread: (at launch, in attending warps after the other warps have released registers).

        At launch the programs use all registers of the multiprocessor, up to the limit per thread."""
        attend_warps, other_warps = 4 * self.warpgroups, (self.load_warps(head_size), self.convert_warps)
        warps = attend_warps + sum(count for count, _ in other_warps)
        other_registers = sum(count * registers for count, registers in other_warps)
        launch_limit = (attend_warps * MAX_REGISTERS + other_registers) // warps
        if head_size > MAX_REGISTER_HEAD_SIZE:
            launch_limit = max(launch_limit, WIDE_PRODUCT_REGISTERS)
        at_launch = min(REGISTERS // (32 * warps * self.programs_per_processor), launch_limit) // 8 * 8
        return at_launch, min((at_launch * warps - other_registers) // attend_warps // 8 * 8, MAX_REGISTERS)


def choose_hopper_config(
    gpu: Chip, packed_queries: int, num_work_items: int, head_size: int, page_size: int, is_fp8: bool = False
) -> HopperConfig | None:
    """Return the launch configuration; None if this chip cannot run the kernel, or if the kernel would not be faster.

    packed_queries: queries times heads of one KV head.  num_work_items: number of work items if a tile has 128 packed
    queries.  is_fp8: whether rows are FP8.
    Usually a program has two warpgroups, which share the loaded blocks.  If this would leave multiprocessors idle, a
    program has one warpgroup.  With enough such programs, a multiprocessor runs two: one works while the other ends.
    With few queries and small pages the Triton kernel is faster, because all of its warps gather rows (docs/log.md)."""
    if gpu.capability != HOPPER or head_size not in HEAD_SIZES or packed_queries <= WARPGROUP_QUERIES // 4:
        return None
    smallest_page = 64 if head_size <= MAX_REGISTER_HEAD_SIZE else 16
    if packed_queries <= WARPGROUP_QUERIES // 2 and page_size < smallest_page:
        return None
    warpgroups = 2 if packed_queries > WARPGROUP_QUERIES and 4 * num_work_items >= 3 * gpu.processors else 1
    if is_fp8:
        # The stages of both dtypes fill a multiprocessor's shared memory.
        config = HopperConfig(warpgroups, FP8_STAGES, 1, FP8_RAW_STAGES)
        return config if config.shared_bytes(head_size) <= gpu.shared_memory else None
    num_programs = num_work_items * (1 if packed_queries <= WARPGROUP_QUERIES else 2)
    runs_two_programs = warpgroups == 1 and num_programs > gpu.processors
    for programs, stages in product((2, 1) if runs_two_programs else (1,), range(MAX_STAGES, MIN_STAGES - 1, -1)):
        config = HopperConfig(warpgroups, stages, programs)
        if config.shared_bytes(head_size) * programs <= gpu.shared_memory:
            return config
    return None


def needs_block_counts(page_size: int, window: int, head_size: int) -> bool:
    """Whether contiguous blocks must be counted (kernels/attention/kv_splits.py).

    If a page holds whole blocks, all blocks are contiguous.  With a window, the kernel uses no counts."""
    return not window and page_size % kv_block_rows(head_size) > 0


def uses_tma(config: HopperConfig) -> bool:
    """Returns whether this launch copies contiguous blocks by TMA.

    Two attending warpgroups keep the multiprocessor busy, and copies by threads would slow them down.  A single
    warpgroup waits for memory, which TMA does not make faster (docs/log.md)."""
    return config.warpgroups == 2


@dataclass(frozen=True)
class HopperLatentConfig:
    """Launch configuration of hopper/latent.py.  num_stages: blocks of two-byte rows in shared memory.
    raw_stages: blocks of FP8 rows in shared memory; 0 if the pages have two-byte rows."""

    num_stages: int
    raw_stages: int = 0

    programs_per_processor: ClassVar[int] = 1
    block_m: ClassVar[int] = BLOCK_M

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, in bytes."""
        two_byte_rows, fp8_rows = BLOCK_M + self.num_stages * LATENT_BLOCK_N, self.raw_stages * LATENT_BLOCK_N
        rows = (2 * two_byte_rows + fp8_rows) * (V_SIZE + ROPE_SIZE)
        return rows + 2 * WEIGHT_SLOTS * BLOCK_M * LATENT_BLOCK_N + 4 * WEIGHT_SLOTS * BLOCK_M + RESERVED_SHARED_MEMORY


def choose_hopper_latent_config(gpu: Chip, is_fp8: bool = False) -> HopperLatentConfig | None:
    """Returns the launch configuration, or None if this chip cannot run the kernel.  is_fp8: whether rows are FP8."""
    stages = (LATENT_FP8_STAGES, LATENT_FP8_RAW_STAGES) if is_fp8 else (LATENT_STAGES,)
    config = HopperLatentConfig(*stages)
    return config if gpu.capability == HOPPER and config.shared_bytes <= gpu.shared_memory else None


def hopper_latent_supports(q: Tensor, rows: list[Tensor], v_size: int) -> bool:
    """Returns whether the kernels for latent rows take these dtypes, sizes and layouts.  rows: tensors [.., size]."""
    return v_size == V_SIZE and all(
        tensor.shape[-1] == V_SIZE + ROPE_SIZE
        and q.dtype in DTYPES
        and tensor.dtype in (q.dtype, FP8)
        and is_aligned_for_copies(tensor)
        for tensor in (q, *rows)
    )


@dataclass(frozen=True)
class HopperLatentFewQueriesConfig:
    """Launch configuration of hopper/latent_few.py.  num_stages: blocks of rows in shared memory."""

    num_stages: int

    programs_per_processor: ClassVar[int] = 1
    block_m: ClassVar[int] = LATENT_FEW_MAX_QUERIES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, in bytes."""
        rows = 2 * (LATENT_FEW_MAX_QUERIES + self.num_stages * LATENT_FEW_BLOCK_N) * (V_SIZE + ROPE_SIZE)
        return rows + 2 * LATENT_FEW_MAX_QUERIES * LATENT_FEW_BLOCK_N + RESERVED_SHARED_MEMORY


def choose_hopper_latent_few_queries_config(
    gpu: Chip, num_queries: int, num_heads: int
) -> HopperLatentFewQueriesConfig | None:
    """Returns the launch configuration, or None if the kernel does not support this chip or number of queries."""
    config = HopperLatentFewQueriesConfig(LATENT_FEW_STAGES)
    is_few = num_queries == 1 and num_heads <= LATENT_FEW_MAX_QUERIES
    fits = gpu.capability == HOPPER and config.shared_bytes <= gpu.shared_memory
    return config if fits and is_few else None
