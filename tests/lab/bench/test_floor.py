"""The floor: which layers a round runs, with how many rows, and what is added to their time."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from espalier.bench.drive import drive
from espalier.bench.linears import ProductGroup, model_sizes, with_draft
from espalier.bench.shapes import SHAPES, find_shape
from espalier.bench.timing import Weights, multiply_by_library
from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.cache.states import bytes_per_state
from espalier.cli.main import main
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import dequantise
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.models import read_config
from espalier.models.layer_loading import layer_specs_of
from espalier.request import SamplingParams
from espalier.speculate.drafters.registry import read_draft
from lab.__main__ import main as lab
from lab.bench.ceilings import GpuCeilings
from lab.bench.floor import (
    ExpertTimes,
    LinearTimes,
    PassCost,
    RoundSize,
    draft_passes,
    floor_table,
    kv_value_bytes,
    round_attention_cost,
    round_products,
)
from lab.bench.passes import attended_rows, attention_flops, prefill_pass
from lab.bench.synthetic_models import recipe_sizes
from lab.synthetic.checkpoint import Recipe
from tests.block import RANK, block_directories
from tests.harness import prompts
from tests.lab.shapes import shape_named
from tests.lab.synthetic.mixtures import SUPPORTED, is_supported, mixture
from tests.mtp import mtp_directories
from tests.properties.mtp_setup import MTPSetup

LLAMA = shape_named("llama-3.1-8b")
QWEN = shape_named("qwen3-30b-a3b")
SIZE = RoundSize(1, TreeShape(5, 8, 64))
# Layers that keep a state have no floor.
NAMED = [
    name
    for name in SHAPES
    if is_supported(find_shape(name)) and not bytes_per_state(layer_specs_of(find_shape(name).target), torch.bfloat16)
]


def by_name(runs):
    return {run.name: (run.shape, run.num_weights, run.num_rows) for run in runs}


def test_a_verify_pass_of_llama():
    assert by_name(LLAMA.target_pass(64)) == {
        "qkv": ((6144, 4096), 32, 64),
        "o": ((4096, 4096), 32, 64),
        "gate_up": ((28672, 4096), 32, 64),
        "down": ((4096, 14336), 32, 64),
        "lm_head": ((128256, 4096), 1, 64),
    }


def test_the_extend_of_its_draft():
    assert by_name(LLAMA.draft_pass(6, 1, fused_rows=6)) == {
        "draft fc": ((4096, 12288), 1, 6),
        "draft qkv": ((6144, 8192), 1, 6),
        "draft o": ((4096, 4096), 1, 6),
        "draft gate_up": ((28672, 4096), 1, 6),
        "draft down": ((4096, 14336), 1, 6),
        "draft lm_head": ((32000, 4096), 1, 1),
    }


def test_a_prefill_pass_reads_the_output_of_a_row_of_each_request():
    """So o and the MLP of the last layers run over these rows alone: 31 layers and the head's one over all rows."""
    rows = [(run.name, run.num_weights, run.num_rows) for run in prefill_pass(LLAMA, 2048, 2)]
    of_layer = ("qkv", "o", "gate_up", "down")
    assert rows[:4] == [(name, 31, 2048) for name in of_layer]
    assert rows[4:9] == [("qkv", 1, 2048), *((name, 1, 2) for name in of_layer[1:]), ("lm_head", 1, 2)]
    assert rows[9:11] == [("draft fc", 1, 2048), ("draft qkv", 1, 2048)]
    assert rows[11:] == [(f"draft {name}", 1, 2) for name in of_layer[1:]]
    assert [(run.num_weights, run.num_rows) for run in prefill_pass(LLAMA, 64, 2, has_draft=False)][-2:] == [
        (1, 2),
        (1, 2),
    ]


def test_mtp_modules_read_all_rows_of_a_prefill_pass():
    one, three = (shape_named("llama-3.1-8b", mtp_layers=modules) for modules in (1, 3))
    assert prefill_pass(three, 64, 2) == (*three.target_pass(64, 2), *three.extend_passes(64))
    assert [run.num_rows for run in prefill_pass(one, 64, 2)[5:]] == [64, 64, 2, 2, 2]


