"""Tiny random checkpoints in the formats users have: targets through transformers, EAGLE-3 heads written by hand.

Weights are drawn wide, so that logits spread and two tokens are never nearly tied.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    MuseGlimmerConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    Starcoder2Config,
)

CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "gemma4": Gemma4TextConfig,
    "gemma4_moe": Gemma4TextConfig,
    "gemma4_e": Gemma4TextConfig,
    "gemma4_unified": Gemma4UnifiedTextConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "gpt_oss": GptOssConfig,
    "deepseek_v3_wide": DeepseekV3Config,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "deepseek_v32": DeepseekV32Config,
    "deepseek_v32_wide": DeepseekV32Config,
    "glm_moe_dsa": GlmMoeDsaConfig,
    "dots1": Dots1Config,
    "granite_hybrid": GraniteMoeHybridConfig,
    "lfm2": Lfm2Config,
    "lfm2_moe": Lfm2MoeConfig,
    "nemotron_h": NemotronHConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_5_moe": Qwen3_5MoeTextConfig,
    "mixtral": MixtralConfig,
    "minimax_m2": MiniMaxM2Config,
    "phi3": Phi3Config,
    "ministral": MinistralConfig,
    "ministral3": Ministral3Config,
    "granite": GraniteConfig,
    "granitemoe": GraniteMoeConfig,
    "granitemoeshared": GraniteMoeSharedConfig,
    "granitemoehybrid": GraniteMoeHybridConfig,
    "smollm3": SmolLM3Config,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "exaone4": Exaone4Config,
    "laguna": LagunaConfig,
    "muse_glimmer": MuseGlimmerConfig,
    # Without a native family.
    "starcoder2": Starcoder2Config,
}
# Of Granite, no factor 1.
FACTORS: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.8,
}
# Fields of families with experts.
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Fields of families with DeepSeek's experts: all layers but the first have them, in four groups of two.
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# Fields of families with latent attention: sizes that are all different.
LATENT: dict[str, Any] = {"kv_lora_rank": 12, "q_lora_rank": 14, "qk_nope_head_dim": 6, "v_head_dim": 10}
# Fields of families whose queries choose rows: few of them.  With many heads no score is exactly 0, as in a tie.
# Behind a family's name, "_topk" and a number choose another number.
INDEX: dict[str, Any] = {"index_topk": 5, "index_head_dim": 11, "index_n_heads": 12}
SHARING = ["full", "full", "shared"]
# Fields of families with the gated delta rule, in all layers but every second one; all sizes are different.
DELTA: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
# Fields of Gemma 4: larger heads, and fewer of them, where attention is full.
GEMMA4: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
}
# Families that transformers has only as the text part of a multimodal model: fields of the whole.
WHOLES_OF: dict[str, dict[str, Any]] = {
    "muse_glimmer": {"image_token_id": 99, "video_token_id": 99, "out_hidden_size": 32, "projector_hidden_size": 8}
}
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 4,
    "patch_size": 2,
    "head_dim": 8,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "ministral": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    # The temperature changes at every 16th position.
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 256.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.7,
        }
    },
    # Caps that bend many logits.
    "gemma2": {
        "sliding_window": 7,
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    # A scale that is not that of the heads' size.  Every second layer has full attention.
    "gemma3": {
        "sliding_window": 7,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 5,
        "tie_word_embeddings": True,
    },
    "gemma4": {**GEMMA4, "hidden_size_per_layer_input": 0},
    "gemma4_unified": GEMMA4,
    "gemma4_moe": {
        **GEMMA4,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    # The last two of four layers read the K and V of the first two.
    "gemma4_e": {
        **GEMMA4,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 20},
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 20},
    "granite_hybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 20,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 6,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "routed_scaling_factor": 1.5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 5,
    },
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm2": {"full_attn_idxs": [1], "block_multiple_of": 10, "tie_word_embeddings": False},
    "qwen3_5": DELTA,
    "qwen3_5_moe": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "deepseek_v2": {**LATENT, **ROUTED, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": {**LATENT, **ROUTED},
    # Latent rows as wide as the published ones, which have a kernel of their own.
    "deepseek_v3_wide": {**LATENT, **ROUTED, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64},
    "glm4_moe": {**ROUTED, "head_dim": 12},
    "glm4_moe_lite": {**LATENT, **ROUTED, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {**LATENT, **ROUTED, **INDEX},
    "deepseek_v32_wide": {
        **LATENT,
        **ROUTED,
        **INDEX,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "index_head_dim": 128,
    },
    # Layers that share the rows that another one chose.
    "glm_moe_dsa": {**LATENT, **ROUTED, **INDEX, "n_group": 1, "topk_group": 1, "indexer_types": SHARING},
    "dots1": {**ROUTED, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    # The limit of the activation cuts part of the values.
    "granite": FACTORS,
    "granitemoe": {**FACTORS, "num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoeshared": {**FACTORS, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 20},
    # As Granite 4: dense, with the MLP of the shared expert.
    "granitemoehybrid": {
        **FACTORS,
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
    },
    "laguna": {
        **EXPERTS,
        "shared_expert_intermediate_size": 20,
        "num_attention_heads_per_layer": [4, 2, 6],
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "moe_routed_scaling_factor": 2.5,
    },
    "muse_glimmer": {
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "layer_rope_theta": [0, 10000.0, 10000.0],
        "post_norm_eps": 0.1,
        "qk_scale_factor": 1.7,
        "output_multiplier": 0.6,
        "final_logit_softcapping": 3.0,
        "attention_bias": True,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "olmo3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": 2},
    "phi3": {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "minimax_m2": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    },
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 7, "swiglu_limit": 0.8},
}

# What a family with "_dense" behind its name has in place of its DEFAULTS.
WITHOUT_EXPERTS: dict[str, Any] = {"first_k_dense_replace": 1000}
# GPT-OSS cannot go without: every token goes to both experts.
WITHOUT_ROUTING: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 2}


def add_kv_scales(target: Path) -> None:
    """Add scales of K and V to a target: no two equal, for each head in every layer but the first."""
    config = json.loads((target / "config.json").read_text())
    by_layer = config.get("per_layer_config", {})
    weights = load_file(target / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        heads = by_layer.get(str(layer), {}).get("num_key_value_heads", config["num_key_value_heads"])
        for i, name in enumerate("kv"):
            count = 1 if config.get("kv_lora_rank") or not layer else heads
            scale = 0.02 * (1 + 0.37 * layer + 0.11 * i + 2.5 * torch.arange(count))
            weights[f"model.layers.{layer}.self_attn.{name}_scale"] = scale.view(-1, 1, 1) if layer else scale
    save_file(weights, target / "model.safetensors")


def make_target(
    path: Path | str,
    family: str = "llama",
    seed: int = 0,
    vocab: int = 16,
    hidden: int = 32,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    **config: Any,
) -> Path:
    """A random Hugging Face directory, float64.  config: further fields of the family's config class.

    A family with "_dense" behind its name chooses between no experts.
    """
    family, _, topk = family.partition("_topk")
    if topk:
        config = {"index_topk": int(topk), **config}
    if family.endswith("_dense"):
        family = family.removesuffix("_dense")
        config = {**(WITHOUT_ROUTING if family == "gpt_oss" else WITHOUT_EXPERTS), **config}
    fields = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        **DEFAULTS.get(family, {}),
        **config,
    }
    if "kv_lora_rank" in fields:
        fields = {"qk_rope_head_dim": head_dim, **fields, "num_key_value_heads": heads, **config}
        # Transformers takes it for the size of the rotated part.
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if family.startswith(("gemma3", "gemma4", "olmo3", "laguna")) and "rope_type" in fields.get("rope_parameters", {}):
        fields["rope_parameters"] = {
            kind: dict(fields["rope_parameters"]) for kind in ("full_attention", "sliding_attention")
        }
    Path(path).mkdir(parents=True, exist_ok=True)
    for name, content in _files_of_target(family, fields, seed).items():
        (Path(path) / name).write_bytes(content)
    return Path(path)


_files: dict[str, dict[str, bytes]] = {}


def _files_of_target(family: str, fields: dict[str, Any], seed: int) -> dict[str, bytes]:
    """The content of each file of a target's directory, made once a process: many tests begin with the same one."""
    key = repr((family, sorted(fields.items()), seed))
    if key not in _files:
        kind: Any = AutoModelForCausalLM
        if family in WHOLES_OF:
            kind = AutoModelForImageTextToText
            fields = {"text_config": fields, "vision_config": VISION, **WHOLES_OF[family]}
        model = kind.from_config(CONFIGS[family](**fields), dtype=torch.float64)
        draw_weights(model, seed)
        with TemporaryDirectory() as made:
            model.save_pretrained(made)
            _files[key] = {file.name: file.read_bytes() for file in Path(made).iterdir()}
    return _files[key]


