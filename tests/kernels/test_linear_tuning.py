"""The table that says which kernel computes a linear layer: written and read, and used only where it holds."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers import linear_tuning as choices
from espalier.kernels.layers.linear import DTYPES, LibraryPlan, TritonPlan, candidates, linear
from espalier.kernels.layers.linear_tuning import (
    CHOICES_FILE,
    DENSE,
    ROWS_BUCKETS,
    SHIPPED,
    LinearPlans,
    Table,
    own_file,
    plans_for,
    read,
    write,
)
from espalier.kernels.runtime.launch import Chip
from espalier.models.layers.linear import Linear
from espalier.models.weight_formats import dense as dense_format

CHIP = Chip(shared_memory=100_000, processors=10, capability=(9, 0))
ONE = TritonPlan(block_out=64, block_in=128, splits=2, warps=4, stages=3)
OTHER = TritonPlan(block_out=128, block_in=64, splits=1, warps=8, stages=4)
CUT = LibraryPlan(pieces=2, splits=1)
SOME = LinearPlans((ONE, None, OTHER, None, CUT))


def test_rows_find_their_bucket():
    found = [SOME.at(rows) for rows in (0, 1, 16, 17, 32, 33, 64, 65, 256, 257, 4096)]
    assert found == [ONE, ONE, ONE, None, None, OTHER, OTHER, None, CUT, None, None]


def test_what_is_written_is_read(tmp_path):
    path, table = tmp_path / "deep" / "choices.json", Table(CHIP, "bfloat16", {(64, 128): SOME}, {"gpu": "one"})
    write(path, table)
    assert read(path) == [table]


def test_writing_keeps_what_is_not_measured_anew(tmp_path):
    path = tmp_path / "choices.json"
    write(path, Table(CHIP, "bfloat16", {(64, 128): SOME, (8, 16): SOME}))
    write(path, Table(CHIP, "float16", {(64, 128): SOME}))
    write(path, Table(CHIP, "bfloat16", {(64, 128): LinearPlans()}, format="int8"))
    write(path, Table(CHIP, "bfloat16", {(8, 16): LinearPlans()}))
    tables = {(table.dtype, table.format): table.shapes for table in read(path)}
    assert tables == {
        ("bfloat16", DENSE): {(64, 128): SOME, (8, 16): LinearPlans()},
        ("bfloat16", "int8"): {(64, 128): LinearPlans()},
        ("float16", DENSE): {(64, 128): SOME},
    }


@pytest.mark.parametrize("wrong", [{"block_in": 32}, {"block_out": 48}, {"warps": 3}, {"splits": 0}, {"stages": -1}])
def test_launches_that_cannot_run_are_refused_when_they_are_read(tmp_path, wrong):
    path = tmp_path / "choices.json"
    launch = replace(TritonPlan(64, 128, 2, 4, 3), **wrong)
    write(path, Table(CHIP, "bfloat16", {(64, 128): LinearPlans((launch, None, None, None, None))}))
    with pytest.raises(EspalierError, match=r"choices\.json is no table of linear layers"):
        read(path)


@pytest.mark.parametrize("wrong", [(1, 1), (2, 2), (0, 2), (1, -1)])
def test_a_library_that_is_asked_for_nothing_less_is_refused(tmp_path, wrong):
    path = tmp_path / "choices.json"
    write(path, Table(CHIP, "bfloat16", {(64, 128): LinearPlans((None, None, None, None, LibraryPlan(*wrong)))}))
    with pytest.raises(EspalierError, match="not in pieces or in parts"):
        read(path)


def test_parts_that_do_not_divide_a_row_are_refused_when_they_are_read(tmp_path):
    path = tmp_path / "choices.json"
    write(path, Table(CHIP, "bfloat16", {(64, 100): LinearPlans((None, None, None, None, LibraryPlan(1, 3)))}))
    with pytest.raises(EspalierError, match="does not divide the 100 numbers"):
        read(path)


def test_a_user_without_a_home_has_no_table_of_his_own(monkeypatch, tmp_path):
    for name in (CHOICES_FILE, "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    assert not own_file().is_file()
    monkeypatch.setenv(CHOICES_FILE, str(tmp_path / "mine.json"))
    assert own_file() == tmp_path / "mine.json"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"tables": [{}]}', '{"tables": [{"chip": 1, "dtype": "float16", "shapes": {}, "measured": {}}]}'],
)
def test_another_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "choices.json"
    path.write_text(text)
    with pytest.raises(EspalierError, match=r"choices\.json is no table of linear layers"):
        read(path)


def test_a_table_of_other_buckets_is_refused(tmp_path):
    path = tmp_path / "choices.json"
    write(path, Table(CHIP, "bfloat16", {(64, 128): SOME}))
    path.write_text(path.read_text().replace('"32"', '"48"'))
    with pytest.raises(EspalierError, match="16, 32, 64"):
        read(path)


@pytest.fixture
def in_force(tmp_path, monkeypatch):
    """A shipped file and a user's own, for a chip that is CHIP."""
    shipped, own = tmp_path / "shipped.json", tmp_path / "own.json"
    write(shipped, Table(CHIP, "bfloat16", {(64, 128): SOME, (8, 16): SOME}))
    write(own, Table(CHIP, "bfloat16", {(8, 16): LinearPlans()}))
    monkeypatch.setattr(choices, "SHIPPED", shipped)
    monkeypatch.setenv(CHOICES_FILE, str(own))
    choices._in_force.cache_clear()
    yield lambda on, dtype="bfloat16", format=DENSE: choices._in_force((on, dtype, format), own_file())
    choices._in_force.cache_clear()


