"""The declaration of a draft (DraftSpec), and the interface of a loaded draft model (DraftModel).

A DraftSpec depends only on the config.json of the draft and of its target.  So the engine computes the sizes of cache
pages and of the tensors kept for a request before it reads weights.
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
from espalier.model_files import add_path_to_errors, read_json
from espalier.models.config import ModelConfig

# The hidden state that a module reads (DraftSpec.hidden_source).
HiddenSource = Literal["chain", "target"]
# The largest number of modules, N.  If a prompt is prefilled in chunks, the modules read up to N tokens of the
# preceding chunk.  So N is at most the length of the shortest chunk.
MAX_MODULES = MIN_CHUNK_WIDTH


@dataclass(frozen=True)
class DraftSpec:
    """A draft's declaration.  Without a draft model (n-gram, plain decoding), all fields but `algorithm` are defaults.

    algorithm: the name of the speculation algorithm, as in the user's setting `algorithm`.
    layer_specs: the specs of the draft's layers, module after module.  Cache pages hold them after the target's layers.
    num_modules: N, the number of modules (a term of DeepSeek-V3).  All modules have the same number of layers.  Module
    l proposes level l of a tree; module N proposes all levels from N on.  An EAGLE head is one module; an MTP head has
    one module per layer.  A P-EAGLE head is one module, which proposes all levels in one pass.  A block draft has 0
    modules.
    block_rows: the rows of the pass that proposes all levels; 0 for drafts that propose one level per pass.
    max_steps: the largest depth that a draft can propose in one pass, which limits a tree's depth; None for no limit.
    mask_token_id: the input token of mask rows, which are all rows of a block except the root's row.
    first_proposing_row: the index in a block of the row that proposes depth 1: 0 (the root) or 1 (the first mask row).
    is_causal_layer: for each layer of a block draft, whether a block row does not attend to later rows of its block.
    windows_end_at_root: whether the sliding windows of all block rows end at the root; if false, the window of a row
    ends at that row.
    hidden_source: the hidden state that module k (counted from 1) reads at token q.  "chain": the output of module k -
    1 at token q - 1, where module 0 is the target.  "target": the target's hidden state at token q - k.  With one
    module, both are the same.
    target_output: the field of the target's ModelOutput that the draft reads.  "captured": the concatenated inputs of
    the layers `captured_layers`; "hidden": the last hidden state after the final norm; None if the draft reads no
    field.
    captured_layers: the target layers whose inputs the draft reads; the index num_layers means the final norm's input.
    hidden_size: H, the size of the hidden states that modules read and return.
    vocab_size: the size of the draft's vocabulary; smaller than the target's if the draft has DraftModel.d2t.

    Raises EspalierError if the number of layers is not a multiple of the number of modules."""

    algorithm: str
    layer_specs: tuple[LayerSpec, ...] = ()
    num_modules: int = 0
    block_rows: int = 0
    max_steps: int | None = None
    mask_token_id: int = 0
    first_proposing_row: int = 0
    is_causal_layer: tuple[bool, ...] = ()
    windows_end_at_root: bool = True
    hidden_source: HiddenSource = "chain"
    target_output: Literal["captured", "hidden"] | None = None
    captured_layers: tuple[int, ...] = ()
    hidden_size: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        if self.block_rows and not self.num_modules:
            return
        divided = len(self.layer_specs) % self.num_modules == 0 if self.num_modules else not self.layer_specs
        if not divided or not 0 <= self.num_modules <= MAX_MODULES or bool(self.layer_specs) != bool(self.num_modules):
            raise EspalierError(
                f"a draft of {len(self.layer_specs)} layers in {self.num_modules} modules is not supported; use 1 to "
                f"{MAX_MODULES} modules with equally many layers"
            )

    @property
    def num_recomputed_tokens(self) -> int:
        """The number of tokens of a cached prefix that the target computes again.
        After a prefix hit of m tokens, the modules continue with row m.  Row m of module k depends on the target's
        hidden state at token m - k, and pages hold no hidden states.  So the target runs again from token m - N on.
        The number is 0 for a block draft, whose rows depend only on the target's row of the same token."""
        return self.num_modules

    @property
    def num_root_rows(self) -> int:
        """1 if the draft's cache holds a row of the root token, else 0.
        A module computes the root's row from the target's hidden state at the token before the root, so the cache holds
        the root's row.  A block draft without modules computes a token's row from the target's hidden states at this
        token, which are not known for the root."""
        return 0 if self.block_rows and not self.num_modules else 1

    @property
    def slot_tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes, by name, of the draft's tensors that are kept for each request between decoding steps.
        hidden: the output of module 1 at the root.  feedk, for k from 2 to N: the hidden state that module k reads at
        the token after the root."""
        names = ["hidden", *(f"feed{k}" for k in range(2, self.num_modules + 1))] if self.num_modules else []
        return dict.fromkeys(names, (self.hidden_size,))

    @property
    def layers_per_module(self) -> int:
        return len(self.layer_specs) // self.num_modules if self.num_modules else 0


class DraftConfig(Protocol):
    """A draft's config.json, checked against its target's.  layer: the config of the draft's decoder layers."""

    @property
    def spec(self) -> DraftSpec: ...

    @property
    def layer(self) -> ModelConfig: ...


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """The output of a module: two tensors [B, Q, H], or [B, 1, H] in a pass that computes one row of
    each request (`needed_row`).
    hidden: the hidden states that the rows of child tokens read.  normed: the input of the lm_head."""

    hidden: Tensor
    normed: Tensor

    def last_rows(self, rows: int) -> "DraftOutput":
        """Returns the last `rows` rows of each request, or all rows if there are fewer."""
        if self.hidden.shape[1] <= rows:
            return self
        return DraftOutput(self.hidden[:, -rows:], self.normed[:, -rows:])


