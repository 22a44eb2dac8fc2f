"""Chooses the attention kernel and its launch configuration: Triton's, or Hopper's where it is faster.

The Triton kernel and the Hopper kernel for K and V heads give the same bits.
"""

from __future__ import annotations

from espalier.kernels.attention.triton_config import TritonConfig, choose_triton_config, choose_triton_latent_config
from espalier.kernels.hopper.config import DTYPES as HOPPER_DTYPES
from espalier.kernels.hopper.config import (
    HEAD_SIZES,
    MAX_REGISTER_HEAD_SIZE,
    WARPGROUP_QUERIES,
    HopperConfig,
    HopperLatentConfig,
    HopperLatentFewQueriesConfig,
    choose_hopper_config,
    choose_hopper_latent_config,
    choose_hopper_latent_few_queries_config,
    hopper_latent_supports,
    kv_block_rows,
    needs_block_counts,
    uses_tma,
)
from espalier.kernels.ops.attention import AttentionInputs
from espalier.kernels.ops.selection import TARGET_PROGRAMS
from espalier.kernels.runtime.launch import chip, is_aligned_for_copies, next_power_of_2
from espalier.layout import next_bucket

LatentAttentionConfig = TritonConfig | HopperLatentConfig | HopperLatentFewQueriesConfig


def choose_attention_config(inputs: AttentionInputs) -> TritonConfig | HopperConfig:
    """Return the launch configuration.  The Hopper kernel and the Triton kernel give the same bits."""
    q, splits, fp8 = inputs.q, inputs.splits, inputs.kv_scales is not None
    (batch, queries, heads, k_size), (kv_heads, v_size) = q.shape, inputs.pages[1].shape[1:]
    packed_queries = queries * heads // kv_heads
    if hopper_kernel_supports(inputs):
        work_items = splits.table.shape[0] * kv_heads * -(-packed_queries // (2 * WARPGROUP_QUERIES))
        config = choose_hopper_config(chip(q), packed_queries, work_items, k_size, inputs.page_size, fp8)
        if config is not None:
            return config
    rows = queries if inputs.staged is None else inputs.staged[0].shape[1]
    # The batch is rounded up to its bucket, so that a padded CUDA graph and an eager launch give the same bits.
    one_wave = next_bucket(batch) * kv_heads * splits.policy.num_splits <= TARGET_PROGRAMS
    return choose_triton_config(chip(q), packed_queries, rows, k_size, v_size, q.dtype, one_wave, fp8)


def hopper_kernel_supports(inputs: AttentionInputs) -> bool:
    """Whether the Hopper kernel takes these dtypes, sizes and strides.

    The kernel has no soft-cap.  With FP8 rows the queries must fit in registers, in which they become float16."""
    if inputs.softcap is not None or (inputs.kv_scales is not None and inputs.q.shape[3] > MAX_REGISTER_HEAD_SIZE):
        return False
    q, staged = inputs.q, inputs.staged
    if q.dtype not in HOPPER_DTYPES or not q.shape[3] == inputs.v_size in HEAD_SIZES:
        return False
    is_aligned = all(map(is_aligned_for_copies, [q, *inputs.pages, *(staged or ())]))
    return is_aligned and (staged is None or staged[0].shape[1] > 0)


def block_rows_to_count(inputs: AttentionInputs) -> int | None:
    """Returns the rows per block for count_contiguous_blocks; None if tree_attention needs no counts for `inputs`."""
    size = inputs.q.shape[3]
    if not needs_block_counts(inputs.page_size, inputs.window or 0, size):
        return None
    config = choose_attention_config(inputs)
    return kv_block_rows(size) if isinstance(config, HopperConfig) and uses_tma(config) else None


def choose_latent_config(inputs: AttentionInputs) -> LatentAttentionConfig:
    """Return the launch configuration of latent attention, which does not depend on the batch."""
    q, staged, fp8 = inputs.q, inputs.staged, inputs.kv_scales is not None
    queries, heads, size = q.shape[1:]
    if _hopper_supports_latent(inputs):
        few_queries_config = None if fp8 else choose_hopper_latent_few_queries_config(chip(q), queries, heads)
        config = few_queries_config or choose_hopper_latent_config(chip(q), fp8)
        if config is not None:
            return config
    row_bytes = sum(latent_tile_widths(size, inputs.v_size)) * q.dtype.itemsize
    rows = 0 if staged is None else staged[0].shape[1]
    return choose_triton_latent_config(chip(q), queries * heads, rows, row_bytes, q.dtype)


def latent_config_supports(config: HopperLatentConfig | HopperLatentFewQueriesConfig, inputs: AttentionInputs) -> bool:
    """Returns whether the Hopper kernel of this configuration takes these inputs."""
    fp8, (queries, heads) = inputs.kv_scales is not None, inputs.q.shape[1:3]
    if isinstance(config, HopperLatentFewQueriesConfig):
        return _hopper_supports_latent(inputs) and not fp8 and queries == 1 and heads <= config.block_m
    return _hopper_supports_latent(inputs) and fp8 == (config.raw_stages > 0)


def _hopper_supports_latent(inputs: AttentionInputs) -> bool:
    """Returns whether the Hopper kernels for latent rows take these tensors."""
    rows = [inputs.pages[0], *(inputs.staged or ())[:1]]
    return hopper_latent_supports(inputs.q, rows, inputs.v_size)


def latent_tile_widths(size: int, v_size: int) -> tuple[int, int]:
    """Returns (width of the latent's tile, width of the RoPE part's tile), which are powers of two."""
    return max(16, next_power_of_2(v_size)), max(16, next_power_of_2(size - v_size))
