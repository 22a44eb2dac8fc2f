"""Rotary position embeddings (RoPE): reads config.json, and computes frequencies and tables of cos and sin.

RoPE types and parameters that are not supported are refused with an error.

The formulas follow transformers.modeling_rope_utils, with the same order of float32 operations, so that the frequencies
are bitwise equal to those of training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError, shown
from espalier.kernels.ops.rope import Rotation
from espalier.kernels.ops.tree import gather_rows
from espalier.model_files import MAX_NUMBER

# A JSON object, such as a config.json.
Json = dict[str, Any]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
# Types that need a factor.
TYPES_WITH_FACTOR = ("linear", "dynamic", "llama3", "yarn")
# The parameters that RopeConfig has under the same names.
COPIED_PARAMETERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
POSITIVE_FIELDS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow"),
)
BOOL_FIELDS = ("truncate", "finetuned")
# The fields of LongRoPE's divisors of frequencies: for texts up to the original length, and for longer texts.
DIVISOR_FIELDS = ("short_factor", "long_factor")
NON_NUMBER_FIELDS = ("rope_type", *BOOL_FIELDS, *DIVISOR_FIELDS)
ROPE_PARAMETERS = (
    *COPIED_PARAMETERS,
    "rope_type",
    "rope_theta",
    "original_max_position_embeddings",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "llama_4_scaling_beta",
    "max_position_embeddings",
    "finetuned",
    *DIVISOR_FIELDS,
)
# Fields of attention that a config may store in its RoPE object.  config.py moves them to the top level of the config.
ATTENTION_FIELDS = ("partial_rotary_factor", "llama_4_scaling_beta")
ROPE_FIELDS = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class RopeConfig:
    """The RoPE of one layer.

    dim: the number of rotated channels of a head; in latent attention, the size of the rope part.
    type: one of ROPE_TYPES, or "none" for a layer without RoPE, whose frequencies are 0.
    The fields that are not described here are parameters of this type, as in transformers' rope_parameters.
    A dynamic RoPE has unscaled frequencies up to the trained length.  Espalier limits contexts to that length, because
    in longer contexts every new token would change the rotation of all cached keys.
    partial_rotary_factor: for a proportional RoPE, the share of rotated channels; channels with the lowest frequencies
    are not rotated.
    latent_mscale: the factor of q and of k that YaRN computes from mscale_all_dim.  Latent attention multiplies its
    softmax scale by the square of this factor; other attention ignores it.
    longrope_factors: LongRoPE's two sets of divisors, with a divisor for each frequency.  The first set is for contexts
    up to original_max_position, the second set for longer contexts.  A loaded model uses one of the sets for all
    contexts, because a change of the set would change the rotation of all cached keys.
    query_scaling_beta: β of Llama 4's attention temperature.  After rotation, the query at position p is multiplied by
    1 + β · ln(1 + floor(p / original_max_position))."""

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
    partial_rotary_factor: float = 1.0
    latent_mscale: float = 1.0
    query_scaling_beta: float = 0.0
    longrope_factors: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    def inverse_frequencies(self, context: int = 0) -> Tensor:
        """Returns the frequencies [dim / 2], float32, in radians per position.
        context: the number of tokens of the longest text, which decides which set of divisors LongRoPE uses."""
        unscaled = 1.0 / self._positions_per_radian()
        match self.type:
            case "linear":
                return unscaled / self.factor
            case "proportional":
                is_rotated = torch.arange(self.dim // 2) < int(self.partial_rotary_factor * self.dim // 2)
                return torch.where(is_rotated, unscaled / self.factor, 0.0)
            case "llama3":
                return self._llama3_frequencies(unscaled)
            case "none":
                return torch.zeros(self.dim // 2)
            case "yarn":
                return self._yarn_frequencies()
            case "longrope":
                divisors = self.longrope_factors[context > self.original_max_position]
                return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * self._positions_per_radian())
            case _:
                return unscaled

    def _positions_per_radian(self) -> Tensor:
        return self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim)

    def _llama3_frequencies(self, unscaled: Tensor) -> Tensor:
        """Returns Llama 3.1's frequencies from the unscaled ones: low frequencies are divided by `factor`, high
        frequencies are unchanged, and frequencies between them are interpolated."""
        wavelength = 2 * math.pi / unscaled
        low, high = self.low_freq_factor, self.high_freq_factor
        unscaled_share = (self.original_max_position / wavelength - low) / (high - low)
        between = (1 - unscaled_share) * unscaled / self.factor + unscaled_share * unscaled
        not_between = torch.where(wavelength > self.original_max_position / low, unscaled / self.factor, unscaled)
        is_between = (wavelength >= self.original_max_position / high) & (
            wavelength <= self.original_max_position / low
        )
        return torch.where(is_between, between, not_between)

    def _yarn_frequencies(self) -> Tensor:
        """Returns YaRN's frequencies: low frequencies are divided by `factor`, high frequencies are unchanged, and
        frequencies between them are interpolated linearly.

        The interpolation starts at the frequency with beta_slow rotations over the original length and ends at the
        frequency with beta_fast rotations."""
        low, high = self._frequency_index(self.beta_fast), self._frequency_index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = high - low if high != low else 0.001
        unscaled_share = 1 - ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        periods = self._positions_per_radian()
        return 1.0 / (self.factor * periods) * (1 - unscaled_share) + 1.0 / periods * unscaled_share

    def _frequency_index(self, turns: float) -> float:
        """Returns the (fractional) index of the frequency that makes `turns` turns over the original length."""
        return self.dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


class RopeTables:
    """Tables of cos and sin for positions 0 .. rows-1, [rows, dim] each, as in Hugging Face's rotate_half.

    The first half of sin is negated, so RoPE is x·cos + swap_halves(x)·sin (kernels/layers/rope.py).
    context: the number of tokens of the longest text; by default `rows`.
    query_scales: [rows], in the model's dtype, the factors of rotated queries; None if there is no attention
    temperature (RopeConfig.query_scaling_beta)."""

    __slots__ = ("cos", "sin", "query_scales")

    def __init__(
        self,
        config: RopeConfig,
        rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        context: int | None = None,
    ) -> None:
        exact_dtype = torch.promote_types(dtype, torch.float32)
        frequencies = config.inverse_frequencies(rows if context is None else context)
        angles = torch.arange(rows, dtype=exact_dtype)[:, None] * frequencies.to(exact_dtype)
        cos, sin = angles.cos() * config.attention_factor, angles.sin() * config.attention_factor
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)
        self.query_scales = None
        if config.query_scaling_beta:
            lengths = torch.arange(rows, dtype=exact_dtype) // config.original_max_position
            self.query_scales = (1 + config.query_scaling_beta * torch.log(1 + lengths)).to(device, dtype)

    def rows(self, positions: Tensor) -> Rotation:
        """Returns one row of cos and one of sin for each position of the flattened `positions`."""
        cos_and_sin = gather_rows(positions.reshape(1, -1), self.cos[None], self.sin[None])[0]
        return Rotation(*cos_and_sin.chunk(2, -1))


def with_rope_type(fields: Mapping[str, Any]) -> Json:
    """Returns the fields of a config.json, in which the old field name "type" of a RoPE is replaced by "rope_type"."""
    renamed = dict(fields)
    for field in ROPE_FIELDS:
        rope = fields.get(field)
        if isinstance(rope, Mapping) and "type" in rope:
            other_fields = {name: value for name, value in rope.items() if name != "type"}
            renamed[field] = {"rope_type": rope["type"], **other_fields}
    return renamed


def rope_overrides(config_json: Json, overrides: Mapping[str, Any]) -> Json:
    """Returns the overrides, with RoPE parameters in the field of ROPE_FIELDS that config.json has.
    Raises EspalierError for an override that would have no effect."""
    moved = with_rope_type(overrides)
    for field, other in (ROPE_FIELDS, ROPE_FIELDS[::-1]):
        if field not in moved or not config_json.get(other) or config_json.get(field):
            continue
        rope = moved.pop(field)
        if rope is None:
            raise EspalierError(
                f"model_overrides: {field} = None does not change {other}, which this model's config has; override "
                f"{other} with the rope_type that you want, for example 'default'"
            )
        moved[other] = {**rope, **(moved.get(other) or {})} if isinstance(rope, Mapping) else rope
    return moved


def rope_type_of(fields: Mapping[str, Any]) -> str:
    """Returns the RoPE type in a config's fields."""
    new, old = (with_rope_type(fields).get(field) or {} for field in ROPE_FIELDS)
    return {**new, **old}.get("rope_type") or "default"


