"""MiMo-7B: Qwen2, with multi-token prediction layers that put the hidden state before the embedding."""

from dataclasses import replace

from espalier.models.families.qwen2 import FAMILY as QWEN2
from espalier.models.mtp_family import SPECULATORS

FAMILY = replace(
    QWEN2,
    architecture="MiMoForCausalLM",
    model_type="mimo",
    honours=("num_nextn_predict_layers",),
    mtp=replace(SPECULATORS, prefix="model.mtp_layers.{}.", hidden_first=True),
)
