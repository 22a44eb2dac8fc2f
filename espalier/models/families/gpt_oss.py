"""GPT-OSS (20b, 120b): attention sinks, a window in every second layer, YaRN, and experts with biases."""

from espalier.kernels.ops.activation import Activation
from espalier.kernels.ops.experts import Routing
from espalier.models.config import Experts, Family, Json, windows_in_even_layers
from espalier.models.config_values import positive_number


def _experts(config_fields: Json) -> Experts:
    return Experts(
        frozenset(range(int(config_fields["num_hidden_layers"]))),
        Routing(
            config_fields["num_local_experts"], config_fields["num_experts_per_tok"], "topk_softmax", logit_bias=True
        ),
        config_fields["intermediate_size"],
        router_name="router",
        storage="stacked",
        has_biases=True,
        activation=Activation(
            positive_number(config_fields, "swiglu_alpha"),
            up_offset=1.0,
            limit=positive_number(config_fields, "swiglu_limit"),
        ),
    )


FAMILY = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    windows=windows_in_even_layers,
    has_sinks=True,
    usable_in_drafts=True,
    experts=_experts,
    supported_fields=("num_experts", "num_local_experts", "swiglu_alpha", "swiglu_limit"),
)
