"""Trees that are predicted for mixtures of experts: plain decoding at few requests, trees above, plain at very many."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from espalier.layout import PLAIN, TreeShape
from espalier.models import read_config
from espalier.speculate.drafters.registry import read_draft
from espalier.startup import tree_policy
from espalier.startup.tree_cost import MixtureWeights, accept_length, mixture_weights, trees_by_cost
from espalier.startup.tree_policy import Machine, chip_figures, choose_trees
from espalier.synthetic.checkpoint import Recipe
from espalier.synthetic.shapes import find_shape
from tests.block import block_directories
from tests.peagle import peagle_directories
from tests.startup.test_tree_policy import HOPPER
from tests.synthetic.mixtures import WITH_EXPERTS, mixture

H200 = chip_figures()[HOPPER]
WIDE, MIDDLE, NARROW = TreeShape(5, 8, 64), TreeShape(5, 4, 16), TreeShape(3, 2, 8)
QWEN = find_shape("qwen3-30b-a3b")
WEIGHTS = mixture_weights(QWEN.target, QWEN.draft_config)


@pytest.mark.parametrize("shape", [QWEN, *map(mixture, WITH_EXPERTS)], ids=lambda shape: shape.name)
def test_weights_are_those_of_the_checkpoint(shape):
    """Routers, biases and the gates of shared experts aside."""
    found = mixture_weights(shape.target, None)
    left_out = ("norm.weight", "bias", "sinks", "mlp.gate.weight", "router.weight", "expert_gate.weight")
    numbers = {
        name: torch.Size(size).numel()
        for name, size in Recipe(shape).tensors(torch.bfloat16, "meta")[0].shapes.items()
        if not name.endswith(left_out) and name != "model.embed_tokens.weight"
    }
    routed = sum(count for name, count in numbers.items() if ".experts." in name)
    assert found.expert * found.num_experts == routed
    assert found.dense == sum(numbers.values()) - routed


def test_a_dense_target_has_no_mixture():
    assert mixture_weights(find_shape("qwen3-8b").target, None) is None


def test_few_requests_decode_plainly_and_more_by_trees():
    """At one request a tree of 8 nodes touches 51 experts for 2.8 tokens, plain decoding 8 for one."""
    by_batch = trees_by_cost(WIDE, WEIGHTS, 1024, H200)
    batches, trees = list(by_batch), list(by_batch.values())
    assert batches[0] == 1 and trees[0] == PLAIN == trees[-1]
    between = [tree.num_draft_tokens for tree in trees[1:-1]]
    assert between and between == sorted(between, reverse=True) and batches[1] <= 16
    for batch, tree in by_batch.items():
        rates = {
            each: accept_length(each) / WEIGHTS.round_cost(each, batch, H200) for each in (WIDE, MIDDLE, NARROW, PLAIN)
        }
        assert rates[tree] == max(rates.values())


def test_costs_are_the_longer_of_reading_and_products():
    weights = MixtureWeights(dense=1000, expert=100, num_experts=10, top_k=2, draft=50)
    assert weights.target_cost(1, H200) == 2 * 1000 + 2 * 100 * 2
    many = 10**6
    assert weights.target_cost(many, H200) == pytest.approx(2 * (1000 + 200) * many * 4.4 / 690)
    # Four levels and the extend.
    assert weights.round_cost(WIDE, 1, H200) == pytest.approx(weights.target_cost(64, H200) + 5 * 100)
    assert weights.round_cost(PLAIN, 3, H200) == weights.target_cost(3, H200)


def test_a_block_draft_pays_for_nodes_and_not_for_depth():
    """Its one pass costs the same at any depth, so smaller trees keep the configured depth."""
    weights = replace(WEIGHTS, block_rows=16, extends=False)
    deep, shallow = TreeShape(15, 8, 64), TreeShape(2, 8, 64)
    assert (
        weights.round_cost(deep, 4, H200)
        == weights.round_cost(shallow, 4, H200)
        # P-EAGLE's extend is a pass.
        < replace(weights, extends=True).round_cost(deep, 4, H200)
        < replace(weights, block_rows=0).round_cost(deep, 4, H200)
    )
    chosen = [tree for tree in trees_by_cost(deep, weights, 1024, H200).values() if tree != PLAIN]
    assert chosen and {tree.steps for tree in chosen} == {15} and {t.num_draft_tokens for t in chosen} <= {8, 16, 64}
    assert trees_by_cost(TreeShape(5, 1, 6), weights, 1, H200)[1] == PLAIN


def test_the_weights_of_a_block_draft_are_those_of_its_layers(tmp_path):
    target_path, path = block_directories("qwen3_moe", "dspark", 5)
    draft = read_draft(path, read_config(target_path))
    weights = mixture_weights(read_config(target_path), draft)
    stored = {name: value.numel() for name, value in load_file(path / "model.safetensors").items()}
    read = sum(n for name, n in stored.items() if ("_proj" in name or "lm_head" in name))
    assert (weights.draft, weights.block_rows, weights.extends) == (read, 5, False)
    target_path, path = peagle_directories("qwen3_moe")
    weights = mixture_weights(read_config(target_path), read_draft(path, read_config(target_path)))
    assert (weights.block_rows, weights.extends) == (15, True)


def test_accept_lengths_are_those_known_and_between_them():
    assert [accept_length(tree) for tree in (PLAIN, NARROW, MIDDLE, WIDE)] == [1.0, 2.8, 3.5, 4.0]
    assert accept_length(TreeShape(5, 8, 32)) == pytest.approx(3.75) and accept_length(TreeShape(1, 8, 8)) == 2
    assert accept_length(TreeShape(7, 8, 128)) == 4.0


def test_a_mixture_takes_predicted_trees_and_a_table_comes_first(caplog):
    machine = Machine(HOPPER, "bfloat16", 2048, 48, WEIGHTS)
    with caplog.at_level("INFO"):
        assert choose_trees("auto", WIDE, machine, max_batch=64) == trees_by_cost(WIDE, WEIGHTS, 64, H200)
    assert (
        "predicted for uniform routing from the bandwidth and peak of NVIDIA H200, and from the accept" in caplog.text
    )
    assert choose_trees({}, WIDE, machine, max_batch=64) == {}
    assert choose_trees("auto", PLAIN, machine, max_batch=64) == {}


def test_another_chip_is_not_predicted_silently_with_this_ones_figures(caplog, monkeypatch):
    """Its own figures count where they are in the file; else the log says whose were used."""
    other = replace(HOPPER, processors=100)
    machine = Machine(other, "bfloat16", 2048, 48, WEIGHTS)
    with caplog.at_level("INFO"):
        assert choose_trees("auto", WIDE, machine, max_batch=64) == trees_by_cost(WIDE, WEIGHTS, 64, H200)
    assert "of NVIDIA H200, as this chip was not measured (`espalier bench floor` does)" in caplog.text
    # A chip that computes much for each byte: trees stay longer.
    fast = replace(H200, gpu="another", peak=10 * H200.peak)
    monkeypatch.setattr(tree_policy, "chip_figures", lambda: {HOPPER: H200, other: fast})
    caplog.clear()
    with caplog.at_level("INFO"):
        found = choose_trees("auto", WIDE, machine, max_batch=1024)
    assert "peak of another, and" in caplog.text
    assert found != choose_trees("auto", WIDE, replace(machine, chip=HOPPER), max_batch=1024)
