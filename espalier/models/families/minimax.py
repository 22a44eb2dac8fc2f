"""MiniMax-M2: experts in every layer, chosen by sigmoid with a correction bias.  Norms of q and k run over all heads.

Experts have the names of Mixtral's experts.  RoPE rotates a part of each head.
"""

from espalier.errors import EspalierError, shown
from espalier.kernels.ops.experts import Routing
from espalier.models.config import Experts, Family, Json
from espalier.models.config_values import positive_integer
from espalier.models.stored_names import MLPNames

DEFAULT_HEAD_SIZE = 128


def _normalise_fields(config_json: Json) -> Json:
    """Returns the fields with `partial_rotary_factor`; published configs have `rotary_dim` instead."""
    if config_json.get("rotary_dim") is None:
        return config_json
    fields = {"head_dim": DEFAULT_HEAD_SIZE, **config_json}
    share = positive_integer(fields, "rotary_dim") / positive_integer(fields, "head_dim")
    return {"partial_rotary_factor": share, **{name: config_json[name] for name in config_json if name != "rotary_dim"}}


def _experts(config_fields: Json) -> Experts:
    scoring = config_fields.get("scoring_func")
    if scoring not in (None, "sigmoid"):
        raise EspalierError(f"scoring_func = {shown(scoring)} is not supported, only 'sigmoid'; use another model")
    return Experts(
        frozenset(range(int(config_fields["num_hidden_layers"]))),
        Routing(
            config_fields["num_local_experts"],
            config_fields["num_experts_per_tok"],
            "sigmoid",
            norm_topk_prob=True,
            correction_bias=True,
        ),
        config_fields["intermediate_size"],
        prefix="block_sparse_moe.",
        names=MLPNames(("w1", "w3"), "w2"),
        correction_name="e_score_correction_bias",
    )


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": DEFAULT_HEAD_SIZE,
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5e6,
    },
    qkv_bias=lambda fields: False,
    out_bias=lambda fields: False,
    qk_norm=True,
    qk_norm_over_all_heads=True,
    experts=_experts,
    normalise_fields=_normalise_fields,
    supported_fields=("num_local_experts", "partial_rotary_factor", "scoring_func"),
)
