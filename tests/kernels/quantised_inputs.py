"""Random quantised matrices for the kernels' tests."""

import os

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import (
    FP8,
    InputScales,
    QuantisedMatrix,
    fake_quantise_inputs,
    make_nibble_matrix,
    pack_nibbles,
)

# float16 where kernels are interpreted: Triton's interpreter does not multiply bfloat16.
DTYPE = torch.float16 if os.environ.get("TRITON_INTERPRET") == "1" else torch.bfloat16
# kind -> (code, group (0: all columns), rows that share a scale, whether it has zero points, group of rounded inputs).
KINDS: dict[str, tuple[str, int, int, bool, int | None]] = {
    "fp8-channel": ("fp8", 0, 1, False, None),
    "fp8-channel-inputs": ("fp8", 0, 1, False, 0),
    "fp8-block": ("fp8", 64, 64, False, None),
    "fp8-block-inputs": ("fp8", 64, 64, False, 64),
    "int4": ("int4", 64, 1, False, None),
    "int4-zeros": ("int4", 32, 1, True, None),
    "int4-channel": ("int4", 0, 1, True, None),
    "mxfp4": ("mxfp4", 32, 1, False, None),
    "nvfp4": ("nvfp4", 16, 1, False, None),
}


def drawn(kind: str, lead: tuple[int, ...], num_out: int, num_in: int, device: torch.device, seed: int = 0):
    code, group, rows_per_scale, has_zeros, inputs = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)

    def integers(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, (*lead, *shape), generator=generator).to(torch.uint8)

    group = group or num_in
    groups = -(-num_in // group)
    if code == "fp8":
        codes = torch.randn(*lead, num_out, num_in, generator=generator).to(FP8)
    else:
        codes = pack_nibbles(integers(16, num_out, num_in))
    if code == "mxfp4":
        scales = integers(6, num_out, groups) + 121
    elif code == "nvfp4":
        scales = (torch.rand(*lead, num_out, groups, generator=generator) * 20).to(FP8)
    else:
        scales = torch.rand(*lead, -(-num_out // rows_per_scale), groups, generator=generator) * 0.1 + 0.01
        scales = scales.to(torch.float32 if code == "fp8" else torch.float16)
    zeros = integers(16, num_out, groups).to(device) if has_zeros else None
    rounded = None if inputs is None else InputScales(inputs or None)
    if code != "fp8":
        factors = None
        if code == "nvfp4":
            factors = (torch.rand(*lead, num_out, generator=generator, dtype=torch.float64) + 0.5).to(device) / 64
        return make_nibble_matrix(code, codes.to(device), scales.to(device), group, zeros, row_scales=factors)
    return QuantisedMatrix(code, codes.to(device), scales.to(device), group, rows_per_scale, None, None, rounded)


def inputs_of(matrix: QuantisedMatrix, x: Tensor) -> Tensor:
    """The inputs that the product has, in float64."""
    return x.double() if matrix.input_scales is None else fake_quantise_inputs(x, matrix.input_scales).double()
