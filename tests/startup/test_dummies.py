"""After the start no kernel compiles, whatever prefill passes come; a layer launches few: simulations without a GPU.

A launch more costs 1 to 2 µs in each layer.
"""

import json
from typing import Any

import pytest

from tests import warm

pytest.importorskip("triton", reason="needs Triton")

LLAMA = {"shape": "llama-3.1-8b", "layers": 3, "drafts": True}
LATENT = {"shape": "deepseek-v2-lite", "layers": 2, "drafts": False}
EXPERTS = {"shape": "qwen3-30b-a3b", "layers": 2, "drafts": False}
SINKS = {"shape": "gpt-oss-20b", "layers": 2, "drafts": False}
PLAIN = {"shape": "llama-3.1-8b", "layers": 2, "drafts": False}
FEW = (
    {**LLAMA, "max_batch": 16, "chunk_size": 1024, "page_size": 16, "passes": 10},
    {**LATENT, "max_batch": 16, "chunk_size": 512, "passes": 6},
    {**PLAIN, "layers": 1, "max_batch": 16, "chunk_size": 128, "passes": 4, "chip": "ampere"},
    {**LATENT, "layers": 1, "max_batch": 16, "chunk_size": 128, "passes": 4, "chip": "ampere"},
    # Passes with other numbers of splits.
    # A narrow MLP, of which the fused kernel takes some numbers of rows between those of the start's passes.  Passes of
    # many requests, whose last tokens are rows of a number that 16 does not divide.
    {**PLAIN, "layers": 1, "inner": 1536, "chunk_size": 2048, "passes": 80},
    {**EXPERTS, "layers": 1, "max_batch": 5, "chunk_size": 700, "passes": 12},
)
# What may differ from launch to launch and change the code: the start's passes have all its values.  Whatever else does
# is a bound that @unspecialised should name, or an address that 16 does not divide.
SPECIALISED = {
    *("_best_of_split_kernel.drafted", "_block_topk_kernel.drafted", "_block_topk_kernel.offset", "_carry_kernel.rows"),
    *(
        "_chain_kernel.first_offset",
        "_commit_kernel.layers",
        "_count_contiguous_blocks_kernel.first_position",
        "_down_kernel.num_rows",
    ),
    *("_draw_filtered_kernel.drafted", "_draw_filtered_kernel.rows", "_gated_kernel.num_rows"),
    *("_head_product_kernel.num_rows", "hopper_attention_kernel.first_position", "hopper_latent_kernel.partial_ptr"),
    *("_kv_splits_kernel.batch", "_linear_kernel.num_rows", "_linear_kernel.out_ptr", "_merge_logprobs_kernel.width"),
    *("_select_beams_kernel.first_row", "_sort_pairs_kernel.num_pairs", "_split_logprobs_kernel.width"),
    *("_tree_attention_kernel.first_position", "_tree_attention_kernel.rows", "_write_latents_kernel.num_rows"),
}
MANY = [
    {**sizes, "passes": 300, **other}
    for sizes in (LLAMA, LATENT, EXPERTS, SINKS, PLAIN)
    for other in ({}, {"chip": "ampere"}, {"page_size": 16, "chunk_size": 2048}, {"max_batch": 5, "chunk_size": 700})
]


# What a layer launches in plain decoding of one request.
ATTENTION_KERNELS = {"_rms_norm_kernel": 1, "_rotate_kernel": 1, "_tree_attention_kernel": 1, "_merge_splits_kernel": 1}
EXPERT_KERNELS = {"_norm_router_kernel": 1, "_route_kernel": 1, "_gated_kernel": 1, "_down_kernel": 1}
DENSE = {**ATTENTION_KERNELS, "_rms_norm_kernel": 2, "_linear_kernel": 4}
# FP8 inputs of o and of down are rounded in a launch each, those of qkv and gate_up with the norm.
FP8 = {**ATTENTION_KERNELS, "_rms_norm_kernel": 2, "_linear_quantised_kernel": 4, "_quantise_rows_kernel": 2}
MIXTURE = {**ATTENTION_KERNELS, **EXPERT_KERNELS, "_linear_kernel": 2}
FP8_MIXTURE = {**ATTENTION_KERNELS, **EXPERT_KERNELS, "_linear_quantised_kernel": 2, "_quantise_rows_kernel": 2}
LATENT_KERNELS = {"_rms_norm_kernel": 1, "_write_latents_kernel": 1, "_merge_splits_kernel": 1}
LATENT_KERNELS |= {"hopper_latent_few_kernel": 1}
LAYERS = (
    ({"shape": "llama-3.1-8b"}, DENSE),
    ({"shape": "llama-3.1-8b", "stored": "fp8"}, FP8),
    ({"shape": "qwen3-30b-a3b"}, MIXTURE),
    ({"shape": "qwen3-30b-a3b", "stored": "fp8"}, FP8_MIXTURE),
    # Its first layer has no experts.  Two projections are products of each head.
    (
        {"shape": "deepseek-v2-lite"},
        {**LATENT_KERNELS, **EXPERT_KERNELS, "_linear_kernel": 2, "_head_product_kernel": 1},
    ),
    # The first layer of each window also computes the splits.
    ({"shape": "gpt-oss-20b", "layer": 2}, MIXTURE),
)


def simulate(simulations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return json.loads(warm.compiler().run("tests.startup.launch_keys", json.dumps(simulations)).splitlines()[-1])


def test_the_start_compiles_every_kernel_that_a_pass_needs_and_no_more_and_a_layer_launches_few():
    """One test, as the simulations share a process."""
    founds = simulate([*FEW, *(fields for fields, _ in LAYERS)])
    for found, fields in zip(founds[: len(FEW)], FEW, strict=True):
        assert found["served"] == [], fields
        assert set(found["specialised"]) <= SPECIALISED, fields
        # The simulation sees that the fullest passes and the rounds do not suffice.
        assert found["without_smaller"] and set(found["without_smaller"]) <= set(found["smaller"]), fields
    launched = dict(zip(map(str, LAYERS), founds[len(FEW) :], strict=True))
    assert launched == {str(each): each[1] for each in LAYERS}


@pytest.mark.full
@pytest.mark.parametrize("fields", MANY, ids=lambda fields: "-".join(map(str, fields.values())))
def test_real_sizes(fields):
    [found] = simulate([fields])
    assert found["served"] == []
