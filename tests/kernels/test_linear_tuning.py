"""The tuning tables of linear layers: written and read back, and used only for the chip, dtype and format they name."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers import linear_plans
from espalier.kernels.layers.linear_plans import (
    DENSE,
    DTYPES,
    LINEAR_TUNING,
    NO_PLANS,
    ROWS_BUCKETS,
    SHIPPED_TUNING_FILE,
    TUNING_FILE_VARIABLE,
    LibraryPlan,
    TritonPlan,
    TuningTable,
    candidate_plans,
    plan_by_rule,
    plans_for_dense_weight,
    plans_for_shape,
    user_tuning_file,
)
from espalier.kernels.layers.quantised import Code, InputScales, QuantisedMatrix
from espalier.kernels.layers.quantised_plans import candidate_plans as quantised_candidates
from espalier.kernels.layers.quantised_plans import tuning_format_name
from espalier.kernels.ops.linear import linear, linear_partial_sums
from espalier.kernels.runtime.launch import Chip
from espalier.models.layers.linear import Linear
from espalier.models.weight_formats import dense as dense_format

CHIP = Chip(shared_memory=100_000, processors=10, capability=(9, 0))
ONE = TritonPlan(block_out=64, block_in=128, splits=2, warps=4, stages=3)
OTHER = TritonPlan(block_out=128, block_in=64, splits=1, warps=8, stages=4)
IN_PIECES = LibraryPlan(pieces=2, splits=1)
SOME = (ONE, None, OTHER, None, IN_PIECES)


def test_rows_find_their_bucket():
    plans = [LINEAR_TUNING.plan_for_count(SOME, rows) for rows in (0, 1, 16, 17, 32, 33, 64, 65, 256, 257, 4096)]
    assert plans == [ONE, ONE, ONE, None, None, OTHER, OTHER, None, IN_PIECES, None, None]


def test_write_then_read(tmp_path):
    path, table = tmp_path / "deep" / "choices.json", TuningTable(CHIP, "bfloat16", {(64, 128): SOME}, {"gpu": "one"})
    LINEAR_TUNING.write_table(path, table)
    assert LINEAR_TUNING.read_tables(path) == [table]


def test_writing_keeps_shapes_that_are_not_overwritten(tmp_path):
    path = tmp_path / "choices.json"
    LINEAR_TUNING.write_table(path, TuningTable(CHIP, "bfloat16", {(64, 128): SOME, (8, 16): SOME}))
    LINEAR_TUNING.write_table(path, TuningTable(CHIP, "float16", {(64, 128): SOME}))
    LINEAR_TUNING.write_table(path, TuningTable(CHIP, "bfloat16", {(64, 128): NO_PLANS}, format="int8"))
    LINEAR_TUNING.write_table(path, TuningTable(CHIP, "bfloat16", {(8, 16): NO_PLANS}))
    tables = {(table.dtype, table.format): table.plans for table in LINEAR_TUNING.read_tables(path)}
    assert tables == {
        ("bfloat16", DENSE): {(64, 128): SOME, (8, 16): NO_PLANS},
        ("bfloat16", "int8"): {(64, 128): NO_PLANS},
        ("float16", DENSE): {(64, 128): SOME},
    }


@pytest.mark.parametrize("wrong", [{"block_in": 32}, {"block_out": 48}, {"warps": 3}, {"splits": 0}, {"stages": -1}])
def test_reading_refuses_plans_that_cannot_be_launched(tmp_path, wrong):
    path = tmp_path / "choices.json"
    plan = replace(TritonPlan(64, 128, 2, 4, 3), **wrong)
    LINEAR_TUNING.write_table(path, TuningTable(CHIP, "bfloat16", {(64, 128): (plan, None, None, None, None)}))
    with pytest.raises(EspalierError, match=r"choices\.json is no table of linear layers"):
        LINEAR_TUNING.read_tables(path)


@pytest.mark.parametrize("wrong", [(1, 1), (2, 2), (0, 2), (1, -1)])
def test_reading_refuses_library_plans_without_exactly_one_division(tmp_path, wrong):
    path = tmp_path / "choices.json"
    LINEAR_TUNING.write_table(
        path, TuningTable(CHIP, "bfloat16", {(64, 128): (None, None, None, None, LibraryPlan(*wrong))})
    )
    with pytest.raises(EspalierError, match="one of pieces and splits at 1"):
        LINEAR_TUNING.read_tables(path)


def test_reading_refuses_splits_that_do_not_divide_in(tmp_path):
    path = tmp_path / "choices.json"
    LINEAR_TUNING.write_table(
        path, TuningTable(CHIP, "bfloat16", {(64, 100): (None, None, None, None, LibraryPlan(1, 3))})
    )
    with pytest.raises(EspalierError, match="do not divide the 100 columns"):
        LINEAR_TUNING.read_tables(path)


def test_a_user_without_a_home_directory(monkeypatch, tmp_path):
    for name in (TUNING_FILE_VARIABLE, "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    assert not user_tuning_file().is_file()
    monkeypatch.setenv(TUNING_FILE_VARIABLE, str(tmp_path / "mine.json"))
    assert user_tuning_file() == tmp_path / "mine.json"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"tables": [{}]}', '{"tables": [{"chip": 1, "dtype": "float16", "shapes": {}, "measured": {}}]}'],
)
def test_a_file_of_another_format_is_refused_by_name(tmp_path, text):
    path = tmp_path / "choices.json"
    path.write_text(text)
    with pytest.raises(EspalierError, match=r"choices\.json is no table of linear layers"):
        LINEAR_TUNING.read_tables(path)


def test_a_table_of_other_buckets_is_refused(tmp_path):
    path = tmp_path / "choices.json"
    LINEAR_TUNING.write_table(path, TuningTable(CHIP, "bfloat16", {(64, 128): SOME}))
    path.write_text(path.read_text().replace('"32"', '"48"'))
    with pytest.raises(EspalierError, match="16, 32, 64"):
        LINEAR_TUNING.read_tables(path)


@pytest.fixture
def merged_plans(tmp_path, monkeypatch):
    """The plans that are used with a shipped table and a user's table for CHIP."""
    shipped, user = tmp_path / "shipped.json", tmp_path / "own.json"
    LINEAR_TUNING.write_table(shipped, TuningTable(CHIP, "bfloat16", {(64, 128): SOME, (8, 16): SOME}))
    LINEAR_TUNING.write_table(user, TuningTable(CHIP, "bfloat16", {(8, 16): NO_PLANS}))
    monkeypatch.setattr(linear_plans, "SHIPPED_TUNING_FILE", shipped)
    monkeypatch.setenv(TUNING_FILE_VARIABLE, str(user))
    linear_plans.merged_plans.cache_clear()
    yield lambda gpu, dtype=torch.bfloat16, format=DENSE: LINEAR_TUNING.measured_plans(gpu, dtype, format)
    linear_plans.merged_plans.cache_clear()


