"""The sizes of published models by name, from their config.json files, for tuning without a checkpoint.

Each model here has an untied lm_head, even if the published model shares the lm_head's weight with the embedding,
because the lab's synthetic models need an untied one.  A pass costs the same with a tied and an untied lm_head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from espalier.errors import EspalierError
from espalier.models.config import ModelConfig, parse_config
from espalier.models.draft import DraftConfig
from espalier.models.loading import find_family
from espalier.speculate.drafters.registry import format_of

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_FIELDS = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False}
QWEN3_FIELDS = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
QWEN3_MOE_FIELDS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False}
DEEPSEEK_V2_FIELDS = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False}
DEEPSEEK_V3_FIELDS = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False}
GEMMA4_FIELDS = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "attention_bias": False}
GPT_OSS_FIELDS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True}
MINISTRAL3_FIELDS = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
PHI3_FIELDS = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False}
# The largest head size of a draft for a target with latent attention.
DRAFT_HEAD_SIZE = 128


@dataclass(frozen=True, eq=False)
class Shape:
    """The sizes of a published model, and of a draft for it.  config_fields: the fields of its config.json.  The lab
    makes synthetic targets of these sizes.  A synthetic target emits only those token ids from first_emitted_id to
    end_emitted_id - 1 that are in the draft's vocabulary."""

    name: str
    hugging_face_id: str
    end_emitted_id: int
    draft_vocab_size: int
    config_fields: Mapping[str, Any]
    first_emitted_id: int = 0

    def with_layers(self, layers: int) -> "Shape":
        """Returns the model with only its first `layers` layers.  Raises EspalierError if it has fewer layers."""
        fields, count = self.config_fields, self.config_fields["num_hidden_layers"]
        if not 1 <= layers <= count:
            raise EspalierError(f"--layers={layers} is not supported: {self.name} has {count} layers; use 1 to {count}")
        by_layer = {name: values[:layers] for name, values in fields.items() if isinstance(values, list)}
        name = f"{self.name}, {layers} of {count} layers"
        return replace(self, name=name, config_fields={**fields, **by_layer, "num_hidden_layers": layers})

    @property
    def config_json(self) -> dict[str, Any]:
        common = {"hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True}
        return {**common, **self.config_fields}

    @property
    def target(self) -> ModelConfig:
        return parse_config(self.config_json, find_family(self.config_json, Path(self.name)), Path(self.name))

    @property
    def draft_layer_fields(self) -> dict[str, Any]:
        """The config.json fields of a draft's layer: a Llama layer with the target's sizes.

        A target with latent attention (MLA) has no K and V heads that the draft could copy.  Its draft has heads of at
        most DRAFT_HEAD_SIZE values, and at most a quarter as many key-value heads as query heads."""
        config = self.target
        heads, kv_heads, head_size = config.heads, config.kv_heads, config.head_size
        if config.latent is not None:
            head_size = min(DRAFT_HEAD_SIZE, config.hidden_size // 8)
            heads = config.hidden_size // head_size
            kv_heads = max(count for count in (1, 2, 4, 8) if heads % count == 0 and 4 * count <= heads)
        return {
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": self.config_fields.get("rope_theta") or 10000.0,
            "rope_scaling": None,
            "max_position_embeddings": self.config_fields["max_position_embeddings"],
            "tie_word_embeddings": False,
        }

    @property
    def draft_json(self) -> dict[str, Any]:
        """The config.json of an EAGLE-3 head in SafeAILab's format."""
        return {
            **self.draft_layer_fields,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target.hidden_size,
        }

    @property
    def draft_config(self) -> DraftConfig:
        """The parsed config of the EAGLE-3 head."""
        path = Path(f"{self.name} draft")
        return format_of(self.draft_json, path).read(path, self.draft_json, self.target)


def _llama(
    hidden_size: int, intermediate_size: int, num_layers: int, head_dim: int, rope_factor: float, num_heads: int = 32
) -> dict[str, Any]:
    """Returns the config.json of a Llama 3 model.  rope_factor: the factor by which positions are scaled."""
    return {
        **LLAMA_FIELDS,
        "mlp_bias": False,
        "vocab_size": 128256,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": rope_factor, **LLAMA3_ROPE},
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


QWEN3_8B = {
    **QWEN3_FIELDS,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    **QWEN3_MOE_FIELDS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LATENT_FIELDS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
}
YARN_ROPE = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_V2_LITE = {
    **DEEPSEEK_V2_FIELDS,
    **LATENT_FIELDS,
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
# Five layers instead of DeepSeek-V3's 61, with one dense layer instead of three.  They take 97 GB in bfloat16.  The MTP
# layer is left out.
DEEPSEEK_V3_1GPU = {
    **DEEPSEEK_V3_FIELDS,
    **LATENT_FIELDS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "rope_scaling": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Eight layers instead of 61, six of them dense.  They take 57 GB, so one GPU has room for long contexts.
# DEEPSEEK_V32_CUT below has sparse attention; DEEPSEEK_V3_CUT has full attention, for comparison.
DEEPSEEK_V3_CUT = {**DEEPSEEK_V3_1GPU, "num_hidden_layers": 8, "first_k_dense_replace": 6}
DEEPSEEK_V32_FIELDS = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
INDEXER_FIELDS = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
DEEPSEEK_V32_CUT = {**DEEPSEEK_V3_CUT, **DEEPSEEK_V32_FIELDS, **INDEXER_FIELDS}
# The weights are in bfloat16 here; the published checkpoint stores its experts in MXFP4.
GPT_OSS_20B = {
    **GPT_OSS_FIELDS,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
}
# The sizes of both Gemma 4 models are from public loaders that read the published files.  The 31B model has 50 layers
# with sliding windows and 10 with full attention.  The 26B-A4B model has 25 with sliding windows and 5 with full
# attention, and 128 experts in each layer.
GEMMA4_31B = {
    **GEMMA4_FIELDS,
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GEMMA4_26B_A4B = {
    **GEMMA4_31B,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
# With the sizes here, the text model has 13.5 billion parameters, as its model card states.  The default sizes of
# Transformers 5.24 are those of the 8B model.
MINISTRAL3_14B = {
    **MINISTRAL3_FIELDS,
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 16384,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e9,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "eos_token_id": 2,
    "pad_token_id": 11,
}
# The MTP layer of both Qwen3.6 models is left out, because the lab makes a synthetic draft instead.
QWEN3_6_27B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "mtp_num_hidden_layers": 0,
    "eos_token_id": 248046,
}
QWEN3_6_35B_A3B = {
    **QWEN3_6_27B,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
NEMOTRON3_SOURCE = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
NEMOTRON3_30B_A3B = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 262144,
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 2,
}
# These sizes are from Phi-4's config.json (14.7 billion parameters).
PHI_4 = {
    **PHI3_FIELDS,
    "vocab_size": 100352,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 250000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "pad_token_id": 100257,
}
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Shape("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 128000, 32000, _llama(4096, 14336, 32, 128, 8.0)),
            Shape("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 128000, 32000, _llama(8192, 28672, 80, 128, 8.0, 64)),
            Shape("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 128000, 32000, _llama(2048, 8192, 16, 64, 32.0)),
            Shape("qwen3-8b", "Qwen/Qwen3-8B", 151643, 32000, QWEN3_8B),
            Shape("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 151643, 32000, QWEN3_30B_A3B),
            Shape("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 100000, 32000, DEEPSEEK_V2_LITE),
            Shape("deepseek-v3-1gpu", "deepseek-ai/DeepSeek-V3", 128000, 32000, DEEPSEEK_V3_1GPU, first_emitted_id=3),
            Shape("deepseek-v3-cut", "deepseek-ai/DeepSeek-V3", 128000, 32000, DEEPSEEK_V3_CUT, first_emitted_id=3),
            Shape(
                "deepseek-v3.2-cut", "deepseek-ai/DeepSeek-V3.2", 128000, 32000, DEEPSEEK_V32_CUT, first_emitted_id=3
            ),
            Shape("gpt-oss-20b", "openai/gpt-oss-20b", 199998, 32000, GPT_OSS_20B),
            Shape("gemma-4-31b", "google/gemma-4-31B", 255999, 32000, GEMMA4_31B, first_emitted_id=256),
            Shape("gemma-4-26b-a4b", "google/gemma-4-26B-A4B", 255999, 32000, GEMMA4_26B_A4B, first_emitted_id=256),
            Shape("ministral3-14b", "mistralai/Ministral-3-14B-Instruct-2512", 131072, 32000, MINISTRAL3_14B, 1000),
            Shape("qwen3.6-27b", "Qwen/Qwen3.6-27B", 248044, 32000, QWEN3_6_27B),
            Shape("qwen3.6-35b-a3b", "Qwen/Qwen3.6-35B-A3B", 248044, 32000, QWEN3_6_35B_A3B),
            Shape("nemotron-30b-a3b", NEMOTRON3_SOURCE, 131072, 32000, NEMOTRON3_30B_A3B, 1000),
            Shape("phi-4", "microsoft/phi-4", 100256, 32000, PHI_4),
        )
    }
)


def find_shape(name: str) -> Shape:
    """Returns the entry of SHAPES with this name.  Raises EspalierError for an unknown name."""
    if name not in SHAPES:
        raise EspalierError(f"shape {name!r} is not known; use one of {', '.join(SHAPES)}")
    return SHAPES[name]
