"""Granite 3, dense and with experts: embeddings, blocks' outputs, scores and logits have factors."""

from dataclasses import replace

from espalier.kernels.ops.experts import Routing
from espalier.models.config import Experts, Family, Raw
from espalier.models.config_values import positive
from espalier.models.families.llama import FAMILY as LLAMA
from espalier.models.layer_declaration import MLPNames

FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
SHARED_MLP = MLPNames(gate_up=("input_linear",), down="output_linear")


def _experts(full: Raw) -> Experts | None:
    if full["num_local_experts"] == 0:
        return None
    return Experts(
        frozenset(range(int(full["num_hidden_layers"]))),
        Routing(full["num_local_experts"], full["num_experts_per_tok"], "topk_softmax"),
        full["intermediate_size"],
        shared_size=full.get("shared_intermediate_size") or 0,
        shared_name="shared_mlp",
        shared_under="",
        shared_names=SHARED_MLP,
        router_name="router.layer",
        stored="joined",
        under="block_sparse_moe.",
        joined_names=("input_linear.weight", "output_linear.weight"),
    )


FAMILY = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    defaults={**LLAMA.defaults, **dict.fromkeys(FACTORS, 1.0)},
    embedding_scale=lambda full: positive(full, "embedding_multiplier"),
    softmax_scale=lambda full: positive(full, "attention_multiplier"),
    residual_scale=lambda full: positive(full, "residual_multiplier"),
    logit_scale=lambda full: 1 / positive(full, "logits_scaling"),
    honours=FACTORS,
)
MOE = replace(
    FAMILY,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    defaults={**FAMILY.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    experts=_experts,
    honours=(*FACTORS, "num_local_experts"),
)
SHARED = replace(
    MOE,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    defaults={**MOE.defaults, "shared_intermediate_size": 0},
    honours=(*MOE.honours, "shared_intermediate_size"),
)
