"""Runs the Hopper attention kernel over requests of different lengths, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize_hopper.py

Exits with an error if the bits differ from the Triton kernel's, or if the tool finds an error.
"""

import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from espalier.kernels.attention.triton_config import choose_triton_config
from espalier.kernels.hopper.attention import HopperConfig
from espalier.kernels.runtime.launch import chip
from tests.kernels.attending import Case, difference, draw, expected, run

CASES = [
    Case((0, 1, 129, 700), queries, rows, page_size, 8, 2, 128, 128, window, 0, torch.bfloat16, 4)
    for queries, rows, page_size, window in ((8, 40, 1, None), (64, 64, 64, None), (100, None, 16, 90))
]
# Contiguous blocks, followed by some that are not.
CASES += [
    Case((0, 1, 129, 700), 64, 64, page_size, 8, 2, 128, 128, None, 1, torch.bfloat16, 4, in_order=in_order)
    for page_size, in_order in ((1, 400), (16, 100))
]
CONFIGS = (HopperConfig(1, 3, 2), HopperConfig(2, 6, 1))


def main() -> None:
    wrong = 0
    for case in CASES:
        inputs = draw(case, torch.device("cuda"))
        exact, _ = expected(inputs)
        plain = choose_triton_config(chip(inputs.q), case.queries * 4, case.rows or case.queries, 128, 128, case.dtype)
        out, lse = run(inputs, case.max_splits, config=plain)
        print(f"{case}\n  the Triton kernel is within {float((out.double() - exact).abs().max()):.2e} of float64")
        for config, contiguous in product(CONFIGS, (False, True)):
            hopper_out, hopper_lse = run(inputs, case.max_splits, contiguous=contiguous, config=config)
            same = torch.equal(hopper_out, out) and torch.equal(hopper_lse, lse)
            wrong += not same
            found = "the same bits" if same else difference(hopper_out, out)
            error = float((hopper_out.double() - exact).abs().max())
            print(f"  {config}, contiguous {contiguous}: within {error:.2e}; {found}")
    sys.exit(f"{wrong} runs gave other bits than the Triton kernel" if wrong else 0)


if __name__ == "__main__":
    main()