def test_latent_values_are_computed_behind_attention():
    last = prefill_pass(shape_named("deepseek-v2-lite"), 64, 2, has_draft=False)[-9:]
    rows = [(run.name, run.num_rows) for run in last if run.name in ("q and kv", "k up", "v up", "o")]
    assert rows == [("q and kv", 64), ("k up", 64), ("v up", 2), ("o", 2)]


def test_a_mixtures_last_layer_has_experts():
    runs = prefill_pass(QWEN, 64, 2)
    assert [(run.name, run.num_weights, run.num_rows) for run in runs if run.name == "router"] == [
        ("router", 47, 64),
        ("router", 1, 2),
    ]


def test_the_weights_of_llama_are_those_of_its_checkpoint():
    parameters = sum(run.weight_bytes for run in LLAMA.target_pass(1)) // 2
    embedding, norms = 128256 * 4096, 65 * 4096
    assert parameters + embedding + norms == 8_030_261_248


@pytest.mark.parametrize(("steps", "levels"), [(0, 0), (1, 0), (2, 1), (5, 4)])
def test_a_round_runs_a_level_less_than_its_steps(steps, levels):
    target, draft = round_products(LLAMA, RoundSize(3, TreeShape(steps, 8, 1)))
    heads = [run.num_rows for run in draft if run.name == "draft lm_head"]
    # At steps=0 nothing is proposed: the draft only extends.
    assert heads == [24] * levels + [3] * (steps > 0)
    assert [run.num_rows for run in draft if run.name == "draft fc"] == [3 * (steps + 1)]
    assert {run.num_rows for run in target} == {3}


def test_a_cost_is_the_larger_of_reading_and_computing():
    ceilings = GpuCeilings(bandwidth=4e12, peak=8e14)
    assert PassCost(4e9, 0).ms(ceilings) == pytest.approx(1.0)
    assert PassCost(4e9, 1.6e12).ms(ceilings) == pytest.approx(2.0)


def test_attention_of_a_round_reads_each_prefix_once_a_pass():
    cost = round_attention_cost(LLAMA, RoundSize(2, TreeShape(5, 8, 64), 1000))
    token = 2 * 8 * 128 * 2  # K and V of a layer
    assert cost.num_bytes == 2 * 1000 * token * (32 + 4 + 1)
    # A product of q and k, and one of weights and v, 2 operations each.
    assert cost.flops == 2 * 1000 * 4 * 32 * 128 * (32 * 64 + 4 * 8 + 6)


def test_a_chain_runs_layer_by_layer():
    shape = type(LLAMA)(8, (LayerSpec(2, KVHeads(1, 4, 4)),) * 2, 16, 10)
    seen = []
    weights = Weights(torch.float32, torch.device("cpu"))

    def multiply(x, weight):
        seen.append((tuple(x.shape), tuple(weight.shape), weight.data_ptr()))
        return multiply_by_library(x, weight)

    weights.make_pass(shape.target_pass(3), multiply)()
    layer = [(16, 8), (8, 8), (32, 8), (8, 16)]
    assert [weight for _, weight, _ in seen] == [*layer, *layer, (10, 8)]
    assert all(x == (3, weight[1]) for x, weight, _ in seen)
    assert len({pointer for *_, pointer in seen}) == len(seen)


@pytest.mark.parametrize("name", NAMED)
def test_every_named_shape_lists_its_weights_once(name):
    shapes = shape_named(name).matrix_shapes()
    assert len(shapes) == len(set(shapes)) >= 7


