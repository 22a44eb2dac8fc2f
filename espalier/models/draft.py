"""What a draft declares, and what the engine knows of a loaded one.

A declaration (DraftSpec) follows from the draft's config.json and its target's, so that memory, pages and slots are
sized before any weight is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from espalier.cache.layer_spec import LayerSpec
from espalier.models.base import Attend
from espalier.models.config import ModelConfig, read_json


@dataclass(frozen=True)
class DraftSpec:
    """A draft's declaration.  Without a draft model (n-gram, plain decoding) every field but the first is its default.

    algorithm: the name that users give.
    layers: its layers, as the pages keep them, after the target's.
    reads: the field of the target's ModelOutput that feeds it: "captured", the inputs of the layers `capture` side by
    side; "hidden", the last hidden state after the final norm; or None.
    capture: target layers; num_layers is what enters the final norm, the last hidden state before it.
    hidden_from: whose hidden state feeds layer k at token q: "target", the target's at q - k, counted from k = 1;
    "chain", layer k - 1's at q - 1, layer 0 being the target; None.
    reentry: rows 0 .. reentry-1 of a draft layer do not exist, and a prefix hit of m tokens is entered again from row
    m - reentry on, whose hidden states no page holds.
    carried: tensors that a slot hands from launch to launch, shapes by name.
    vocab_size: tokens that the draft scores; fewer than the target's where it brings a map (DraftModel.d2t).
    """

    algorithm: str
    layers: tuple[LayerSpec, ...] = ()
    reads: Literal["captured", "hidden"] | None = None
    capture: tuple[int, ...] = ()
    hidden_from: Literal["target", "chain"] | None = None
    reentry: int = 0
    carried: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    vocab_size: int = 0


class DraftConfig(Protocol):
    """A draft's config.json, read and held against its target's.  layer: the shape of its decoder layers."""

    @property
    def spec(self) -> DraftSpec: ...

    @property
    def layer(self) -> ModelConfig: ...


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """[B, Q, H] each.  hidden: to hand on; normed: what the lm_head reads."""

    hidden: Tensor
    normed: Tensor


class DraftModel(Protocol):
    """A draft, loaded.  A row stands under its token q; the caller passes q - reentry as its RoPE position."""

    spec: DraftSpec
    geometry: tuple[LayerSpec, ...]
    d2t: Tensor | None

    @property
    def fuse(self) -> Callable[[Tensor], Tensor]:
        """What `spec.reads` names, [..., F] -> the hidden state [..., H] that feeds the next token's row."""
        ...

    def __call__(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, parents: Tensor | None = None
    ) -> DraftOutput:
        """tokens, positions int64 [B, Q]; hidden [B, R, H], fused or handed on; parents int64 [B, Q], which of the R
        rows each continues, None for each its own.  Layer i calls `attend(i, ...)`."""
        ...

    def output_of(self, hidden: Tensor) -> DraftOutput:
        """Of rows of which only what they handed on was kept."""
        ...

    def logits(self, out: DraftOutput) -> Tensor:
        """[B, Q, draft vocabulary] in the model's dtype; d2t [draft vocabulary], the target's ids of these, None where
        the vocabularies are one."""
        ...


def draft_verifier(path: Path | str) -> str | None:
    """The target that a speculators-format draft names, so that a user may give the draft alone."""
    speculators: Mapping[str, Any] = read_json(Path(path) / "config.json").get("speculators_config") or {}
    return (speculators.get("verifier") or {}).get("name_or_path")
