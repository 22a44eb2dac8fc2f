"""The table of expert plans: written and read back beside that of linear layers, and used for the nearest size."""

from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers import linear_plans
from espalier.kernels.layers.experts_plan import (
    EXPERTS_TUNING,
    PAIRS_BUCKETS,
    TILE_ROWS_BY_PAIRS,
    ExpertsPlan,
    ExpertsShape,
    ProductPlan,
    candidate_plans,
    choose_experts_plan,
    experts_plan_by_rule,
)
from espalier.kernels.layers.linear_plans import (
    LINEAR_TUNING,
    NO_PLANS,
    SHIPPED_TUNING_FILE,
    TUNING_FILE_VARIABLE,
    TuningTable,
)
from espalier.kernels.runtime.launch import Chip

CHIP = Chip(shared_memory=100_000, processors=10, capability=(9, 0))
SHAPE = ExpertsShape(num_experts=128, top_k=8, hidden_size=2048, inner_size=768)


def plans(first: int) -> tuple[ExpertsPlan, ...]:
    """One for each bucket, told apart by block_in."""
    gated = [ProductPlan(64, first + bucket, 4, 3) for bucket in range(len(PAIRS_BUCKETS))]
    return tuple(ExpertsPlan(16, each, ProductPlan(32, 128, 4, 4)) for each in gated)


SMALL, LARGE = plans(100), plans(200)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    path = tmp_path / "shipped.json"
    LINEAR_TUNING.write_table(path, TuningTable(CHIP, "bfloat16", {(8, 16): NO_PLANS}))
    EXPERTS_TUNING.write_table(
        path, TuningTable(CHIP, "bfloat16", {(2048, 768): SMALL, (4096, 4096): LARGE}, {"gpu": "one"})
    )
    monkeypatch.setattr(linear_plans, "SHIPPED_TUNING_FILE", path)
    monkeypatch.setenv(TUNING_FILE_VARIABLE, str(tmp_path / "own.json"))
    linear_plans.merged_plans.cache_clear()
    yield path
    linear_plans.merged_plans.cache_clear()


def test_both_kinds_of_tables_share_a_file(shipped):
    other = TuningTable(replace(CHIP, processors=11), "bfloat16", {(8, 8): LARGE})
    EXPERTS_TUNING.write_table(shipped, other)
    EXPERTS_TUNING.write_table(shipped, TuningTable(CHIP, "bfloat16", {(2048, 768): LARGE}))
    LINEAR_TUNING.write_table(shipped, TuningTable(CHIP, "bfloat16", {(64, 128): NO_PLANS}))
    assert EXPERTS_TUNING.read_tables(shipped)[0] == other and EXPERTS_TUNING.read_tables(shipped)[1].plans == {
        (2048, 768): LARGE,
        (4096, 4096): LARGE,
    }
    assert LINEAR_TUNING.read_tables(shipped)[0].plans == {(8, 16): NO_PLANS, (64, 128): NO_PLANS}


@pytest.mark.parametrize("text", ["[]", '{"experts": [{}]}', '{"experts": [{"chip": 1}]}'])
def test_a_file_of_another_form_is_refused_by_name(tmp_path, text):
    path = tmp_path / "choices.json"
    path.write_text(text)
    with pytest.raises(EspalierError, match=r"choices\.json is no table of experts"):
        EXPERTS_TUNING.read_tables(path)


def test_rows_find_their_bucket_by_the_pairs_of_an_expert(shipped):
    taken = {
        rows: choose_experts_plan(SHAPE, rows, torch.bfloat16, CHIP) for rows in (1, 2, 3, 16, 17, 64, 256, 1024, 1025)
    }
    assert taken.pop(1) == replace(SMALL[0], tile_rows=1)
    assert [SMALL.index(plan) for plan in taken.values()] == [0, 1, 1, 2, 2, 3, 4, 5]


def test_rows_up_to_a_power_of_two_share_a_plan(shipped):
    """So a padded batch and its rows alone have the same bits."""
    few = ExpertsShape(num_experts=60, top_k=4, hidden_size=2048, inner_size=768)
    for low, high in ((17, 32), (33, 64), (65, 128)):
        assert len({choose_experts_plan(few, rows, torch.bfloat16, CHIP) for rows in range(low, high + 1)}) == 1


def test_a_size_that_was_not_measured_takes_the_nearest(shipped):
    for size, found in (((2048, 1024), SMALL), ((7168, 2048), LARGE)):
        shape = replace(SHAPE, hidden_size=size[0], inner_size=size[1])
        assert choose_experts_plan(shape, 16, torch.bfloat16, CHIP) == found[1]


def test_the_users_plans_come_first(shipped, tmp_path):
    EXPERTS_TUNING.write_table(tmp_path / "own.json", TuningTable(CHIP, "bfloat16", {(2048, 768): LARGE}))
    assert choose_experts_plan(SHAPE, 16, torch.bfloat16, CHIP) == LARGE[1]


def test_other_chips_and_dtypes_take_the_rule(shipped):
    for dtype, gpu in ((torch.float16, CHIP), (torch.float32, CHIP), (torch.bfloat16, replace(CHIP, processors=9))):
        assert choose_experts_plan(SHAPE, 16, dtype, gpu) == experts_plan_by_rule(SHAPE, 16, dtype, gpu)


def test_shipped_plans_fit_their_chips():
    for table in EXPERTS_TUNING.read_tables(SHIPPED_TUNING_FILE):
        for of_size in table.plans.values():
            for plan, (_, tile_rows) in zip(of_size, TILE_ROWS_BY_PAIRS, strict=True):
                assert plan.tile_rows in tile_rows
                assert plan.gated in candidate_plans(plan.tile_rows, 2, table.chip)
                assert plan.down in candidate_plans(plan.tile_rows, 1, table.chip)
