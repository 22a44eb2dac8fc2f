"""The EAGLE-3 draft as a training module.  Its parameters have the names of SafeAILab's checkpoints.

A row pairs the feature at position p with the token at p + 1, and predicts the token at p + 2.  Its rotary position is
p.  Attention computes explicit scores, because the training-time test mixes the keys of several steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.train.llama import MLP, RMSNorm, rope_tables, rotate


@dataclass(frozen=True)
class DraftShape:
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048


class DraftAttention(nn.Module):
    """The projections from 2H.  The caller computes attention."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., T, 2H] -> q, k, v [..., heads, T, head_dim].  q and k are rotated; k and v are repeated for every
        query head."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = q.shape[-3] // k.shape[-3]
        k, v = rotate(k, cos, sin).repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
        return rotate(q, cos, sin), k, v


class DraftLayer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = DraftAttention(shape)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, shape.intermediate_size)

    def join(self, embeds: Tensor, feature: Tensor) -> Tensor:
        """The layer's input [..., 2H], of embeddings and features [..., H]."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(feature)), dim=-1)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [..., T, H].  attended: [..., heads, T, head_dim]; the residual is the feature before its
        norm."""
        x = feature + self.self_attn.o_proj(attended.transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Draft(nn.Module):
    """fc, one layer, norm and an lm_head over the draft vocabulary.  d2t and t2d are as in the checkpoint."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def set_vocabulary(self, target_ids: Tensor, head: Tensor) -> None:
        """target_ids: the target id of each draft id, ascending.  head: the target's lm_head [vocab, H_target], which
        initialises the draft's if the hidden sizes agree."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True
        if head.shape[1] == self.shape.hidden_size:
            self.lm_head.weight.data.copy_(head[target_ids])

    @property
    def target_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.shape.head_dim, self.shape.rope_theta)

    def logits(self, output: Tensor) -> Tensor:
        return self.lm_head(self.norm(output)).float()

    def unroll(self, embeds: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        """The training-time test (EAGLE-3, arXiv 2503.01840): every row starts a chain of `num_steps` rows.

        embeds: [B, R, H], row p's of the token at p + 1.  features: [B, R, 3 H_target].

        In the chain from row p, step j reads the token of row p + j.  Its feature is the output of step j - 1.  It
        attends to the step-0 rows up to p and to the rows of its chain, itself included.  Returns the outputs before
        `norm`; that of step j is [B, R - j, H].
        """
        feature, outputs = self.fc(features), []
        chain: list[tuple[Tensor, Tensor]] = []
        num_rows = embeds.shape[1]
        for step in range(min(num_steps, num_rows)):
            # The last `step` rows have no token.  They run on zeros, so that every step has the same shape.
            tokens = F.pad(embeds[:, step:], (0, 0, 0, step))
            cos, sin = self.rope(torch.arange(step, step + num_rows, device=embeds.device))
            q, k, v = self.midlayer.self_attn.project(self.midlayer.join(tokens, feature), cos, sin)
            chain.append((k, v))
            feature = self.midlayer.finish(feature, attend(q, chain))
            outputs.append(feature[:, : num_rows - step])
        return outputs


def attend(q: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Causal attention to the keys of step 0, and to the key with the query's index of each later step."""
    (k0, v0), later = chain[0], chain[1:]
    length = q.shape[-2]
    scale = q.shape[-1] ** -0.5
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ k0.mT).float().masked_fill(mask, float("-inf"))]
    scores += [(q * k).float().sum(-1, keepdim=True) for k, _ in later]
    weights = (torch.cat(scores, dim=-1) * scale).softmax(-1).to(v0.dtype)
    out = weights[..., :length] @ v0
    for index, (_, v) in enumerate(later):
        out = out + weights[..., length + index, None] * v
    return out


def training_loss(
    draft: Eagle3Draft, embeds: Tensor, features: Tensor, target_logits: Tensor, num_steps: int, decay: float
) -> tuple[Tensor, Tensor]:
    """(loss, top-1 agreement by depth [num_steps]).  target_logits: [B, R, vocab], of the token that each row predicts.

    The loss is soft cross-entropy with the target's distribution over the draft vocabulary.  Rows where the target's
    most likely token is not in that vocabulary are left out.
    """
    probabilities = target_logits[..., draft.target_ids].float().softmax(-1)
    picks = target_logits.argmax(-1)
    known = draft.t2d[picks]
    losses, agreements = [], []
    for step, output in enumerate(draft.unroll(embeds, features, num_steps)):
        logits = draft.logits(output)
        loss = F.cross_entropy(logits.flatten(0, 1), probabilities[:, step:].flatten(0, 1), reduction="none")
        mask = known[:, step:].flatten()
        losses.append(decay**step * (loss * mask).sum() / mask.sum().clamp(min=1))
        agreements.append((draft.target_ids[logits.argmax(-1)] == picks[:, step:]).float().mean())
    return torch.stack(losses).sum(), torch.stack(agreements).detach()