@pytest.mark.parametrize("shape", [*map(mixture, SUPPORTED), *map(find_shape, NAMED)], ids=lambda shape: shape.name)
def test_the_weights_of_a_pass_are_those_of_the_checkpoint(shape):
    """Of linear layers and all experts; embedding, norms, biases, convolutions and sinks aside."""
    sizes, (tensors, _) = recipe_sizes(Recipe(shape)), Recipe(shape).tensors(torch.bfloat16, "meta")
    stored = {
        name: torch.Size(size).numel()
        for name, size in tensors.shapes.items()
        if len(size) > 1 and not name.endswith(("bias", "conv1d.weight")) and not name.startswith("model.embed")
    }
    counted = sum(run.weight_bytes for run in sizes.target_pass(1)) // 2
    if sizes.experts is not None:
        counted += sizes.experts.num_layers * sizes.experts.shape.num_experts * sizes.experts.shape.expert_bytes // 2
    assert counted == sum(stored.values())


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3.6-moe", "gemma4-moe"])
def test_experts_are_counted_as_they_are_stored(name):
    """In FP8, whose scales are small, also where the family joins them."""
    recipe = Recipe(mixture(name), weights="fp8")
    tensors, _ = recipe.tensors(torch.bfloat16, "meta")
    stored = sum(
        torch.Size(size).numel() * tensors.itemsize(name)
        for name, size in tensors.shapes.items()
        if ".experts." in name and "scale" not in name
    )
    counted = sum(run.expert_bytes for run in recipe_sizes(recipe).target_pass(10**6))
    assert counted == pytest.approx(stored)


def test_layers_share_weights_that_no_cache_holds(monkeypatch):
    monkeypatch.setattr("espalier.bench.timing.MIN_WEIGHT_BYTES", 2 * 6 * 8 * 4)
    run = ProductGroup("out", (4, 8), 10, 1)
    weights = [each.data_ptr() for each in Weights(torch.float32, torch.device("cpu")).weights_of(run)]
    assert len(weights) == 10 and len(set(weights)) == 6 and weights[6:] == weights[:4]


def test_layers_of_several_sizes_run_and_read_what_each_has():
    """Windows of 1,024 with 16 KV heads of 256, and every sixth layer without, with 4 of 512 whose V is K."""
    shape = shape_named("gemma-4-31b")
    assert by_name(run for run in shape.target_pass(2) if run.num_weights == 10) == {
        "qkv": ((36 * 512, 5376), 10, 2),
        "o": ((5376, 32 * 512), 10, 2),
        "gate_up": ((2 * 21504, 5376), 10, 2),
        "down": ((5376, 21504), 10, 2),
    }
    assert [run.shape for run in shape.target_pass(2)[:2]] == [(64 * 256, 5376), (5376, 32 * 256)]
    for context, read in ((4096, 1024), (100, 100)):
        cost = round_attention_cost(shape, RoundSize(3, PLAIN_TREE, context, has_draft=False))
        assert cost.num_bytes == 3 * 2 * 2 * (50 * read * 16 * 256 + 10 * context * 4 * 512)
        assert cost.flops == 3 * 4 * 32 * (50 * read * 256 + 10 * context * 512)


def test_a_state_is_read_and_written_once_in_a_round():
    """Three of four layers keep 48 heads of 128 x 128 in float32; the others read K and V of the context."""
    cost = round_attention_cost(shape_named("qwen3.6-27b"), RoundSize(3, TreeShape(3, 4, 16), 1000, has_draft=False))
    assert cost.num_bytes == 3 * (48 * 2 * 4 * 48 * 128 * 128 + 16 * 1000 * 2 * 2 * 4 * 256)


def test_layers_of_other_layers_rows_read_them_again_and_project_queries_alone():
    own = LayerSpec(4, KVHeads(2, 8, 8), window=16)
    shape = replace(LLAMA, layer_specs=(own, replace(own, shares_with=0)))
    assert [(run.name, run.shape[0]) for run in shape.target_pass(1) if run.name == "qkv"] == [("qkv", 64), ("qkv", 32)]
    assert round_attention_cost(shape, RoundSize(1, PLAIN_TREE, 100, has_draft=False)).num_bytes == 2 * 16 * 32 * 2


