"""DFlash 2 drafts: DFlash (block.py) with convolutions over the rows of a block, and a selector of candidate tokens.

The normed input and the output of each sublayer (attention or MLP) are convolved: a row is combined with the earlier
rows of its block (kernels/layers/block_conv.py).  Context rows are not convolved.  The selector scores the likeliest
tokens of each depth, given the parent token.  The score of token v after parent u is logit(v) + sum over r of
parent_codebook[u, r] · project(hidden)[r] · token_codebook[v, r].
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.ops.drafts import block_conv, block_conv_norm
from espalier.kernels.tree.edges import LowRankEdges
from espalier.models.base import CausalLM
from espalier.models.block import (
    BlockConfig,
    BlockDraft,
    load_block_fields,
    make_block_spec,
    read_dflash_fields,
    read_layer_config,
    read_speculators_config,
    refuse_mismatch,
)
from espalier.models.config import Json, ModelConfig
from espalier.models.draft_parts import DraftFields
from espalier.models.layers.attention import Attention
from espalier.models.layers.decoder import DecoderLayer, PlainNormReader, cap_logits
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.norm import AnyNorm, RMSNorm
from espalier.models.layers.residual import Residual
from espalier.models.weight_formats.sharded import sum_over_ranks
from espalier.models.weights import Weights
from espalier.shards import whole_part

ARCHITECTURES = ("DFlash2DraftModel",)
SPECULATORS_TYPES = ("dflash2",)
# The size fields of config.json, with the default values of the DFlash 2 package.
SIZE_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
SCALE_FIELDS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
DFLASH_FIELDS = ("target_layer_ids", "mask_token_id", "block_size", *SIZE_DEFAULTS, *SCALE_FIELDS)
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """A DFlash 2 draft's config.json, checked against its target's.
    conv_taps: the number of input rows that a convolution reads for one output row.  conv_group: the number of adjacent
    channels that share a coefficient.
    selector_rank: the rank of the codebooks.  selector_topk: the number of tokens of a depth that the selector scores.
    embedding_scale, logit_scale: the factors of embeddings and of logits.  logit_cap: the soft cap of logits,
    tanh(logit / cap) · cap; None for no cap."""

    conv_taps: int
    conv_group: int
    selector_rank: int
    selector_topk: int
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None


def read_dflash2(path: Path, config_json: Json, target: ModelConfig) -> DFlash2Config:
    """Returns the config of the draft at `path`, checked against the target's config.  Loads no weights.
    Raises EspalierError if the draft does not fit this target, or has a format that is not supported."""
    fields = DraftFields(config_json, path)
    is_speculators = fields.get("speculators_model_type") is not None
    config = (_read_speculators_config if is_speculators else _read_z_lab_config)(fields, target)
    refuse_mismatch(config, target, path)
    _refuse_wrong_sizes(config, fields)
    return config


def _read_z_lab_config(top_fields: DraftFields, target: ModelConfig) -> DFlash2Config:
    """Returns the config of a draft in the format of z-lab.  top_fields: the fields at config.json's top level."""
    fields = read_dflash_fields(top_fields, DFLASH_FIELDS).with_defaults(
        {"block_size": DEFAULT_BLOCK_SIZE, **top_fields.raw}
    )
    layer_fields = {name: value for name, value in top_fields.raw.items() if name not in SCALE_FIELDS}
    layer = read_layer_config(DraftFields(layer_fields, top_fields.path), target)
    is_causal = top_fields.get("is_causal")
    causal = tuple(window is not None if is_causal is None else bool(is_causal) for window in layer.windows)
    spec = make_block_spec(
        *(fields, layer),
        captured_layers=tuple(k + 1 for k in fields.target_layers("target_layer_ids")),
        first_proposing_row=1,
        is_causal_layer=causal,
        algorithm="dflash2",
        windows_end_at_root=False,
    )
    for window, is_causal_layer in zip(layer.windows, causal, strict=True):
        if window is not None and window < spec.block_rows and not is_causal_layer:
            raise fields.error(
                f"sliding_window = {window} is below block_size = {spec.block_rows} in a layer that is not causal, "
                "which is not supported; use a draft with a wider window"
            )
    scale, cap, embedding_scale = map(fields.number, SCALE_FIELDS)
    return DFlash2Config(
        layer=layer,
        spec=spec,
        embedding_scale=1.0 if embedding_scale is None else embedding_scale,
        logit_scale=1.0 if scale is None else scale,
        logit_cap=cap if cap is not None and cap > 0 else None,
        **_size_fields(fields),
    )