def test_the_users_plans_override_the_shipped_ones(merged_plans):
    assert merged_plans(CHIP) == {(64, 128): SOME, (8, 16): NO_PLANS}


@pytest.mark.parametrize(
    "gpu",
    [Chip(99_999, 10, (9, 0)), Chip(100_000, 11, (9, 0)), Chip(100_000, 10, (8, 9))],
    ids=["memory", "processors", "capability"],
)
def test_another_chip_does_not_use_the_table(merged_plans, gpu):
    assert merged_plans(gpu) == {}


def test_another_dtype_does_not_use_the_table(merged_plans):
    assert merged_plans(CHIP, torch.float16) == {}


def test_another_format_does_not_use_the_table(merged_plans):
    LINEAR_TUNING.write_table(
        user_tuning_file(), TuningTable(CHIP, "bfloat16", {(64, 128): (OTHER,) * 5}, format="int8")
    )
    assert merged_plans(CHIP) == {(64, 128): SOME, (8, 16): NO_PLANS}
    assert merged_plans(CHIP, format="int8") == {(64, 128): (OTHER,) * 5}


def test_a_table_without_a_format_is_for_dense_weights(tmp_path):
    path, table = tmp_path / "choices.json", TuningTable(CHIP, "bfloat16", {(64, 128): SOME})
    LINEAR_TUNING.write_table(path, table)
    path.write_text(path.read_text().replace('   "format": "dense",\n', ""))
    assert "format" not in path.read_text() and LINEAR_TUNING.read_tables(path) == [table]