def count_weights(*shapes):
    """The number of weights of each name and size in the layers; each is in one run."""
    counted = Counter()
    for shape in shapes:
        taken = Counter()
        for run in shape.target_pass(1)[:-1]:
            assert run.first_weight == taken[run.name, run.shape]
            taken[run.name, run.shape] += run.num_weights
        counted += taken
    return counted


@pytest.mark.parametrize("name", [*SUPPORTED, "gemma-4-26b-a4b"])
def test_parts_of_a_model_are_the_whole(name):
    """A part has the experts of its own layers, and no weight is counted twice or left out."""
    shape = recipe_sizes(Recipe(mixture(name) if name in SUPPORTED else find_shape(name)))
    for at in range(shape.num_layers + 1):
        assert count_weights(shape.slice_layers(0, at), shape.slice_layers(at)) == count_weights(shape)


@pytest.mark.parametrize("field", ["hidden_size_per_layer_input", "use_double_wide_mlp"])
def test_layers_with_products_that_are_not_counted_are_refused(field):
    shape = mixture("gemma4")
    shape = replace(shape, config_fields={**shape.config_fields, field: 8})
    with pytest.raises(EspalierError, match=f"Gemma4ForCausalLM have products of {field}"):
        recipe_sizes(Recipe(shape))


@pytest.mark.parametrize(("rows", "touched"), [(1, 8.0), (16, 82.42), (64, 125.94), (10**6, 128.0)])
def test_experts_touched_by_uniform_routing(rows, touched):
    assert QWEN.experts.shape.active_experts(rows) == pytest.approx(touched, abs=0.01)


def expert_bytes(runs):
    """Of each pass that has experts."""
    return [run.expert_bytes for run in runs if run.experts is not None]


def test_experts_count_the_bytes_of_those_touched():
    size = 2 * 3 * 2048 * 768
    uniform, measured = (
        round_products(QWEN, RoundSize(1, TreeShape(5, 8, 64), num_touched_experts=each))[0] for each in (None, 20.0)
    )
    assert expert_bytes(uniform) == [pytest.approx(48 * 125.94 * size, rel=1e-4)]
    assert expert_bytes(measured) == [48 * 20 * size]
    assert not expert_bytes(round_products(LLAMA, RoundSize(1, TreeShape(5, 8, 64), num_touched_experts=20.0))[0])
    # An EAGLE head's layer is dense.
    assert not expert_bytes(round_products(QWEN, SIZE)[1])


def test_latent_attention_reads_one_row_for_all_heads():
    shape = recipe_sizes(Recipe(mixture("v3-dense")))
    plain_cost = round_attention_cost(shape, RoundSize(2, PLAIN_TREE, 1000, has_draft=False))
    assert plain_cost.num_bytes == 4 * 2 * 1000 * (64 + 32) * 2  # layers, batch, context, values, bytes
    assert plain_cost.flops == 4 * 2 * 1000 * 8 * 2 * (96 + 64)  # a product with the row, one with the latent
    batched = {run.name: (run.shape, run.num_heads) for run in shape.target_pass(3) if run.num_heads > 1}
    assert batched == {"k up": ((64, 32), 8), "v up": ((48, 64), 8)}


def test_chosen_rows_are_read_once_and_every_index_key():
    shape = recipe_sizes(Recipe(mixture("v3.2")))
    cost = round_attention_cost(shape, RoundSize(2, TreeShape(1, 4, 5), 1000, has_draft=False))
    of_keys, of_rows = 1000 * 48, 24 * (64 + 32)
    assert cost.num_bytes == 4 * 2 * (of_keys + of_rows) * 2  # layers, batch, values, bytes
    assert cost.flops == 5 * 4 * 2 * (1000 * 2 * 24 * 48 + 24 * 8 * 2 * (96 + 64))  # nodes, layers, batch
    # No more rows than are chosen: no key is scored.
    assert (
        round_attention_cost(shape, RoundSize(2, PLAIN_TREE, 20, has_draft=False)).num_bytes
        == 4 * 2 * 20 * (64 + 32) * 2
    )


