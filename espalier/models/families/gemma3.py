"""Gemma 3 (text): norms before and behind each block, of weight 1 + w; windows and RoPE by layer type."""

from collections.abc import Mapping

from espalier.errors import EspalierError, shown
from espalier.model_files import MAX_NUMBER
from espalier.models.config import Family, LayerNorms, Raw, Windows

FULL, SLIDING = "full_attention", "sliding_attention"
# The base of each layer type's RoPE: the field that older configs have, and its default.
BASES: Mapping[str, tuple[str, float]] = {
    FULL: ("rope_theta", 1_000_000.0),
    SLIDING: ("rope_local_base_freq", 10_000.0),
}


def _kinds(full: Raw) -> list[str]:
    """The type of each layer: of `layer_types`; without it, every sliding_window_pattern-th has full attention."""
    if full.get("layer_types") is not None:
        return list(full["layer_types"])
    every = full["sliding_window_pattern"]
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise EspalierError(f"sliding_window_pattern = {shown(every)}; a positive integer is needed; correct it")
    return [SLIDING if layer % every else FULL for layer in range(1, full["num_hidden_layers"] + 1)]


def _windows(full: Raw) -> Windows:
    kinds, window = _kinds(full), full["sliding_window"]
    if SLIDING in kinds and (not isinstance(window, int) or window < 1):
        raise EspalierError(f"sliding_window = {shown(window)}; sliding layers need a positive integer; correct it")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(full: Raw) -> list[Raw]:
    """The RoPE of each layer, by its type.  rope_scaling is of layers with full attention, as in transformers."""
    given = full.get("rope_parameters") or {}
    for name, value in given.items():
        if name not in BASES or not isinstance(value, Mapping | None):
            raise EspalierError(
                f"rope_parameters has {name!r}: {shown(value)}; Gemma 3 has an object for {FULL!r} and one for "
                f"{SLIDING!r}; put the parameters of a layer type into its object"
            )
    own = {kind: {"rope_scaling": None, "rope_parameters": _rope(full, kind, given.get(kind) or {})} for kind in BASES}
    own[FULL]["rope_scaling"] = full.get("rope_scaling")
    return [own[kind] for kind in _kinds(full)]


def _rope(full: Raw, kind: str, given: Raw) -> Raw:
    field, default = BASES[kind]
    base = full.get(field)
    if base is not None and given.get("rope_theta", base) != base:
        raise EspalierError(
            f"{field} is {shown(base)}, but rope_theta of {kind!r} in rope_parameters is {shown(given['rope_theta'])}; "
            "remove one of the two"
        )
    return {"rope_theta": default if base is None else base, **given}


def _softmax_scale(full: Raw) -> float:
    scalar = full["query_pre_attn_scalar"]
    if not isinstance(scalar, int | float) or isinstance(scalar, bool) or not 0 < scalar <= MAX_NUMBER:
        raise EspalierError(f"query_pre_attn_scalar = {shown(scalar)}; a positive number is needed; correct the config")
    return float(scalar**-0.5)


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": None,
    },
    qkv_bias=lambda full: bool(full["attention_bias"]),
    out_bias=lambda full: bool(full["attention_bias"]),
    windows=_windows,
    qk_norm=True,
    layer_norms=LayerNorms(
        before_mlp="pre_feedforward_layernorm",
        behind_attention="post_attention_layernorm",
        behind_mlp="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    embedding_scale=lambda full: float(full["hidden_size"] ** 0.5),
    softmax_scale=_softmax_scale,
    ropes=_ropes,
    honours=("query_pre_attn_scalar",),
    activation_field="hidden_activation",
)