def test_active_plans_are_logged_once(merged_plans, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        merged_plans(CHIP)
    assert len(caplog.messages) == 1
    assert "shipped.json (2 shapes)" in caplog.text and "own.json (1 shapes)" in caplog.text


def test_a_chip_without_plans_is_logged_with_the_remedy(merged_plans, caplog):
    caplog.set_level(logging.INFO)
    merged_plans(Chip(1, 1, (7, 5)))
    assert "F.linear" in caplog.text and "doctor --tune" in caplog.text


H200 = Chip(shared_memory=232448, processors=132, capability=(9, 0))


def test_a_shape_without_an_entry_takes_the_rule_up_to_64_rows():
    measured = {(64, 128): SOME}
    assert plans_for_shape(H200, (64, 128), measured) is SOME and plans_for_shape(H200, (5120, 2048), {}) is None
    plans = plans_for_shape(H200, (5120, 2048), measured)
    assert plans is not None and LINEAR_TUNING.plan_for_count(plans, 65) is None
    assert [LINEAR_TUNING.plan_for_count(plans, rows) for rows in (1, 17, 33)] == [
        plan_by_rule(rows, 5120, 2048, H200) for rows in (16, 32, 64)
    ]


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("shape", [(1, 64), (100, 90), (1024, 4096), (5120, 2048), (2048, 4096), (151936, 2048)])
@pytest.mark.parametrize("gpu", [H200, Chip(101_376, 20, (8, 9))], ids=["H200", "small"])
def test_the_rule_fills_the_chip_once(rows, shape, gpu):
    """Its programs fit the shared memory, and where it splits, all run at once and fill their pipelines."""
    plan = plan_by_rule(rows, *shape, gpu)
    assert isinstance(plan, TritonPlan)
    programs = -(-shape[0] // plan.block_out) * plan.splits
    together = gpu.shared_memory // plan.shared_memory(rows)
    assert together >= 1 and 1 <= plan.splits <= 4
    if rows > 16 and -(-shape[0] // 64) <= gpu.processors:
        assert programs <= gpu.processors
    assert plan.splits == 1 or (programs <= together * gpu.processors and shape[1] >= 3 * plan.splits * plan.block_in)


def test_the_rule_splits_what_would_leave_the_chip_idle():
    def splits(rows):
        return [plan_by_rule(rows, out, 4096, H200).splits for out in (64, 2048, 6144, 8192, 16384, 28672)]

    assert splits(16) == [4, 4, 4, 3, 1, 1] and splits(32) == splits(64) == [4, 4, 1, 1, 1, 1]


def test_above_16_rows_the_rule_gives_a_program_a_multiprocessor_if_there_are_enough():
    assert plan_by_rule(32, 4096, 4096, H200) == TritonPlan(64, 128, 2, 4, 8)
    assert plan_by_rule(64, 4096, 4096, H200) == TritonPlan(64, 64, 2, 4, 8)
    assert plan_by_rule(32, 16384, 4096, H200) == TritonPlan(64, 128, 1, 4, 4)


def test_a_weight_on_the_cpu_has_no_plans():
    assert plans_for_dense_weight(torch.zeros(64, 128, dtype=torch.bfloat16)) is None


def test_the_users_file_is_in_the_configuration_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(TUNING_FILE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_tuning_file() == tmp_path / "espalier" / "choices.json"


@pytest.mark.parametrize("shape", [(2, 3, 128), (5, 128), (0, 3, 128), (1, 40, 128)])
def test_a_linear_layer_uses_the_plan_of_its_bucket(kernel_device, monkeypatch, shape):
    """40 rows are in a bucket whose plan is F.linear."""
    used = []
    monkeypatch.setattr(dense_format, "plans_for_dense_weight", lambda *weight: (ONE, ONE, None, None, None))
    monkeypatch.setattr(dense_format, "linear", lambda *args: used.append(args[-1]) or linear(*args))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator).half().to(kernel_device) for size in (shape, (64, 128)))
    out = Linear(dense_format.dense_weight(weight))(x)
    assert used == [None if shape[:2] == (1, 40) else ONE]
    assert out.shape == (*shape[:-1], 64)
    assert torch.allclose(out.double(), x.double() @ weight.double().T, rtol=0.001, atol=0.02)


@pytest.mark.parametrize("rows", [5, 0, 40])
def test_a_linear_layer_returns_partial_sums(kernel_device, monkeypatch, rows):
    """Only for a plan with splits.  With F.linear, or without a measured plan, the result is complete."""
    for product in (linear, linear_partial_sums):
        monkeypatch.setattr(dense_format, product.__name__, product.triton)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator).half().to(kernel_device) for size in ((rows, 128), (64, 128)))
    unmeasured = Linear(dense_format.dense_weight(weight))
    monkeypatch.setattr(dense_format, "plans_for_dense_weight", lambda *weight: (ONE, ONE, None, None, None))
    layer = Linear(dense_format.dense_weight(weight))
    assert torch.equal(unmeasured.partial_sums(x), unmeasured(x))
    out = layer.partial_sums(x)
    assert out.shape == ((2, 5, 64) if rows == 5 else (rows, 64))
    assert torch.equal((out[0] + out[1]).half() if rows == 5 else out, layer(x))
    parts = torch.full((layer.weight.num_partial_sums(rows), rows, 64), torch.nan, device=kernel_device)
    layer.write_partial_sums(x, parts)
    assert len(parts) == (1 if rows == 40 else 2) and torch.equal(parts.cumsum(0)[-1].half(), layer(x))