def test_a_window_limits_what_a_layer_reads():
    narrow = replace(LLAMA.layer_specs[0], window=128)
    assert (attended_rows(narrow, 1000), attended_rows(narrow, 100), attended_rows(LLAMA.layer_specs[0], 1000)) == (
        128,
        100,
        1000,
    )


def test_a_batched_product_has_rows_for_every_head():
    shape = recipe_sizes(Recipe(mixture("v2-dense")))
    weights, seen = Weights(torch.float32, torch.device("cpu")), []
    weights.make_pass(
        shape.target_pass(3), lambda x, weight: seen.append(weight.shape) or multiply_by_library(x, weight)
    )()
    assert len(seen) == 4 * 4 + 1  # q and kv, o, gate_up and down; the batched ones do not come here


def test_an_unknown_shape_is_refused_with_those_there_are():
    with pytest.raises(EspalierError, match=r"llama-3\.1-8b"):
        shape_named("llama-9b")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(("main", "command"), [(lab, ["floor"]), (main, ["doctor", "--tune"])])
def test_without_a_gpu_it_says_so(main, command, capsys):
    assert main(command) == 2
    assert "on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["", "1,,2", "0", "1,x", "-4"])
def test_rows_are_numbers(rows, capsys):
    assert lab(["floor", f"--rows={rows}"]) == 2
    assert "--rows=" in capsys.readouterr().err


def test_plain_decoding_without_a_draft_has_no_extend():
    target, draft = round_products(LLAMA, RoundSize(2, PLAIN_TREE, has_draft=False))
    assert (target, draft) == (LLAMA.target_pass(2), ())
    cost = round_attention_cost(LLAMA, RoundSize(2, PLAIN_TREE, 1000, has_draft=False))
    assert cost.num_bytes == 2 * 1000 * 2 * 8 * 128 * 2 * 32


def test_the_dtype_of_a_drafts_cache_follows_the_targets():
    assert kv_value_bytes("fp8_e4m3", "auto") == (1, 1) and kv_value_bytes("auto", "auto") == (2, 2)
    assert kv_value_bytes("fp8_e4m3", "bfloat16") == (1, 2)


def test_the_table_of_linear_layers_has_a_row_a_pass():
    dense = [(LinearTimes(64, 4.452, 4.1, 15 * 10**9), None), (LinearTimes(8, 4, 3.9, 1), None)]
    rows = floor_table(dense, GpuCeilings(4e12, 8e14))
    assert rows[1:] == [["64", "4.45", "4.10", "3.75"], ["8", "4.00", "3.90", "0.00"]]
    mixed = floor_table([(LinearTimes(64, 4, 3, 1), ExpertTimes(12.34, 10**9, 0.5))], GpuCeilings(4e12, 8e14))
    assert mixed[0][-3:] == ["experts touched", "experts add, ms", "their bytes / bandwidth, ms"]
    assert mixed[1][-3:] == ["12.3", "0.50", "0.25"]


BLOCK = shape_named("llama-3.1-8b", block_size=16)


@pytest.mark.parametrize("steps", [7, 15])
def test_a_block_draft_runs_one_pass_its_edges_and_its_context(steps):
    target, draft = round_products(BLOCK, RoundSize(3, TreeShape(steps, 8, 64)))
    assert target == LLAMA.target_pass(3 * 64)
    edges = [run for run in draft if run.name == "draft edges"]
    assert [run.num_rows for run in edges] == [3] + [24] * (steps - 1) and {run.shape for run in edges} == {
        (128256, 256)
    }
    # All rows of the block run at any depth, because they see one another.
    assert by_name(run for run in draft if run.name != "draft edges") == {
        "draft qkv": ((6144, 4096), 5, 48),
        "draft o": ((4096, 4096), 5, 48),
        "draft gate_up": ((28672, 4096), 5, 48),
        "draft down": ((4096, 14336), 5, 48),
        "draft lm_head": ((128256, 4096), 1, 3 * steps),
        "draft fc": ((4096, 5 * 4096), 1, 3 * (steps + 1)),
        "draft context": ((2048, 4096), 5, 3 * (steps + 1)),
    }


