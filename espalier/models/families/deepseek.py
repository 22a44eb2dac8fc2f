"""DeepSeek-V2, V2-Lite, V3, V3.1 and R1: latent attention, and experts (routed and shared) after some dense layers.

In V2 the queries may be projected without a latent.  V2 weights experts by softmax, V3 by sigmoid with a correction
bias (DeepSeek-AI 2024, arXiv:2405.04434, section 2.2, and arXiv:2412.19437, section 2.1.2).
"""

from dataclasses import replace

from espalier.errors import EspalierError
from espalier.kernels.ops.experts import Routing
from espalier.models.config import Experts, Family, Json
from espalier.models.stored_names import NEXTN_LAYERS

# The fields of config.json that this file reads (Family.supported_fields).
EXPERT_FIELDS = (
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "scoring_func",
    "topk_method",
    "routed_scaling_factor",
)
# The scoring_func for each topk_method.
SCORING_OF_METHOD = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}


def routed_experts(config_fields: Json, topk_methods: tuple[str, ...], layers: frozenset[int]) -> Experts | None:
    """Returns the experts of `layers`; None if there are none.
    topk_methods: the values of topk_method that the family supports, the default first.  All these methods have the
    same scoring_func.
    Raises EspalierError for another topk_method or scoring_func."""
    if not config_fields["n_routed_experts"] or not layers:
        return None
    method = config_fields.get("topk_method") or topk_methods[0]
    scoring = SCORING_OF_METHOD[topk_methods[0]]
    for name, value, supported in (
        ("topk_method", method, topk_methods),
        ("scoring_func", config_fields.get("scoring_func") or scoring, (scoring,)),
    ):
        if value not in supported:
            values = " or ".join(map(repr, supported))
            raise EspalierError(f"{name} = {value!r} is not supported, only {values}; use another model")
    size, num_shared = config_fields["moe_intermediate_size"], config_fields["n_shared_experts"] or 0
    if not isinstance(num_shared, int):
        raise EspalierError(f"n_shared_experts = {num_shared!r}; an integer or null is needed; correct the config")
    return Experts(
        layers,
        _routing(config_fields, method),
        size,
        size * num_shared if isinstance(size, int) else 0,
        "shared_experts",
        shared_has_bias=bool(config_fields.get("mlp_bias", False)),
    )


def _routing(config_fields: Json, topk_method: str) -> Routing:
    """Returns the routing for this topk_method."""
    routing = Routing(
        config_fields["n_routed_experts"],
        config_fields["num_experts_per_tok"],
        norm_topk_prob=bool(config_fields["norm_topk_prob"]),
        routed_scaling_factor=config_fields["routed_scaling_factor"],
    )
    if topk_method == "greedy":
        return routing
    routing = replace(routing, n_group=config_fields["n_group"] or 1, topk_group=config_fields["topk_group"] or 1)
    if topk_method == "group_limited_greedy":
        return routing
    return replace(routing, scoring="sigmoid", group_score="top2_sum", correction_bias=True)


def expert_layers_after_dense(config_fields: Json) -> frozenset[int]:
    """Returns the indices of layers with experts: the multiples of moe_layer_freq that are at least
    first_k_dense_replace."""
    first, step = config_fields["first_k_dense_replace"] or 0, config_fields.get("moe_layer_freq") or 1
    for name, value in (("first_k_dense_replace", first), ("moe_layer_freq", step)):
        if not isinstance(value, int) or value < 0:
            raise EspalierError(f"{name} = {value!r}; an integer of at least 0 is needed; correct the config")
    return frozenset(layer for layer in range(first, int(config_fields["num_hidden_layers"])) if layer % step == 0)


def _experts_v2(config_fields: Json) -> Experts | None:
    # As in the publisher's code, routing weights are scaled only if they are not normalised to the sum 1.  Transformers
    # never normalises routing weights.  Published configs do not set norm_topk_prob.
    norm = config_fields["norm_topk_prob"] and config_fields["num_experts_per_tok"] != 1
    scale = 1.0 if norm else config_fields["routed_scaling_factor"]
    as_published = {**config_fields, "norm_topk_prob": norm, "routed_scaling_factor": scale}
    return routed_experts(as_published, ("greedy", "group_limited_greedy"), expert_layers_after_dense(config_fields))


V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "num_experts_per_tok": None,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
    },
    uses_mla=True,
    usable_in_drafts=True,
    supported_fields=EXPERT_FIELDS,
    experts=_experts_v2,
)
V3 = replace(
    V2,
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    defaults={
        **V2.defaults,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
    supported_fields=(*EXPERT_FIELDS, "num_nextn_predict_layers"),
    experts=lambda fields: routed_experts(fields, ("noaux_tc",), expert_layers_after_dense(fields)),
    mtp=NEXTN_LAYERS,
)
