"""Trees that are predicted: deep ones at few requests, chains at many; of a mixture, small ones at one request too."""

import itertools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from espalier.bench.linears import model_sizes
from espalier.bench.shapes import SHAPES, find_shape
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.models import read_config
from espalier.speculate.drafters.registry import read_draft
from espalier.startup import tree_cost
from espalier.startup.tree_cost import (
    CACHE_BANDWIDTH_SHARE,
    LAYER_OVERHEAD_S,
    PASS_OVERHEAD_S,
    ChipFigures,
    PassWeights,
    assumed_accept_length,
    pass_weights,
    trees_by_cost,
)
from espalier.startup.tree_policy import PredictedCosts, choose_trees
from lab.synthetic.checkpoint import Recipe
from tests.block import block_directories
from tests.lab.synthetic.mixtures import WITH_EXPERTS, mixture
from tests.peagle import peagle_directories
from tests.startup.test_tree_policy import BIG, H100

H200 = ChipFigures("NVIDIA H200", 4.4e12, 6.9e14)
WIDE, MIDDLE, NARROW, CHAIN = TreeShape(5, 8, 64), TreeShape(5, 4, 16), TreeShape(3, 2, 8), TreeShape(3, 1, 4)
ALL = (WIDE, MIDDLE, NARROW, CHAIN, TreeShape(1, 1, 2), PLAIN_TREE)
QWEN = find_shape("qwen3-30b-a3b")
WEIGHTS = pass_weights(QWEN.target, QWEN.draft_config)


COUNTED = [*map(find_shape, SHAPES), *map(mixture, WITH_EXPERTS), mixture("gemma4")]


@pytest.mark.parametrize("shape", COUNTED, ids=lambda shape: shape.name)
def test_weights_are_those_of_the_checkpoint_and_of_the_benches(shape):
    """Routers, norms, scales, biases and convolutions aside."""
    found = pass_weights(shape.target, None)
    left_out = ("norm.weight", "norm_f.weight", "bias", "sinks", "mlp.gate.weight", "mixer.gate.weight")
    left_out += ("norm_1.weight", "norm_2.weight", "router.weight", "router.proj.weight", "scale", "layer_scalar")
    left_out += ("conv1d.weight", "A_log", "mixer.D", "embed_tokens.weight", "embeddings.weight")
    numbers = {
        name: torch.Size(size).numel()
        for name, size in Recipe(shape).tensors(torch.bfloat16, "meta")[0].shapes.items()
        if not name.endswith(left_out)
    }
    routed = sum(count for name, count in numbers.items() if ".experts." in name)
    assert found.expert * found.num_experts == routed
    assert found.dense == sum(numbers.values()) - routed
    assert found.dense == sum(run.flops for run in model_sizes(shape.target).target_pass(1) if run.experts is None) // 2


# ms of a round of Llama-3.1-8B with an EAGLE-3 head on an H100, contexts of 1,024 (docs/log.md, 2026-11-27).
MEASURED = {
    (PLAIN_TREE, 1): 5.55, (PLAIN_TREE, 2): 5.63, (PLAIN_TREE, 4): 5.73, (PLAIN_TREE, 8): 5.97,
    (PLAIN_TREE, 16): 6.38, (PLAIN_TREE, 32): 7.24, (PLAIN_TREE, 48): 8.48, (PLAIN_TREE, 64): 9.11,
    (PLAIN_TREE, 96): 11.39, (WIDE, 1): 7.91, (MIDDLE, 1): 7.19, (MIDDLE, 2): 7.44, (MIDDLE, 4): 7.88,
    (MIDDLE, 8): 8.74, (MIDDLE, 16): 10.03, (NARROW, 4): 6.98, (NARROW, 8): 7.50, (NARROW, 16): 8.57,
    (NARROW, 32): 10.85, (CHAIN, 16): 7.87, (CHAIN, 32): 9.41, (CHAIN, 48): 11.00, (CHAIN, 64): 12.33,
    (CHAIN, 96): 17.09,
}  # fmt: skip


def test_rounds_are_predicted_as_they_were_measured():
    """A dense target; within 6%, and plain decoding within 3%."""
    shape = find_shape("llama-3.1-8b")
    weights = pass_weights(shape.target, shape.draft_config)
    assert weights == BIG.weights
    for (tree, batch), ms in MEASURED.items():
        predicted = 1e3 * weights.round_seconds(tree, batch, H100, context=1045)
        assert predicted == pytest.approx(ms, rel=0.03 if tree == PLAIN_TREE else 0.06)


@pytest.mark.parametrize("weights", [WEIGHTS, BIG.weights], ids=["mixture", "dense"])
def test_the_fastest_tree_is_taken_unless_it_gains_little(weights):
    by_batch = trees_by_cost(WIDE, weights, 1024, H200)
    current = WIDE
    for batch in range(1, 1025):
        current = by_batch.get(batch, current)
        if batch & (batch - 1) == 0:
            rates = {tree: assumed_accept_length(tree) / weights.round_seconds(tree, batch, H200) for tree in ALL}
            assert rates[current] >= max(rates.values()) / 1.03
    assert by_batch


def test_at_one_request_a_mixture_has_a_small_tree():
    """A tree of 64 nodes touches 126 of 128 experts for 4 tokens, plain decoding 8 for one."""
    by_batch = trees_by_cost(WIDE, WEIGHTS, 8, H200)
    assert by_batch[1].num_draft_tokens <= 4 < max(tree.num_draft_tokens for tree in by_batch.values())