def read_rope(config_fields: Json, rotary_dim: int, max_position_embeddings: int) -> tuple[RopeConfig, int]:
    """Returns the RoPE configuration, and the longest context, in tokens, that it supports.
    rotary_dim: the number of rotated values of a head.  Two formats are supported: rope_theta with rope_scaling, and
    rope_parameters of transformers 5, which contains all values.  Raises EspalierError for a type or parameter that is
    not supported."""
    new, old = (with_rope_type(config_fields).get(field) or {} for field in ROPE_FIELDS)
    for name in new:
        # Beside rope_scaling, the type "default" is ignored: users add rope_scaling to configs with rope_parameters.
        if old.get(name, new[name]) != new[name] and (name, new[name]) != ("rope_type", "default"):
            raise EspalierError(
                f"{name} is {new[name]!r} in rope_parameters and {old[name]!r} in rope_scaling; remove one of "
                "the two fields"
            )
    parameters: Json = {**new, **old}
    kind = parameters.get("rope_type") or "default"
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise EspalierError(
            "rope_parameters differ by layer type; only one set for all layers is supported; use another model"
        )
    _require_values(parameters, kind, max_position_embeddings)
    theta = parameters.get("rope_theta") or config_fields.get("rope_theta") or 10000.0
    if theta <= 1:
        raise EspalierError(f"rope_theta = {theta!r}; a number above 1 is needed; correct it")
    # The field at the config's top level has priority, as in transformers.
    name = "original_max_position_embeddings"
    original_max_position = int(config_fields.get(name) or parameters.get(name) or max_position_embeddings)
    scaled = kind in TYPES_WITH_FACTOR
    if kind == "default" and parameters.get("factor") not in (None, 1):
        raise EspalierError(
            f"rope parameter factor = {parameters['factor']!r} has no effect with rope_type 'default'; set the "
            "rope_type that the model was trained with, or remove factor"
        )
    if scaled and not isinstance(parameters.get("factor"), int | float):
        raise EspalierError(f"rope type {kind!r} needs a number 'factor', not {parameters.get('factor')!r}")
    for name in ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ():
        if not isinstance(parameters.get(name), int | float):
            raise EspalierError(f"rope type 'llama3' needs a number {name!r}, not {parameters.get(name)!r}")
    rope = RopeConfig(
        dim=rotary_dim,
        theta=float(theta),
        type=kind,
        original_max_position=original_max_position,
        attention_factor=_attention_factor(parameters, kind, original_max_position, max_position_embeddings),
        query_scaling_beta=float(config_fields.get("llama_4_scaling_beta") or 0),
        latent_mscale=_yarn_mscale(parameters["factor"], parameters.get("mscale_all_dim") or 0) if scaled else 1.0,
        longrope_factors=_longrope_factors(parameters, rotary_dim) if kind == "longrope" else ((), ()),
        partial_rotary_factor=_partial_rotary_factor(parameters) if kind == "proportional" else 1.0,
        **{name: parameters[name] for name in COPIED_PARAMETERS if parameters.get(name) is not None},
    )
    scaled_length = int(original_max_position * rope.factor) if kind == "yarn" else max_position_embeddings
    return rope, max(max_position_embeddings, scaled_length)


