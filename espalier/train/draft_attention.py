"""A draft's attention during the training-time test (EAGLE-3, arXiv 2503.01840).

In this test, a layer runs in several steps.  From the second step on, it reads its own output.  In the first step,
attention is causal.  In a later step, a row also attends to its own keys of all steps after the first (its
chain), so this module computes the attention scores itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.train.llama import rotate


class DraftAttention(nn.Module):
    """The projections of an attention layer.  The caller computes the attention."""

    def __init__(self, input_size: int, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def project_qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects x [..., T, input_size] to q, k and v, [..., heads, T, head_dim] each.
        q and k are rotated.  k and v are repeated, so that each query head has its own k and v."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = q.shape[-3] // k.shape[-3]
        k, v = rotate(k, cos, sin).repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
        return rotate(q, cos, sin), k, v

    def project_output(self, attended: Tensor) -> Tensor:
        """Projects the attention's output [..., heads, T, head_dim] to [..., T, hidden_size]."""
        return self.o_proj(attended.transpose(-3, -2).flatten(-2))


def attend(q: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the output of attention in the last step of `chain`, which has (keys, values) of each step so far.  Row p
    attends to the rows 0 .. p of step 0, and to row p of each later step.  q, keys, values: [..., heads, T, size]."""
    (k0, v0), later_steps = chain[0], chain[1:]
    if not later_steps:
        return F.scaled_dot_product_attention(q, k0, v0, is_causal=True)
    length = q.shape[-2]
    scale = q.shape[-1] ** -0.5
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ k0.mT).float().masked_fill(mask, float("-inf"))]
    scores += [(q * k).float().sum(-1, keepdim=True) for k, _ in later_steps]
    weights = (torch.cat(scores, dim=-1) * scale).softmax(-1).to(v0.dtype)
    out = weights[..., :length] @ v0
    for index, (_, v) in enumerate(later_steps):
        out = out + weights[..., length + index, None] * v
    return out
