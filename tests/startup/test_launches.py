"""What a layer launches in plain decoding of one request: a launch more costs 1 to 2 µs in each layer."""

import json

import pytest

from tests import warm

pytest.importorskip("triton", reason="needs Triton")

ATTENTION = {"_rms_norm_kernel": 1, "_rotate_kernel": 1, "_tree_attention_kernel": 1, "_merge_splits_kernel": 1}
EXPERTS = {"_norm_router_kernel": 1, "_route_kernel": 1, "_gated_kernel": 1, "_down_kernel": 1}
DENSE = {**ATTENTION, "_rms_norm_kernel": 2, "_linear_kernel": 4}
# FP8 inputs of o and of down are rounded in a launch each, those of qkv and gate_up with the norm.
FP8 = {**ATTENTION, "_rms_norm_kernel": 2, "_linear_quantised_kernel": 4, "_quantise_rows_kernel": 2}
MIXTURE = {**ATTENTION, **EXPERTS, "_linear_kernel": 2}
FP8_MIXTURE = {**ATTENTION, **EXPERTS, "_linear_quantised_kernel": 2, "_quantise_rows_kernel": 2}
LATENT = {"_rms_norm_kernel": 1, "_write_latents_kernel": 1, "_merge_splits_kernel": 1}
LATENT |= {"hopper_latent_few_kernel": 1}
LAYERS = (
    ({"shape": "llama-3.1-8b"}, DENSE),
    ({"shape": "llama-3.1-8b", "stored": "fp8"}, FP8),
    ({"shape": "qwen3-30b-a3b"}, MIXTURE),
    ({"shape": "qwen3-30b-a3b", "stored": "fp8"}, FP8_MIXTURE),
    # Its first layer has no experts.  Two projections are products of each head.
    ({"shape": "deepseek-v2-lite"}, {**LATENT, **EXPERTS, "_linear_kernel": 2, "_head_product_kernel": 1}),
    # The first layer of each window also computes the splits.
    ({"shape": "gpt-oss-20b", "layer": 2}, MIXTURE),
)


def test_launches_of_a_layer():
    """One test, as the layers share a process."""
    asked = json.dumps([fields for fields, _ in LAYERS])
    found = json.loads(warm.compiler().run("tests.startup.launch_keys", asked).splitlines()[-1])
    assert dict(zip(map(str, LAYERS), found, strict=True)) == {str(each): each[1] for each in LAYERS}
