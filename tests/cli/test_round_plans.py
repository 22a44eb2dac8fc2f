"""The tool that compares plans in rounds: what a variant changes, and which plans are taken together."""

from dataclasses import replace

import torch

from espalier.kernels.layers import linear_quantised
from espalier.kernels.layers.linear import TritonPlan, block_rows
from espalier.kernels.runtime.launch import Chip
from espalier.models.weight_formats import dense
from tools.round_plans import ENGINES, LEAST_GAIN, chosen, neighbours, taken_together

PLAN, OTHER = TritonPlan(64, 128, 2, 4, 4), TritonPlan(64, 128, 4, 4, 4)
HOPPER = Chip(shared_memory=232448, processors=132, capability=(9, 0))


def test_only_products_of_the_shape_and_the_rows_take_the_plan(monkeypatch):
    taken = []
    monkeypatch.setattr(dense, "linear", lambda x, weight, bias, plan: taken.append(plan))
    before, met = (dense.linear, linear_quantised.plan_of), {}
    with chosen({(8, 4): OTHER}, 3, met):
        for rows, shape in ((3, (8, 4)), (2, (8, 4)), (3, (16, 4))):
            dense.linear(torch.zeros(rows, 4), torch.zeros(shape), None, PLAN)
    assert taken == [OTHER, PLAN, PLAN]
    assert met == {(8, 4): PLAN, (16, 4): PLAN}
    assert (dense.linear, linear_quantised.plan_of) == before


def test_neighbours_fit_the_chip_and_differ():
    found = neighbours(PLAN, 64, 2, HOPPER)
    assert PLAN not in found and len(set(found)) == len(found) > 20
    for plan in found:
        assert plan.stages * (plan.block_out + block_rows(64)) * plan.block_in * 2 < HOPPER.shared_memory
    assert replace(PLAN, splits=4) in found


def test_the_best_plan_of_each_shape_is_taken_the_largest_gain_first():
    variants = {ENGINES: {}, "a": {(8, 4): PLAN}, "b": {(8, 4): OTHER}, "c": {(16, 4): OTHER}, "d": {(32, 4): PLAN}}
    ms = {ENGINES: 1.0, "a": 0.9, "b": 0.95, "c": 0.8, "d": 1.0 - LEAST_GAIN / 2}
    assert taken_together(ms, variants) == {
        ENGINES: {},
        "and c": {(16, 4): OTHER},
        "and a": {(16, 4): OTHER, (8, 4): PLAN},
    }