def _read_speculators_config(fields: DraftFields, target: ModelConfig) -> DFlash2Config:
    """Returns the config of a draft in the format of speculators.  fields: the draft's config.json."""
    base = read_speculators_config(fields.with_defaults({"sliding_window_non_causal": True}), target)
    return DFlash2Config(
        layer=base.layer,
        spec=replace(base.spec, algorithm="dflash2"),
        **_size_fields(fields.with_defaults(SIZE_DEFAULTS)),
    )


def _size_fields(fields: DraftFields) -> dict[str, Any]:
    """Returns the fields of DFlash2Config for convolutions and selector.  fields: the draft's config.json."""
    taps, group, rank, topk = (fields.integer(name, min_value=1) for name in SIZE_DEFAULTS)
    return {"conv_taps": taps, "conv_group": group, "selector_rank": rank, "selector_topk": topk}


def _refuse_wrong_sizes(config: DFlash2Config, fields: DraftFields) -> None:
    """Raises EspalierError for a config whose sizes do not fit together.  fields: make the errors, with the path."""
    hidden, vocab = config.layer.hidden_size, config.layer.vocab_size
    problems = {
        f"conv_group_size = {config.conv_group} does not divide the hidden size {hidden}": hidden % config.conv_group,
        f"conv_kernel_size = {config.conv_taps} is above block_size = {config.spec.block_rows}": (
            config.conv_taps > config.spec.block_rows
        ),
        f"selector_top_k = {config.selector_topk} is above the vocabulary of {vocab}": config.selector_topk > vocab,
        f"draft_vocab_size = {config.spec.vocab_size} is not the vocabulary of {vocab}, which a DFlash 2 draft needs": (
            config.spec.vocab_size != vocab
        ),
    }
    for problem, is_wrong in problems.items():
        if is_wrong:
            raise fields.error(f"{problem}; correct the config, or use another draft")


@dataclass(frozen=True)
class BlockConv:
    """Two convolutions with T taps each.  Index 0 is the convolution of a sublayer's input, index 1 that of its output.
    base_taps: [2, T, H], coefficients that are the same for all rows.  coefficient_weight: [2 · T · G, H], the
    projection that computes further coefficients from each row: one for each tap and each of the G channel groups."""

    base_taps: Tensor
    coefficient_weight: Tensor

    def convolve_input(self, normed: Tensor, block_width: int) -> tuple[Tensor, Tensor]:
        """Convolves normed rows [N, H] with the rows before them in their own block of `block_width` rows.
        Returns (the convolved rows [N, H], the coefficients for the convolution of the sublayer's output)."""
        return block_conv(normed, self.coefficient_weight, self.base_taps[0], block_width)


