"""Creates MTP heads for a frozen target, and computes their loss and their agreement with texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.train.checkpoint import layer_fields
from espalier.train.draft_run import LossFunction
from espalier.train.llama import LlamaShape
from espalier.train.mtp_head import MtpHead, mtp_loss
from espalier.train.settings import MtpConfig
from espalier.train.target import FrozenTarget


def new_head(target: FrozenTarget, config: MtpConfig) -> MtpHead:
    """Returns an untrained MTP head that fits the target."""
    torch.manual_seed(config.seed)
    sizes: dict[str, Any] = layer_fields(target.config, config.intermediate_size)
    head = MtpHead(LlamaShape(num_hidden_layers=config.layers, **sizes), config.form).to(target.device)
    for layer in head.layers:
        layer.final_layernorm.weight.data.copy_(target.final_norm)
    return head


def make_loss(
    head: MtpHead, target: FrozenTarget, config: MtpConfig, loss: Callable[..., tuple[Tensor, Tensor]] = mtp_loss
) -> LossFunction:
    """Returns a function for the loss of a batch.  loss: mtp_loss, or its compiled form."""
    return lambda embeds, hidden, logits, loss_mask: loss(
        head, target.lm_head, embeds, hidden, logits, loss_mask, config.ttt_steps, config.decay
    )


@torch.no_grad()
def matches_by_depth(head: MtpHead, target: FrozenTarget, tokens: Tensor, first_root: int, steps: int) -> Tensor:
    """Returns whether the head's likeliest token is the text's token: bool [steps, roots], for every depth and every
    root n, first_root <= n < T - steps.  tokens: [T], greedy text of the target."""
    roots = torch.arange(first_root, len(tokens) - steps, device=tokens.device)
    dtype, (hidden, _) = head.dtype, target(tokens[None])
    outputs = head.unroll(target.embed(tokens[None, 1:]).to(dtype), hidden[:, :-1].to(dtype), steps)
    matches = [
        F.linear(output[0, roots - 1], target.lm_head.to(dtype)).argmax(-1) == tokens[roots + depth]
        for depth, output in enumerate(outputs, 1)
    ]
    return torch.stack(matches)


def accept_lengths(head: MtpHead, target: FrozenTarget, tokens: Tensor, first_root: int, steps: int, *_: int) -> Tensor:
    """Returns the accept lengths of chains of `steps` tokens.  For other arguments, see matches_by_depth."""
    return 1 + matches_by_depth(head, target, tokens, first_root, steps).cumprod(0).sum(0)


def agreement_by_depth(
    head: MtpHead, target: FrozenTarget, texts: list[np.ndarray], output_starts: list[int], steps: int
) -> list[float]:
    """Returns for each of `steps` depths how often the head's likeliest token is the text's token, as a share."""
    tokens = [torch.from_numpy(text.astype(np.int64)).to(target.device) for text in texts]
    matches = [matches_by_depth(head, target, t, f, steps) for t, f in zip(tokens, output_starts, strict=True)]
    return torch.cat(matches, 1).float().mean(1).tolist()


def print_agreement(head: MtpHead, target: FrozenTarget, texts: list[np.ndarray], output_starts: list[int]) -> None:
    """Prints agreement_by_depth for the head's layers and two more depths."""
    agreement = agreement_by_depth(head, target, texts, output_starts, num_layers(head) + 2)
    depths = " ".join(f"{share:.3f}" for share in agreement)
    print(f"share of the head's most likely tokens that are the target's, by depth: {depths}")


def num_layers(head: MtpHead) -> int:
    return head.shape.num_hidden_layers
