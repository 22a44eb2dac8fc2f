"""Synthetic models in quantised formats: text by the rule, on = off, files as `build` makes them, sizes as stored."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from espalier.config import FP8_KV
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import dequantise
from espalier.layout import RoundLayout
from espalier.models import load_target
from espalier.models.weight_formats.quantised import QuantisedWeight
from espalier.speculate.drafters.registry import load_draft
from espalier.startup.build import LoadedModels, assemble_engine, config_without_files
from lab.synthetic.chain import predicted_accept_length
from lab.synthetic.checkpoint import Recipe, build_models, total_bytes, write_checkpoint
from tests.harness import CPU
from tests.lab.shapes import greedy_continuation
from tests.lab.synthetic.mixtures import mixture
from tests.lab.synthetic.test_checkpoint import PLAIN, POSITIONS, a_recipe, generate, prompts, tiny
from tests.oracles.dense import DensePass
from tests.pairwise import in_turn_params

SHAPES = {"llama": tiny(), "qwen3-moe": mixture("qwen3-moe"), "v3": mixture("v3"), "gpt-oss": mixture("gpt-oss")}
TOKENS = {"cpu": 30, "cuda": 120}
# Of the plain engine.  On a CPU a step takes as long as a round, as both unpack all weights.
PLAIN_TOKENS = {"cpu": 16, "cuda": 120}
STORED = [("llama", "fp8"), ("llama", "fp8-block"), ("llama", "int4"), ("qwen3-moe", "fp8"), ("v3", "fp8-block")]
COPIED = [*STORED[:4], ("gpt-oss", "mxfp4")]
# On a CPU the rows do not depend on the weights' format, nor the format's logits, compared above, on the text.
ON_CPU = [("qwen3-moe", "fp8", FP8_KV)]
ON_CPU_FULL = [
    *(("llama", weights, None) for weights in ("int4", "fp8", "fp8-block")),
    ("llama", "fp8", FP8_KV),
    ("qwen3-moe", "fp8", None),
    ("gpt-oss", "mxfp4", None),
]
COPYING = [
    *(pytest.param("cpu", *cell) for cell in ON_CPU),
    *(pytest.param("cpu", *cell, marks=pytest.mark.full) for cell in ON_CPU_FULL),
    *(pytest.param("cuda", *each, kv, marks=pytest.mark.gpu) for each, kv in product(COPIED, (None, FP8_KV))),
]


@pytest.mark.parametrize(("name", "weights"), [*STORED, ("gpt-oss", "mxfp4")])
def test_text_is_the_chains_and_files_are_what_build_gives(name, weights, tmp_path):
    recipe = a_recipe(shape=SHAPES[name], weights=weights)
    target, _ = build_models(recipe, torch.float32, CPU, POSITIONS)
    [start] = prompts(recipe, 1)
    text = start + greedy_continuation(recipe.chain(), start, 40)
    logits = logits_of(target, text)
    assert logits[len(start) - 1 : -1].argmax(-1).tolist() == text[len(start) :]
    dense, _ = build_models(replace(recipe, weights="dense"), torch.float32, CPU, POSITIONS)
    assert not torch.equal(logits, logits_of(dense, text))
    path, _ = write_checkpoint(recipe, tmp_path, torch.float32)
    files = load_target(path, dtype=torch.float32, device="cpu", position_rows=POSITIONS)
    assert torch.equal(logits_of(files, text), logits)
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    # A file has a header besides.
    assert 0 < stored - total_bytes(recipe.tensors(torch.float32, "meta")[0]) < 0.1 * stored


def logits_of(target, text):
    positions = torch.arange(len(text))[None]
    return target.logits(target(DensePass(torch.tensor([text]), target.layer_specs, positions)).hidden)[0]


def test_experts_in_mxfp4_are_the_dense_ones_rounded():
    recipe = a_recipe(shape=SHAPES["gpt-oss"])
    dense, quantised = (
        build_models(replace(recipe, weights=w), torch.float32, CPU, POSITIONS)[0] for w in ("dense", "mxfp4")
    )
    for one, other in zip(dense.layers, quantised.layers, strict=True):
        for exact, matrix in ((one.mlp.gate_up, other.mlp.gate_up), (one.mlp.down, other.mlp.down)):
            rounded = torch.stack([dequantise(matrix[i], torch.float32) for i in range(len(matrix))])
            assert 0 < (rounded - exact).norm() / exact.norm() < 0.2


def test_heads_routers_and_columns_that_no_group_divides_stay_dense():
    target, _ = build_models(a_recipe(shape=tiny(hidden_size=336), weights="int4"), torch.float32, CPU, POSITIONS)
    layer = target.layers[0]
    kinds = [layer.attention.qkv, layer.attention.out, layer.mlp.down, target.head]
    assert [isinstance(linear.weight, QuantisedWeight) for linear in kinds] == [False, True, True, False]


# int4 takes all columns of these.
WIDE = tiny(hidden_size=384)
DRAFTS = {"eagle3": {}, "mtp": {"mtp_layers": 2}, "block": {"block_size": 5}}


def of_layer(layer):
    return layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down


# By draft: matrices that are quantised, as they are stacked when loaded.
LINEARS = {
    "eagle3": lambda d: (d.fuse.fc, *of_layer(d.layers[0]), d.head),
    "mtp": lambda d: (*(m.project for m in d.modules), *(m.layer.attention.qkv for m in d.modules)),
    "block": lambda d: (d.fc, *d.context_kv, *(layer.mlp.down for layer in d.layers), d.head),
}
# On a CPU each draft and each format once, and the pairs that are left.
DRAFT_CELLS = [("eagle3", "fp8-block"), ("mtp", "fp8"), ("block", "int4")]
DRAFT_CELLS_FULL = [("eagle3", "fp8"), ("eagle3", "int4")]


@pytest.mark.parametrize(
    ("device", "name", "weights"),
    [
        *(("cpu", *cell) for cell in DRAFT_CELLS),
        *(pytest.param("cpu", *cell, marks=pytest.mark.full) for cell in DRAFT_CELLS_FULL),
        *(pytest.param("cuda", *cell, marks=pytest.mark.gpu) for cell in product(DRAFTS, ("fp8", "fp8-block", "int4"))),
    ],
)
def test_a_quantised_draft_changes_no_token_and_is_accepted_as_a_dense_one(device, name, weights):
    """Of a dense target, whose text it is."""
    recipe = a_recipe(shape=WIDE, draft_weights=weights, **DRAFTS[name])
    starts, lengths, count = prompts(recipe, 4), [], TOKENS[device]
    rule = [greedy_continuation(recipe.chain(), start, count) for start in starts]
    for each in (recipe, replace(recipe, draft_weights="dense")):
        engine = an_engine(each, (5, 4, 16), torch.device(device))
        assert generate(engine, starts, count) == rule
        lengths.append(engine.totals.accept_length)
    # Nibbles move a candidate's log-probability by a few tenths at this size.
    assert lengths[0] == pytest.approx(lengths[1], abs=0.5 if weights == "int4" else 0.2) and lengths[0] > 2


@pytest.mark.parametrize(("weights", "name"), in_turn_params(["fp8", "fp8-block", "int4"], list(DRAFTS)))
def test_files_of_a_quantised_draft_are_what_build_gives(name, weights, tmp_path):
    recipe = a_recipe(shape=WIDE, draft_weights=weights, **DRAFTS[name])
    target, made = build_models(recipe, torch.float32, CPU, POSITIONS)
    path = write_checkpoint(recipe, tmp_path, torch.float32)[1]
    assert "quantization_config" in json.loads((path / "config.json").read_text())
    assert "quantization_config" not in json.loads((tmp_path / "target" / "config.json").read_text())
    files = load_draft(path, target, dtype=torch.float32, device="cpu", position_rows=POSITIONS)
    for one, other in zip(LINEARS[name](files), LINEARS[name](made), strict=True):
        assert isinstance(one.weight, QuantisedWeight)
        x = torch.randn(3, one.shape[1])
        assert torch.equal(one(x), other(x))
    # A file has a header besides, and d2t is counted as other tensors are.
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert total_bytes(recipe.tensors(torch.float32, "meta")[1]) == pytest.approx(stored, rel=0.02)


def test_a_draft_has_no_stacked_experts_to_store():
    with pytest.raises(EspalierError, match="draft weights 'mxfp4' are for stacked experts"):
        build_models(a_recipe(draft_weights="mxfp4"), torch.float32, CPU, POSITIONS)


@pytest.mark.parametrize(("name", "weights"), [("llama", "mxfp4"), ("gpt-oss", "fp8"), ("llama", "int2")])
def test_weights_that_a_shape_is_not_stored_in_are_refused(name, weights):
    with pytest.raises(EspalierError, match=weights):
        build_models(Recipe(SHAPES[name], weights=weights), torch.float32, CPU, POSITIONS)


# Greedy text with wide margins, where each token depends on a far K/V row of a layer: no near-tie excuses a difference.
@pytest.mark.full
@pytest.mark.parametrize(("device", "name", "weights", "kv_dtype"), COPYING)
def test_copied_text_is_the_same_with_and_without_a_tree(name, weights, kv_dtype, device):
    """And accept lengths are as the tables foretell.  On a GPU: its kernels, in bfloat16, with CUDA graphs."""
    recipe = a_recipe(shape=SHAPES[name], mode="copy", weights=weights)
    starts = prompts(recipe, 4)
    rule = [greedy_continuation(recipe.chain(), start, TOKENS[device]) for start in starts]
    on, off = (an_engine(recipe, tree, torch.device(device), kv_dtype) for tree in ((5, 4, 16), PLAIN))
    few = PLAIN_TOKENS[device]
    assert generate(off, starts, few) == [text[:few] for text in rule]
    assert generate(on, starts, TOKENS[device]) == rule
    assert on.totals.accept_length == pytest.approx(predicted_accept_length(recipe.chain(), 5, 4, 16), abs=0.3)


def an_engine(recipe, tree, device, kv_dtype=None):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, draft = build_models(recipe, dtype, device, POSITIONS)
    spec = recipe.draft_config.spec
    layout = RoundLayout(4, *tree, 16, 256, spec.num_recomputed_tokens, 256, block_rows=spec.block_rows)
    algorithm = spec.algorithm if tree != PLAIN else "none"
    chosen = {"overlap": True, "graph_batch": layout.max_batch} if device.type == "cuda" else {}
    if kv_dtype is not None:
        chosen["kv_dtype"] = kv_dtype
    attention = "triton" if device.type == "cuda" else "sdpa"
    config = config_without_files(layout, algorithm, attention, dtype, device, **chosen)
    return assemble_engine(LoadedModels(config, target, draft if tree != PLAIN else None))