@pytest.mark.parametrize(
    ("form", "vanilla", "parts", "inputs"), [("gated", "dspark", 1, (1, 1)), ("rnn", "speculators", 3, (1, 2))]
)
def test_edges_of_more_than_a_token_are_projected_too(form, vanilla, parts, inputs):
    """inputs: what depth 1 reads, which has no state, and what the others read, in ranks."""

    def runs_of(form):
        target, draft = block_directories("llama", form, 8)
        config = read_config(target)
        return with_draft(model_sizes(config), read_draft(draft, config)).block_pass(batch=3, steps=7, topk=8)

    runs = runs_of(form)
    assert tuple(run for run in runs if not run.name.startswith("draft edge ")) == runs_of(vanilla)
    [hidden_part, *factors] = [run for run in runs if run.name.startswith("draft edge ")]
    assert (hidden_part.shape, hidden_part.num_rows) == ((parts * RANK, 32), 3 * 7)
    assert [run.num_rows for run in factors] == [3] + [24] * 6
    assert [run.shape for run in factors] == [(parts * RANK, read * RANK) for read in (inputs[0], *[inputs[1]] * 6)]


def test_without_a_tree_a_block_draft_only_projects_context():
    _, draft = round_products(BLOCK, RoundSize(3, PLAIN_TREE))
    assert [run.name for run in draft] == ["draft fc", "draft context"] == [r.name for r in BLOCK.extend_passes(3)]
    assert round_products(BLOCK, RoundSize(3, PLAIN_TREE, has_draft=False))[1] == ()


def test_the_weights_of_a_block_draft_are_read_once():
    """But for the edges and for the K and V projections, which the block's rows and the context rows each read."""
    tensors = Recipe(find_shape("llama-3.1-8b"), block_size=16).tensors(torch.bfloat16, "meta")[1]
    stored = sum(torch.Size(size).numel() for size in tensors.shapes.values() if len(size) == 2)
    before = 128256 * 256  # a table of rows
    draft = round_products(BLOCK, RoundSize(1, TreeShape(7, 8, 64)))[1]
    once = {run.name: run.weight_bytes // 2 for run in draft if run.name != "draft context"}
    assert sum(once.values()) == stored - before


def test_the_attention_of_a_block_draft_is_its_block_over_the_context():
    cost = round_attention_cost(BLOCK, RoundSize(3, TreeShape(7, 8, 64), 100))
    assert cost.num_bytes == 2 * 3 * 100 * 2 * 8 * 128 * (32 + 5)
    assert cost.flops == 3 * 100 * attention_flops(BLOCK.layer_specs[0]) * (64 * 32 + 16 * 5)


class Spied:
    """A draft's module that notes the rows of a request in each pass and at its head."""

    def __init__(self, module, number, passes, heads):
        self.module, self.number, self.passes, self.heads = module, number, passes, heads

    def __getattr__(self, name):
        return getattr(self.module, name)

    def __call__(self, p, *args):
        self.passes.append((self.number, p.tokens.shape[1]))
        return self.module(p, *args)

    def logits(self, out):
        self.heads.append((self.number, out.normed.shape[1]))
        return self.module.logits(out)


@pytest.mark.parametrize("form", ["chain", "target"])
@pytest.mark.parametrize(
    ("modules", "steps", "topk", "nodes"), [(3, 5, 2, 8), (3, 2, 2, 5), (1, 4, 3, 9), (2, 3, 1, 4)]
)
def test_the_passes_that_are_counted_are_those_that_run(modules, form, steps, topk, nodes):
    setup = MTPSetup(form=(modules, form), steps=steps, topk=topk, num_draft_tokens=nodes, overlap=False)
    engine, passes, heads, rounds = setup.engine(), [], [], []
    draft = engine.executor.runner.drafter.draft
    own = draft.modules
    draft.modules = tuple(Spied(module, i, passes, heads) for i, module in enumerate(own, 1))

    def note():
        if heads:
            rounds.append((sorted(passes), sorted(heads)))
        passes.clear()
        heads.clear()

    try:
        drive(engine, prompts(0, (9,)), SamplingParams(temperature=0.0, max_tokens=12), after_step=note)
    finally:
        draft.modules = own
    counted = draft_passes(modules, steps, topk)
    expected = (
        sorted((each.module, each.queries) for each in counted),
        sorted((each.module, each.head_rows) for each in counted if each.head_rows),
    )
    assert len(rounds) >= 3 and all(found == expected for found in rounds)


def stored_size(tensors, *left_out):
    """Numbers of the linear layers and experts: norms, biases and what is named aside."""
    ends = ("norm.weight", "bias", "e_score_correction_bias", *left_out)
    return sum(tensor.numel() for name, tensor in tensors.items() if not name.endswith(ends))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "llama"])