def _require_values(parameters: Json, rope_type: object, max_position_embeddings: int) -> None:
    """Raises EspalierError for an unsupported RoPE type or parameter, and for a value of a wrong type."""
    unknown = [name for name in parameters if name not in ROPE_PARAMETERS]
    if rope_type not in ROPE_TYPES or unknown:
        problem = f"rope type {rope_type!r}" if rope_type not in ROPE_TYPES else f"rope parameter {unknown[0]!r}"
        raise EspalierError(f"{problem} is not supported; supported types are {', '.join(ROPE_TYPES)}")
    for name, value in parameters.items():
        is_number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= MAX_NUMBER
            and (name not in POSITIVE_FIELDS or value > 0)
        )
        if name not in NON_NUMBER_FIELDS and value is not None and not is_number:
            words = "a positive number" if name in POSITIVE_FIELDS else "a number"
            raise EspalierError(f"rope parameter {name} = {value!r}; {words} is needed; correct it")
        if name in BOOL_FIELDS and not isinstance(value, bool | None):
            raise EspalierError(f"rope parameter {name} = {value!r}; true or false is needed; correct it")
    if parameters.get("max_position_embeddings") not in (None, max_position_embeddings):
        raise EspalierError(
            f"rope parameter max_position_embeddings = {parameters['max_position_embeddings']!r}, but the "
            f"model has max_position_embeddings = {max_position_embeddings}; remove the rope parameter"
        )


def _longrope_factors(parameters: Json, rotary_dim: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns LongRoPE's divisors.  Raises EspalierError for lists without a positive number per frequency."""
    for name in DIVISOR_FIELDS:
        values = parameters.get(name)
        if (
            not isinstance(values, list)
            or len(values) != rotary_dim // 2
            or not all(isinstance(value, int | float) and 0 < value <= MAX_NUMBER for value in values)
        ):
            raise EspalierError(
                f"rope parameter {name} = {shown(values)}; a list of {rotary_dim // 2} positive numbers is "
                "needed, half as many as a head has rotated values; correct it"
            )
    short, long = (tuple(map(float, parameters[name])) for name in DIVISOR_FIELDS)
    return short, long


def _attention_factor(parameters: Json, rope_type: str, original_length: int, max_position_embeddings: int) -> float:
    """Returns the factor by which cos and sin are multiplied."""
    if rope_type == "longrope" and parameters.get("attention_factor") is None:
        factor = float(parameters.get("factor") or max_position_embeddings / original_length)
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))
    return _yarn_attention_factor(parameters) if rope_type in ("yarn", "longrope") else 1.0


def _partial_rotary_factor(parameters: Json) -> float:
    share = parameters.get("partial_rotary_factor")
    if share is not None and not 0 < share <= 1:
        raise EspalierError(f"partial_rotary_factor = {share!r}; a share above 0, 1 at most, is needed; correct it")
    return 1.0 if share is None else float(share)


def _yarn_attention_factor(parameters: Json) -> float:
    """Returns the factor by which cos and sin are multiplied: attention_factor, else the value of YaRN's formula."""
    attention_factor = parameters.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    factor = float(parameters["factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Returns YaRN's 0.1·mscale·ln(factor) + 1, or 1 for factors of at most 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
