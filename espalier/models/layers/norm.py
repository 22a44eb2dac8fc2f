"""RMS normalisation (arXiv:1910.07467)."""

import torch
from torch import Tensor

from espalier.kernels.norm import add_rms_norm_triton, rms_norm_reference, rms_norm_triton


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 at least; returns x's dtype."""

    __slots__ = ("weight", "eps", "_scaled_weight", "_floor")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        size = weight.numel()
        self._scaled_weight = weight * size**0.5
        self._floor = torch.tensor((eps * size) ** 0.5, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return rms_norm_triton(x, self.weight, self.eps)
        if x.dtype in (torch.float32, torch.float64):
            # sqrt(sum(x²) + size·eps) as the hypotenuse: four operations where rms_norm runs nine.
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / torch.hypot(length, self._floor)).mul_(self._scaled_weight)
        return rms_norm_reference(x, self.weight, self.eps)

    def after(self, delta: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(residual + delta, its norm), [N, H] each; delta is None where nothing was added yet."""
        if delta is None:
            return residual, self(residual)
        if residual.is_cuda:
            return add_rms_norm_triton(delta, residual, self.weight, self.eps)
        total = residual + delta
        return total, self(total)