def draw_weights(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, tuple(parameter.shape), generator))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.copy_(_draw(name, tuple(buffer.shape), generator))
    model.tie_weights()


def make_eagle3(
    path: Path | str, target_path: Path | str, seed: int = 0, draft_vocab: int | None = None, **config: Any
) -> Path:
    """A random EAGLE-3 head in SafeAILab's form for the target at target_path, float64.

    draft_vocab: fewer tokens than the target's, with a random d2t.  config: fields of its config.json; with
    kv_lora_rank its layer has latent attention.  Two more choose what the file holds: own_embed and own_head (true
    unless the vocabularies are one).
    """
    target = json.loads((Path(target_path) / "config.json").read_text())
    target = target.get("text_config", target)
    vocab, hidden = target["vocab_size"], target["hidden_size"]
    layers = target.get("num_hidden_layers") or len(target["layers_block_type"])
    own_embed, own_head = config.pop("own_embed", False), config.pop("own_head", draft_vocab is not None)
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab or vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target.get("head_dim") or hidden // target["num_attention_heads"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": target["max_position_embeddings"],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float64",
        **config,
    }
    weights = _eagle3_weights(fields, layers, torch.Generator().manual_seed(seed + 1000))
    if not own_embed:
        weights.pop("embed_tokens.weight")
    if not own_head:
        weights.pop("lm_head.weight")
    if draft_vocab is not None:
        weights |= _vocabulary_map(draft_vocab, vocab, seed)
    Path(path).mkdir(parents=True, exist_ok=True)
    (Path(path) / "config.json").write_text(json.dumps(fields, indent=1))
    save_file(weights, Path(path) / "model.safetensors")
    return Path(path)


