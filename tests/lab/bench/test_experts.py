"""Benches of experts: what is drawn, what is measured and taken, and how many experts a pass touches."""

from contextlib import nullcontext

import pytest
import torch

from espalier.bench import tune_experts
from espalier.bench.linears import ExpertSizes, ModelShape
from espalier.bench.tune_experts import ChainInputs, ExpertsTuner, random_expert_ids, random_experts
from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.layers.experts_plan import TILE_ROWS_BY_PAIRS, ExpertsShape, candidate_plans, experts_plan_by_rule
from espalier.kernels.ops.experts import Routing, grouped_experts
from espalier.kernels.runtime.launch import Chip
from espalier.models.layers.mlp import MixtureMLP
from lab.bench.cells import RoundCell
from lab.bench.engine_sizes import CellEngineSizes
from lab.bench.experts import expert_case
from lab.bench.experts_touched import CountingExperts
from lab.bench.full_rounds import measure_full_rounds
from lab.bench.synthetic_models import SyntheticModels
from lab.synthetic.checkpoint import Recipe
from tests.bench.test_tune import Told
from tests.lab.synthetic.mixtures import mixture

CPU = torch.device("cpu")
H200 = Chip(232448, 132, (9, 0))
SHAPE = ExpertsShape(16, 3, 32, 16)
SPECS = (LayerSpec(2, KVHeads(1, 32, 32)),) * 2


def test_a_row_goes_through_all_experts_call_by_call():
    calls = random_expert_ids(SHAPE, 40, 5)
    assert all(ids.shape == (40, 3) and (ids[:, 1:] > ids[:, :-1]).all() for ids in calls)
    assert torch.stack(calls)[:, 0].unique().tolist() == torch.stack(calls)[:, 0].flatten().sort().values.tolist()
    # Rows are independent: their experts meet as if drawn.
    assert ChainInputs(SHAPE, 4, torch.float32, CPU).mean_active_experts == pytest.approx(
        SHAPE.active_experts(4), abs=1.5
    )


@pytest.mark.parametrize("num_matrices", [1, 2])
def test_experts_without_a_gate_are_timed_too(kernel_device, num_matrices):
    shape = ExpertsShape(4, 2, 32, 16, num_matrices)
    expert_case((), shape, *random_experts(shape, torch.float32, kernel_device), torch.float32, 3).run()


@pytest.fixture
def tuner(monkeypatch):
    monkeypatch.setattr(tune_experts, "require_gpu", lambda what: CPU)
    monkeypatch.setattr(tune_experts, "precompile", nullcontext)
    for name in ("CHAIN_BYTES", "CHAIN_FLOPS"):
        monkeypatch.setattr(tune_experts, name, 1)
    for name in ("experts_tiles.make_expert_tiles", "experts.launch_gate_and_up", "experts.launch_down"):
        monkeypatch.setattr(f"espalier.kernels.layers.{name}", lambda *args, **named: None)
    monkeypatch.setattr(grouped_experts, "triton", lambda *args, **named: None)
    tuner = ExpertsTuner(torch.bfloat16, Told(3.0, 1.0, 2.0))
    tuner.chip = H200
    return tuner


def test_every_bucket_takes_one_of_its_plans(tuner):
    rows = (1, 4, 16, 64, 256, 512)
    found = list(tuner.measure(SHAPE, rows))
    assert [each.num_rows for bucket in found for each in bucket] == list(rows)
    for bucket in found:
        [plan] = {each.plan for each in bucket}
        tile_rows = TILE_ROWS_BY_PAIRS[SHAPE.pairs_bucket(bucket[0].num_rows)][1]
        assert plan.tile_rows in tile_rows
        # The timer says that the second of all contenders is the fastest.
        assert plan.gated == candidate_plans(plan.tile_rows, 2, H200)[1]
        assert all(
            each.measured_us == pytest.approx(1e3 / ChainInputs(SHAPE, each.num_rows, torch.bfloat16, CPU).num_calls)
            for each in bucket
        )


