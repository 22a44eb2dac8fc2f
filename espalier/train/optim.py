"""Muon for matrices between hidden states, AdamW for all other weights, and one learning-rate schedule for both.

Muon (Jordan et al., 2024) orthogonalises a matrix's momentum by a few Newton-Schulz iterations.  Then it scales the
step to the root mean square of a usual AdamW step (Liu et al., arXiv 2502.16982).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# If a matrix's name contains one of these texts, the matrix has a row for each token of the vocabulary.
TOKEN_MATRIX_NAMES = ("embed_tokens", "lm_head", "markov_w")


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Returns approximately the nearest semi-orthogonal matrices (Newton-Schulz).  matrices: [N, rows, columns]."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """The Muon optimizer.  Matrices of the same shape are updated together, because many matrices are small."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        parameters_by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            parameters_by_shape[parameter.shape].append(parameter)
        groups = [{"params": group} for group in parameters_by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = group["params"]
            gradients = torch.stack([p.grad for p in parameters])
            state = self.state[parameters[0]]
            velocity = state.setdefault("velocity", torch.zeros_like(gradients))
            velocity.lerp_(gradients, 1 - group["momentum"])
            update = orthogonalise(gradients.lerp(velocity, group["momentum"]))
            scale = 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, list(update.to(parameters[0].dtype).unbind()), alpha=-group["lr"] * scale)


def make_optimizers(
    model: nn.Module, matrix_lr: float, other_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Returns [Muon for matrices between hidden states, AdamW for norms, biases and matrices with a row for each
    token]."""
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    is_matrix = [p.ndim == 2 and not any(part in name for part in TOKEN_MATRIX_NAMES) for name, p in parameters]
    matrices = [p for (_, p), for_muon in zip(parameters, is_matrix, strict=True) if for_muon]
    other_parameters = [p for (_, p), for_muon in zip(parameters, is_matrix, strict=True) if not for_muon]
    fused = other_parameters[0].is_cuda
    return [
        Muon(matrices, lr=matrix_lr, weight_decay=weight_decay),
        torch.optim.AdamW(other_parameters, lr=other_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused),
    ]


def learning_rate_factor(progress: float, warmup_share: float = 0.01, constant_share: float = 0.45) -> float:
    """Returns the factor of the learning rate at `progress` in [0, 1]: warm-up, constant phase, decay to 0."""
    if progress < warmup_share:
        return progress / warmup_share
    return min(1.0, max(0.0, (1 - progress) / (1 - constant_share)))


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Sets each group's learning rate to `factor` times its initial rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * factor
