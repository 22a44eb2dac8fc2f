"""The loss of a draft that predicts several tokens ahead: the sum of the losses of all depths."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def depth_loss(
    logits_by_depth: Iterable[Tensor], target_logits: Tensor, target_choices: Tensor, loss_mask: Tensor, decay: float
) -> tuple[Tensor, Tensor]:
    """Returns (loss, by depth the share of rows whose likeliest token is the target's).  The loss is the cross-entropy
    with the target's distribution, in nats.

    logits_by_depth: [B, R - j, V] at depth 1 + j, over the draft's vocabulary.  Row p at depth 1 + j predicts the same
    token as row p + j of the target.  target_logits: [B, R, V].
    target_choices: [B, R] int64, the target's likeliest token as an index in the draft's vocabulary; -1 if the
    vocabulary lacks it.  Rows with -1 do not count in the loss, and never agree.
    loss_mask: bool [B, R], the rows that count.  decay: the weight of a depth, relative to the preceding depth."""
    probabilities = target_logits.float().softmax(-1)
    losses, agreements = [], []
    for skipped, logits in enumerate(logits_by_depth):
        choices, counts = target_choices[:, skipped:], loss_mask[:, skipped:]
        loss = F.cross_entropy(logits.flatten(0, 1), probabilities[:, skipped:].flatten(0, 1), reduction="none")
        mask = ((choices >= 0) & counts).flatten()
        losses.append(decay**skipped * (loss * mask).sum() / mask.sum().clamp(min=1))
        agreements.append(((logits.argmax(-1) == choices) & counts).sum() / counts.sum().clamp(min=1))
    return torch.stack(losses).sum(), torch.stack(agreements).detach()
