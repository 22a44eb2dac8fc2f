"""The operands of a product with a quantised matrix as quantised_dot takes them, and who rounds the inputs to FP8.

Linear layers and experts share these rules.
"""

from typing import Any

import torch
from torch import Tensor

from espalier.kernels.layers.linear import MIN_BLOCK_ROWS
from espalier.kernels.layers.quantise_rows import quantise_rows
from espalier.kernels.layers.quantised import QuantisedMatrix, RoundedRows, Rows
from espalier.kernels.layers.quantised_tile import CODES, SUM_COLUMNS


def kernel_inputs(x: Rows, weight: QuantisedMatrix, tile: int, block_in: int) -> tuple[Tensor, Tensor | None]:
    """(inputs, their scales or None) as quantised_dot takes them: in the order of the columns, maybe rounded."""
    if isinstance(x, RoundedRows):
        return x.values, x.scales
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if weight.inputs is not None and not rounds_in_product(weight, tile, block_in):
        return quantise_rows(x, weight.inputs)
    return (x if x.stride(1) == 1 else x.contiguous()), None


def rounds_in_product(weight: QuantisedMatrix, tile: int, block_in: int) -> bool:
    """Whether the product rounds inputs that are not rounded yet, each group where it loads it; else a launch does.

    tile: of rows; block_in: columns of a step.  Every block of the weight rounds all inputs again, so rows must be few.
    A program sees a group whole only if it is what one sum takes.
    """
    inputs = weight.inputs
    return (
        weight.code == "fp8"
        and inputs is not None
        and inputs.static is None
        and weight.group == inputs.group == SUM_COLUMNS < weight.shape[-1]
        and block_in % SUM_COLUMNS == 0
        and tile <= MIN_BLOCK_ROWS
    )


def input_bytes_of(weight: QuantisedMatrix, tile: int, block_in: int, is_rounded: bool) -> int:
    """Bytes of an input as the product loads it.  is_rounded: before the product, however few rows there are."""
    is_fp8 = weight.inputs is not None and (is_rounded or not rounds_in_product(weight, tile, block_in))
    return 1 if is_fp8 else 2


def stored(x: Rows) -> Tensor:
    """The values of x as they lie in memory."""
    return x.values if isinstance(x, RoundedRows) else x


def kernel_codes(weight: QuantisedMatrix) -> Tensor:
    """The codes as quantised_dot takes them: FP8, or int32 words of 8 nibbles."""
    return weight.codes if weight.code == "fp8" else weight.codes.view(torch.int32)


def tile_options(weight: QuantisedMatrix) -> dict[str, Any]:
    """The constants of quantised_dot that follow from the matrix."""
    num_in, inputs = weight.shape[-1], weight.inputs
    input_group = 0 if inputs is None or inputs.columns(num_in) == num_in else inputs.columns(num_in)
    group = 0 if weight.group >= num_in and weight.code != "mxfp4" else weight.group
    return {"CODE": CODES[weight.code], "GROUP": group, "ROW_BLOCK": weight.row_block, "INPUT_GROUP": input_group}
