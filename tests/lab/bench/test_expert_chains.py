"""The floor of a mixture: which experts a chain goes to, in which order, and that it launches what the engine does."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.bench import timing
from espalier.bench.linears import ProductGroup
from espalier.bench.shapes import SHAPES, Shape
from espalier.bench.timing import multiply_by_library
from espalier.bench.tune_experts import random_expert_ids
from espalier.kernels.layers.experts_plan import ExpertsShape
from espalier.kernels.layers.quantised import InputScales, RoundedRows
from espalier.kernels.ops.experts import grouped_experts
from espalier.layout import TreeShape
from espalier.models.layers import mlp as layer
from espalier.models.quantisers import QUANTISERS
from lab.__main__ import main as lab
from lab.bench import experts as lab_experts
from lab.bench import floor as floor_module
from lab.bench.ceilings import GpuCeilings
from lab.bench.experts import ExpertCalls, ExpertWeights, LayerExperts, num_expert_copies, product_steps
from lab.bench.floor import FloorMeter, LinearTimes, RoundSize, round_products
from lab.bench.passes import prefill_pass
from lab.bench.synthetic_models import recipe_sizes
from lab.synthetic.checkpoint import Recipe, build_models
from tests.lab.shapes import shape_named
from tests.lab.synthetic.mixtures import WITH_EXPERTS, mixture

CPU = torch.device("cpu")
CEILINGS = GpuCeilings(4e12, 8e14)
QWEN = shape_named("qwen3-30b-a3b")
MIXTURES = [
    name
    for name, shape in SHAPES.items()
    if shape.target.experts is not None and shape.target.family.layer_specs is None
]


@given(st.integers(1, 40), st.integers(1, 32), st.integers(1, 6), st.integers(0, 10**6))
def test_each_call_touches_as_many_experts_as_were_measured(rows, num_experts, top_k, measured):
    top_k = min(top_k, num_experts)
    most = min(num_experts, rows * top_k)
    touched = top_k + measured % (most - top_k + 1)
    calls = random_expert_ids(ExpertsShape(num_experts, top_k, 8, 4), rows, 5, touched)
    assert len(calls) == 5
    for ids in calls:
        assert ids.shape == (rows, top_k) and (ids[:, 1:] > ids[:, :-1]).all()
        assert len(ids.unique()) == touched and ids.min() >= 0 and ids.max() < num_experts
    # As long as there are others, the next call goes to others.
    for before, after in zip(calls[::2], calls[1::2], strict=False):
        if num_experts // touched == 2:
            assert not set(before.unique().tolist()) & set(after.unique().tolist())


@pytest.mark.parametrize(
    ("rows", "measured", "drawn"), [(64, 57.4, 57), (64, 3.0, 8), (2, 20.0, 16), (64, 200.0, 128), (64, None, None)]
)
def test_a_measured_number_is_rounded_to_one_that_the_rows_can_touch(rows, measured, drawn):
    target, _ = round_products(QWEN, RoundSize(1, TreeShape(1, rows, rows), num_touched_experts=measured))
    [router] = [run for run in target if run.experts is not None]
    assert lab_experts.num_touched_experts(router.experts, rows) == drawn
    calls = ExpertCalls(router, [LayerExperts(torch.empty(0, 0, 2048), torch.empty(1), torch.float32)]).inputs
    assert len(calls.expert_ids) == 48 and {ids.shape for ids in calls.expert_ids} == {(rows, 8)}
    # 48 calls of 64 independent rows touch 125.9 each.
    expected = QWEN.experts.shape.active_experts(rows) if drawn is None else drawn
    assert calls.mean_active_experts == pytest.approx(expected, abs=0.5 if drawn is None else 0)


def names(runs, experts=True):
    return [f"{step.layer} {step.run.name}{' experts' * step.is_experts}" for step in product_steps(runs, experts)]


def test_experts_follow_the_router_of_their_layer():
    of_layer = ("qkv", "o", "router", "router experts")
    expected = [f"{at} {name}" for at in range(48) for name in of_layer] + ["0 lm_head"]
    assert names(QWEN.target_pass(64)) == expected
    assert names(QWEN.target_pass(64), experts=False) == [name for name in expected if "experts" not in name]


@pytest.mark.parametrize(("rows", "joins"), [(16, True), (17, False)])
def test_few_rows_take_the_shared_expert_with_the_routed_ones(rows, joins):
    """And the dense layer comes first, as in a pass."""
    shape = shape_named("deepseek-v2-lite")
    found = names(shape.target_pass(rows))
    assert found[:6] == [f"0 {name}" for name in ("q and kv", "k up", "v up", "o", "gate_up", "down")]
    shared = [] if joins else ["shared gate_up", "shared down"]
    of_layer = ("q and kv", "k up", "v up", "o", "router", "router experts", *shared)
    assert found[6:] == [f"{at} {name}" for at in range(26) for name in of_layer] + ["0 lm_head"]
    # The linear layers alone are all there.
    assert sum("shared" in name for name in names(shape.target_pass(rows), experts=False)) == 2 * 26


def test_no_weight_is_multiplied_twice_in_a_pass_with_dense_layers():
    shape, weights = recipe_sizes(Recipe(mixture("v2"))), ExpertWeights(torch.float32, CPU)
    runs = shape.target_pass(3)
    pointers = [weights.weights_of(step.run)[step.layer].data_ptr() for step in product_steps(runs, with_experts=False)]
    assert len(pointers) == len(set(pointers)) == sum(run.num_weights for run in runs)


def test_each_pass_of_an_mtp_module_with_experts_has_its_product():
    target = recipe_sizes(Recipe(mixture("qwen3-moe"), mtp_layers=2))
    layer_sizes = replace(target.mtp.layer_shape, experts=replace(target.experts, num_layers=1))
    shape = replace(target, mtp=replace(target.mtp, layer_shape=layer_sizes))
    _, draft = round_products(shape, RoundSize(2, TreeShape(3, 2, 6)))
    found = [step.run for step in product_steps(draft, with_experts=True) if step.is_experts]
    assert [(run.name, run.num_rows) for run in found] == [
        *(("draft 2 router", 4), ("draft 2 router", 4)),
        *(("draft 1 router", 8), ("draft 2 router", 8)),
    ]
    ExpertWeights(torch.float32, CPU).make_pass(draft, multiply_by_library, experts=True)()


STORED = [(name, "dense") for name in MIXTURES] + [
    *((name, weights) for name in MIXTURES if name != "gpt-oss-20b" for weights in ("fp8", "fp8-block", "int4")),
    ("gpt-oss-20b", "mxfp4"),
]


@pytest.mark.parametrize(("name", "weights"), STORED)
def test_more_than_a_cache_is_read_between_two_uses_of_an_expert(name, weights):
    [router] = [run for run in shape_named(name, weights=weights).target_pass(1) if run.experts is not None]
    copies, experts = num_expert_copies(router.experts), router.experts
    of_call = experts.sizes.shape.top_k * experts.expert_bytes
    assert (copies - 1) * of_call + of_call / 3 >= 60e6 or copies == router.num_weights
    if not name.startswith("deepseek-v3"):
        assert copies * experts.sizes.shape.num_experts * experts.expert_bytes < 4e9
    else:
        # A layer of them has 22.5 GB in bfloat16.
        assert copies == 1


def wide(name: str) -> Shape:
    """mixture(name) with sizes that all formats take."""
    shape, sizes = mixture(name), {"hidden_size": 384, "moe_intermediate_size": 128}
    if name == "gpt-oss":
        sizes = {"hidden_size": 384, "intermediate_size": 128}
    if name == "qwen2-moe":
        # As wide as two routed ones, but it has a gate.
        sizes["shared_expert_intermediate_size"] = 256
    return Shape(
        name, shape.hugging_face_id, shape.end_emitted_id, shape.draft_vocab_size, {**shape.config_fields, **sizes}
    )


def about(value):
    """What of an argument decides which kernel runs."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    if hasattr(value, "__dict__"):
        return type(value), {name: about(each) for name, each in vars(value).items()}
    return value


