"""The tool that compares plans in rounds: what a variant changes, and which plans are taken together."""

from dataclasses import astuple, replace
from operator import ne

import pytest
import torch

from espalier.kernels.layers import linear_quantised, quantised_plans
from espalier.kernels.layers.linear_plans import LibraryPlan, TritonPlan, candidate_plans
from espalier.kernels.runtime.launch import Chip
from espalier.models.quantisers import QUANTISERS
from espalier.models.weight_formats import dense
from scripts.round_plans import BY_PLAN, ENGINES, LEAST_GAIN, Met, chosen, neighbours, taken_together

PLAN, OTHER = TritonPlan(64, 128, 2, 4, 4), TritonPlan(64, 128, 4, 4, 4)
HOPPER = Chip(shared_memory=232448, processors=132, capability=(9, 0))


@pytest.mark.parametrize("name", [*BY_PLAN, "quantised"])
def test_only_products_of_the_weight_and_the_rows_take_the_plan(name, monkeypatch):
    taken, weight = [], torch.zeros
    if name == "quantised":
        weight = lambda shape: QUANTISERS["int4"].quantise_matrix(torch.zeros(shape, dtype=torch.bfloat16))  # noqa: E731
    kind = "int4-1x128" if name == "quantised" else "dense"
    monkeypatch.setattr(linear_quantised, "quantised_plan_for", lambda weight, x: PLAN)
    for each in BY_PLAN:
        monkeypatch.setattr(dense, each, lambda x, weight, bias, plan: taken.append(plan))
    before = [linear_quantised.quantised_plan_for, *(getattr(dense, each) for each in BY_PLAN)]
    met = {}
    for of_kind, expected in ((kind, [OTHER, PLAN, PLAN]), ("another format", [PLAN] * 3)):
        taken.clear()
        with chosen({(of_kind, 8, 256): OTHER}, 3, met):
            for rows, shape in ((3, (8, 256)), (2, (8, 256)), (3, (16, 256))):
                x = torch.zeros(rows, 256)
                if name == "quantised":
                    taken.append(linear_quantised.quantised_plan_for(weight(shape), x))
                else:
                    getattr(dense, name)(x, weight(shape), None, PLAN)
        assert taken == expected
    assert {product: (one.plan, one.is_gated) for product, one in met.items()} == dict.fromkeys(
        ((kind, 8, 256), (kind, 16, 256)), (PLAN, name == "linear_gated")
    )
    assert before == [linear_quantised.quantised_plan_for, *(getattr(dense, each) for each in BY_PLAN)]


@pytest.mark.parametrize(
    "weights, rows",
    [("dense", 64), ("fp8", 1), ("fp8", 64), ("int4", 64), pytest.param("int4", 1, marks=pytest.mark.full)],
)
def test_neighbours_are_near_the_plan_and_have_other_splits(weights, rows):
    weight = torch.zeros(2048, 4096, dtype=torch.bfloat16)
    plan = TritonPlan(64, 64, 2, 4, 8)
    if weights != "dense":
        weight = QUANTISERS[weights].quantise_matrix(weight)
        grouped = weight.group_size < 4096
        plan = quantised_plans.plan_by_rule(
            rows, 2048, 4096, weight.code, 256, grouped, HOPPER, 2 if weights == "int4" else 1
        )
    found = neighbours(Met(plan, weight), rows, HOPPER)
    kernels = [each for each in found if each is not None]
    assert (len(kernels) < len(found)) == (weights == "dense"), "F.linear takes dense weights alone"
    assert all(0 < sum(map(ne, astuple(each), astuple(plan))) <= 2 for each in kernels)
    assert {each.splits for each in kernels} > {plan.splits}
    gated = neighbours(Met(plan, weight, is_gated=True), rows, HOPPER)
    assert {each.splits for each in gated if each is not None} <= {1}


def test_beside_the_library_all_kernels_and_its_other_plans_are_near():
    weight = torch.zeros(4096, 14336, dtype=torch.bfloat16)
    found = neighbours(Met(LibraryPlan(1, 2), weight), 128, HOPPER)
    assert None in found and LibraryPlan(1, 4) in found and LibraryPlan(1, 2) not in found
    kernels = [plan for plan in found if isinstance(plan, TritonPlan)]
    assert {plan.splits for plan in kernels} > {1}
    every = {plan for plan in candidate_plans(128, 4096, 14336, HOPPER) if isinstance(plan, TritonPlan)}
    most = {replace(plan, stages=0): plan.stages for plan in sorted(every, key=lambda plan: plan.stages)}
    assert {replace(plan, stages=0): plan.stages for plan in kernels} == most and len(kernels) == len(most) < len(every)


def test_the_best_plan_of_each_product_is_taken_the_largest_gain_first():
    one, two, three = (("dense", rows, 4) for rows in (8, 16, 32))
    variants = {ENGINES: {}, "a": {one: PLAN}, "b": {one: OTHER}, "c": {two: OTHER}, "d": {three: PLAN}}
    ms = {ENGINES: 1.0, "a": 0.9, "b": 0.95, "c": 0.8, "d": 1.0 - LEAST_GAIN / 2}
    assert taken_together(ms, variants) == {
        ENGINES: {},
        "and c": {two: OTHER},
        "and a": {two: OTHER, one: PLAN},
    }
