"""Tuning without a chip: who is measured, and who is taken for which figures."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from espalier.bench import tune
from espalier.bench.linears import ModelShape
from espalier.bench.tune import LinearTuner, MeasuredPlans, plans_by_shape
from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import LINEAR_TUNING, ROWS_BUCKETS, LibraryPlan, TritonPlan, TuningTable
from espalier.kernels.layers.quantised_plans import max_block_in
from lab.bench.synthetic_models import recipe_sizes
from lab.synthetic.checkpoint import Recipe
from tests.lab.synthetic.mixtures import mixture

TINY = ModelShape(64, (LayerSpec(2, KVHeads(1, 32, 32)),) * 2, intermediate_size=96, vocab_size=72, draft_vocab_size=40)
LATENT = recipe_sizes(Recipe(mixture("v3-dense")))
WIDE = ModelShape(
    256, (LayerSpec(4, KVHeads(4, 64, 64)),) * 2, intermediate_size=1024, vocab_size=320, draft_vocab_size=40
)
NAMES = {"fp8": "fp8", "fp8-block": "fp8-128x128", "int4": "int4-1x128", "mxfp4": "mxfp4-1x32"}
FIRST, SECOND = TritonPlan(64, 64, 1, 4, 2), TritonPlan(64, 128, 1, 4, 2)


class Told:
    """A timer that says what it is told to, contender by contender."""

    def __init__(self, *times):
        self.times = times

    def median_ms(self, bodies, turns, seconds=0.0):
        return [self.times[min(at, len(self.times) - 1)] for at in range(len(bodies))]


@pytest.fixture
def tuner(monkeypatch):
    monkeypatch.setattr(tune, "require_gpu", lambda what: torch.device("cpu"))
    monkeypatch.setattr(tune, "COPIES_BYTES", 1)
    monkeypatch.setattr(tune, "CHAIN_BYTES", 1)
    return LinearTuner(torch.bfloat16)


def test_every_bucket_is_measured_and_the_fastest_is_first(tuner):
    # Of a bucket's last measurement, F.linear comes first and takes longest.
    tuner.timer = Told(5.0, 4.0, 3.0)
    found = [tuner.measure_alone([(4096, 64)], rows)[(4096, 64), rows] for rows in ROWS_BUCKETS]
    assert [each.num_rows for each in found] == list(ROWS_BUCKETS)
    assert all(each.fastest is not None and each.fastest == each.plans[0] for each in found if len(each.plans) > 1)
    assert all(each.fastest_us < each.baseline_us for each in found if each.plans)


def test_a_shape_that_no_candidate_fits_is_left_to_pytorch():
    assert MeasuredPlans((8, 8), 16, 1.0, torch.inf, ()).fastest is None


@pytest.mark.parametrize(
    ("times", "taken"),
    [((2.0, 1.0, 3.0), None), ((1.0, 2.0, 3.0), FIRST), ((2.0, 1.999, 2.0), FIRST), ((2.0, 2.0, 1.0), SECOND)],
)
def test_among_neighbours_the_fastest_pass_decides(tuner, times, taken):
    """In force is FIRST; contenders are F.linear and SECOND; a gain of half a thousandth is none."""
    tuner.timer, measured = Told(*times), MeasuredPlans((64, 64), 16, 2.0, 1.0, (FIRST, SECOND))
    assert tuner._fastest_plan_in_pass((), tuner.random_weights, measured, {((64, 64), 16): FIRST}) == taken


def test_what_comes_in_parts_is_read(tuner, monkeypatch):
    """The read belongs to the time of a split linear, which would look too fast without."""
    read = []
    monkeypatch.setattr(tune, "add_rms_norm", lambda made, *given: read.append(made.shape) or (made, made))
    runs = TINY.target_pass(16)
    table = dict.fromkeys(((run.shape, 16) for run in runs), LibraryPlan(1, 2))
    table[TINY.target_pass(1)[-1].shape, 16] = table[(192, 64), 16] = None
    tuner.random_weights.make_pass(runs, tune._multiply_by_table(runs, table, 16))()
    assert read == [(2, 16, 128), (2, 16, 64), (2, 16, 64)] * TINY.num_layers


def test_a_gate_belongs_to_the_time_of_what_is_in_front_of_it(tuner, monkeypatch):
    """Some ways take it in, and would look no faster than others without."""
    gated = []
    monkeypatch.setattr(tune, "linear_gated", lambda x, weight, bias, plan: gated.append((weight.shape, plan)))
    runs = TINY.target_pass(16)
    table = dict.fromkeys(((run.shape, 16) for run in runs), None) | {((192, 64), 16): FIRST}
    tuner.random_weights.make_pass(runs, tune._multiply_by_table(runs, table, 16))()
    assert gated == [((192, 64), FIRST)] * TINY.num_layers


@pytest.mark.parametrize("model", [TINY, LATENT], ids=["heads", "latent"])
def test_every_shape_of_a_model_is_settled_once(tuner, model):
    tuner.timer = Told(1.0)
    alone = {
        (s, rows): MeasuredPlans(s, rows, 2.0, 1.0, (FIRST,)) for s in model.matrix_shapes() for rows in ROWS_BUCKETS
    }
    table = {(model.matrix_shapes()[0], rows): SECOND for rows in ROWS_BUCKETS}
    tuner.measure_in_passes(model, alone, table)
    found = plans_by_shape(table, {})
    assert set(found) == set(model.matrix_shapes())
    assert found.pop(model.matrix_shapes()[0]) == (SECOND,) * len(ROWS_BUCKETS)
    assert set(found.values()) == {(FIRST,) * len(ROWS_BUCKETS)}


@pytest.mark.parametrize(("weights", "format"), [*NAMES.items()])
def test_quantised_shapes_are_measured_and_written_under_their_format(tuner, monkeypatch, tmp_path, weights, format):
    """Head and draft stay dense: they are neither measured nor in the table."""
    monkeypatch.setattr(
        tune, "shape_named", lambda name, weight_format, draft_weight_format: replace(WIDE, weight_format=weight_format)
    )
    monkeypatch.setattr(tune, "print_header", lambda: None)
    monkeypatch.setattr(tune, "gpu_versions", dict)
    monkeypatch.setattr(LinearTuner, "measure_in_passes", kept := Kept())
    monkeypatch.setattr(tune, "GraphTimer", lambda: Told(5.0, 4.0, 3.0))
    path = tmp_path / "choices.json"
    args = Namespace(shapes="wide", choices=path, tune="linears", weights=weights, draft_weights=None, seconds=None)
    tune._run(args, EngineConfig(dtype="bfloat16"))
    [table] = LINEAR_TUNING.read_tables(path)
    assert (table.format, set(table.plans)) == (format, {(768, 256), (256, 256), (2048, 256), (256, 1024)})
    own = kept.tuner.random_weights.random_weight((2048, 256), weights)
    plans = [plan for plans in table.plans.values() for plan in plans]
    assert all(isinstance(plan, TritonPlan) and max_block_in(own) % plan.block_in == 0 for plan in plans)


class Kept:
    """Instead of measuring among neighbours: takes what is fastest alone, and keeps the tuner."""

    def __call__(self, model, alone, table):
        table |= {cell: each.fastest for cell, each in alone.items()}

    def __get__(self, tuner, owner):
        self.tuner = tuner
        return self


class Clock:
    """A second passes with every look."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