class Recorder:
    """Stands in for grouped_experts and computes the same; calls: their arguments by name."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, gate_up, down, ids, weights, live_rows=None, biases=None, activation=layer.SILU, **others):
        named = {"x": x, "gate_up": gate_up, "down": down, "ids": ids, "weights": weights, "live": live_rows}
        self.calls.append({**named, "biases": biases, "activation": activation, "shared": others.get("shared_experts")})
        return grouped_experts.reference(x, gate_up, down, ids, weights, live_rows, biases, activation, **others)


DENSE = [(name, "dense") for name in WITH_EXPERTS if not name.endswith("-dense")]
QUANTISED = [(name, weights) for name in ("qwen3-moe", "v2") for weights in ("fp8", "fp8-block", "int4")]
# Few rows take a shared expert with the routed ones, if experts are dense: the others have one number of rows each.
CASES = [
    *((*case, rows) for case in DENSE for rows in (3, 20)),
    *((*case, (3, 20)[i % 2]) for i, case in enumerate([*QUANTISED[::2], ("gpt-oss", "mxfp4")])),
    *(pytest.param(*case, 20, marks=pytest.mark.full) for case in QUANTISED[1::2]),
]


@pytest.mark.parametrize(("name", "weights", "rows"), CASES)
def test_a_chain_launches_what_the_engine_launches(name, weights, rows, monkeypatch):
    recipe = Recipe(wide(name), weights=weights)
    # Float32 on a CPU has no shared expert in the product.
    dtype = torch.bfloat16
    [*_, block] = build_models(recipe, dtype, CPU, 64)[0].layers
    engine, chain = Recorder(), Recorder()
    monkeypatch.setattr(layer, "grouped_experts", engine)
    monkeypatch.setattr(lab_experts, "grouped_experts", chain)
    x = torch.randn(rows, recipe.shape.target.hidden_size, dtype=dtype)
    live = torch.ones(rows, dtype=torch.bool)
    mixture = getattr(block.mlp, "mixture", block.mlp)
    mixture(mixture.route_rows(x), live)
    shape = recipe_sizes(recipe)
    ExpertWeights(dtype, CPU).make_pass(shape.target_pass(rows), multiply_by_library, experts=True)()
    assert len(chain.calls) == shape.experts.num_layers
    [expected] = engine.calls
    for call in chain.calls:
        assert {key: about(value) for key, value in call.items()} == {
            key: about(value) for key, value in expected.items()
        }


def test_layers_take_the_copies_in_turn(monkeypatch):
    monkeypatch.setattr(lab_experts, "L2_BYTES", 2 * 10**5)
    monkeypatch.setattr(lab_experts, "grouped_experts", recorder := Recorder())
    shape = recipe_sizes(Recipe(mixture("qwen3-moe")))
    shape = replace(shape, layer_specs=shape.layer_specs[:1] * 5, experts=replace(shape.experts, num_layers=5))
    [router] = [run for run in shape.target_pass(3) if run.experts is not None]
    assert num_expert_copies(router.experts) == 2
    ExpertWeights(torch.float32, CPU).make_pass(shape.target_pass(3), multiply_by_library, experts=True)()
    pointers = [(call["gate_up"].data_ptr(), call["down"].data_ptr()) for call in recorder.calls]
    assert len(set(pointers)) == 2 and pointers[::2] == [pointers[0]] * 3 and pointers[1::2] == [pointers[1]] * 2
    assert len({tuple(call["ids"].flatten().tolist()) for call in recorder.calls}) == 5


class Counting:
    """A timer: the ms of a body are 1, and 0.25 for each product with experts."""

    def __init__(self, recorder):
        self.recorder, self.timed = recorder, 0

    def median_ms(self, bodies, turns, seconds):
        self.timed += 1
        return [1 + 0.25 * self._calls(body) for body in bodies]

    def _calls(self, body):
        before = len(self.recorder.calls)
        body()
        return len(self.recorder.calls) - before


@pytest.fixture
def told(monkeypatch):
    """Floors on a CPU."""
    monkeypatch.setattr(floor_module, "require_gpu", lambda what: CPU)
    monkeypatch.setattr(floor_module, "multiply_like_engine", multiply_by_library)
    monkeypatch.setattr(lab_experts, "grouped_experts", recorder := Recorder())
    found = FloorMeter(recipe_sizes(Recipe(mixture("qwen3-moe", hot=512))), torch.float32)
    found.timer = Counting(recorder)
    return found


def test_the_floor_of_a_mixture_is_one_chain_of_linear_layers_and_experts(told):
    layers, sizes = told.shape.experts.num_layers, told.shape.experts.shape
    floor = told.round(RoundSize(2, TreeShape(3, 2, 6), 100.0, num_touched_experts=9.2), CEILINGS)
    assert (floor.linear_ms, floor.expert_ms) == (1, 0.25 * layers)
    attention = floor_module.round_attention_cost(told.shape, RoundSize(2, TreeShape(3, 2, 6), 100.0)).ms(CEILINGS)
    assert floor.ms == 1 + 0.25 * layers + attention
    runs = [run for of_model in round_products(told.shape, RoundSize(2, TreeShape(3, 2, 6))) for run in of_model]
    num_bytes = sum(run.weight_bytes for run in runs) + layers * 9.2 * sizes.expert_bytes
    assert floor.weight_bytes_ms == pytest.approx(1e3 * num_bytes / CEILINGS.bandwidth)
    calls = told.timer.recorder.calls
    # By the library and as the engine multiplies.
    assert len(calls) == 2 * layers and {len(call["ids"].unique()) for call in calls} == {9}


def test_products_are_timed_once_for_each_number_of_touched_experts(told):
    for context in (100.0, 200.0):
        told.round(RoundSize(2, TreeShape(3, 2, 6), context, num_touched_experts=9.2), CEILINGS)
    assert told.timer.timed == 1
    told.round(RoundSize(2, TreeShape(3, 2, 6), 100.0, num_touched_experts=12.0), CEILINGS)
    told.round(RoundSize(2, TreeShape(3, 2, 6), 100.0), CEILINGS)
    assert told.timer.timed == 3
    # Without experts where only linear layers are asked for, as prefill does.
    before = len(told.timer.recorder.calls)
    told.time_linears(prefill_pass(told.shape, 8, 2), 8)
    assert len(told.timer.recorder.calls) == before


def test_the_command_prints_what_experts_add(told, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(floor_module, "shape_named", lambda name: told.shape)
    monkeypatch.setattr(floor_module, "FloorMeter", lambda shape: told)
    monkeypatch.setattr(told, "ceilings", lambda: CEILINGS, raising=False)
    file = tmp_path / "floor.json"
    assert lab(["floor", "--shape", "any", "--rows", "1,4", "--json", str(file)]) == 0
    assert "experts touched" in capsys.readouterr().out
    one, four = (each["experts"] for each in json.loads(file.read_text())["passes"])
    layers, sizes = told.shape.experts.num_layers, told.shape.experts.shape
    assert one == {"touched": 4.0, "num_bytes": 4 * layers * sizes.expert_bytes, "ms": 0.25 * layers}
    assert four["touched"] == pytest.approx(sizes.active_experts(4)) and four["ms"] == 0.25 * layers


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "weights"), [*DENSE, *QUANTISED, ("gpt-oss", "mxfp4")])
def test_on_a_gpu_experts_are_in_the_floor(name, weights):
    recipe = Recipe(wide(name), weights=weights)
    floor = FloorMeter(recipe_sizes(recipe)).round(
        RoundSize(2, TreeShape(3, 2, 6), 100.0, num_touched_experts=7.0), CEILINGS
    )
    assert floor.expert_ms > 0 and floor.ms > floor.linear_ms + floor.expert_ms > floor.weight_bytes_ms


def test_ranks_share_the_time_of_the_target_and_of_a_draft_in_parts(monkeypatch):
    monkeypatch.setattr(floor_module, "require_gpu", lambda command: torch.device("cpu"))
    monkeypatch.setattr(floor_module, "GraphTimer", object)

    def time_products(self, runs, num_rows):
        return LinearTimes(num_rows, 0.0, sum(run.num_weights * run.num_rows for run in runs), 0.0), None

    monkeypatch.setattr(FloorMeter, "time_products", time_products)
    sizes = recipe_sizes(Recipe(mixture("qwen3-moe")))
    size = RoundSize(2, TreeShape(3, 2, 6))
    one, two = (FloorMeter(sizes, ranks=ranks).round(size, CEILINGS).ms for ranks in (1, 2))
    target = FloorMeter(sizes).round(replace(size, has_draft=False), CEILINGS).ms
    assert one > target > 0 and two == pytest.approx(one - target / 2)
    assert FloorMeter(sizes, ranks=2, draft_ranks=2).round(size, CEILINGS).ms == pytest.approx(one / 2)


@pytest.mark.parametrize("rows", [1, 256, 257])
def test_what_a_norm_rounds_in_its_launch_is_no_part_of_a_chain(rows, monkeypatch):
    monkeypatch.setattr(timing, "rounding_in_norm", lambda weight, x: InputScales())
    weight = QUANTISERS["fp8"].quantise_matrix(torch.randn(128, 128))
    rounded = set()

    def multiply(x, multiplied):
        assert multiplied is weight and len(x) == rows
        rounded.add(isinstance(x, RoundedRows))

    for name, behind_a_norm in (("qkv", True), ("gate_up", True), ("o", False), ("down", False)):
        run = ProductGroup(name, (128, 128), 1, rows, weight_format="fp8")
        timing._bind_product(run, torch.randn(rows, 128), weight, multiply)()
        assert rounded == {behind_a_norm and rows <= 256}, name
        rounded.clear()
