"""Reads the sizes of latent attention and of the indexer.  An indexer chooses the rows that a layer attends to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from espalier.errors import EspalierError, shown

FULL_INDEXER, SHARED_INDEXER = "full", "shared"
INDEXER_TYPES = {"F": FULL_INDEXER, "S": SHARED_INDEXER, FULL_INDEXER: FULL_INDEXER, SHARED_INDEXER: SHARED_INDEXER}
TYPES_FIELD, PATTERN_FIELD, FREQ_FIELD, OFFSET_FIELD = (
    "indexer_types",
    "index_topk_pattern",
    "index_topk_freq",
    "index_skip_topk_offset",
)
# The default of index_skip_topk_offset.
DEFAULT_OFFSET = 2
# The defaults of families with an indexer.  index_share_for_mtp_iteration has no effect here: in an MTP layer, the
# indexer runs for every query, which can only change what the MTP layer drafts.
INDEXER_DEFAULTS: dict[str, Any] = {
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_share_for_mtp_iteration": False,
    **dict.fromkeys((TYPES_FIELD, PATTERN_FIELD, FREQ_FIELD, OFFSET_FIELD)),
}


@dataclass(frozen=True)
class IndexerConfig:
    """The sizes of the indexers of a model's layers (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1).
    topk: the largest number of rows that a query attends to.  heads: the number of index heads.  size: the number of
    values of an index key, and of each head of an index query.
    interleaved: whether the two values that RoPE rotates as a pair are adjacent.
    layer_types: for each layer, FULL_INDEXER (it has an indexer) or SHARED_INDEXER (an earlier layer's indexer
    chooses its rows)."""

    topk: int
    heads: int
    size: int
    interleaved: bool
    layer_types: tuple[str, ...]

    def has_own_indexer(self, layer: int) -> bool:
        return self.layer_types[layer] == FULL_INDEXER


def read_indexer_config(config_fields: dict[str, Any], read_count: Callable[[str], int]) -> IndexerConfig:
    """Returns the sizes of the indexers.  read_count: a function that reads a field as a positive integer.
    Raises EspalierError naming a field that is missing or wrong."""
    types = indexer_types(config_fields)
    if config_fields.get("q_lora_rank") is None:
        raise EspalierError(
            "q_lora_rank is null, but index queries are made from the queries' latent; use another model"
        )
    index = IndexerConfig(
        topk=read_count("index_topk"),
        heads=read_count("index_n_heads"),
        size=read_count("index_head_dim"),
        interleaved=bool(config_fields["indexer_rope_interleave"]),
        layer_types=types,
    )
    if index.size < config_fields["qk_rope_head_dim"]:
        raise EspalierError(
            f"index_head_dim = {index.size} is less than qk_rope_head_dim = {config_fields['qk_rope_head_dim']}, the "
            "values of it that are rotated; correct the config or pass model_overrides"
        )
    return index


def indexer_types(config_fields: dict[str, Any]) -> tuple[str, ...]:
    """Returns FULL_INDEXER or SHARED_INDEXER for each layer.  Raises EspalierError for contradicting fields."""
    layers = config_fields["num_hidden_layers"]
    names = (TYPES_FIELD, PATTERN_FIELD, FREQ_FIELD, OFFSET_FIELD)
    declared, pattern, freq, offset = (config_fields.get(name) for name in names)
    declarations = [
        _listed_indexer_types(name, value, layers)
        for name, value in ((TYPES_FIELD, declared), (PATTERN_FIELD, pattern))
        if value is not None
    ]
    if pattern is None and (freq is not None or not declarations):
        declarations.append(_scheduled_indexer_types(config_fields, layers))
    types = declarations[0]
    for other in declarations[1:]:
        if other != types:
            layer = next(i for i, (a, b) in enumerate(zip(types, other, strict=True)) if a != b)
            field = PATTERN_FIELD if pattern is not None else f"{FREQ_FIELD} = {freq!r} and {OFFSET_FIELD} = {offset!r}"
            raise EspalierError(
                f"{TYPES_FIELD} and {field} say different things of layer {layer} ({types[layer]} and {other[layer]}"
                f"); correct one, or pass model_overrides with {TYPES_FIELD}=null to go by the other"
            )
    if layers and types[0] != FULL_INDEXER:
        raise EspalierError("layer 0 is 'shared', but no layer before it chooses rows; make it 'full'")
    return types


def _listed_indexer_types(name: str, value: Any, num_layers: int) -> tuple[str, ...]:
    """Returns the indexer type of each layer.  name, value: the config's field that lists the types."""
    if not isinstance(value, list | tuple | str):
        raise EspalierError(f"{name} = {shown(value)}; a list or null is needed; correct it")
    unknown = [kind for kind in value if not isinstance(kind, str) or kind not in INDEXER_TYPES]
    if unknown:
        raise EspalierError(f"{name} names {shown(unknown[0])}; supported are 'full' and 'shared'; correct it")
    if len(value) != num_layers:
        raise EspalierError(f"{name} has {len(value)} entries for num_hidden_layers = {num_layers}; make them agree")
    return tuple(INDEXER_TYPES[kind] for kind in value)