def test_a_pass_reads_multiplies_and_launches():
    weights = PassWeights(
        dense=1000, expert=100, num_experts=10, top_k=2, draft=50, num_layers=3, num_draft_layers=1, kv_values=7
    )
    fixed = 3 * LAYER_OVERHEAD_S + PASS_OVERHEAD_S
    # Reading hides the products of a row, and the products of many rows hide the reading.
    assert weights.target_seconds(1, H200) == pytest.approx(fixed + 2 * 1200 / 4.4e12)
    assert weights.target_seconds(10**6, H200) == pytest.approx(fixed + 2e6 * 1200 / 6.9e14)
    both = replace(weights, expert=0, dense=10**9)
    reading, multiplying = 2e9 / 4.4e12, 150 * 2e9 / 6.9e14
    assert max(reading, multiplying) < both.target_seconds(150, H200) - fixed < reading + multiplying
    cache = 2 * 7 * 1024 / (CACHE_BANDWIDTH_SHARE * 4.4e12)
    assert weights.round_seconds(PLAIN_TREE, 3, H200) == pytest.approx(weights.target_seconds(3, H200) + 3 * cache)
    # Four levels and the extend.
    levels = 4 * weights.draft_seconds(8, H200) + weights.draft_seconds(6, H200)
    assert weights.round_seconds(WIDE, 1, H200) == pytest.approx(weights.target_seconds(64, H200) + cache + levels)


def test_a_busy_host_does_not_slow_the_chip_down(monkeypatch):
    """More than half of the launches come late, so that the median would be four times as long."""
    times = itertools.cycle([4.0, 1.0, 4.0, 4.0, 1.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        synchronize = record

        def elapsed_time(self, end):
            return next(times)

    monkeypatch.setattr(tree_cost.torch.cuda, "Event", Event)
    monkeypatch.setattr(tree_cost, "WARM_UP_S", 0.0)
    assert tree_cost._seconds_of(lambda: None) == 1e-3


def test_weights_of_four_bits_are_read_as_such():
    """The mean bytes of a weight.  An embedding that is no head is in memory, but a pass reads few of its rows."""
    shape = find_shape("llama-3.1-8b")
    wide = pass_weights(shape.target, shape.draft_config)
    embedding = 2 * shape.target.vocab_size * shape.target.hidden_size
    for value_bytes in (0.53, 1.0, 2.0):
        stored = int(value_bytes * (wide.dense + wide.draft)) + embedding
        found = pass_weights(shape.target, shape.draft_config, stored)
        assert found.value_bytes == pytest.approx(value_bytes) and replace(found, value_bytes=2.0) == wide
    few, many = ([each.target_seconds(rows, H100) for each in (found, wide)] for rows in (1, 4096))
    assert few[0] == few[1] and many[0] == many[1]
    found = pass_weights(shape.target, shape.draft_config, int(0.53 * (wide.dense + wide.draft)) + embedding)
    assert found.target_seconds(1, H100) < 0.4 * wide.target_seconds(1, H100)


def test_a_block_draft_pays_for_nodes_and_not_for_depth():
    """Its one pass costs the same at any depth, so smaller trees keep the configured depth."""
    weights = replace(WEIGHTS, block_rows=16, extends=False)
    deep, shallow = TreeShape(15, 8, 64), TreeShape(2, 8, 64)
    assert (
        weights.round_seconds(deep, 4, H200)
        == weights.round_seconds(shallow, 4, H200)
        # P-EAGLE's extend is a pass.
        < replace(weights, extends=True).round_seconds(deep, 4, H200)
        < replace(weights, block_rows=0).round_seconds(deep, 4, H200)
    )
    chosen = [tree for tree in trees_by_cost(deep, weights, 1024, H200).values() if tree != PLAIN_TREE]
    assert chosen and {tree.steps for tree in chosen} == {15}
    assert {tree.num_draft_tokens for tree in chosen} <= {2, 4, 8, 16, 64}


def test_the_weights_of_a_block_draft_are_those_of_its_layers(tmp_path):
    target_path, path = block_directories("qwen3_moe", "dspark", 5)
    draft = read_draft(path, read_config(target_path))
    weights = pass_weights(read_config(target_path), draft)
    stored = {name: value.numel() for name, value in load_file(path / "model.safetensors").items()}
    read = sum(n for name, n in stored.items() if ("_proj" in name or "lm_head" in name))
    assert (weights.draft, weights.block_rows, weights.extends) == (read, 5, False)
    target_path, path = peagle_directories("qwen3_moe")
    weights = pass_weights(read_config(target_path), read_draft(path, read_config(target_path)))
    assert (weights.block_rows, weights.extends) == (15, True)


def test_accept_lengths_are_those_known_and_between_them():
    assert [assumed_accept_length(tree) for tree in (PLAIN_TREE, NARROW, MIDDLE, WIDE)] == [1.0, 2.85, 3.5, 4.0]
    assert (
        assumed_accept_length(TreeShape(5, 8, 32)) == pytest.approx(3.75)
        and assumed_accept_length(TreeShape(1, 8, 8)) == 2
    )
    assert assumed_accept_length(TreeShape(7, 8, 128)) == 4.0


def test_a_mixture_takes_predicted_trees_and_a_table_comes_first(caplog):
    costs = PredictedCosts(WEIGHTS, H200)
    with caplog.at_level("INFO"):
        assert choose_trees("auto", WIDE, costs, max_batch=64) == trees_by_cost(WIDE, WEIGHTS, 64, H200)
    assert "predicted for uniform routing from 4.4 TB/s and 690 TFLOP/s, as measured on NVIDIA H200" in caplog.text
    assert choose_trees({}, WIDE, costs, max_batch=64) == {}
    assert choose_trees("auto", PLAIN_TREE, costs, max_batch=64) == {}