def _eagle3_weights(fields: dict[str, Any], target_layers: int, generator: torch.Generator) -> dict[str, Tensor]:
    hidden, inner, size = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    q_rows, kv_rows = fields["num_attention_heads"] * size, fields["num_key_value_heads"] * size
    target_hidden = fields.get("target_hidden_size") or hidden
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    captured = len(
        fields.get("eagle_aux_hidden_state_layer_ids") or nested or (2, target_layers // 2, target_layers - 3)
    )
    attention: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (q_rows, 2 * hidden),
        "k_proj.weight": (kv_rows, 2 * hidden),
        "v_proj.weight": (kv_rows, 2 * hidden),
        "o_proj.weight": (hidden, q_rows),
    }
    if fields.get("kv_lora_rank"):
        attention = _latent_shapes(fields)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (fields["vocab_size"], hidden),
        "fc.weight": (hidden, captured * target_hidden),
        **{f"midlayer.self_attn.{name}": shape for name, shape in attention.items()},
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (fields["draft_vocab_size"], hidden),
    }
    if fields.get("bias"):
        shapes["fc.bias"] = (hidden,)
    if fields.get("norm_before_fc"):
        shapes["input_norm.weight"] = (captured * target_hidden,)
    if fields.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(captured)}
    return {name: _draw(name, shape, generator) for name, shape in shapes.items()}


def _latent_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The attention weights of a latent head, which projects embedding and hidden state side by side."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    q_rank, kv_rank, rope = (fields[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"))
    nope, v_size = fields["qk_nope_head_dim"], fields["v_head_dim"]
    q_rows = heads * (nope + rope)
    queries: dict[str, tuple[int, ...]] = {"q_proj.weight": (q_rows, 2 * hidden)}
    if q_rank is not None:
        queries = {
            "q_a_proj.weight": (q_rank, 2 * hidden),
            "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (q_rows, q_rank),
        }
    return {
        **queries,
        "kv_a_proj_with_mqa.weight": (kv_rank + rope, 2 * hidden),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (heads * (nope + v_size), kv_rank),
        "o_proj.weight": (hidden, heads * v_size),
    }


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if "norm" in name:
        return 1 + 0.2 * drawn
    if name.endswith("bias"):
        return 0.3 * drawn
    if name.endswith(("scale", "layer_scalar")):
        return 1 + 0.2 * drawn
    if "embed_tokens" in name:
        return drawn
    gain = 1.5 if "lm_head" in name else 1.2
    return drawn * gain / shape[-1] ** 0.5


def _vocabulary_map(draft_vocab: int, vocab: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed + 2000))[:draft_vocab].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": known}