def test_the_weights_of_mtp_modules_are_those_of_their_layers(family):
    target_path, draft_path = mtp_directories(family, 2)
    target = read_config(target_path)
    sizes = with_draft(model_sizes(target), read_draft(draft_path, target))
    first = target.num_layers
    own = {
        name: value
        for name, value in load_file(draft_path / "model.safetensors").items()
        if not is_of_target(name, first)
    }
    runs = [run for module in (1, 2) for run in sizes.draft_pass(4, 0, module=module)]
    counted = sum(run.weight_bytes for run in runs) // 2
    experts = sizes.mtp.layer_shape.experts
    if experts is not None:
        counted += 2 * experts.shape.num_experts * experts.shape.expert_bytes // 2
    assert counted == stored_size(own) and (experts is not None) == (target.experts is not None)
    # No weight of one module is taken for another's or for the target's.
    names = [(run.name, run.shape, run.first_weight) for run in (*runs, *sizes.target_pass(4))]
    assert len(names) == len(set(names))


def is_of_target(name, num_layers):
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    return not name.startswith(("mtp_layers.", "model.mtp_layers.")) and not (layer and int(layer) >= num_layers)


def test_heads_of_modules_are_the_targets_or_their_own():
    shared = shape_named("llama-3.1-8b", mtp_layers=3)
    apart = replace(shared, mtp=replace(shared.mtp, has_own_heads=True))
    for sizes, names in ((shared, ["lm_head"] * 3), (apart, [f"draft {m} lm_head" for m in (2, 3, 1)])):
        _, draft = round_products(sizes, RoundSize(2, TreeShape(3, 4, 16)))
        heads = [run for run in draft if run.name.endswith("lm_head")]
        assert [run.name for run in heads] == names and [run.num_rows for run in heads] == [8, 8, 2]
        assert {run.shape for run in heads} == {(128256, 4096)}
    # The first two levels of modules 2 and 3 run over all beams so far; an extend runs all three.
    rows = [(run.name, run.num_rows) for run in draft if run.name.endswith("project")]
    assert rows == [("draft 2 project", 8), ("draft 3 project", 16), *((f"draft {m} project", 8) for m in (1, 2, 3))]
    assert not [run for run in draft if run.name == "draft fc"]
    assert {run.shape for run in draft if run.name.endswith("project")} == {(4096, 8192)}