def quantised(num_out: int, num_in: int, code: Code, group: int, **more) -> QuantisedMatrix:
    codes = (
        torch.empty(num_out, num_in, device="meta")
        if code == "fp8"
        else torch.empty(num_out, num_in // 2, device="meta")
    )
    return QuantisedMatrix(code, codes, torch.empty(0), group or num_in, **more)


FORMATS = {
    "fp8-inputs": ("fp8", 0, {"input_scales": InputScales()}),
    "fp8-128x128-inputs128": ("fp8", 128, {"rows_per_scale": 128, "input_scales": InputScales(128)}),
    "int4-1x128": ("int4", 128, {}),
    "mxfp4-1x32": ("mxfp4", 32, {}),
}


def test_shipped_plans_are_candidates_on_their_chips():
    for table in LINEAR_TUNING.read_tables(SHIPPED_TUNING_FILE):
        assert getattr(torch, table.dtype) in DTYPES
        for shape, plans in table.plans.items():
            for rows, plan in zip(ROWS_BUCKETS, plans, strict=True):
                if plan is None:
                    continue
                if table.format == DENSE:
                    assert plan in candidate_plans(rows, *shape, table.chip), (shape, rows)
                else:
                    code, group, more = FORMATS[table.format]
                    matrix = quantised(*shape, code, group, **more)
                    assert tuning_format_name(matrix) == table.format
                    assert plan in quantised_candidates(rows, matrix, table.chip), (table.format, shape, rows)


def test_the_file_is_json_with_one_line_per_plan(tmp_path):
    path = tmp_path / "choices.json"
    LINEAR_TUNING.write_table(path, TuningTable(CHIP, "bfloat16", {(64, 128): SOME}))
    assert json.loads(path.read_text())["tables"][0]["shapes"]["64x128"]["32"] is None
    assert '"16": { "block_out": 64, "block_in": 128, "splits": 2, "warps": 4, "stages": 3 }' in path.read_text()
