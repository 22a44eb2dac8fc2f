"""Transformers as the oracle, made to compute in float64 where it casts to float32 on its own."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.gemma2 import modeling_gemma2


def load_reference(path: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it.  In float64 its norms and rotary tables are computed in float64 too."""
    # Eager: transformers' grouped product does not take float64, and its call of SDPA neither sinks nor soft-caps.
    is_eager = json.loads((path / "config.json").read_text())["model_type"] in ("gpt_oss", "gemma2")
    how = {"attn_implementation": "eager" if is_eager else "sdpa", "experts_implementation": "eager"}
    # Transformers keeps some routers' weights in float32, whatever the dtype.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **how).to(dtype).eval()
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _norm_float64.__get__(module)
            elif type(module).__name__.endswith("RotaryEmbedding"):
                module.forward = ROTARY.get(type(module).__name__, _rotary_float64).__get__(module)
            elif type(module).__name__.endswith("MoeTopKRouter"):
                module.forward = _router_float64.__get__(module)
            elif type(module).__name__ == "Gemma4TextRouter":
                module.forward = _gemma4_router_float64.__get__(module)
            elif type(module).__name__.endswith("TopkRouter"):
                module.forward = _topk_router_float64.__get__(module)
    return model


def _norm_float64(self: Any, x: Tensor) -> Tensor:
    eps = getattr(self, "variance_epsilon", None) or self.eps
    if not getattr(self, "with_scale", True):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weight = 1 + self.weight if type(self).__name__ in ("Gemma2RMSNorm", "Gemma3RMSNorm") else self.weight
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _rotary_float64(self: Any, x: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * self.inv_freq.double()
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def _rotary_complex128(self: Any, x: Tensor, position_ids: Tensor, **_: Any) -> Tensor:
    angles = position_ids[..., None].double() * self.inv_freq.double()
    return torch.polar(torch.ones_like(angles), angles) * self.attention_scaling


def _rotary_half_float64(self: Any, x: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * self.inv_freq.double()
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def _rotary_by_type_float64(self: Any, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * getattr(self, f"{layer_type}_inv_freq").double()
    angles, factor = torch.cat((angles, angles), dim=-1), getattr(self, f"{layer_type}_attention_scaling")
    return angles.cos() * factor, angles.sin() * factor


# Others than `_rotary_float64`.
ROTARY = {
    "DeepseekV2RotaryEmbedding": _rotary_complex128,
    "Gemma3RotaryEmbedding": _rotary_by_type_float64,
    "Gemma4TextRotaryEmbedding": _rotary_by_type_float64,
    "Gemma4UnifiedTextRotaryEmbedding": _rotary_by_type_float64,
    "GptOssRotaryEmbedding": _rotary_half_float64,
}


def _rotate_in_own_type(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2's rotation of q and k [B, heads, Q, size], without its cast to float32."""

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * angles[:, None]).flatten(3).to(x.dtype)

    return rotated(q), rotated(k)


modeling_deepseek_v2.apply_rotary_emb = _rotate_in_own_type


def _capped_in_own_type(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, softcap: float | None, **_: Any
) -> tuple[Tensor, None]:
    """Gemma 2's attention of q, k, v [B, heads, Q, size], without its cast to float32."""
    k, v = (rows.repeat_interleave(module.num_key_value_groups, 1) for rows in (k, v))
    logits = q @ k.transpose(2, 3) * scaling
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    return ((logits + mask).softmax(-1) @ v).transpose(1, 2), None


modeling_gemma2.eager_attention_forward = _capped_in_own_type


def _router_float64(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Qwen's router."""
    logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
    weights, ids = logits.softmax(-1).topk(self.top_k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights, ids


def _topk_router_float64(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router of DeepSeek and of those that have taken it over."""
    logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
    groups = (self.num_group or 1, -1)
    is_v2 = isinstance(self, modeling_deepseek_v2.DeepseekV2TopkRouter)
    scores = logits.softmax(-1) if is_v2 else logits.sigmoid()
    choosing = (scores if is_v2 else scores + self.e_score_correction_bias).unflatten(-1, groups)
    if not is_v2 or self.topk_method == "group_limited_greedy":
        group_scores = choosing.amax(-1) if is_v2 else choosing.topk(2).values.sum(-1)
        others = group_scores.argsort(-1)[:, : groups[0] - self.topk_group]
        choosing = choosing.scatter(1, others[:, :, None].expand(-1, -1, choosing.shape[-1]), -torch.inf)
    ids = choosing.flatten(1).topk(self.top_k).indices
    weights = scores.gather(1, ids)
    if not is_v2 and self.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * self.routed_scaling_factor, ids


def _gemma4_router_float64(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    probabilities = self.proj(self.norm(x) * self.scale * self.scalar_root_size).softmax(-1)
    weights, ids = probabilities.topk(self.config.top_k_experts)
    return probabilities, weights / weights.sum(-1, keepdim=True) * self.per_expert_scale[ids], ids


def reference_logits(model: nn.Module, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, Q, V] and what enters each layer, [B, Q, H] each."""
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True, use_cache=False)
    return out.logits, list(out.hidden_states)
