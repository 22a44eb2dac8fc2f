"""Windows and RoPE by layer type, for families whose sliding layers have another RoPE."""

from collections.abc import Callable, Mapping, Sequence

from espalier.errors import EspalierError, shown
from espalier.models.config import FULL_ATTENTION, SLIDING_ATTENTION, Json, LayerWindows

# Layer type -> (the field that has the RoPE's base, rope_theta, in older configs; the default base).
RopeBases = Mapping[str, tuple[str, float]]


def layer_types_of(config_fields: Json, is_full: Callable[[int], bool]) -> list[str]:
    """Returns the type of each layer, from `layer_types`.  is_full: decides, if that field is missing, whether a layer
    (counted from 1) has full attention."""
    declared, count = config_fields.get("layer_types"), config_fields["num_hidden_layers"]
    return list(declared or (FULL_ATTENTION if is_full(layer) else SLIDING_ATTENTION for layer in range(1, count + 1)))


def windows_by_type(config_fields: Json, layer_types: Sequence[str]) -> LayerWindows:
    """Returns the window of each layer; None for layers with full attention.
    Raises EspalierError for sliding layers without a window."""
    window = config_fields["sliding_window"]
    if SLIDING_ATTENTION in layer_types and (not isinstance(window, int) or window < 1):
        raise EspalierError(f"sliding_window = {shown(window)}; sliding layers need a positive integer; correct it")
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in layer_types)


def ropes_by_type(config_fields: Json, layer_types: Sequence[str], bases: RopeBases) -> list[Json]:
    """Returns the RoPE fields of each layer, by the layer's type.  As in transformers, rope_scaling applies only to
    layers with full attention."""
    parameters = config_fields.get("rope_parameters") or {}
    for name, value in parameters.items():
        if name not in bases or not isinstance(value, Mapping | None):
            raise EspalierError(
                f"rope_parameters has {name!r}: {shown(value)}; this family has an object for {FULL_ATTENTION!r} and "
                f"one for {SLIDING_ATTENTION!r}; put the parameters of a layer type into its object"
            )
    ropes = {
        kind: {
            "rope_scaling": None,
            "rope_parameters": _rope_of_type(config_fields, kind, bases, parameters.get(kind) or {}),
        }
        for kind in bases
    }
    ropes[FULL_ATTENTION]["rope_scaling"] = config_fields.get("rope_scaling")
    return [ropes[kind] for kind in layer_types]


def _rope_of_type(config_fields: Json, layer_type: str, bases: RopeBases, rope: Json) -> Json:
    """Returns the RoPE parameters of a layer type.  rope: the entry of this type in rope_parameters."""
    field, default = bases[layer_type]
    base = config_fields.get(field)
    if base is not None and rope.get("rope_theta", base) != base:
        raise EspalierError(
            f"{field} is {shown(base)}, but rope_theta of {layer_type!r} in rope_parameters is "
            f"{shown(rope['rope_theta'])}; remove one of the two"
        )
    return {"rope_theta": default if base is None else base, **rope}
