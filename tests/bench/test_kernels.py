"""The pass that `espalier bench kernels` times."""

import pytest
import torch

from espalier.bench.kernels import Shape, prepared


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_are_in_order_where_that_is_asked(page_size):
    shape = Shape(2, 4, 130)
    width = -(-130 // page_size)
    for in_order in (False, True):
        attention, _ = prepared(shape, page_size, 1, torch.device("cpu"), in_order)
        held = attention.prefix.page_table[:, :width]
        assert held.flatten().sort().values.tolist() == list(range(1, 2 * width + 1))
        assert held.flatten().tolist() == list(range(1, 2 * width + 1)) or not in_order
        assert attention.prefix.length.tolist() == [130, 130]
