"""A block draft as a training module in DSpark's format, in which the root's row proposes the token at depth 1.

The module's parameters have the same names as in the saved file (espalier/train/block.py).  A block of size S at
position a has the root (token a) and S - 1 mask tokens, at positions a .. a+S-1.  Row j of the block proposes token
a + j + 1.  In every layer, the block's rows attend to the whole block and to a context row for each token before a.
Each layer projects the K and V of a context row from norm(fc(the target's feature of the token)).

A Markov head adds logits that depend on the preceding tokens (espalier/kernels/tree/edges.py).  In training, the text
is known, so `MarkovHead.factors` computes the factors of all depths at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.kernels.tree.edges import FactorProjection, LowRankEdges, split_projection_columns
from espalier.train.draft_attention import DraftAttention
from espalier.train.llama import MLP, LlamaShape, RMSNorm, rope_tables, rotate
from espalier.train.settings import EdgeKind


@dataclass(frozen=True, kw_only=True)
class BlockShape(LlamaShape):
    """The sizes of a block draft.

    num_features: the number of target layers whose inputs the draft reads.  edge_rank: the rank of the Markov head
    (MarkovHead); 0 if the draft has no Markov head."""

    block_size: int
    num_features: int
    edge_rank: int
    mask_token_id: int
    edge_kind: EdgeKind = "vanilla"


class BlockAttention(DraftAttention):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__(shape.hidden_size, *shape.attention)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def project_heads(self, x: Tensor, proj: nn.Linear) -> Tensor:
        """Projects x [..., T, H] to heads [..., heads, T, head_dim]."""
        return proj(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)

    def keys_and_values(self, x: Tensor, rope_tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns K and V of rows x [..., T, H].  K is rotated by the RoPE tables."""
        return rotate(self.k_norm(self.project_heads(x, self.k_proj)), *rope_tables), self.project_heads(x, self.v_proj)

    def queries(self, x: Tensor, rope_tables: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the rotated queries of x [..., T, H].  rope_tables: (cos, sin)."""
        return rotate(self.q_norm(self.project_heads(x, self.q_proj)), *rope_tables)


class BlockDraftLayer(nn.Module):
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
        """Returns the layer's output for x [B, Q, H], the rows of all blocks.  context: the context rows [B, T, H].
        positions: (of x, of context).  mask: bool [Q, T + Q], True where a row attends.  theta: the base of RoPE."""
        attention = self.self_attn
        x_rope, c_rope = (rope_tables(p, attention.head_dim, theta) for p in positions)
        normed = self.input_layernorm(x)
        pairs = zip(attention.keys_and_values(context, c_rope), attention.keys_and_values(normed, x_rope), strict=True)
        k, v = (torch.cat(pair, -2) for pair in pairs)
        q = attention.queries(normed, x_rope)
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
        x = x + attention.project_output(F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=mask))
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """DSpark's Markov head.  It computes edges: logits of a token that depend on the preceding tokens, as a product of
    factors [rank] and markov_w2.  edge_kind: what the factors depend on.  "vanilla": the preceding token.  "gated":
    that token and the block's hidden state.  "rnn": the hidden state and all preceding tokens of the block."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.edge_kind, rank, size = shape.edge_kind, shape.edge_rank, shape.hidden_size
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.vocab_size, bias=False)
        if self.edge_kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.edge_kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, factors: Tensor) -> Tensor:
        """Returns the logits that the head adds.  factors: [..., rank]."""
        return self.markov_w2(factors)

    def factors(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Returns the factors [..., S, rank] of blocks in a text.  tokens: [..., S], the token before each depth.
        hidden: [..., S, H], the inputs of the lm_head."""
        embedded, projection = self.markov_w1(tokens), self.projection(hidden)
        if projection is None:
            return embedded
        if not projection.is_recurrent:
            return torch.sigmoid(projection.hidden_part + F.linear(embedded, projection.weight)) * embedded
        state_weight, token_weight = projection.weight.chunk(2, 1)
        # Only the state depends on the preceding depth, so all other terms are computed first.
        without_state = projection.hidden_part + F.linear(embedded, token_weight)
        state, factors = torch.zeros_like(embedded[..., 0, :]), []
        for terms in without_state.unbind(-2):
            gate, candidate, output = (terms + F.linear(state, state_weight)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            factors.append(torch.tanh(output))
        return torch.stack(factors, -2)

    def projection(self, hidden: Tensor) -> FactorProjection | None:
        """Returns the part of the factors that depends on hidden states; None for "vanilla", which has no such part.
        hidden: [..., S, H], the inputs of the lm_head."""
        if self.edge_kind == "vanilla":
            return None
        is_recurrent = self.edge_kind == "rnn"
        linear = self.joint_proj if is_recurrent else self.gate_proj
        hidden_part, row_weight = split_projection_columns(linear.weight, hidden.shape[-1], is_recurrent)
        return FactorProjection(F.linear(hidden, hidden_part, linear.bias), row_weight, is_recurrent)

    def edges(self, logits: Tensor, hidden: Tensor) -> LowRankEdges:
        """Returns the edges of blocks in the engine's form.  hidden: [B, S, H], the inputs of the lm_head.  logits:
        [B, S, V], the outputs of the lm_head."""
        return LowRankEdges(logits, self.markov_w1.weight, self.markov_w2.weight, projection=self.projection(hidden))


class BlockHead(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(shape.num_features * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockDraftLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.markov_head = MarkovHead(shape) if shape.edge_rank else None
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, roots: Tensor, mask_embed: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Returns [B, A, S, H], the inputs of the lm_head for A blocks.
        anchors: [A], the positions of the blocks' roots.  roots: [B, A, H], the embeddings of the roots.
        mask_embed: [H], the embedding of the mask token.  features: [B, T, num_features · H], the concatenated hidden
        states of several target layers for tokens 0 .. T-1."""
        size, num_blocks = self.shape.block_size, len(anchors)
        masks = mask_embed.expand(*roots.shape[:2], size - 1, -1)
        x = torch.cat((roots[:, :, None], masks), 2).flatten(1, 2)
        context = self.hidden_norm(self.fc(features))
        context_positions = torch.arange(features.shape[1], device=x.device)
        slots = torch.arange(size, device=x.device)
        block = torch.arange(num_blocks, device=x.device).repeat_interleave(size)
        mask = torch.cat((context_positions < anchors[block][:, None], block[:, None] == block), 1)
        positions = ((anchors[:, None] + slots).flatten(), context_positions)
        for layer in self.layers:
            x = layer(x, context, positions, mask, self.shape.rope_theta)
        return self.norm(x).unflatten(1, (num_blocks, size))


def block_loss(
    head: BlockHead,
    lm_head: Tensor,
    embeds: tuple[Tensor, Tensor],
    tokens: Tensor,
    features: Tensor,
    target_logits: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """Returns (loss, top-1 agreement by depth [S]).  The loss is the cross-entropy with the target's distribution.

    lm_head: [V, H], the target's lm_head.  embeds: the embeddings of the tokens and of the mask token.  tokens: [B, R],
    at positions 1 .. R.  features: [B, R, F], at positions 0 .. R-1.  target_logits: [B, R, V], at positions 1 .. R.
    loss_mask: bool [B, R], the positions that count in the loss.  anchors: [A], from 1 to R - S + 1.
    decay: the weight of a depth, relative to the preceding depth.  The Markov head uses teacher forcing."""
    outputs = head(embeds[0][:, anchors - 1], embeds[1], features, anchors)
    # Depth d follows the token at position anchor + d, which has index anchor + d - 1 in tokens and target_logits.
    token_indices = anchors[:, None] + torch.arange(head.shape.block_size, device=anchors.device) - 1
    factors = None if head.markov_head is None else head.markov_head.factors(tokens[:, token_indices], outputs)
    losses, agreements = [], []
    for depth, index in enumerate(token_indices.unbind(1)):
        logits = F.linear(outputs[:, :, depth], lm_head.to(outputs.dtype)).float()
        if head.markov_head is not None and factors is not None:
            logits = logits + head.markov_head(factors[:, :, depth]).float()
        depth_logits, counts = target_logits[:, index].float(), loss_mask[:, index]
        loss = F.cross_entropy(logits.flatten(0, 1), depth_logits.softmax(-1).flatten(0, 1), reduction="none")
        num_counted = counts.sum().clamp(min=1)
        losses.append(decay**depth * (loss * counts.flatten()).sum() / num_counted)
        agreements.append(((logits.argmax(-1) == depth_logits.argmax(-1)) & counts).sum() / num_counted)
    return torch.stack(losses).sum(), torch.stack(agreements).detach()