class DraftModule(Protocol):
    """One module of a draft.  The row of token q in module k has RoPE position q - k."""

    def __call__(self, p: Pass, hidden: Tensor, parents: Tensor | None = None) -> DraftOutput:
        """Computes the module's output for the rows of a pass.
        hidden: [B, R, H], R vectors of each request: fused features or hidden states of earlier rows.  parents: int64
        [B, Q], for each row of the pass the index of the vector in `hidden` that the row reads; None if row i reads
        vector i."""
        ...

    def output_from_hidden(self, hidden: Tensor) -> DraftOutput:
        """Returns the DraftOutput of rows from their `hidden` [..., H], without running the module."""
        ...

    def logits(self, out: DraftOutput) -> Tensor:
        """Returns the logits [B, Q, draft vocabulary] of an output, in the model's dtype."""
        ...


class DraftModel(Protocol):
    """A loaded draft model.  A block draft (BlockModel) has no modules.
    modules: the `spec.num_modules` modules, in order.
    has_experts: whether the model has experts.  Experts must skip padding rows.
    d2t: [draft vocabulary] int64, the target id of each draft id; None if both vocabularies are the same."""

    spec: DraftSpec
    layer_specs: tuple[LayerSpec, ...]
    d2t: Tensor | None

    @property
    def modules(self) -> Sequence[DraftModule]: ...

    @property
    def has_experts(self) -> bool: ...

    @property
    def fuse(self) -> Callable[[Tensor], Tensor]:
        """A function from the target's features [..., F] (`spec.target_output`) to hidden states [..., H]."""
        ...


class EdgeScorer(Protocol):
    """The part of a block draft that scores tokens given their parents: DSpark's Markov head or DFlash 2's selector."""

    def score_edges(self, logits: Tensor, hidden: Tensor) -> LowRankEdges:
        """Returns the scores of the edges from parent tokens to tokens, in one block of each request.
        logits: [B, S, draft vocabulary], the part of the scores that does not depend on the parent token.
        hidden: [B, S, H], the inputs of the lm_head."""
        ...


class BlockModel(DraftModel, Protocol):
    """A loaded block draft: one pass over a block of rows proposes all depths.

    The rows of a block are the root and mask tokens at the next positions.  Block rows attend to rows of their block
    and to context rows.  Each token before the root has one context row.  Pages keep context rows, but no block rows.

    edge_scorer: scores that depend on the parent token; None if the draft has no such scores."""

    edge_scorer: EdgeScorer | None

    def __call__(self, p: Pass) -> Tensor:
        """Computes the rows of a block.  Returns the input of the lm_head, [B, Q, H]."""
        ...

    def block_logits(self, hidden: Tensor) -> Tensor:
        """Converts inputs of the lm_head [..., H] to logits [..., draft vocabulary] in the model's dtype."""
        ...

    def write_context(self, features: Tensor, p: Pass) -> None:
        """Writes the context rows of a pass to the cache, in every layer.
        features: [B, W, F], the target's features (`spec.target_output`) at W tokens of each request."""
        ...


def refuse_wrong_sizes(path: Path, target: ModelConfig, hidden: int, vocab: int, draft_vocab: int = 1) -> None:
    """Raises EspalierError for a draft, in the directory `path`, whose sizes do not fit its target.
    hidden: the size of the target's hidden states that the draft reads.  vocab: the number of tokens that the draft
    embeds.  draft_vocab: the number of tokens that the draft can propose."""
    for name, size, needed in (("hidden size", hidden, target.hidden_size), ("vocabulary", vocab, target.vocab_size)):
        if size != needed:
            raise EspalierError(
                f"{path} does not fit its target: {name} {size}, the target has {needed}; use the draft trained for it"
            )
    if not 1 <= draft_vocab <= target.vocab_size:
        raise EspalierError(
            f"{path}: draft_vocab_size = {draft_vocab}, the target's vocabulary is {target.vocab_size}; use the draft "
            "trained for it"
        )


def draft_verifier(path: Path | str) -> str | None:
    """Returns the path or name of the target ("verifier") that a draft's config.json in the format of speculators
    names.  Returns None if the config names no target; then the user must name it."""
    speculators: Mapping[str, Any] = read_json(Path(path) / "config.json").get("speculators_config") or {}
    with add_path_to_errors(Path(path)):
        return (speculators.get("verifier") or {}).get("name_or_path")
