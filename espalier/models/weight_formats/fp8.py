"""FP8 weights (E4M3) with one scale per matrix, row or block.  This module also reads quant_method "fp8".

DeepSeek-V3 and the FP8 checkpoints of Qwen3 have quant_method "fp8" with `weight_block_size`; older checkpoints have no
`weight_block_size`.  compressed_tensors.py reads the same tensors under other names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8, InputScales, QuantisedMatrix
from espalier.models.weight_formats.base import FormatLookup, StoredTensor
from espalier.models.weight_formats.quantised import (
    SCALE_DTYPES,
    QuantisedFormat,
    adapt_to_device,
    dense_if_skipped,
    module_names,
    read_field,
)

FP8_NAME = "fp8"
# Pairs (name suffix of a matrix's scale, name suffix of its inputs' scale).  The first pair is in most checkpoints, the
# second in transformers' copies of Mistral's models, the third in Mistral's own checkpoints.
SCALE_SUFFIXES = (
    (".weight_scale", ".input_scale"),
    (".weight_scale_inv", ".activation_scale"),
    (".qscale_weight", ".qscale_act"),
)
# The name suffix of the scales of stacked experts.
STACK_SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class Fp8Format(QuantisedFormat):
    """A matrix in FP8: `.weight` [out, in] in E4M3, multiplied by scales.
    block_shape: the numbers (rows, columns) that share a scale; None stands for all rows or all columns.
    scale_suffix: the name suffix of the scales, [ceil(out / rows), ceil(in / columns)], or [1] for one scale.
    inputs: "static" if inputs are quantised with a scale in the checkpoint, [1]; "dynamic" if scales are computed for
    each input row; None if inputs are not quantised.  group_size: the number of columns of an input row that share a
    dynamic scale; None for all columns."""

    block_shape: tuple[int | None, int | None]
    scale_suffix: str = ".weight_scale"
    inputs: Literal["static", "dynamic"] | None = None
    group_size: int | None = None
    input_scale_suffix: str = ".input_scale"
    name = FP8_NAME
    supports_shards = True

    def with_stored_suffixes(self, is_stored: Callable[[str], bool]) -> "Fp8Format":
        """Returns the format with the names of its scales.  is_stored: whether a tensor with this suffix exists."""
        suffixes = (
            next((pair for pair in SCALE_SUFFIXES if is_stored(pair[0])), None)
            if self.block_shape == (None, None)
            else None
        )
        return self if suffixes is None else replace(self, scale_suffix=suffixes[0], input_scale_suffix=suffixes[1])

    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        rows_per_scale, column_block = self.block_shape
        if rows_per_scale is None:
            scale = StoredTensor(self.scale_suffix, (1,), SCALE_DTYPES)
        else:
            shape = (-(-rows // rows_per_scale), -(-columns // (column_block or columns)))
            column_dim = None if column_block is None else 1
            scale = StoredTensor(
                self.scale_suffix, shape, SCALE_DTYPES, 0, column_dim, rows_per_scale, column_block or columns
            )
        static = (StoredTensor(self.input_scale_suffix, (1,), SCALE_DTYPES),) if self.inputs == "static" else ()
        return StoredTensor(".weight", (rows, columns), FP8, row_dim=0, column_dim=1), scale, *static

    def stored_matrix(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> QuantisedMatrix:
        """Returns the stacked matrix.  tensors: by suffix.  row_counts: the number of rows of each matrix in it."""
        scales, rows_per_scale = self._stacked_scales(tensors[self.scale_suffix], row_counts)
        inputs = None
        if self.inputs is not None:
            inputs = InputScales(
                self.group_size, _common_scale(tensors[self.input_scale_suffix]) if self.inputs == "static" else None
            )
        return QuantisedMatrix(
            "fp8", tensors[".weight"], scales, self.block_shape[1] or columns, rows_per_scale, input_scales=inputs
        )

    def expert_tensors(self, num_experts: int, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        """Returns the tensors of stacked experts; see WeightFormat.  Their names have no `.weight`."""
        rows_per_scale, column_block = self.block_shape
        if rows_per_scale is None or column_block is None:
            return super().expert_tensors(num_experts, rows, columns)
        shape = (num_experts, -(-rows // rows_per_scale), -(-columns // column_block))
        return (
            StoredTensor("", (num_experts, rows, columns), FP8, 1, 2),
            StoredTensor(STACK_SCALE_SUFFIX, shape, SCALE_DTYPES, 1, 2, rows_per_scale, column_block),
        )

    def expert_matrix(self, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
        """Returns [experts, rows, columns].  tensors: the codes and the scales, by suffix."""
        (rows_per_scale, column_block), codes, scales = self.block_shape, tensors[""], tensors[STACK_SCALE_SUFFIX]
        assert rows_per_scale is not None and column_block is not None
        if codes.shape[1] % rows_per_scale:
            # Some experts begin inside a block of the stacked rows.  So scales are repeated: one scale for each row.
            scales, rows_per_scale = scales.repeat_interleave(rows_per_scale, 1)[:, : codes.shape[1]].contiguous(), 1
        inputs = None if self.inputs is None else InputScales(self.group_size)
        return adapt_to_device(QuantisedMatrix("fp8", codes, scales, column_block, rows_per_scale, input_scales=inputs))

    def _stacked_scales(self, scales: Tensor, row_counts: Sequence[int]) -> tuple[Tensor, int]:
        """Returns the scales [blocks of rows, blocks of columns] of the stacked matrices, and the rows per block."""
        rows_per_scale = self.block_shape[0]
        lengths = torch.tensor(row_counts, device=scales.device)
        if rows_per_scale is None:
            return scales.repeat_interleave(lengths, 0).contiguous(), 1
        if len(row_counts) == 1 or not any(count % rows_per_scale for count in row_counts):
            return scales, rows_per_scale
        # Some matrix begins inside a block of the stacked rows.  So scales are repeated: one scale for each row.
        num_blocks = [-(-count // rows_per_scale) for count in row_counts]
        row_scales = (
            part.repeat_interleave(rows_per_scale, 0)[:count]
            for part, count in zip(scales.split(num_blocks), row_counts, strict=True)
        )
        return torch.cat(list(row_scales)), 1

    def keeps_stored_dtype(self, name: str, dtype: torch.dtype) -> bool:
        return dtype == FP8 or name.endswith(
            (self.scale_suffix, STACK_SCALE_SUFFIX, *(suffix for pair in SCALE_SUFFIXES for suffix in pair))
        )


def _common_scale(scales: Tensor) -> Tensor:
    """Returns the common input scale of stacked matrices, float32 [1].  scales: [matrices, 1].
    Raises EspalierError if the scales differ, because stacked matrices read the same inputs."""
    if not bool((scales == scales[0]).all()):
        raise EspalierError(
            "the stacked matrices have different values of input_scale; only equal ones are supported: use a "
            "checkpoint with dynamic activation scales"
        )
    return scales[0].float()


def read_fp8(quantisation: Mapping[str, Any]) -> FormatLookup:
    """Returns the format of each matrix, for quant_method "fp8".
    Raises EspalierError naming a field that is not supported."""
    read_field(quantisation, "fmt", ("e4m3", "float8_e4m3fn", None))
    inputs = read_field(quantisation, "activation_scheme", ("dynamic", "static"), "dynamic")
    block, lm_head = quantisation.get("weight_block_size"), bool(quantisation.get("lm_head"))
    skipped = module_names(quantisation, "ignored_layers") + module_names(quantisation, "modules_to_not_convert")
    if block is None:
        return dense_if_skipped(skipped, Fp8Format((None, None), inputs=inputs), lm_head)
    rows, columns = read_block(block)
    if inputs == "static":
        raise EspalierError("quantization_config: activation_scheme = 'static' with weight_block_size is not supported")
    format = Fp8Format((rows, columns), ".weight_scale_inv", inputs, columns)
    return dense_if_skipped(skipped, format, lm_head)


def read_block(block: Any) -> tuple[int, int]:
    """Returns the (rows, columns) of a scale's block.  Raises EspalierError for sizes that no kernel supports."""
    sizes = block if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size >= 16 and not size & (size - 1) for size in sizes):
        raise EspalierError(
            f"quantization_config: a block of {block!r} is not supported, only powers of two from 16, as [128, 128]"
        )
    return sizes[0], sizes[1]
