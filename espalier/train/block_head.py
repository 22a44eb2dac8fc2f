"""A block draft as a training module: DSpark's form, whose root row proposes depth 1.

Its parameters have the names of the file (espalier/train/block.py).  A block is a root, token a of a text, and S - 1
mask tokens, at positions a .. a+S-1.  In every layer its rows attend to context rows of the tokens before a, and to the
whole block.  Row j proposes token a + j + 1.  Context rows are norm(fc(features)), through each layer's K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.train.draft_attention import DraftAttention
from espalier.train.llama import MLP, RMSNorm, rope_tables, rotate


@dataclass(frozen=True)
class BlockShape:
    """block_size: S; num_features: target layers that are read; edge_rank: 0 for no edges."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    num_features: int
    edge_rank: int
    mask_token_id: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048


class BlockAttention(DraftAttention):
    def __init__(self, shape: BlockShape) -> None:
        heads = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        super().__init__(shape.hidden_size, shape.hidden_size, *heads)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def heads(self, x: Tensor, proj: nn.Linear) -> Tensor:
        """x [..., T, H] -> [..., heads, T, head_dim]."""
        return proj(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)

    def keys(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K and V of rows x [..., T, H]."""
        return rotate(self.k_norm(self.heads(x, self.k_proj)), *tables), self.heads(x, self.v_proj)

    def queries(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self.q_norm(self.heads(x, self.q_proj)), *tables)


class BlockLayer(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, shape.intermediate_size)

    def forward(
        self, x: Tensor, context: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor, theta: float
    ) -> Tensor:
        """x [B, Q, H], of blocks; context [B, T, H]; positions: of block and context rows; mask: bool [Q, T + Q]."""
        attention = self.self_attn
        own, before = (rope_tables(at, attention.head_dim, theta) for at in positions)
        normed = self.input_layernorm(x)
        pairs = zip(attention.keys(context, before), attention.keys(normed, own), strict=True)
        k, v = (torch.cat(pair, -2) for pair in pairs)
        q = attention.queries(normed, own)
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
        x = x + attention.output(F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=mask))
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Edges: logits of a token given the one before."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(tokens))


class BlockHead(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(shape.num_features * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.markov_head = MarkovHead(shape.vocab_size, shape.edge_rank) if shape.edge_rank else None
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, roots: Tensor, mask_embed: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """[B, A, S, H], the inputs of the lm_head for A blocks.

        roots: [B, A, H], embeddings of tokens `anchors` [A]; mask_embed: [H]; features: [B, T, F], of tokens 0 .. T-1.
        """
        size, num_blocks = self.shape.block_size, len(anchors)
        masks = mask_embed.expand(*roots.shape[:2], size - 1, -1)
        x = torch.cat((roots[:, :, None], masks), 2).flatten(1, 2)
        context = self.hidden_norm(self.fc(features))
        at = torch.arange(features.shape[1], device=x.device)
        slots = torch.arange(size, device=x.device)
        block = torch.arange(num_blocks, device=x.device).repeat_interleave(size)
        seen = torch.cat((at < anchors[block][:, None], block[:, None] == block), 1)
        positions = ((anchors[:, None] + slots).flatten(), at)
        for layer in self.layers:
            x = layer(x, context, positions, seen, self.shape.rope_theta)
        return self.norm(x).unflatten(1, (num_blocks, size))


def block_loss(
    head: BlockHead,
    lm_head: Tensor,
    embeds: tuple[Tensor, Tensor],
    tokens: Tensor,
    features: Tensor,
    target_logits: Tensor,
    anchors: Tensor,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """(loss, top-1 agreement by depth [S]): soft cross-entropy with the target's distribution behind the text, in nats.

    lm_head: the target's [V, H]; embeds: of tokens, and the mask's; tokens: [B, R], of positions 1 .. R; features:
    [B, R, F], of positions 0 .. R-1; target_logits: [B, R, V], at positions 1 .. R; anchors: [A], from 1 to R - S + 1.
    With edges, the token before is the text's.
    """
    outputs = head(embeds[0][:, anchors - 1], embeds[1], features, anchors)
    losses, agreements = [], []
    for depth in range(head.shape.block_size):
        # The token before is at anchor + depth; what the target says there is what the row learns.
        at = anchors + depth - 1
        logits = F.linear(outputs[:, :, depth], lm_head.to(outputs.dtype)).float()
        if head.markov_head is not None:
            logits = logits + head.markov_head(tokens[:, at]).float()
        wanted = target_logits[:, at].float()
        losses.append(decay**depth * F.cross_entropy(logits.flatten(0, 1), wanted.softmax(-1).flatten(0, 1)))
        agreements.append((logits.argmax(-1) == wanted.argmax(-1)).float().mean())
    return torch.stack(losses).sum(), torch.stack(agreements).detach()
