"""Mixtral: Mistral's attention, and experts in every layer."""

from dataclasses import replace

from espalier.kernels.ops.experts import Routing
from espalier.models.config import Experts, Raw
from espalier.models.families.mistral import FAMILY as MISTRAL
from espalier.models.layer_declaration import MLPNames


def _experts(full: Raw) -> Experts:
    return Experts(
        frozenset(range(int(full["num_hidden_layers"]))),
        Routing(full["num_local_experts"], full["num_experts_per_tok"], norm_topk_prob=True),
        full["intermediate_size"],
        under="block_sparse_moe.",
        names=MLPNames(("w1", "w3"), "w2"),
    )


FAMILY = replace(
    MISTRAL,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    defaults={
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    experts=_experts,
    honours=("num_local_experts",),
    in_drafts=False,
    multimodal=(),
)
