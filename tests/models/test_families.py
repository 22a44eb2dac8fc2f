"""Every family computes what transformers computes, over whole sequences."""

import copy
import json
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Dots1Config, Gemma3TextConfig, Phi3Config, Qwen2Config, Qwen2MoeConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from espalier.cache.layer_spec import KVHeads, RecurrentState
from espalier.errors import EspalierError
from espalier.models import load_target, read_config
from espalier.models.eagle3 import read_eagle3
from espalier.models.families import FAMILIES
from espalier.models.layer_loading import layer_specs_of
from espalier.models.mtp import read_mtp
from tests.builders import CONFIGS, make_eagle3, make_target
from tests.checkpoints import edit_config
from tests.models.reference import load_reference, reference_logits
from tests.oracles.dense import DensePass
from tests.pairwise import fewer

LENGTH = 40
# The factors of DeepSeek-V3 and V2-Lite, over a shorter length.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16}
YARN_LITE = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
# As Phi-4-mini, whose heads are rotated in part.  The numbers are not in order.
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "short_factor": [1.5, 1.1]}
LONGROPE |= {"long_factor": [3.0, 17.0]}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one kv head": ("llama", {"kv_heads": 1}),
    "llama, plain heads": ("llama", {"kv_heads": 4}),
    "llama, the other name of silu": ("llama", {"hidden_act": "swish"}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention and mlp biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head size apart": ("llama", {"head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window on upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, head size apart": ("qwen3", {"head_dim": 16, "heads": 4}),
    "qwen3, attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3, layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, every second layer, plain weights": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": None, "norm_topk_prob": False},
    ),
    "qwen3_moe, window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
    "qwen3_moe, many experts": ("qwen3_moe", {"num_experts": 40, "num_experts_per_tok": 8}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, no bias, window": (
        "qwen2_moe",
        {"qkv_bias": False, "use_sliding_window": True, "sliding_window": 5, "norm_topk_prob": True},
    ),
    "mistral": ("mistral", {}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "mistral, head size apart": ("mistral", {"head_dim": 10}),
    "gemma2": ("gemma2", {}),
    "gemma2, layer types, without caps": (
        "gemma2",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": ("gemma3", {}),
    "gemma3, not tied, biases, silu": (
        "gemma3",
        {"tie_word_embeddings": False, "attention_bias": True, "hidden_activation": "silu"},
    ),
    "gemma3, layer types, a RoPE for each": (
        "gemma3",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "gemma4": ("gemma4", {}),
    "gemma4, K and V apart, biases, not tied": (
        "gemma4",
        {"attention_k_eq_v": False, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma4, full attention alone, another RoPE": (
        "gemma4",
        {
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 700.0,
                    "factor": 2.0,
                }
            },
        },
    ),
    "gemma4_unified": ("gemma4_unified", {}),
    "gemma4_moe": ("gemma4_moe", {}),
    "gemma4_moe, inputs of layers": (
        "gemma4_moe",
        {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 20},
    ),
    "gemma4_e": ("gemma4_e", {}),
    "gemma4_e, K as V, no wide MLP": ("gemma4_e", {"attention_k_eq_v": True, "use_double_wide_mlp": False}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2, queries without a latent, greedy": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2, attention and mlp biases": ("deepseek_v2", {"attention_bias": True, "mlp_bias": True}),
    "deepseek_v2, as V2-Lite": (
        "deepseek_v2",
        {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_parameters": YARN_LITE},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, dense": ("deepseek_v3_dense", {}),
    "deepseek_v3, queries without a latent, biases": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "deepseek_v3, rope in halves": ("deepseek_v3", {"rope_interleave": False}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, no biases of the attention, full attention first": (
        "gpt_oss",
        {
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "deepseek_v3, eps of the other norms": ("deepseek_v3", {"rms_norm_eps": 0.1}),
    "deepseek_v3, weights as they are, yarn": ("deepseek_v3", {"norm_topk_prob": False, "rope_parameters": YARN}),
    "deepseek_v3, one group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, biases, norms of heads": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
    "glm4_moe, a third rotated, yarn": ("glm4_moe", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.34}}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe_lite, layers by type": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "deepseek_v32": ("deepseek_v32", {}),
    "deepseek_v32, biases, yarn, layers by type": (
        "deepseek_v32",
        {
            "attention_bias": True,
            "rope_parameters": YARN,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "index_topk": 16,
        },
    ),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm_moe_dsa, a pattern": (
        "glm_moe_dsa",
        {"indexer_types": None, "index_topk_pattern": "FSS", "index_topk": 4, "index_topk_freq": None},
    ),
    **{
        f"glm_moe_dsa, every {every} from {offset}": (
            "glm_moe_dsa",
            {"indexer_types": None, "index_topk_freq": every, "index_skip_topk_offset": offset, "layers": 5},
        )
        for every, offset in ((1, 0), (2, 1), (3, 2), (2, 3))
    },
    "dots1": ("dots1", {}),
    "granite_hybrid": ("granite_hybrid", {}),
    "granite_hybrid, no experts, RoPE, biases, limits of dt": (
        "granite_hybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": [0.4, 0.9],
            "mamba_n_groups": 1,
        },
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h, experts last": (
        "nemotron_h",
        {
            "layers_block_type": ["mlp", "full_attention", "linear_attention", "moe"],
            "use_conv_bias": False,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {"routed_scaling_factor": 1.5}),
    "lfm2, biases, tied, the MLP's size as it stands, attention last": (
        "lfm2",
        {
            "conv_bias": True,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [0, 2],
            "conv_L_cache": 4,
        },
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, one head of k, a dense layer, three taps, half rotated": (
        "qwen3_next",
        {
            "linear_num_key_heads": 1,
            "mlp_only_layers": [1],
            "linear_conv_kernel_dim": 3,
            "partial_rotary_factor": 0.5,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, biases, every head of k": ("qwen3_5", {"attention_bias": True, "linear_num_key_heads": 4}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "dots1, window on upper layers": ("dots1", {"sliding_window": 5, "max_window_layers": 1}),
    "ministral": ("ministral", {}),
    "ministral3": ("ministral3", {}),
    "ministral3, window": ("ministral3", {"sliding_window": 6}),
    "phi3": ("phi3", {}),
    "phi3, longrope, a long text": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3, longrope, a short text": (
        "phi3",
        {"rope_parameters": {**LONGROPE, "attention_factor": 1.2}, "original_max_position_embeddings": LENGTH},
    ),
    "phi3, all rotated, window": ("phi3", {"rope_parameters": {"rope_theta": 10000.0}, "sliding_window": 6}),
    "granite": ("granite", {}),
    "granite, biases, tied": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granitemoe": ("granitemoe", {}),
    "granitemoeshared": ("granitemoeshared", {}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid, experts, no RoPE": (
        "granitemoehybrid",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": None},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3, biases, by interval, windows": (
        "smollm3",
        {
            "no_rope_layers": None,
            "no_rope_layer_interval": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2, one kv head, biases": ("olmo2", {"kv_heads": 1, "attention_bias": True}),
    "olmo3": ("olmo3", {}),
    "olmo3, scaled in full layers": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            }
        },
    ),
    "exaone4": ("exaone4", {}),
    "exaone4, full attention alone, RoPE in every layer, scaled": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": {**YARN, "mscale": None}},
    ),
    "exaone4, full attention alone, no RoPE": ("exaone4", {"layer_types": ["full_attention"] * 3}),
    "exaone4, a pattern of letters beside layer types": (
        "exaone4",
        {
            "sliding_window_pattern": "LLG",
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "laguna": ("laguna", {}),
    "laguna, a gate of each value, layers by type": (
        "laguna",
        {
            "gating": "per-element",
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "num_attention_heads_per_layer": None,
            "layer_types": None,
        },
    ),
    "muse_glimmer": ("muse_glimmer", {}),
    "muse_glimmer, by their places": (
        "muse_glimmer",
        {"layers": 5, "layer_types": None, "layer_rope_theta": None, "attention_bias": False},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, window": ("mixtral", {"sliding_window": 6}),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2, whole heads rotated, yarn, one kv head": ("minimax_m2", {"kv_heads": 1, "rope_parameters": YARN}),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# Of the delta rule, whose chunks are solved in another order.
DELTA_TOLERANCE = {**TOLERANCE, torch.float32: 1e-4}


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


# Llama has these.
SHOWN_BY_ALL = {"tie_word_embeddings", "head_dim", "heads", "kv_heads", "attention_bias", "mlp_bias"}
# With values that other variants of the family, or other families, have too.
SHOWN_BY_OTHERS = {
    *("llama, one kv head", "qwen3_moe, window", "mixtral, window", "mistral, window", "ministral3, window"),
    *("qwen2", "mistral", "gemma4_unified", "lfm2"),
}
# Of these float32 is computed too: each kind of layer, of router, of norm and of state.
IN_FLOAT32 = (
    *("llama", "gemma2", "gemma4_e", "gemma4_moe", "gpt_oss", "deepseek_v2", "deepseek_v32", "granite_hybrid"),
    *("nemotron_h", "lfm2_moe", "qwen3_next", "qwen2_moe", "laguna", "minimax_m2", "glm4_moe", "phi3"),
    *("muse_glimmer", "ministral3"),  # which make tensors of their own
)


def is_usual(variant: str, dtype: torch.dtype) -> bool:
    """Every family, and of its variants all but what other families show too."""
    _, fields = VARIANTS[variant]
    if variant in SHOWN_BY_OTHERS or (dtype == torch.float32 and variant not in IN_FLOAT32):
        return False
    return variant.startswith("llama") or not fields or not set(fields) <= SHOWN_BY_ALL


# A variant is the family with other values: what is rounded to float32, and where, is the family's.
RUNS = [
    (variant, dtype)
    for variant, (family, _) in VARIANTS.items()
    for dtype in (TOLERANCE if variant == family else (torch.float64,))
]


@pytest.mark.parametrize(("variant", "dtype"), fewer(RUNS, is_usual), ids=str)
def test_logits_and_captured_inputs(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    family, fields = VARIANTS[variant]
    path = make_target(tmp_path, family, seed=3, **fields)
    tokens = torch.randint(0, 16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    kept = [spec.cache_spec for spec in layer_specs_of(read_config(path))]
    has_delta = any(isinstance(keeps, RecurrentState) and keeps.heads and keeps.delta for keeps in kept)
    tolerance = (DELTA_TOLERANCE if has_delta else TOLERANCE)[dtype]
    model = load_target(path, dtype=dtype, device="cpu", position_rows=LENGTH, captured_layers=(2, 0, 1))
    out = model(DensePass(tokens, model.layer_specs, torch.arange(LENGTH).expand(2, -1)))
    logits, inputs = reference_logits(load_reference(path, dtype), tokens)
    assert out.captured is not None
    difference = max(
        relative(model.logits(out.hidden), logits),
        relative(out.captured, torch.cat([inputs[i] for i in (2, 0, 1)], dim=-1)),
    )
    assert difference <= tolerance, f"{variant} {dtype}: {difference:.1e}"


def test_longrope_keeps_to_the_frequencies_of_max_context(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rows of the tables reach past max_context, and published configs call LongRoPE by older names."""
    path = make_target(tmp_path, "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    raw = json.loads((path / "config.json").read_text())
    for name, context in product(("longrope", "su", "yarn"), (64, 65)):
        scaling = {field: value for field, value in LONGROPE.items() if field != "rope_type"}
        old = {"rope_scaling": {**scaling, "type": name}, "rope_parameters": None}
        (path / "config.json").write_text(json.dumps({**raw, **old}))
        caplog.clear()
        with caplog.at_level(logging.INFO, "espalier"):
            model = load_target(path, dtype=torch.float32, device="cpu", position_rows=99, max_context=context)
        theirs = ROPE_INIT_FUNCTIONS["longrope"](Phi3Config.from_pretrained(path), "cpu", seq_len=context)[0]
        torch.testing.assert_close(model.rope.cos[1, :2], theirs.cos() * model.config.rope.attention_factor)
        assert f"LongRoPE's {('short', 'long')[context > 64]} frequencies" in caplog.text


def test_windows_reach_the_geometry(tmp_path: Path) -> None:
    """A window that nothing reads would pass every short sequence."""
    for variant, expected in (
        ("qwen2, window on upper layers", (None, 5, 5)),
        ("qwen3, layer types", (7, None, 7)),
        ("mistral, window", (6, 6, 6)),
        ("mixtral, window", (6, 6, 6)),
        ("ministral3, window", (6, 6, 6)),
        ("qwen3_moe, window", (7, 7, 7)),
        ("qwen2", (None, None, None)),
        ("gpt_oss", (7, None, 7)),
        ("gemma3", (7, None, 7)),
        ("gemma3, layer types, a RoPE for each", (None, 7, 7)),
    ):
        family, fields = VARIANTS[variant]
        path = make_target(tmp_path / variant, family, **fields)
        model = load_target(path, dtype=torch.float32, device="cpu", position_rows=8)
        assert tuple(layer.window for layer in model.layer_specs) == expected == model.config.windows


# The families whose window starts or ends at a layer.
BY_LAYER = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen2_moe": Qwen2MoeConfig, "dots1": Dots1Config}


@pytest.mark.parametrize("family", BY_LAYER)
def test_windows_of_a_config_without_layer_types(family: str, tmp_path: Path) -> None:
    """Transformers 4 wrote only where the window starts.  Transformers 5 makes layer_types of that."""
    path = make_target(tmp_path, family, layers=5)
    raw = json.loads((path / "config.json").read_text()) | {"layer_types": None, "sliding_window": 5}
    for use, first in product((True, False), range(7)):
        given = {**raw, "use_sliding_window": use, "max_window_layers": first}
        (path / "config.json").write_text(json.dumps(given))
        theirs = BY_LAYER[family](**given)
        expected = tuple(5 if kind == "sliding_attention" else None for kind in theirs.layer_types)
        assert read_config(path).windows == expected, (use, first)
    if family == "dots1":  # which knows no use_sliding_window
        return
    no_window = {**raw, "use_sliding_window": False, "max_window_layers": None}
    (path / "config.json").write_text(json.dumps(no_window))
    assert read_config(path).windows == (None,) * 5, "where no layer has a window, nobody asks where it starts"


def test_gemma3_in_the_old_spelling(tmp_path: Path) -> None:
    """Transformers 4 wrote sliding_window_pattern, and a base for each type of layer.  Transformers 5 reads both."""
    path = make_target(tmp_path, "gemma3", layers=5)
    raw = json.loads((path / "config.json").read_text())
    for name in ("layer_types", "rope_parameters", "_sliding_window_pattern", "sliding_window_pattern"):
        raw.pop(name, None)
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    given = {"rope_theta": 5e5, "rope_local_base_freq": 700.0, "sliding_window_pattern": 3, **scaling}
    for old in ({}, scaling, given):
        (path / "config.json").write_text(json.dumps(raw | old))
        theirs, ours = Gemma3TextConfig(**raw, **copy.deepcopy(old)), read_config(path)
        assert ours.windows == tuple(7 if kind == "sliding_attention" else None for kind in theirs.layer_types)
        for rope, kind in zip(ours.layer_ropes, theirs.layer_types, strict=True):
            expected = theirs.rope_parameters[kind]
            assert (rope.theta, rope.type, rope.factor) == (
                expected["rope_theta"],
                expected["rope_type"],
                expected.get("factor", 1.0),
            )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"sliding_window": None}, "sliding_window = None; sliding layers need"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0; a positive integer"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0; a positive number"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_parameters has 'rope_type': 'linear'; this family has",
        ),
        ({"rope_theta": 7.0}, "rope_theta is 7.0, but rope_theta of 'full_attention' in rope_parameters is"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor = 0.5 is not"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_gemma3_refuses_what_it_cannot_compute(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match=f"^{tmp_path}.*{message}"):
        read_config(make_target(tmp_path, "gemma3"), fields)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("granite", {"residual_multiplier": 0}, "residual_multiplier = 0; a positive number"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling = '8'; a number of at least 0 or null is needed"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "layer_types names 'mamba'; supported are"),
        ("granitemoehybrid", {"layer_types": None}, "layer_types names no 'full_attention'"),
        ("llama", {"position_embedding_type": "nope"}, "position_embedding_type = 'nope' is not supported"),
        ("llama", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers = .* is not supported"),
        ("llama", {"output_multiplier": 0.5}, "output_multiplier = 0.5 is not supported"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers = .*; 0 or 1 is needed for each of 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers = .*; 0 or 1 is needed"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0; a positive"),
        ("olmo3", {"sliding_window": None}, "sliding_window = None; sliding layers need"),
        ("exaone4", {"sliding_window": None}, "layer_types calls layer 0 'sliding_attention', but the layer has no"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLG"}, "sliding_window_pattern = 'LLG'; without"),
        ("laguna", {"num_attention_heads_per_layer": [4, 2]}, "num_attention_heads_per_layer = .* each of 3 layers"),
        ("laguna", {"num_attention_heads_per_layer": [4, 3, 2]}, "num_attention_heads_per_layer = .*; a multiple of"),
        ("laguna", {"gating": "per-token"}, "gating = 'per-token' is not supported, only"),
        ("laguna", {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping = 5.0 is not supported"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True is not"),
        ("muse_glimmer", {"layer_rope_theta": [0, 5.0, 0]}, "layer_rope_theta = .*; 0 or the model's rope_theta"),
        ("muse_glimmer", {"qk_scale_factor": None}, "qk_scale_factor = None; a positive number"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sigmoid'"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor = 0 of heads"),
    ],
    ids=str,
)
def test_what_a_family_cannot_compute_is_refused(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Before a weight is taken."""
    path = make_target(tmp_path, family)
    with pytest.raises(EspalierError, match=f"^{tmp_path}.*{message}"):
        load_target(path, dtype=torch.float64, device="cpu", position_rows=8, overrides=fields)


def test_layers_by_their_places(tmp_path: Path) -> None:
    """Older configs leave out what transformers writes for each layer."""
    for family, fields, windows, with_rope in (
        ("olmo3", {"layer_types": None}, (7, 7, 7, None, 7), (True,) * 5),
        ("smollm3", {"no_rope_layers": None, "layer_types": None}, (None,) * 5, (True, True, True, False, True)),
        (
            "muse_glimmer",
            {"layer_types": None, "layer_rope_theta": None},
            (None, 7, 7, 7, None),
            (False, *[True] * 3, False),
        ),
        ("ministral", {"layer_types": None}, (7,) * 5, (True,) * 5),
        ("exaone4", {"layer_types": None}, (7, None, 7, None, 7), (True, False, True, False, True)),
    ):
        path = make_target(
            tmp_path / family, family, layers=5, **{"no_rope_layers": None, "layer_types": None, **fields}
        )
        config = read_config(path, fields)
        assert config.windows == windows and tuple(rope.type != "none" for rope in config.layer_ropes) == with_rope, (
            family
        )


def test_a_draft_has_layers_only_of_families_that_declare_it(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    config = read_config(target)
    head = json.loads((make_eagle3(tmp_path / "head", target) / "config.json").read_text())
    not_in_drafts = {family.model_type for family in FAMILIES.values() if not family.usable_in_drafts}
    assert "gemma3_text" in not_in_drafts
    for kind in not_in_drafts:
        with pytest.raises(EspalierError, match=f"a draft layer of model_type '{kind}' is not supported"):
            read_eagle3(tmp_path, {**head, "model_type": kind}, config)
        mtp = {"speculators_model_type": "mtp", "transformer_layer_config": {**head, "model_type": kind}}
        with pytest.raises(EspalierError, match=f"MTP layers of model_type '{kind}'"):
            read_mtp(tmp_path, mtp, config)


NOT_ROTATED = {"rope_type": "proportional", "partial_rotary_factor": 0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping = '30'; a number of at least 0 or null is needed"),
        ({"sliding_window": None}, "sliding_window = None; sliding layers need"),
        ({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "layer_types ends with 'sliding"),
        ({"rope_theta": 7.0}, "rope_theta = 7.0 has no effect in Gemma 4"),
        ({"rope_parameters": {"sliding_attention": None}}, "rope_parameters has None for 'sliding_attention'"),
        ({"rope_parameters": {"full_attention": NOT_ROTATED}}, "partial_rotary_factor = 0; "),
        ({"per_layer_config": {"2": {"sliding_window": 3}}}, "per_layer_config has 'sliding_window'; supported are"),
        ({"per_layer_config": {"2": 3}}, "per_layer_config = {'2': 3.*}; an object for each layer"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 3}}}, "4 heads over 3 key-value heads"),
        ({"per_layer_config": {"2": {"head_dim": "8"}}}, "head_dim = '8'; a positive integer"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3 of 3 layers; fewer"),
        ({"num_kv_shared_layers": 1}, "layer 2 has no earlier layer of its type and sizes"),
        (
            {"num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 3},
            "layer 2 has no earlier layer of its type",
        ),
        ({"num_kv_shared_layers": "1"}, "num_kv_shared_layers = '1' of 3 layers"),
    ],
    ids=str,
)
def test_gemma4_refuses_what_it_cannot_compute(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Before a weight is read."""
    with pytest.raises(EspalierError, match=f"^{tmp_path}.*{message}"):
        layer_specs_of(read_config(make_target(tmp_path, "gemma4"), fields))


def test_minimax_m2_as_published(tmp_path: Path) -> None:
    """Published files have the number of rotated values, not their share, and the type of FP8 by its name in torch."""
    path = make_target(tmp_path, "minimax_m2")
    raw = json.loads((path / "config.json").read_text())
    raw.pop("rope_parameters")
    raw |= {"scoring_func": "sigmoid", "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn"}}
    for given in ({}, {"rotary_dim": 4}, {"rotary_dim": 4, "partial_rotary_factor": 0.75}, {"rotary_dim": None}):
        (path / "config.json").write_text(json.dumps(raw | given))
        theirs, ours = CONFIGS["minimax_m2"](**raw, **given).rope_parameters, read_config(path)
        assert ours.rope.dim == 8 * theirs.get("partial_rotary_factor", 1), given
        assert ours.rope.theta == theirs["rope_theta"]
    (path / "config.json").write_text(json.dumps(raw | {"rotary_dim": "4"}))
    with pytest.raises(EspalierError, match=f"^{tmp_path}.*rotary_dim = '4'; a positive integer"):
        read_config(path)


@pytest.mark.parametrize("k_is_v", [False, True])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_gemma4_as_published(family: str, k_is_v: bool, tmp_path: Path) -> None:
    """Published files name the sizes of full attention; transformers writes those of each layer."""
    path = make_target(tmp_path, family, layers=8, layer_types=None)
    raw = json.loads((path / "config.json").read_text())
    for name in ("layer_types", "rope_parameters", "per_layer_config", "sliding_window"):
        raw.pop(name, None)
    raw |= {"global_head_dim": 20, "num_global_key_value_heads": 1, "attention_k_eq_v": k_is_v}
    (path / "config.json").write_text(json.dumps(raw))
    theirs, ours = CONFIGS[family](**raw), read_config(path)
    for layer, (spec, rope) in enumerate(zip(layer_specs_of(ours), ours.layer_ropes, strict=True)):
        of_layer, kind = theirs.per_layer_config[layer], theirs.layer_types[layer]
        assert spec.window == (theirs.sliding_window if kind == "sliding_attention" else None)
        assert spec.cache_spec == KVHeads(of_layer.num_key_value_heads, of_layer.head_dim, of_layer.head_dim)
        assert (rope.dim, rope.theta) == (of_layer.head_dim, theirs.rope_parameters[kind]["rope_theta"])
    assert [spec.window is None for spec in layer_specs_of(ours)] == [False] * 5 + [True, False, True]


def test_gemma4_ignores_what_layers_that_share_rows_still_store(tmp_path: Path) -> None:
    path = make_target(tmp_path, "gemma4_e")
    weights = load_file(path / "model.safetensors")
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        weights[f"model.layers.3.self_attn.{name}"] = weights[f"model.layers.1.self_attn.{name}"].clone()
    save_file(weights, path / "model.safetensors")
    loaded = load_target(path, dtype=torch.float64, device="cpu", position_rows=8)
    assert [spec.shares_with for spec in loaded.layer_specs] == [None, None, 0, 1]


def test_mistrals_window_is_in_every_layer_or_the_config_is_refused(tmp_path: Path) -> None:
    path = make_target(tmp_path, "mistral", sliding_window=6)
    edit_config(path, layer_types=["sliding_attention", "full_attention"] * 2)
    with pytest.raises(EspalierError, match="num_hidden_layers = 3"):
        read_config(path)
    edit_config(path, layer_types=["sliding_attention"] * 2 + ["full_attention"])
    with pytest.raises(EspalierError, match=f"^{path}: layer_types .*uses the window in every layer; remove one"):
        read_config(path)


def test_the_input_of_the_final_norm_can_be_captured(tmp_path: Path) -> None:
    path = make_target(tmp_path)
    model = load_target(path, dtype=torch.float64, device="cpu", position_rows=8, captured_layers=(3,))
    tokens = torch.arange(8)[None]
    out = model(DensePass(tokens, model.layer_specs, tokens))
    assert out.captured is not None
    torch.testing.assert_close(out.hidden, model.norm(out.captured))


def test_empty_batches_and_rows(tmp_path: Path) -> None:
    path = make_target(tmp_path)
    for dtype in (torch.float32, torch.float64):
        model = load_target(path, dtype=dtype, device="cpu", position_rows=8, captured_layers=(1,))
        for shape in ((0, 4), (2, 0)):
            empty = torch.zeros(shape, dtype=torch.int64)
            out = model(DensePass(empty, model.layer_specs, empty))
            assert model.logits(out.hidden).shape == (*shape, 16)


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    path = make_target(tmp_path, tie_word_embeddings=True)
    model = load_target(path, dtype=torch.float64, device="cpu", position_rows=8)
    assert model.head.weight.tensor.data_ptr() == model.embed.weight.data_ptr()


def test_every_eos_id_is_read(tmp_path: Path) -> None:
    path = make_target(tmp_path, eos_token_id=[3, 5])
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert read_config(path).eos_token_ids == (7, 5, 3)
    assert read_config(path, {"eos_token_id": 9}).eos_token_ids == (9,)


def test_an_eos_id_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = make_target(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": ["3"]}')
    with pytest.raises(EspalierError, match="eos_token_id = '3'; a token id"):
        read_config(path)
