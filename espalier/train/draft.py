"""The EAGLE-3 draft as a training module.  Parameters have the same names as in SafeAILab's checkpoints.

Row p of the draft combines the target's feature at position p with the token at p + 1, and predicts the token at p + 2.
Its RoPE position is p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.train.depth_loss import depth_loss
from espalier.train.draft_attention import DraftAttention, attend
from espalier.train.llama import MLP, LlamaShape, RMSNorm, rope_tables


@dataclass(frozen=True, kw_only=True)
class DraftShape(LlamaShape):
    draft_vocab_size: int
    target_hidden_size: int
    num_hidden_layers: int = 1


class DraftLayer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = DraftAttention(2 * size, *shape.attention)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, shape.intermediate_size)

    def join(self, embeds: Tensor, feature: Tensor) -> Tensor:
        """Concatenates the norms of embeddings and features, [..., H] each, to the layer's input [..., 2H]."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(feature)), dim=-1)

    def finish_layer(self, feature: Tensor, attended: Tensor) -> Tensor:
        """Returns the layer's output [..., T, H].
        feature: the layer's residual input, before hidden_norm.  attended: [..., heads, T, head_dim]."""
        x = feature + self.self_attn.project_output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Draft(nn.Module):
    """The EAGLE-3 draft: fc, one layer, a norm, and an lm_head over the draft vocabulary.  d2t: for each draft id, the
    target's id minus the draft id.  t2d: for each target id, whether the draft vocabulary has it."""

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

    def set_vocabulary(self, target_ids: Tensor, lm_head: Tensor) -> None:
        """Sets the draft vocabulary.  target_ids: the target id of each draft id, ascending.  lm_head: the target's
        lm_head [vocab, H_target], which initialises the draft's lm_head if the hidden sizes are equal."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True
        if lm_head.shape[1] == self.shape.hidden_size:
            self.lm_head.weight.data.copy_(lm_head[target_ids])

    @property
    def target_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin) of the rotation at these positions, [..., head_dim] each."""
        return rope_tables(positions, self.shape.head_dim, self.shape.rope_theta)

    def logits(self, output: Tensor) -> Tensor:
        """Returns logits over the draft vocabulary, float32.  output: of the layer, [..., H]."""
        return self.lm_head(self.norm(output)).float()

    def unroll(self, embeds: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        """Runs EAGLE-3's training-time test (arXiv 2503.01840), in which every row starts a chain of `num_steps` rows.

        embeds: [B, R, H]; row p has the embedding of token p + 1.  features: [B, R, 3 H_target].

        In the chain from row p, step 0 is row p itself.  Step j reads the token of row p + j and the output of step
        j - 1, and attends to step 0 of the rows up to p, and to the steps 1 .. j of its own chain.  Returns the outputs
        before `norm`, [B, R - j, H] for step j."""
        feature, outputs = self.fc(features), []
        chain: list[tuple[Tensor, Tensor]] = []
        num_rows = embeds.shape[1]
        for step in range(min(num_steps, num_rows)):
            # The last `step` rows would read tokens after the text.  They get zeros, so that all steps have one shape.
            tokens = F.pad(embeds[:, step:], (0, 0, 0, step))
            cos, sin = self.rope(torch.arange(step, step + num_rows, device=embeds.device))
            q, k, v = self.midlayer.self_attn.project_qkv(self.midlayer.join(tokens, feature), cos, sin)
            chain.append((k, v))
            feature = self.midlayer.finish_layer(feature, attend(q, chain))
            outputs.append(feature[:, : num_rows - step])
        return outputs


def training_loss(
    draft: Eagle3Draft,
    embeds: Tensor,
    features: Tensor,
    target_logits: Tensor,
    loss_mask: Tensor,
    num_steps: int,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """Returns (loss, top-1 agreement by depth [num_steps]).

    The loss is the cross-entropy with the target's distribution over the draft vocabulary.  Rows do not count if the
    target's likeliest token is not in that vocabulary.
    embeds, features: see unroll.  target_logits: [B, R, vocab], of next tokens.  loss_mask, decay: see depth_loss."""
    picks = target_logits.argmax(-1)
    choices = torch.where(draft.t2d[picks], draft.t2d.cumsum(0)[picks] - 1, -1)
    logits = (draft.logits(output) for output in draft.unroll(embeds, features, num_steps))
    return depth_loss(logits, target_logits[..., draft.target_ids], choices, loss_mask, decay)
