"""Granite 3 and 4, dense and with experts: embeddings, blocks' outputs, scores and logits have factors.

Granite 4 is `granitemoehybrid`.  Its models without experts have the shared expert as their MLP.  Configs with
recurrent layers are refused.
"""

from dataclasses import replace

from espalier.errors import EspalierError, shown
from espalier.kernels.ops.experts import Routing
from espalier.models.config import Experts, Family, Raw, Windows, full_attention
from espalier.models.config_values import positive
from espalier.models.families.llama import FAMILY as LLAMA
from espalier.models.layer_declaration import LayerNames, MLPNames

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


def _attention_in_every_layer(full: Raw) -> Windows:
    """Raises EspalierError for a config without layer_types: all of its layers would keep recurrent state."""
    if full.get("layer_types") is None:
        raise EspalierError("layer_types is missing, so all layers keep recurrent state, which is not supported")
    return full_attention(full)


def _ropes(full: Raw) -> list[Raw | None]:
    """Every layer has the config's RoPE, or none has one."""
    kind = full["position_embedding_type"]
    if kind not in (None, "rope", "nope"):
        raise EspalierError(f"position_embedding_type = {shown(kind)}; 'rope', 'nope' or null is needed; correct it")
    return [{} if kind == "rope" else None] * full["num_hidden_layers"]


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
HYBRID = replace(
    SHARED,
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    defaults={**MOE.defaults, "shared_intermediate_size": 1024, "position_embedding_type": None},
    windows=_attention_in_every_layer,
    ropes=_ropes,
    names=LayerNames(under_mlp="shared_mlp.", mlp=SHARED_MLP),
    mlp_size_field="shared_intermediate_size",
    honours=(*SHARED.honours, "position_embedding_type"),
)
