"""Rotary position embeddings (RoPE): the fields of config.json, the frequencies of each type, and tables by position.

Types and parameters that are not supported are refused by name.

The formulas follow transformers.modeling_rope_utils, with the same order of float32 operations.  So the frequencies are
bitwise equal to those that the checkpoints were trained with.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError, shown
from espalier.kernels.ops.rope import Rotation
from espalier.kernels.ops.tree import gather_rows
from espalier.model_files import MAX_NUMBER

Raw = dict[str, Any]

TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "proportional", "divided")
# Types that need a factor.
SCALED = ("linear", "dynamic", "llama3", "yarn")
RAMP = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
POSITIVE = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow"),
)
NOT_NUMBERS, BOOLS = ("rope_type", "truncate", "finetuned", "divisors"), ("truncate", "finetuned")
FIELDS = (
    *RAMP,
    "rope_type",
    "rope_theta",
    "original_max_position_embeddings",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "finetuned",
    "divisors",
)
SPELLINGS = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class RopeConfig:
    """The RoPE of one model.

    dim: rotated channels of a head: all of them, or, in latent attention, the rope part.
    type: one of TYPES.  A dynamic model has unscaled frequencies up to its trained length.
    `ModelConfig.max_position` limits it to that length: beyond it, every new token would change the rotation of all
    cached keys.
    rotated: of a proportional RoPE, the share of the channels, low frequencies excluded, that turn at all.
    divisors: of each frequency, for the type "divided": GGUF files hold them for llama3.
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
    rotated: float = 1.0
    latent_mscale: float = 1.0
    divisors: tuple[float, ...] = ()

    def inverse_frequencies(self) -> Tensor:
        """[dim / 2] float32, radians per position."""
        plain = 1.0 / self._periods()
        match self.type:
            case "linear":
                return plain / self.factor
            case "divided":
                return plain / torch.tensor(self.divisors)
            case "proportional":
                turning = torch.arange(self.dim // 2) < int(self.rotated * self.dim // 2)
                return torch.where(turning, plain / self.factor, 0.0)
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

    def rows(self, positions: Tensor) -> Rotation:
        """cos and sin for positions of any shape, in order."""
        found = gather_rows(positions.reshape(1, -1), self.cos[None], self.sin[None])[0]
        return Rotation(*found.chunk(2, -1))


def with_rope_type(fields: Mapping[str, Any]) -> Raw:
    """Fields of a config.json in which every RoPE calls its type "rope_type".  The old name is "type"."""
    named = dict(fields)
    for field in SPELLINGS:
        rope = fields.get(field)
        if isinstance(rope, Mapping) and "type" in rope:
            rest = {name: value for name, value in rope.items() if name != "type"}
            named[field] = {"rope_type": rope["type"], **rest}
    return named


def rope_overrides(raw: Raw, overrides: Mapping[str, Any]) -> Raw:
    """The overrides, in which RoPE's parameters stand in the field that config.json has: one of SPELLINGS.

    Raises EspalierError for an override that would change nothing.
    """
    moved = with_rope_type(overrides)
    for field, other in (SPELLINGS, SPELLINGS[::-1]):
        if field not in moved or not raw.get(other) or raw.get(field):
            continue
        rope = moved.pop(field)
        if rope is None:
            raise EspalierError(
                f"model_overrides: {field} = None does not change {other}, which this model's config has; override "
                f"{other} with the rope_type that you want, for example 'default'"
            )
        moved[other] = {**rope, **(moved.get(other) or {})} if isinstance(rope, Mapping) else rope
    return moved


def type_of_rope(fields: Mapping[str, Any]) -> str:
    """The type of RoPE that a config's fields name."""
    new, old = (with_rope_type(fields).get(field) or {} for field in SPELLINGS)
    return {**new, **old}.get("rope_type") or "default"


def read_rope(full: Raw, rotated: int, longest: int, path: Path) -> tuple[RopeConfig, int]:
    """The RoPE configuration, and the longest context that it was made for.

    rotated: values of a head that are rotated.  longest: max_position_embeddings.  Two formats are read: rope_theta
    with rope_scaling, and rope_parameters of transformers 5, which holds all values.  Raises EspalierError for a type
    or parameter that is not supported.
    """
    new, old = (with_rope_type(full).get(field) or {} for field in SPELLINGS)
    for name in new:
        # Users add rope_scaling to a config whose rope_parameters have no scaling.
        if old.get(name, new[name]) != new[name] and (name, new[name]) != ("rope_type", "default"):
            raise EspalierError(
                f"{path}: {name} is {new[name]!r} in rope_parameters and {old[name]!r} in rope_scaling; remove one of "
                "the two fields"
            )
    parameters: Raw = {**new, **old}
    kind = parameters.get("rope_type") or "default"
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise EspalierError(
            f"{path}: rope_parameters differ by layer type; only one set for all layers is supported; use another model"
        )
    unknown = [name for name in parameters if name not in FIELDS]
    if kind not in TYPES or unknown:
        what = f"rope type {kind!r}" if kind not in TYPES else f"rope parameter {unknown[0]!r}"
        raise EspalierError(f"{path}: {what} is not supported; supported types are {', '.join(TYPES)}")
    for name, value in parameters.items():
        is_number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= MAX_NUMBER
            and (name not in POSITIVE or value > 0)
        )
        if name not in NOT_NUMBERS and value is not None and not is_number:
            words = "a positive number" if name in POSITIVE else "a number"
            raise EspalierError(f"{path}: rope parameter {name} = {value!r}; {words} is needed; correct it")
        if name in BOOLS and not isinstance(value, bool | None):
            raise EspalierError(f"{path}: rope parameter {name} = {value!r}; true or false is needed; correct it")
    theta = parameters.get("rope_theta") or full.get("rope_theta") or 10000.0
    if theta <= 1:
        raise EspalierError(f"{path}: rope_theta = {theta!r}; a number above 1 is needed; correct it")
    original = int(parameters.get("original_max_position_embeddings") or longest)
    scaled = kind in SCALED
    if kind == "default" and parameters.get("factor") not in (None, 1):
        raise EspalierError(
            f"{path}: rope parameter factor = {parameters['factor']!r} has no effect with rope_type 'default'; set the "
            "rope_type that the model was trained with, or remove factor"
        )
    if scaled and not isinstance(parameters.get("factor"), int | float):
        raise EspalierError(f"{path}: rope type {kind!r} needs a number 'factor', not {parameters.get('factor')!r}")
    for name in ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ():
        if not isinstance(parameters.get(name), int | float):
            raise EspalierError(f"{path}: rope type 'llama3' needs a number {name!r}, not {parameters.get(name)!r}")
    rope = RopeConfig(
        dim=rotated,
        theta=float(theta),
        type=kind,
        original_max_position=original,
        attention_factor=_yarn_attention_factor(parameters) if kind == "yarn" else 1.0,
        latent_mscale=_yarn_mscale(parameters["factor"], parameters.get("mscale_all_dim") or 0) if scaled else 1.0,
        rotated=_rotated_share(parameters, path) if kind == "proportional" else 1.0,
        divisors=_divisors(parameters, rotated, path) if kind == "divided" else (),
        **{name: parameters[name] for name in RAMP if parameters.get(name) is not None},
    )
    extended = int(original * rope.factor) if kind == "yarn" else longest
    return rope, max(longest, extended)


def _divisors(parameters: Raw, rotated: int, path: Path) -> tuple[float, ...]:
    """Of each frequency.  Raises EspalierError for anything but as many positive numbers."""
    given = parameters.get("divisors")
    are_numbers = isinstance(given, list) and all(type(each) is float and 0 < each <= MAX_NUMBER for each in given)
    if not are_numbers or len(given or ()) != rotated // 2:
        raise EspalierError(f"{path}: rope type 'divided' needs {rotated // 2} positive divisors, not {shown(given)}")
    return tuple(given or ())


def _rotated_share(parameters: Raw, path: Path) -> float:
    share = parameters.get("partial_rotary_factor")
    if share is not None and not 0 < share <= 1:
        raise EspalierError(
            f"{path}: partial_rotary_factor = {share!r}; a share above 0, 1 at most, is needed; correct it"
        )
    return 1.0 if share is None else float(share)


def _yarn_attention_factor(parameters: Raw) -> float:
    """The factor of cos and sin: attention_factor if it is set, else by YaRN's formula."""
    attention_factor = parameters.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    factor = float(parameters["factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's 0.1·mscale·ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