def test_attention_and_experts_of_modules_are_of_their_own_rows_and_layers():
    target_path, draft_path = mtp_directories("deepseek_v3", 2)
    target = read_config(target_path)
    sizes = with_draft(model_sizes(target), read_draft(draft_path, target))
    layer, size = sizes.mtp.layer_shape, 2 * 3 * 100
    cost = round_attention_cost(sizes, RoundSize(3, TreeShape(3, 2, 6), 100))
    # The target, the levels 2 and 3, two extends.
    assert cost.num_bytes == size * target.latent.cache_row_size * (target.num_layers + 2 + 2)
    assert cost.flops == 3 * 100 * attention_flops(sizes.layer_specs[0]) * (target.num_layers * 6 + 2 + 2 + 4 + 4)
    verify, drafted = (
        [(run.num_rows, run.num_weights, run.experts.mean_active_experts) for run in runs if run.experts is not None]
        for runs in round_products(sizes, RoundSize(3, TreeShape(3, 2, 6), num_touched_experts=5.0))
    )
    # What is measured is of the target; the levels 2 and 3 and two extends, of one layer each, route uniformly.
    assert verify == [(18, target.num_layers - 1, 5.0)]
    assert drafted == [(6, 1, None), (6, 1, None), (12, 1, None), (12, 1, None)] and layer.experts.num_layers == 1
    assert not round_products(sizes, RoundSize(3, PLAIN_TREE, has_draft=False))[1]


def test_a_chain_of_passes_has_weights_for_each_module_and_one_shared_head():
    sizes = recipe_sizes(Recipe(mixture("v2", hot=512), mtp_layers=3))
    target, draft = round_products(sizes, RoundSize(2, TreeShape(4, 2, 6)))
    seen, weights = [], Weights(torch.float32, torch.device("cpu"))

    def multiply(x, weight):
        seen.append((tuple(weight.shape), len(x), weight.data_ptr()))
        return multiply_by_library(x, weight)

    weights.make_pass((*draft, *target), multiply)()
    by_shape = {shape: {pointer for size, _, pointer in seen if size == shape} for shape, *_ in seen}
    hidden = sizes.hidden_size
    assert len(by_shape[sizes.vocab_size, hidden]) == 1
    # The projection and the down product of each module, and the down product of the target's dense layer.
    assert len(by_shape[hidden, 2 * hidden]) == 2 * 3 + 1
    heads = [rows for shape, rows, _ in seen if shape == (sizes.vocab_size, hidden)]
    assert heads == [4, 4, 4, 2, 12]  # levels 2 to 4, the root, the verify pass


@pytest.mark.parametrize(("weights", "layers_bytes"), [("fp8", 1), ("fp8-block", 1), ("int4", 0.5 + 2 / 128)])
def test_quantised_layers_count_as_they_are_stored(weights, layers_bytes):
    """The head, and all of a dense draft, have two bytes a number."""
    quantised, count = shape_named("llama-3.1-8b", weights=weights), 32 * (6144 + 4096 + 28672 + 3.5 * 4096) * 4096
    target, draft = round_products(quantised, SIZE)
    assert sum(run.weight_bytes for run in target) == layers_bytes * count + 2 * 128256 * 4096
    assert draft == round_products(LLAMA, SIZE)[1]
    assert all(run.weight_format == "dense" for run in round_products(replace(quantised, draft=None), SIZE)[1])
    assert {run.name for run in target if run.weight_format == weights} == {"qkv", "o", "gate_up", "down"}


@pytest.mark.parametrize(
    ("name", "weights", "share"), [("qwen3-30b-a3b", "fp8", 0.5), ("gpt-oss-20b", "mxfp4", 0.265625)]
)
def test_quantised_experts_count_as_they_are_stored(name, weights, share):
    dense, quantised = (expert_bytes(shape_named(name, weights=each).target_pass(8)) for each in ("dense", weights))
    assert quantised == [pytest.approx(share * dense[0])]


@pytest.mark.parametrize("weights", ["fp8", "fp8-block", "int4"])
def test_drawn_weights_are_of_the_format(weights):
    drawn = Weights(torch.bfloat16, torch.device("cpu"))
    matrix = drawn.weights_of(ProductGroup("o", (128, 256), 1, 1, weight_format=weights))[0]
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    # The rounding of the result to bfloat16.
    torch.testing.assert_close(
        multiply_by_library(x, matrix), x @ dequantise(matrix, torch.bfloat16).T, rtol=2e-2, atol=2e-2
    )
