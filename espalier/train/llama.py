"""The modules of a Llama layer that all trained drafts use.  Parameters have Hugging Face's names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The fields of a config.json that give the sizes of Llama's layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def attention(self) -> tuple[int, int, int, int]:
        """The arguments of DraftAttention after `input_size`."""
        return self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, [..., head_dim] each, float32, for Hugging Face's rotate_half.  positions: [...]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the rotated x [..., head_dim].  cos, sin: from rope_tables."""
    left, right = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns the norm of x [..., H], computed in float32, in x's dtype."""
        x32 = x.float()
        return (self.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the MLP's output [..., H] for x [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