def test_a_users_own_stands_before_the_shipped(in_force):
    assert in_force(CHIP) == {(64, 128): SOME, (8, 16): LinearPlans()}


@pytest.mark.parametrize(
    "on",
    [Chip(99_999, 10, (9, 0)), Chip(100_000, 11, (9, 0)), Chip(100_000, 10, (8, 9))],
    ids=["memory", "processors", "capability"],
)
def test_another_chip_takes_nothing_from_it(in_force, on):
    assert in_force(on) == {}


def test_another_dtype_takes_nothing_from_it(in_force):
    assert in_force(CHIP, "float16") == {}


def test_another_format_takes_nothing_from_it(in_force):
    write(own_file(), Table(CHIP, "bfloat16", {(64, 128): LinearPlans((OTHER,) * 5)}, format="int8"))
    assert in_force(CHIP) == {(64, 128): SOME, (8, 16): LinearPlans()}
    assert in_force(CHIP, format="int8") == {(64, 128): LinearPlans((OTHER,) * 5)}


def test_a_table_without_formats_is_of_dense_weights(tmp_path):
    path, table = tmp_path / "choices.json", Table(CHIP, "bfloat16", {(64, 128): SOME})
    write(path, table)
    path.write_text(path.read_text().replace('   "format": "dense",\n', ""))
    assert "format" not in path.read_text() and read(path) == [table]


def test_what_is_in_force_is_logged_once(in_force, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        in_force(CHIP)
    assert len(caplog.messages) == 1
    assert "shipped.json (2 shapes)" in caplog.text and "own.json (1 shapes)" in caplog.text


def test_nothing_measured_is_logged_with_what_to_do(in_force, caplog):
    caplog.set_level(logging.INFO)
    in_force(Chip(1, 1, (7, 5)))
    assert "F.linear" in caplog.text and "doctor --tune" in caplog.text


def test_a_weight_on_the_cpu_has_no_choices():
    weight = torch.zeros(64, 128, dtype=torch.bfloat16)
    assert plans_for((64, 128), DENSE, weight.dtype, weight) is None


def test_the_users_file_stands_in_the_configuration_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(CHOICES_FILE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert own_file() == tmp_path / "espalier" / "choices.json"


@pytest.mark.parametrize("shape", [(2, 3, 128), (5, 128), (0, 3, 128), (1, 40, 128)])
def test_a_linear_layer_takes_what_is_in_force(kernel_device, monkeypatch, shape):
    """40 rows fall into a bucket without a launch of ours."""
    gone = []
    monkeypatch.setattr(dense_format, "plans_for", lambda *weight: LinearPlans((ONE, ONE, None, None, None)))
    monkeypatch.setattr(dense_format, "linear", lambda *given: gone.append(given[-1]) or linear(*given))
    at = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=at).half().to(kernel_device) for size in (shape, (64, 128)))
    out = Linear(dense_format.dense_weight(weight))(x)
    assert gone == [None if shape[:2] == (1, 40) else ONE]
    assert out.shape == (*shape[:-1], 64)
    assert torch.allclose(out.double(), x.double() @ weight.double().T, rtol=0.001, atol=0.02)


@pytest.mark.parametrize("rows", [5, 0, 40])
def test_a_linear_layer_hands_on_its_parts(kernel_device, monkeypatch, rows):
    """Of what the choice splits; what F.linear computes, or nothing was measured for, comes whole."""
    at = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=at).half().to(kernel_device) for size in ((rows, 128), (64, 128)))
    unmeasured = Linear(dense_format.dense_weight(weight))
    monkeypatch.setattr(dense_format, "plans_for", lambda *weight: LinearPlans((ONE, ONE, None, None, None)))
    layer = Linear(dense_format.dense_weight(weight))
    assert torch.equal(unmeasured.in_parts(x), unmeasured(x))
    made = layer.in_parts(x)
    assert made.shape == ((2, 5, 64) if rows == 5 else (rows, 64))
    assert torch.equal((made[0] + made[1]).half() if rows == 5 else made, layer(x))


def test_what_is_shipped_fits_the_chips_it_is_for():
    for table in read(SHIPPED):
        assert getattr(torch, table.dtype) in DTYPES
        for shape, found in table.shapes.items():
            for rows, choice in zip(ROWS_BUCKETS, found.by_bucket, strict=True):
                assert choice is None or choice in candidates(rows, *shape, table.chip), (shape, rows)


def test_the_file_is_plain_json_with_a_line_a_launch(tmp_path):
    path = tmp_path / "choices.json"
    write(path, Table(CHIP, "bfloat16", {(64, 128): SOME}))
    assert json.loads(path.read_text())["tables"][0]["shapes"]["64x128"]["32"] is None
    assert '"16": { "block_out": 64, "block_in": 128, "splits": 2, "warps": 4, "stages": 3 }' in path.read_text()