class PendingConvolution(NamedTuple):
    """A sublayer's output that is not yet convolved.  One kernel convolves the output, adds it to the residual and
    computes the next norm.  output: [N, H], or partial sums that the kernel adds.  coefficients, base_taps: see
    BlockConv, index 1.  block_width: the number of rows of a block."""

    output: Tensor
    coefficients: Tensor
    base_taps: Tensor
    block_width: int

    def add_and_norm(self, norm: AnyNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (x + the convolved output, the norm of that sum).  See residual.py:PendingAdd."""
        assert isinstance(norm, RMSNorm)
        convolution = self.output, self.coefficients, self.base_taps
        return block_conv_norm(*convolution, x, norm.weight, norm.eps, self.block_width)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions around its sublayers."""

    __slots__ = ("attention_conv", "mlp_conv")

    attention: Attention
    mlp: GatedMLP

    def __init__(self, layer: DecoderLayer, attention_conv: BlockConv, mlp_conv: BlockConv) -> None:
        """layer: has the norms, attention and MLP.  attention_conv, mlp_conv: convolve around these two blocks."""
        super().__init__(layer.index, layer.attention_norm, layer.attention, layer.mlp_norm, layer.mlp)
        self.attention_conv = attention_conv
        self.mlp_conv = mlp_conv

    def __call__(self, s: Residual, p: Pass) -> None:
        """Adds the outputs of attention and MLP to the residual `s`.  p: a pass over one block of each request."""
        block_width = p.tokens.shape[1]
        rows, coefficients = self.attention_conv.convolve_input(
            s.add_and_norm(self.attention_norm, PlainNormReader), block_width
        )
        q = self.attention.write_kv(self.index, rows, p)
        output = self.attention.project(p.attend(self.index, q, self.attention.sink))
        s.add(PendingConvolution(sum_over_ranks(output), coefficients, self.attention_conv.base_taps[1], block_width))
        rows, coefficients = self.mlp_conv.convolve_input(s.add_and_norm(self.mlp_norm, PlainNormReader), block_width)
        s.add(PendingConvolution(sum_over_ranks(self.mlp(rows)), coefficients, self.mlp_conv.base_taps[1], block_width))


@dataclass(frozen=True)
class CandidateSelector:
    """Scores the likeliest tokens of each depth, given the parent token.  parent_codebook, token_codebook: [V, rank].
    topk: the number of tokens of a depth that get scores."""

    parent_codebook: Tensor
    token_codebook: Tensor
    project: Linear
    topk: int

    def score_edges(self, logits: Tensor, hidden: Tensor) -> LowRankEdges:
        """Returns the scores of edges.  logits: [B, S, V].  hidden: [B, S, H], the inputs of the lm_head."""
        # If logits are equal, topk may choose any of their tokens.  The choice only affects which tokens are drafted.
        ids = logits.topk(self.topk, -1).indices.sort(-1).values
        token_vectors = self.token_codebook[ids] * self.project(hidden)[:, :, None]
        return LowRankEdges(logits.gather(2, ids), self.parent_codebook, token_vectors, ids)


@dataclass(eq=False)
class DFlash2Draft(BlockDraft):
    """A loaded DFlash 2 draft: a BlockModel (espalier/models/draft.py)."""

    config: DFlash2Config

    def block_logits(self, hidden: Tensor) -> Tensor:
        """Returns the scaled and capped logits [..., V].  hidden: [..., H], the inputs of the lm_head."""
        return cap_logits(super().block_logits(hidden), self.config.logit_cap, self.config.logit_scale)


def make_dflash2(weights: Weights, config: DFlash2Config, target: CausalLM, position_rows: int) -> DFlash2Draft:
    """Builds the draft from its weights.  A draft without an embedding or a head uses the target's.
    position_rows: the number of positions in the RoPE tables.
    Raises EspalierError naming a weight that does not fit or is not used."""
    hidden, vocab, rank = config.layer.hidden_size, config.layer.vocab_size, config.selector_rank
    rows = 2 * config.conv_taps * (hidden // config.conv_group)

    def load_conv(prefix: str) -> BlockConv:
        base_taps = weights.load(f"{prefix}.base_kernel", 2, config.conv_taps, hidden)
        return BlockConv(base_taps, weights.load_dense_matrix(f"{prefix}.kernel_projection", whole_part(rows), hidden))

    parent_codebook, token_codebook = (
        weights.load(f"candidate_selector.{name}_codebook", vocab, rank) for name in ("predecessor", "successor")
    )
    project = weights.linear("", ("candidate_selector.hidden_projection",), (whole_part(rank),), hidden, bias=False)
    selector = CandidateSelector(parent_codebook, token_codebook, project, config.selector_topk)
    draft_fields = load_block_fields(weights, config, target, position_rows)
    draft_fields["embed"] = Embedding(draft_fields["embed"].weight, config.embedding_scale)
    draft_fields["layers"] = [
        ConvolvedLayer(layer, *(load_conv(f"layers.{layer.index}.{name}_conv") for name in ("attention", "mlp")))
        for layer in draft_fields["layers"]
    ]
    draft = DFlash2Draft(**draft_fields, edge_scorer=selector)
    weights.require_all_used()
    return draft