def _scheduled_indexer_types(config_fields: dict[str, Any], num_layers: int) -> tuple[str, ...]:
    """Returns the indexer type of each layer.  Layers up to index_skip_topk_offset - 1 have an indexer, and from there
    on every index_topk_freq-th layer."""
    freq, offset = config_fields.get(FREQ_FIELD), config_fields.get(OFFSET_FIELD)
    freq, offset = 1 if freq is None else freq, DEFAULT_OFFSET if offset is None else offset
    for name, value in ((FREQ_FIELD, freq), (OFFSET_FIELD, offset)):
        if type(value) is not int or value < 0:
            raise EspalierError(f"{name} = {shown(value)}; an integer of at least 0 or null is needed; correct it")
    period = max(freq, 1)
    return tuple(SHARED_INDEXER if max(layer - offset + 1, 0) % period else FULL_INDEXER for layer in range(num_layers))


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).
    q_rank: the size of the queries' latent; None: queries are projected directly from the hidden state.
    kv_rank: the size of the latent from which K and V are computed.
    nope_size: the number of values of a q or k head without RoPE; rope_size: the number of values with RoPE.
    v_size: the size of a v head.
    interleaved: whether the two values that RoPE rotates as a pair are adjacent.
    indexer: the sizes of the indexers; None if layers attend to all rows."""

    q_rank: int | None
    kv_rank: int
    nope_size: int
    rope_size: int
    v_size: int
    interleaved: bool
    indexer: IndexerConfig | None = None

    @property
    def head_size(self) -> int:
        """The size of a q or k head."""
        return self.nope_size + self.rope_size

    @property
    def cache_row_size(self) -> int:
        """The number of values that the cache stores for a token: the latent and the rotated part of the key."""
        return self.kv_rank + self.rope_size


def read_latent_config(
    config_fields: dict[str, Any], read_count: Callable[[str], int], has_indexer: bool = False
) -> LatentConfig:
    """Returns the sizes of latent attention.  read_count: a function that reads a field as a positive integer.
    Raises EspalierError naming a field that is missing or wrong."""
    latent = LatentConfig(
        q_rank=None if config_fields.get("q_lora_rank") is None else read_count("q_lora_rank"),
        kv_rank=read_count("kv_lora_rank"),
        nope_size=read_count("qk_nope_head_dim"),
        rope_size=read_count("qk_rope_head_dim"),
        v_size=read_count("v_head_dim"),
        interleaved=bool(config_fields["rope_interleave"]),
    )
    if latent.rope_size % 2:
        raise EspalierError(
            f"qk_rope_head_dim = {latent.rope_size}, but values are rotated in pairs; it must be even: correct "
            "the config or pass model_overrides"
        )
    return replace(latent, indexer=read_indexer_config(config_fields, read_count)) if has_indexer else latent
