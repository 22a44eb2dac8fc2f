"""Reads the sizes of latent attention, and of the indexer, which chooses the rows that a layer attends to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, shown

FULL, SHARED = "full", "shared"
LETTERS = {"F": FULL, "S": SHARED, FULL: FULL, SHARED: SHARED}
TYPES, PATTERN, FREQ, OFFSET = "indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"
# The value of index_skip_topk_offset if a config does not have the field.
DEFAULT_OFFSET = 2
# The defaults of families with an indexer.  index_share_for_mtp_iteration is accepted and not used: here each row of an
# MTP layer chooses for itself.  The target's output does not depend on that.
INDEX_FIELDS: dict[str, Any] = {
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_share_for_mtp_iteration": False,
    **dict.fromkeys((TYPES, PATTERN, FREQ, OFFSET)),
}


@dataclass(frozen=True)
class IndexConfig:
    """The sizes of the indexers of a model's layers (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1).

    topk: the largest number of rows that a query attends to.  heads: the number of index heads.  size: how many values
    an index key and a head of an index query have.  interleaved: see espalier/kernels/ops/selection.py:IndexRows.
    types: FULL (the layer has an indexer) or SHARED (it uses an earlier layer's choice) for each layer.
    """

    topk: int
    heads: int
    size: int
    interleaved: bool
    types: tuple[str, ...]

    def is_full(self, layer: int) -> bool:
        return self.types[layer] == FULL


def read_index(full: dict[str, Any], count: Callable[[str], int], path: Path) -> IndexConfig:
    """Returns the sizes of the indexers.  count: a function that reads a field as a positive integer.

    Raises EspalierError naming a field that is missing or wrong.
    """
    try:
        types = indexer_types(full)
    except EspalierError as error:
        raise EspalierError(f"{path}: {error}") from None
    if full.get("q_lora_rank") is None:
        raise EspalierError(
            f"{path}: q_lora_rank is null, but index queries are made from the queries' latent; use another model"
        )
    index = IndexConfig(
        topk=count("index_topk"),
        heads=count("index_n_heads"),
        size=count("index_head_dim"),
        interleaved=bool(full["indexer_rope_interleave"]),
        types=types,
    )
    if index.size < full["qk_rope_head_dim"]:
        raise EspalierError(
            f"{path}: index_head_dim = {index.size} is less than qk_rope_head_dim = {full['qk_rope_head_dim']}, the "
            "values of it that are rotated; correct the config or pass model_overrides"
        )
    return index


def indexer_types(full: dict[str, Any]) -> tuple[str, ...]:
    """FULL or SHARED for each layer.  Raises EspalierError for fields that are wrong, or that contradict each other."""
    layers = full["num_hidden_layers"]
    declared, pattern, freq = (full.get(name) for name in (TYPES, PATTERN, FREQ))
    read = [
        _types_of_list(name, value, layers)
        for name, value in ((TYPES, declared), (PATTERN, pattern))
        if value is not None
    ]
    if pattern is None and (freq is not None or not read):
        read.append(_types_of_schedule(full, layers))
    for other in read[1:]:
        if other != read[0]:
            layer = next(i for i, (a, b) in enumerate(zip(read[0], other, strict=True)) if a != b)
            given = PATTERN if pattern is not None else f"{FREQ} = {freq!r} and {OFFSET} = {full.get(OFFSET)!r}"
            raise EspalierError(
                f"{TYPES} and {given} say different things of layer {layer} ({read[0][layer]} and {other[layer]}); "
                f"correct one, or pass model_overrides with {TYPES}=null to go by the other"
            )
    if layers and read[0][0] != FULL:
        raise EspalierError(f"layer 0 is {SHARED!r}, but no layer before it chooses rows; make it {FULL!r}")
    return read[0]


def _types_of_list(name: str, value: Any, layers: int) -> tuple[str, ...]:
    if not isinstance(value, list | tuple | str):
        raise EspalierError(f"{name} = {shown(value)}; a list or null is needed; correct it")
    unknown = [each for each in value if not isinstance(each, str) or each not in LETTERS]
    if unknown:
        raise EspalierError(f"{name} names {shown(unknown[0])}; supported are {FULL!r} and {SHARED!r}; correct it")
    if len(value) != layers:
        raise EspalierError(f"{name} has {len(value)} entries for num_hidden_layers = {layers}; make them agree")
    return tuple(LETTERS[each] for each in value)


def _types_of_schedule(full: dict[str, Any], layers: int) -> tuple[str, ...]:
    freq, offset = full.get(FREQ), full.get(OFFSET)
    freq, offset = 1 if freq is None else freq, DEFAULT_OFFSET if offset is None else offset
    for name, value in ((FREQ, freq), (OFFSET, offset)):
        if type(value) is not int or value < 0:
            raise EspalierError(f"{name} = {shown(value)}; an integer of at least 0 or null is needed; correct it")
    every = max(freq, 1)
    return tuple(SHARED if max(layer - offset + 1, 0) % every else FULL for layer in range(layers))


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    q_rank: the size of the queries' latent; None: queries are projected directly from the hidden state.
    kv_rank: the size of the latent from which K and V are computed.
    nope_size, rope_size: how many values of a q or k head are not rotated, and how many are.
    v_size: the size of a v head.
    interleaved: see espalier/kernels/ops/rope.py:LatentFormat.
    index: the sizes of the indexers; None: layers attend to all rows.
    """

    q_rank: int | None
    kv_rank: int
    nope_size: int
    rope_size: int
    v_size: int
    interleaved: bool
    index: IndexConfig | None = None

    @property
    def head_size(self) -> int:
        """The size of a q or k head."""
        return self.nope_size + self.rope_size

    @property
    def row_size(self) -> int:
        """How many values are kept for a token: its latent, and the rotated part of its key, shared by all heads."""
        return self.kv_rank + self.rope_size


def read_latent(
    full: dict[str, Any], count: Callable[[str], int], path: Path, is_indexed: bool = False
) -> LatentConfig:
    """Returns the sizes of latent attention.  count: a function that reads a field as a positive integer.
    Raises EspalierError naming a field that is missing or wrong."""
    latent = LatentConfig(
        q_rank=None if full.get("q_lora_rank") is None else count("q_lora_rank"),
        kv_rank=count("kv_lora_rank"),
        nope_size=count("qk_nope_head_dim"),
        rope_size=count("qk_rope_head_dim"),
        v_size=count("v_head_dim"),
        interleaved=bool(full["rope_interleave"]),
    )
    if latent.rope_size % 2:
        raise EspalierError(
            f"{path}: qk_rope_head_dim = {latent.rope_size}, but values are rotated in pairs; it must be even: correct "
            "the config or pass model_overrides"
        )
    return replace(latent, index=read_index(full, count, path)) if is_indexed else latent
