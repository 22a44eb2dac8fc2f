"""Hopper's attention kernel over ragged requests, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize_hopper.py

Ends with an error where its bits are not the plain kernel's, or where the tool says so.
"""

import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from espalier.kernels.attention.hopper import HopperBlocks
from espalier.kernels.attention.tree_attention import choose
from espalier.kernels.runtime.launch import chip
from tests.kernels.attending import Case, difference, draw, expected, run

CASES = [
    Case((0, 1, 129, 700), queries, rows, page_size, 8, 2, 128, 128, window, 0, torch.bfloat16, 4)
    for queries, rows, page_size, window in ((8, 40, 1, None), (64, 64, 64, None), (100, None, 16, 90))
]
# Blocks side by side, and some behind them that are not.
CASES += [
    Case((0, 1, 129, 700), 64, 64, page_size, 8, 2, 128, 128, None, 1, torch.bfloat16, 4, in_order=in_order)
    for page_size, in_order in ((1, 400), (16, 100))
]
HOW = (HopperBlocks(1, 3, 2), HopperBlocks(2, 6, 1))


def main() -> None:
    wrong = 0
    for case in CASES:
        inputs = draw(case, torch.device("cuda"))
        exact, _ = expected(inputs)
        plain = choose(chip(inputs.q), case.queries * 4, case.rows or case.queries, 128, 128, case.dtype)
        out, lse = run(inputs, case.most, how=plain)
        print(f"{case}\n  the plain kernel is within {float((out.double() - exact).abs().max()):.2e} of float64")
        for how, counted in product(HOW, (False, True)):
            again, again_lse = run(inputs, case.most, counted=counted, how=how)
            same = torch.equal(again, out) and torch.equal(again_lse, lse)
            wrong += not same
            found = "the same bits" if same else difference(again, out)
            print(f"  {how}, counted {counted}: within {float((again.double() - exact).abs().max()):.2e}; {found}")
    sys.exit(f"{wrong} runs gave other bits than the plain kernel" if wrong else 0)


if __name__ == "__main__":
    main()
