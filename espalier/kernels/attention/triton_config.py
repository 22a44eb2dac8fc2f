"""The launch configurations of the Triton kernels of kernels/attention/tree_attention.py and latent_attention.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from espalier.kernels.runtime.launch import Chip, next_power_of_2

# Bytes of shared memory reserved for the compiler's own use, for sizes whose `shared_bytes` estimate was not measured.
COMPILER_SCRATCH_BYTES = 8 * 1024


@dataclass(frozen=True)
class TritonConfig:
    """Launch configuration of a Triton attention kernel.

    block_m: packed queries of a tile (queries times the heads of one KV head).  block_n: committed rows per step.
    block_r: staged rows per step.  num_stages: pipeline stages.  programs_per_processor: programs of the persistent
    grid per multiprocessor."""

    block_m: int
    block_n: int
    block_r: int
    num_warps: int
    num_stages: int
    programs_per_processor: int = 1

    def constexpr_arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the constexpr arguments and launch options of this configuration.  dtype: the queries' dtype."""
        return {
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_R": self.block_r,
            "STAGES": self.num_stages,
            "num_warps": self.num_warps,
        }

    def shared_bytes(self, gpu: Chip, k_bytes: int, v_bytes: int, q_bytes: int | None = None) -> int:
        """Estimates a program's shared memory in bytes: queries, the rows of all stages, and weights.

        k_bytes, v_bytes: bytes of one row of K and of V.  A latent row counts as K, with v_bytes 0.  q_bytes: bytes of
        one query; None: k_bytes.
        From Hopper on, a product reads its weights from registers, and each stage needs a separate buffer."""
        step, q_bytes = self.block_n * (k_bytes + v_bytes), k_bytes if q_bytes is None else q_bytes
        if self.block_m >= 64 and gpu.capability >= (9, 0):
            return self.block_m * q_bytes + self.num_stages * step
        return self.block_m * (q_bytes + 2 * self.block_n) + max(self.num_stages - 1, 1) * step


def choose_triton_config(
    gpu: Chip,
    packed_queries: int,
    rows: int,
    k_size: int,
    v_size: int,
    dtype: torch.dtype,
    one_wave: bool = False,
    fp8: bool = False,
) -> TritonConfig:
    """Returns the configuration that was fastest on an H200 (docs/log.md).

    A chip with less shared memory gets fewer stages, then fewer rows per step.  Heads of more than 256 values were not
    measured.  For such heads, a tile has so few queries that few registers spill.
    packed_queries: queries times heads of one KV head.  rows: staged rows.  fp8: whether the rows of K and V are FP8.
    one_wave: whether all splits run at the same time, as in a small batch.  Then each split should end soon."""
    k_bytes, v_bytes = (max(16, next_power_of_2(size)) * dtype.itemsize for size in (k_size, v_size))
    q_bytes, is_large, is_wide = k_bytes, k_bytes + v_bytes > 512, max(k_size, v_size) > 256
    if dtype == torch.float32:
        # IEEE float32 products use no tensor cores, so larger tiles would spill registers.
        rows_per_step = 16 if k_bytes + v_bytes > 1024 else 32
        if is_wide:
            return TritonConfig(16, rows_per_step, rows_per_step, 8, 1, 1)
        block_m, num_warps = (16, 4) if packed_queries <= 16 else (32, 8)
        return TritonConfig(block_m, rows_per_step, rows_per_step, num_warps, 1, 2)
    if packed_queries <= 16 and not is_large:
        config = TritonConfig(16, 64, 64, 4, 3 if fp8 else 2, 4) if one_wave else TritonConfig(16, 32, 32, 2, 4, 4)
        if fp8:
            k_bytes, v_bytes = k_bytes // dtype.itemsize, v_bytes // dtype.itemsize
    elif is_wide:
        fits_64_queries = packed_queries > 32 and gpu.capability[0] == 9 and not fp8
        config = TritonConfig(16 if packed_queries <= 16 else 64 if fits_64_queries else 32, 32, 64, 8, 3, 1)
    elif packed_queries <= 64 or is_large:
        # From Hopper on, a product with 64 queries needs no exchange between warps, so it is faster than with 32.
        block_m = 64 if gpu.capability >= (9, 0) else min(64, max(16, next_power_of_2(packed_queries)))
        config = TritonConfig(block_m, 32 if is_large else 64, 64, 8 if is_large else 4, 3, 2)
    else:
        config = TritonConfig(128, 64, 64, 8, 4, 1)
    available = gpu.shared_memory - (COMPILER_SCRATCH_BYTES if is_wide else 0)
    for min_stages, min_rows in ((3, 32), (2, 16)):
        while config.num_stages > min_stages and config.shared_bytes(gpu, k_bytes, v_bytes, q_bytes) > available:
            config = replace(config, num_stages=config.num_stages - 1)
        while config.block_n > min_rows and config.shared_bytes(gpu, k_bytes, v_bytes, q_bytes) > available:
            config = replace(config, block_n=config.block_n // 2)
    fitting_programs = gpu.shared_memory // config.shared_bytes(gpu, k_bytes, v_bytes, q_bytes)
    programs = min(config.programs_per_processor, max(1, fitting_programs))
    block_r = min(config.block_n, max(16, next_power_of_2(rows)))
    return replace(config, block_r=block_r, programs_per_processor=programs)


def choose_triton_latent_config(
    gpu: Chip, packed_queries: int, rows: int, row_bytes: int, dtype: torch.dtype
) -> TritonConfig:
    """Returns the configuration for latent rows.  packed_queries: queries times heads; rows: staged rows.

    row_bytes: bytes of one row in shared memory.  A chip with less shared memory gets fewer rows per step, then fewer
    stages, then fewer queries."""
    if dtype == torch.float32:
        # IEEE float32 products use no tensor cores, so larger tiles would spill registers.
        return TritonConfig(16, 16, 16, 4, 1)
    block_m = 64 if packed_queries > 32 else 32 if packed_queries > 16 else 16
    config = TritonConfig(block_m, 32, 32, 8 if block_m == 64 else 4, 3)
    if config.shared_bytes(gpu, row_bytes, 0) > gpu.shared_memory:
        config = replace(config, block_n=16)
    if config.shared_bytes(gpu, row_bytes, 0) > gpu.shared_memory:
        config = replace(config, num_stages=2)
    while config.block_m > 16 and config.shared_bytes(gpu, row_bytes, 0) > gpu.shared_memory:
        config = replace(config, block_m=config.block_m // 2)
    # Two tiles of 64 queries need more registers than a multiprocessor has.
    max_programs = 1 if config.block_m == 64 else 2
    programs = max(1, min(max_programs, gpu.shared_memory // config.shared_bytes(gpu, row_bytes, 0)))
    block_r = min(config.block_n, max(16, next_power_of_2(rows)))
    return replace(config, block_r=block_r, programs_per_processor=programs)
