"""The pass that `python -m lab kernels` times."""

import pytest
import torch

import espalier.attention.triton as backend
from espalier.kernels.ops.attention import latent_attention, tree_attention
from lab.bench import kernels
from lab.bench.kernels import PassShape, prepare_pass


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_are_in_order_where_that_is_asked(page_size):
    shape = PassShape(2, 4, 130)
    width = -(-130 // page_size)
    for in_order in (False, True):
        attention, _ = prepare_pass(shape, page_size, 1, torch.device("cpu"), in_order)
        held = attention.prefix.page_table[:, :width]
        assert held.flatten().sort().values.tolist() == list(range(1, 2 * width + 1))
        assert held.flatten().tolist() == list(range(1, 2 * width + 1)) or not in_order
        assert attention.prefix.length.tolist() == [130, 130]


def test_latent_rows_are_read_as_k_and_in_part_as_v(monkeypatch):
    given = []
    monkeypatch.setattr(latent_attention, "triton", lambda inputs, _: given.append(inputs) or (inputs.q, None))
    shape = PassShape(2, 4, 130, spec=kernels.MLA_SPEC_16_HEADS)
    _, run = prepare_pass(shape, 16, 2, torch.device("cpu"))
    run()
    inputs = given[0]
    assert len(given) == 2 and inputs.q.shape == (2, 4, 16, 576)
    assert [[rows.shape[-1] for rows in of] for of in (inputs.pages, inputs.staged)] == [[576, 512], [576, 512]]
    assert shape.kv_bytes == 2 * 130 * 576 * 2 and shape.flops == 2 * 2 * 16 * 4 * 130 * (576 + 512)


@pytest.mark.parametrize("asks", [False, True])
def test_a_plan_is_timed_with_all_that_the_pass_had_planned(kernel_device, monkeypatch, asks):
    counts = []

    def counted(*args):
        counts.append(args)
        return torch.zeros(0)

    for module in (backend, kernels):
        monkeypatch.setattr(module, "count_contiguous_blocks", counted)
    monkeypatch.setattr(backend, "block_rows_to_count", lambda *_: 64 if asks else None)
    monkeypatch.setattr(tree_attention, "triton", lambda inputs, *_, **__: (inputs.q, None))
    shape = PassShape(2, 4, 130)
    attention, run = prepare_pass(shape, 16, 2, kernel_device)
    run()
    assert len(counts) == asks
    kernels._planner(attention, shape)()
    assert len(counts) == 2 * asks