def test_rates_count_touched_experts_and_all_products(tuner):
    [[measured]] = tuner.measure(SHAPE, (8,))
    size = 3 * 32 * 16
    assert measured.bytes_per_second == pytest.approx(
        measured.mean_active_experts * 2 * size / measured.measured_us * 1e6
    )
    assert measured.flops_per_second == pytest.approx(8 * 3 * 2 * size / measured.measured_us * 1e6)


def test_a_model_without_experts_is_refused(tmp_path):
    dense = ModelShape(64, SPECS, 96, 72)
    with pytest.raises(EspalierError, match="for mixtures of experts"):
        tune_experts.run([dense], torch.bfloat16, tmp_path / "choices.json")


def test_models_with_the_same_experts_are_not_refused(monkeypatch, tmp_path):
    def reached(what):
        raise EspalierError("reached")

    monkeypatch.setattr(tune_experts, "require_gpu", reached)
    models = [ModelShape(64, SPECS, 96, vocab, experts=ExpertSizes(2, SHAPE)) for vocab in (72, 80)]
    with pytest.raises(EspalierError, match="reached"):
        tune_experts.run(models, torch.bfloat16, tmp_path / "choices.json")


@pytest.mark.parametrize("correlation", [0.0, 1.0])
def test_the_experts_of_a_pass_are_counted(correlation):
    """Four requests, each in a topic of its own: at 1 a pass touches the experts of four tokens, at 0 of many more."""
    shape = mixture("qwen3-moe", hot=1024)
    models = SyntheticModels(Recipe(shape, skill=0.9, routing_correlation=correlation), torch.float32, CPU, 512)
    cell = RoundCell(4, 24, (4, 4, 16), 16)
    with CellEngineSizes(models.recipe.draft_config.spec, chunk_size=128).open(models, cell, 4) as (engine, _):
        rounds = measure_full_rounds(engine, models, cell, 4)
    assert rounds.follows == 4
    if correlation:
        assert 4 <= rounds.experts_touched <= 16 * (1 - 0.75**4) + 2
    else:
        # 64 nodes, some of them of the same token.
        assert 15 <= rounds.experts_touched <= 16


def test_a_dense_target_touches_no_experts():
    models = SyntheticModels(Recipe(mixture("v3-dense"), skill=0.9), torch.float32, CPU, 512)
    cell = RoundCell(1, 24, (2, 2, 4), 16)
    with CellEngineSizes(models.recipe.draft_config.spec, chunk_size=128).open(models, cell, 2) as (engine, _):
        assert measure_full_rounds(engine, models, cell, 2).experts_touched is None


def test_the_rule_grows_tiles_with_the_pairs_of_an_expert():
    shape = ExpertsShape(128, 8, 2048, 768)
    tiles = {
        rows: experts_plan_by_rule(shape, rows, torch.bfloat16, H200).tile_rows for rows in (2, 128, 512, 2048, 8192)
    }
    assert tiles == {2: 16, 128: 16, 512: 32, 2048: 128, 8192: 128}
    assert experts_plan_by_rule(shape, 33, torch.bfloat16, H200) == experts_plan_by_rule(
        shape, 64, torch.bfloat16, H200
    )


def test_rows_that_go_to_no_expert_are_not_counted():
    counts: list[tuple[int, torch.Tensor]] = []
    router = torch.eye(6)[:, :6]
    mlp = MixtureMLP(Routing(6, 2), router, None, torch.zeros(6, 4, 6), torch.zeros(6, 6, 2))
    counting = CountingExperts(mlp, counts)
    x = torch.tensor([[9.0, 8, 0, 0, 0, 0], [0, 9, 8, 0, 0, 0], [0, 0, 0, 0, 9, 8]])
    assert torch.equal(counting(mlp.route_rows(x)), mlp(mlp.route_rows(x)))
    counting(mlp.route_rows(x), torch.tensor([True, True, False]))
    assert [(rows, int(count)) for rows, count in counts] == [(3, 5), (3, 3)]
