"""The declaration of a draft (DraftSpec), and the contract of a loaded draft model (DraftModel).

A DraftSpec follows from the config.json of the draft and of its target.  So memory, pages and slots are sized before
weights are read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.tree.edges import LowRankEdges
from espalier.layout import MIN_CHUNK_WIDTH
from espalier.model_files import naming_config, read_json
from espalier.models.config import ModelConfig

# DraftSpec.form.
Form = Literal["chain", "target"]
# A piece of a prompt holds the tokens that the modules of the next piece look back to.
MAX_MODULES = MIN_CHUNK_WIDTH


@dataclass(frozen=True)
class DraftSpec:
    """A draft's declaration.  Without a draft model (n-gram, plain decoding), all fields but `algorithm` are defaults.

    algorithm: the name that users give.
    layers: specs of the draft's layers, module after module; pages keep them after the target's.
    modules: N, the modules of the draft, each with as many layers.  Module l proposes level l of a tree; the last one
    proposes all levels from N on.  An EAGLE head is one module, and so is each MTP layer (DeepSeek-V3's word).  0 for a
    block draft, whose layers all run in its one pass.  P-EAGLE's one module extends as EAGLE's and proposes in a pass.
    block_rows: the rows of that pass; 0 for drafts that propose one level a pass.
    max_steps: the depth that this pass proposes, which a tree must not exceed; None: no limit.
    mask_token: the token of all rows of this pass but the root's.
    first_proposing: the row of a block that proposes depth 1: 0, the root's, or 1, the first mask.
    causal: for each layer of a block draft, whether a block row sees no later block row.
    windows_from_root: whether a sliding window is the same for all rows of a block, counted from the root; if not, each
    row counts from its own position.
    form: the hidden state that module k (from 1) reads at token q.  "chain": the output of module k - 1 at token q - 1,
    where module 0 is the target; "target": the target's at token q - k.  Both are the same for one module.
    reads: the field of the target's ModelOutput that the draft reads.  "captured": the inputs of the layers `capture`,
    concatenated; "hidden": the last hidden state after the final norm; None: no field.
    capture: target layers whose inputs are read; num_layers means the input of the final norm.
    hidden_size: H, of the hidden states that modules read and hand on.
    vocab_size: size of the draft's vocabulary; below the target's if the draft has a map (DraftModel.d2t).

    Raises EspalierError for layers that cannot be divided among the modules.
    """

    algorithm: str
    layers: tuple[LayerSpec, ...] = ()
    modules: int = 0
    block_rows: int = 0
    max_steps: int | None = None
    mask_token: int = 0
    first_proposing: int = 0
    causal: tuple[bool, ...] = ()
    windows_from_root: bool = True
    form: Form = "chain"
    reads: Literal["captured", "hidden"] | None = None
    capture: tuple[int, ...] = ()
    hidden_size: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        if self.block_rows and not self.modules:
            return
        divided = len(self.layers) % self.modules == 0 if self.modules else not self.layers
        if not divided or not 0 <= self.modules <= MAX_MODULES or bool(self.layers) != bool(self.modules):
            raise EspalierError(
                f"a draft of {len(self.layers)} layers in {self.modules} modules is not supported; use 1 to "
                f"{MAX_MODULES} modules with equally many layers"
            )

    @property
    def reentry(self) -> int:
        """Rows 0 .. k-1 of module k do not exist.  After a prefix hit of m tokens, the target's rows from m - reentry
        on are computed again: pages hold no hidden states, and row m of the last module follows from those rows.  A row
        of a block draft follows from the target's row of its own token, so nothing is computed again."""
        return self.modules

    @property
    def root_rows(self) -> int:
        """Committed rows of the root: 1 if its row follows from the feature of the token before it, 0 for a block
        draft without modules, whose rows follow from the features of their own tokens."""
        return 0 if self.block_rows and not self.modules else 1

    @property
    def carried(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors that each slot carries from launch to launch, as shapes by name.

        hidden: the output of module 1 at the root.  feed2 to feedN: the hidden state that module k reads at the token
        after the root.
        """
        names = ["hidden", *(f"feed{k}" for k in range(2, self.modules + 1))] if self.modules else []
        return dict.fromkeys(names, (self.hidden_size,))

    @property
    def layers_per_module(self) -> int:
        return len(self.layers) // self.modules if self.modules else 0


class DraftConfig(Protocol):
    """A draft's config.json, checked against its target's.  layer: the config of its decoder layers."""

    @property
    def spec(self) -> DraftSpec: ...

    @property
    def layer(self) -> ModelConfig: ...


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """[B, Q, H] each, or [B, 1, H] in a pass with `needed`.  hidden: input of the rows that follow; normed: input of
    the lm_head."""

    hidden: Tensor
    normed: Tensor

    def last(self, rows: int) -> "DraftOutput":
        """The last `rows` rows of each request, or all if there are fewer."""
        if self.hidden.shape[1] <= rows:
            return self
        return DraftOutput(self.hidden[:, -rows:], self.normed[:, -rows:])


class DraftModule(Protocol):
    """One module of a draft.  A row of module k belongs to its token q, and has RoPE position q - k."""

    def __call__(self, p: Pass, hidden: Tensor, parents: Tensor | None = None) -> DraftOutput:
        """Run over the rows of a pass, whose layers are the module's.

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


class DraftModel(Protocol):
    """A loaded draft model.  A block draft (BlockModel) has no modules.

    modules: `spec.modules` of them, in order.
    has_experts: whether rows go to experts, so that padding should not.
    d2t: [draft vocabulary] int64, the target id of each draft id; None if both vocabularies are the same.
    """

    spec: DraftSpec
    layer_specs: tuple[LayerSpec, ...]
    d2t: Tensor | None

    @property
    def modules(self) -> Sequence[DraftModule]: ...

    @property
    def has_experts(self) -> bool: ...

    @property
    def fuse(self) -> Callable[[Tensor], Tensor]:
        """The target's features [..., F] (`spec.reads`) -> hidden states [..., H] that rows read."""
        ...


class Edges(Protocol):
    """What makes a block draft's scores depend on the tokens before (DSpark's Markov head, DFlash 2's selector)."""

    def of_block(self, logits: Tensor, hidden: Tensor) -> LowRankEdges:
        """logits: [B, S, draft vocabulary], which do not depend on the tokens before; hidden: [B, S, H], the inputs of
        the head that gave them."""
        ...


class BlockModel(DraftModel, Protocol):
    """A loaded block draft: one pass over a block of rows proposes all depths.

    The rows are the root and mask tokens, at the positions from the root on.  They attend to context rows, one for each
    token before the root, and to one another.  Context rows are kept in pages; block rows are not.

    edges: None if a depth's scores do not depend on the tokens before.
    """

    edges: Edges | None

    def __call__(self, p: Pass) -> Tensor:
        """Run over the rows of a block.  Returns the input of the head, [B, Q, H]."""
        ...

    def block_logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., draft vocabulary] in the model's dtype."""
        ...

    def write_context(self, features: Tensor, p: Pass) -> None:
        """Write the context rows of a pass, in every layer.

        features: [B, W, F], the target's (`spec.reads`) at the tokens of the pass.
        """
        ...


def refuse_sizes(path: Path, target: ModelConfig, hidden: int, vocab: int, draft_vocab: int = 1) -> None:
    """Raises EspalierError if the sizes in a draft's config.json do not fit its target.

    hidden: of the hidden states that it reads of the target; vocab: of the tokens that it embeds; draft_vocab: of the
    tokens that it proposes.
    """
    for what, have, need in (("hidden size", hidden, target.hidden_size), ("vocabulary", vocab, target.vocab_size)):
        if have != need:
            raise EspalierError(
                f"{path} does not fit its target: {what} {have}, the target has {need}; use the draft trained for it"
            )
    if not 1 <= draft_vocab <= target.vocab_size:
        raise EspalierError(
            f"{path}: draft_vocab_size = {draft_vocab}, the target's vocabulary is {target.vocab_size}; use the draft "
            "trained for it"
        )


def draft_verifier(path: Path | str) -> str | None:
    """The target that a draft in the speculators format names.  With it, a user may give the draft alone."""
    speculators: Mapping[str, Any] = read_json(Path(path) / "config.json").get("speculators_config") or {}
    with naming_config(Path(path)):
        return (speculators.get("verifier") or {}).get("name_or_path")
