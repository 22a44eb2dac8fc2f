"""Tuning without a chip: who is measured, and who is taken for which figures."""

import pytest
import torch

from espalier.bench import tune
from espalier.bench.linears import ModelShape, recipe_sizes
from espalier.bench.tune import Measured, Tuner, plans_by_shape
from espalier.kernels.layers.linear import LibraryPlan, TritonPlan
from espalier.kernels.layers.linear_tuning import ROWS_BUCKETS, LinearPlans
from espalier.synthetic.checkpoint import Recipe
from tests.synthetic.mixtures import mixture

TINY = ModelShape(hidden=64, layers=2, heads=2, kv_heads=1, head_size=32, intermediate=96, vocab=72, draft_vocab=40)
LATENT = recipe_sizes(Recipe(mixture("v3-dense")))
FIRST, SECOND = TritonPlan(64, 64, 1, 4, 2), TritonPlan(64, 128, 1, 4, 2)


class Told:
    """A stopwatch that says what it is told to, contender by contender."""

    def __init__(self, *times):
        self.times = times

    def ms(self, bodies, turns, seconds=0.0):
        return [self.times[min(at, len(self.times) - 1)] for at in range(len(bodies))]


@pytest.fixture
def tuner(monkeypatch):
    monkeypatch.setattr(tune, "require_gpu", lambda what: torch.device("cpu"))
    monkeypatch.setattr(tune, "COPIES_BYTES", 1)
    monkeypatch.setattr(tune, "CHAIN_BYTES", 1)
    return Tuner(torch.bfloat16)


def test_every_bucket_is_measured_and_the_fastest_is_first(tuner):
    # Of a bucket's last measurement, F.linear comes first and takes longest.
    tuner.stopwatch = Told(5.0, 4.0, 3.0)
    found = tuner.alone((4096, 64))
    assert [each.rows for each in found] == list(ROWS_BUCKETS)
    assert all(each.fastest is not None and each.fastest == each.ours[0] for each in found if len(each.ours) > 1)
    assert all(each.ours_us < each.cublas_us for each in found if each.ours)


def test_a_shape_that_no_candidate_fits_is_left_to_pytorch():
    assert Measured((8, 8), 16, 1.0, torch.inf, ()).fastest is None


@pytest.mark.parametrize(
    ("times", "taken"),
    [((2.0, 1.0, 3.0), None), ((1.0, 2.0, 3.0), FIRST), ((2.0, 1.999, 2.0), FIRST), ((2.0, 2.0, 1.0), SECOND)],
)
def test_among_neighbours_the_fastest_pass_decides(tuner, times, taken):
    """In force is FIRST; contenders are F.linear and SECOND; a gain of half a thousandth is none."""
    tuner.stopwatch, measured = Told(*times), Measured((64, 64), 16, 2.0, 1.0, (FIRST, SECOND))
    assert tuner._fastest_among((), tuner.weights, measured, {((64, 64), 16): FIRST}) == taken


def test_what_comes_in_parts_is_read(tuner, monkeypatch):
    """The read belongs to the time of a split linear, which would look too fast without."""
    read = []
    monkeypatch.setattr(tune, "add_rms_norm", lambda made, *given: read.append(made.shape) or (made, made))
    runs = TINY.target_pass(16)
    table = dict.fromkeys(((run.shape, 16) for run in runs), LibraryPlan(1, 2))
    table[TINY.target_pass(1)[-1].shape, 16] = table[(192, 64), 16] = None
    tuner.weights.chain(runs, tune._by_table(runs, table, 16))()
    assert read == [(2, 16, 128), (2, 16, 64), (2, 16, 64)] * TINY.layers


def test_a_gate_belongs_to_the_time_of_what_is_in_front_of_it(tuner, monkeypatch):
    """Some ways take it in, and would look no faster than others without."""
    gated = []
    monkeypatch.setattr(tune, "linear_gated", lambda x, weight, bias, plan: gated.append((weight.shape, plan)))
    runs = TINY.target_pass(16)
    table = dict.fromkeys(((run.shape, 16) for run in runs), None) | {((192, 64), 16): FIRST}
    tuner.weights.chain(runs, tune._by_table(runs, table, 16))()
    assert gated == [((192, 64), FIRST)] * TINY.layers


@pytest.mark.parametrize("model", [TINY, LATENT], ids=["heads", "latent"])
def test_every_shape_of_a_model_is_settled_once(tuner, model):
    tuner.stopwatch = Told(1.0)
    alone = {s: [Measured(s, rows, 2.0, 1.0, (FIRST,)) for rows in ROWS_BUCKETS] for s in model.shapes()}
    table = {(model.shapes()[0], rows): SECOND for rows in ROWS_BUCKETS}
    tuner.among_neighbours(model, alone, table)
    found = plans_by_shape(table)
    assert set(found) == set(model.shapes())
    assert found.pop(model.shapes()[0]) == LinearPlans((SECOND,) * len(ROWS_BUCKETS))
    assert set(found.values()) == {LinearPlans((FIRST,) * len(ROWS_BUCKETS))}
