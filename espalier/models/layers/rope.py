"""Rotary position embeddings (RoPE): the frequencies of each scaling type, and tables of cos and sin by position.

The formulas follow transformers.modeling_rope_utils, with the same order of float32 operations.  So the frequencies are
bitwise equal to those that the checkpoints were trained with.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """The RoPE of one model.

    dim: rotated channels of a head: all of them, or, in latent attention, the rope part.
    type: default, linear, dynamic, llama3 or yarn.  A dynamic model has unscaled frequencies up to its trained length.
    `ModelConfig.max_position` limits it to that length: beyond it, every new token would change the rotation of all
    cached keys.
    latent_mscale: YaRN's factor of q and of k for mscale_all_dim.  Latent attention multiplies its softmax scale by its
    square; other attention ignores it.
    """

    dim: int
    theta: float
    type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    latent_mscale: float = 1.0

    def inverse_frequencies(self) -> Tensor:
        """[dim / 2] float32, radians per position."""
        plain = 1.0 / self._periods()
        match self.type:
            case "linear":
                return plain / self.factor
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn()
            case _:
                return plain

    def _periods(self) -> Tensor:
        return self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim)

    def _llama3(self, plain: Tensor) -> Tensor:
        """Llama 3.1: divide low frequencies by `factor`, keep high ones, interpolate between."""
        wavelength = 2 * math.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        keep = (self.original_max_position / wavelength - low) / (high - low)
        between = (1 - keep) * plain / self.factor + keep * plain
        slow = torch.where(wavelength > self.original_max_position / low, plain / self.factor, plain)
        is_between = (wavelength >= self.original_max_position / high) & (
            wavelength <= self.original_max_position / low
        )
        return torch.where(is_between, between, slow)

    def _yarn(self) -> Tensor:
        """YaRN: divide low frequencies by `factor`, keep high ones, ramp between beta_slow and beta_fast turns."""
        low, high = self._dimension_of(self.beta_fast), self._dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = high - low if high != low else 0.001
        keep = 1 - ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        periods = self._periods()
        return 1.0 / (self.factor * periods) * (1 - keep) + 1.0 / periods * keep

    def _dimension_of(self, turns: float) -> float:
        """The (fractional) dimension that makes this many turns over the original length."""
        return self.dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


class RopeTables:
    """cos and sin for positions 0 .. rows-1, [rows, dim] each, in two halves as in Hugging Face's rotate_half.

    The first half of sin is negated, so RoPE is x·cos + swap_halves(x)·sin (kernels/layers/rope.py).
    """

    __slots__ = ("cos", "sin")

    def __init__(self, config: RopeConfig, rows: int, dtype: torch.dtype, device: torch.device | str) -> None:
        dtype = dtype if dtype == torch.float64 else torch.float32
        angles = torch.arange(rows, dtype=dtype)[:, None] * config.inverse_frequencies().to(dtype)
        cos, sin = angles.cos() * config.attention_factor, angles.sin() * config.attention_factor
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)
