"""An MTP head of N layers as a training module.  Parameters have the same names as in the saved file
(mtp_checkpoint.py).

Layer k (DeepSeek-V3, arXiv 2412.19437, section 2.2) is a decoder layer over one projection of two inputs:

    x[p]   = input_proj(concat(token_layernorm(embedding of token p + k), hidden_layernorm(h[p])))
    out[p] = final_layernorm(decoder layer k (x)[p])

The target's lm_head reads out[p] and predicts token p + k + 1.  Row p attends to rows 0 .. p of its layer.  In layer 1,
h[p] is the target's hidden state at p, after the final norm.  In other layers, h[p] is out[p] of layer k - 1 in the
form "chain", and the target's hidden state in the form "target".  In both forms, depths beyond N run layer N again on
its own output.

A row that reads token q has the rotary position q - 1.  Layers do not attend to rows of other layers, so any other
constant offset gives the same scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.train.depth_loss import depth_loss
from espalier.train.draft_attention import DraftAttention, attend
from espalier.train.llama import MLP, LlamaShape, RMSNorm, rope_tables
from espalier.train.settings import HiddenForm


class MtpLayer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.token_layernorm = RMSNorm(size, eps)
        self.hidden_layernorm = RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = DraftAttention(size, *shape.attention)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, shape.intermediate_size)
        self.final_layernorm = RMSNorm(size, eps)

    def join(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Returns the decoder layer's input for embeddings and hidden states, [..., H] each."""
        return self.input_proj(torch.cat((self.token_layernorm(embeds), self.hidden_layernorm(hidden)), dim=-1))

    def finish_layer(self, x: Tensor, attended: Tensor) -> Tensor:
        """Returns the output after final_layernorm, [..., T, H].  x: see join.  attended: [..., heads, T, head_dim]."""
        x = x + self.self_attn.project_output(attended)
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))


class MtpHead(nn.Module):
    """An MTP head.  shape: the sizes of its layers; num_hidden_layers: the number of MTP layers.
    hidden_form: what a later layer reads: "chain", the layer before it; "target", the target's hidden state."""

    def __init__(self, shape: LlamaShape, hidden_form: HiddenForm) -> None:
        super().__init__()
        self.shape = shape
        self.form = hidden_form
        self.mtp_layers = nn.ModuleList(MtpLayer(shape) for _ in range(shape.num_hidden_layers))
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].input_proj.weight.dtype

    @property
    def layers(self) -> list[MtpLayer]:
        return [layer for layer in self.mtp_layers if isinstance(layer, MtpLayer)]

    def unroll(self, embeds: Tensor, hidden: Tensor, num_depths: int) -> list[Tensor]:
        """Returns the outputs of all depths, [B, R - j, H] for depth 1 + j.

        embeds: [B, R, H]; row p has the embedding of token p + 1.  hidden: [B, R, H], the target's hidden state at p.
        """
        hidden_inputs, outputs = hidden, []
        chain: list[tuple[Tensor, Tensor]] = []
        num_rows, num_layers = embeds.shape[1], len(self.layers)
        for skipped in range(min(num_depths, num_rows)):
            layer = self.layers[min(skipped, num_layers - 1)]
            # The last `skipped` rows would read tokens after the text.  They get zeros, so that depths have one shape.
            x = layer.join(F.pad(embeds[:, skipped:], (0, 0, 0, skipped)), hidden_inputs)
            positions = torch.arange(skipped, skipped + num_rows, device=embeds.device)
            tables = rope_tables(positions, self.shape.head_dim, self.shape.rope_theta)
            q, k, v = layer.self_attn.project_qkv(layer.input_layernorm(x), *tables)
            chain = [*chain, (k, v)] if skipped >= num_layers else [(k, v)]
            output = layer.finish_layer(x, attend(q, chain))
            outputs.append(output[:, : num_rows - skipped])
            hidden_inputs = hidden if self.form == "target" and skipped + 1 < num_layers else output
        return outputs


def mtp_loss(
    head: MtpHead,
    lm_head: Tensor,
    embeds: Tensor,
    hidden: Tensor,
    target_logits: Tensor,
    loss_mask: Tensor,
    num_depths: int,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """Returns (loss, top-1 agreement by depth [num_depths]).  The loss is the cross-entropy with the target's
    distribution.

    lm_head: [V, H], the target's lm_head.  target_logits: [B, R, V]; row p predicts token p + 2.  embeds, hidden: see
    MtpHead.unroll.  loss_mask, decay: see depth_loss."""
    logits = (F.linear(output, lm_head).float() for output in head.unroll(embeds, hidden, num_depths))
    return depth_loss(logits, target_logits, target_logits.argmax(-1), loss_mask, decay)