def test_a_limit_ends_the_measurement_and_keeps_what_was_known(tuner, monkeypatch, tmp_path, capsys):
    """Few rows are measured, with few candidates; other buckets keep the plans of the file."""
    monkeypatch.setattr(
        tune, "shape_named", lambda name, weight_format, draft_weight_format: replace(WIDE, weight_format=weight_format)
    )
    monkeypatch.setattr(tune, "print_header", lambda: None)
    monkeypatch.setattr(tune, "gpu_versions", dict)
    monkeypatch.setattr(tune, "GraphTimer", lambda: Told(5.0, 4.0, 3.0))
    monkeypatch.setattr(tune, "perf_counter", Clock())
    monkeypatch.setattr(tune, "MAX_CANDIDATES_IN_LIMIT", 2)
    asked, us = [], LinearTuner._plan_us
    monkeypatch.setattr(
        LinearTuner,
        "_plan_us",
        lambda self, x, w, plans, turns: asked.append(len(plans)) or us(self, x, w, plans, 1),
    )
    path, known = tmp_path / "choices.json", (None, None, None, None, FIRST)
    LINEAR_TUNING.write_table(path, TuningTable(tuner.chip, "bfloat16", {(768, 256): known}, {}, "int4-1x128"))
    args = Namespace(shapes="wide", choices=path, tune="linears", weights="int4", draft_weights=None, seconds=40.0)
    tune._run(args, EngineConfig(dtype="bfloat16"))
    [table] = LINEAR_TUNING.read_tables(path)
    first, *_, last = table.plans[768, 256]
    assert first is not None and last == FIRST
    plans = [plan for plans in table.plans.values() for plan in plans]
    assert None in plans and "the time was over" in capsys.readouterr().out
    # Alone plans are measured one by one; then the best of them together.
    assert asked.count(1) <= 2 * sum(plan is not None for plan in plans)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_in_a_pass_only_quantised_matrices_take_plans(tuner, monkeypatch, weights):
    model, taken = replace(WIDE, weight_format=weights), []
    monkeypatch.setattr(tune, "add_rms_norm", lambda made, *given: (made, made))
    monkeypatch.setattr(
        tune, "_plan_product", lambda x, weight, plan, **how: taken.append((weight.shape, plan, how)) or x
    )
    runs = model.target_pass(16)
    table = dict.fromkeys(((shape, 16) for shape in model.matrix_shapes(weights)), FIRST)
    tuner.random_weights.make_pass(runs, tune._multiply_by_table(runs, table, 16))()
    summed = "as_partial_sums"
    parts = {(768, 256): summed, (256, 256): summed, (2048, 256): "gated", (256, 1024): summed}
    assert (
        taken[:4] == [(shape, FIRST, {how: True}) for shape, how in parts.items()] and len(taken) == 4 * WIDE.num_layers
    )


def test_what_is_not_tuned_is_refused(tuner):
    args = Namespace(
        shapes="gpt-oss-20b", choices=None, tune="experts", weights="fp8", draft_weights=None, seconds=None
    )
    with pytest.raises(EspalierError, match="--weights is not for --tune experts"):
        tune._run(args, EngineConfig(dtype="bfloat16"))
    args = Namespace(shapes="gpt-oss-20b", choices=None, tune="experts", weights=None, draft_weights=None, seconds=60.0)
    with pytest.raises(EspalierError, match="--seconds is not for --tune experts"):
        tune._run(args, EngineConfig(dtype="bfloat16"))
