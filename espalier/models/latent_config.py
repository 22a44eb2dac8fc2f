"""Reads the sizes of latent attention (MLA) from a completed config.json."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError
from espalier.models.index_config import IndexConfig, read_index


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    q_rank: size of the queries' latent; None: queries are projected from the hidden state at once.
    kv_rank: size of the latent that stands for K and V.
    nope_size, rope_size: values of a q or k head without and with rotation.
    v_size: values of a v head.
    interleaved: as in espalier/kernels/ops/rope.py:LatentForm.
    index: how layers choose the rows that they attend to; None: they attend to all.
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
        """Values of a q or k head."""
        return self.nope_size + self.rope_size

    @property
    def row_size(self) -> int:
        """Values that a token keeps: its latent and the rotated part of its key, which all heads share."""
        return self.kv_rank + self.rope_size


def read_latent(
    full: dict[str, Any], count: Callable[[str], int], path: Path, is_indexed: bool = False
) -> LatentConfig:
    """count: the positive integer of a field.  Raises EspalierError naming a field that is missing or wrong."""
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
