"""The declaration of a draft (DraftSpec), and the contract of a loaded draft model (DraftModel).

A DraftSpec follows from the config.json of the draft and of its target.  So memory, pages and slots are sized before
weights are read.
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
    """A draft's declaration.  Without a draft model (n-gram, plain decoding), all fields but `algorithm` are defaults.

    algorithm: the name that users give.
    layers: specs of the draft's layers; pages keep them after the target's.
    reads: the field of the target's ModelOutput that the draft reads.  "captured": the inputs of the layers `capture`,
    concatenated; "hidden": the last hidden state after the final norm; None: no field.
    capture: target layers whose inputs are read; num_layers means the input of the final norm.
    hidden_from: the source of the hidden state that draft layer k (from 1) reads at token q.  "target": the target at
    token q - k; "chain": layer k - 1 at token q - 1, where layer 0 is the target; None: no source.
    reentry: rows 0 .. reentry-1 of a draft layer do not exist.  After a prefix hit of m tokens, rows from m - reentry
    on are computed again, because pages do not hold their hidden states.
    carried: tensors that each slot carries from launch to launch, as shapes by name.
    vocab_size: size of the draft's vocabulary; below the target's if the draft has a map (DraftModel.d2t).
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
    """A draft's config.json, checked against its target's.  layer: the config of its decoder layers."""

    @property
    def spec(self) -> DraftSpec: ...

    @property
    def layer(self) -> ModelConfig: ...


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """[B, Q, H] each.  hidden: input of the rows that follow; normed: input of the lm_head."""

    hidden: Tensor
    normed: Tensor


class DraftModel(Protocol):
    """A loaded draft model.  A row belongs to its token q; the caller passes q - reentry as its RoPE position.

    d2t: [draft vocabulary] int64, the target id of each draft id; None if both vocabularies are the same.
    """

    spec: DraftSpec
    layer_specs: tuple[LayerSpec, ...]
    d2t: Tensor | None

    @property
    def fuse(self) -> Callable[[Tensor], Tensor]:
        """The target's features [..., F] (`spec.reads`) -> hidden states [..., H] that the next tokens' rows read."""
        ...

    def __call__(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, parents: Tensor | None = None
    ) -> DraftOutput:
        """Run over new rows.  tokens, positions: int64 [B, Q]; layer i calls `attend(i, ...)`.

        hidden: [B, R, H], fused features or the hidden states of earlier rows; parents: int64 [B, Q], index of the row
        of `hidden` that each new row reads; None: row i reads row i.
        """
        ...

    def output_of(self, hidden: Tensor) -> DraftOutput:
        """The output of rows of which only `hidden` was kept."""
        ...

    def logits(self, out: DraftOutput) -> Tensor:
        """[B, Q, draft vocabulary] in the model's dtype."""
        ...


def draft_verifier(path: Path | str) -> str | None:
    """The target that a draft in the speculators format names.  With it, a user may give the draft alone."""
    speculators: Mapping[str, Any] = read_json(Path(path) / "config.json").get("speculators_config") or {}
    return (speculators.get("verifier") or {}).get("name_or_path")
