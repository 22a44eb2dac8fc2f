"""Block drafts (DFlash: Chen et al. 2026, arXiv:2602.06036; JetSpec; DSpark): one pass proposes every depth.

A block consists of the root token and of mask tokens at the next positions.  In each layer, the rows of a block attend
to one another and to the context rows.  Every layer has one context row for each token before the root: K and V, which
the layer projects from norm(fc(x)), where x is the target's captured hidden states of that token.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import LayerSpec, specs_of_rank
from espalier.errors import EspalierError
from espalier.kernels.tree.edges import FactorProjection, LowRankEdges, split_projection_columns
from espalier.models.base import CausalLM
from espalier.models.config import Json, ModelConfig, architecture_of, parse_config
from espalier.models.draft import DraftSpec, EdgeScorer, refuse_wrong_sizes
from espalier.models.draft_parts import DraftFields, draft_embedding, draft_head, draft_to_target
from espalier.models.families.qwen import QWEN3
from espalier.models.layer_loading import layer_specs_of, load_layer
from espalier.models.layers.attention import Attention
from espalier.models.layers.decoder import DecoderLayer
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.dense import dense_weight
from espalier.models.weights import Weights
from espalier.shards import whole_part

Z_LAB_ARCHITECTURE, DEEP_SPEC_ARCHITECTURE = "DFlashDraftModel", "Qwen3DSparkModel"
ARCHITECTURES = (Z_LAB_ARCHITECTURE, DEEP_SPEC_ARCHITECTURE)
SPECULATORS_TYPES = ("dflash", "dspark")
# DSpark's Markov head scores a token of the tree, given the tokens before it on its path.  A "vanilla" head reads only
# the parent token.  A "gated" head also reads the block's hidden state at the token's depth.  An "rnn" head reads this
# hidden state and all tokens of the path.
MarkovHeadType = Literal["vanilla", "gated", "rnn"]
MARKOV_HEAD_TYPES: tuple[MarkovHeadType, ...] = get_args(MarkovHeadType)
# For each type, the number of rows and of columns of the head's gate projection ("gated") or recurrent projection
# ("rnn"), as multiples of the rank.  Columns that read the hidden state are not counted.
MARKOV_PROJECTION_SIZES: Mapping[MarkovHeadType, tuple[int, int]] = {"vanilla": (0, 0), "gated": (1, 1), "rnn": (3, 2)}
# The fields of dflash_config that the reader supports.
DFLASH_FIELDS = ("target_layer_ids", "mask_token_id", "block_size", "causal_head", "target_hidden_size", "draft_shift")
# A file in some of z-lab's drafts.  In such a draft, the input of mask rows is a vector that is no token's embedding.
MASK_EMBEDDING = "mask_embedding.pt"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockConfig:
    """A block draft's config.json, checked against its target's.
    layer: the config of the decoder layers.  If `spec.windows_end_at_root` is set, layer.windows count only
    the tokens before the root.
    markov_rank: the rank of the Markov head; 0 for a draft without a Markov head.  markov_head_type: what the Markov
    head reads (MarkovHeadType)."""

    layer: ModelConfig
    spec: DraftSpec
    markov_rank: int = 0
    markov_head_type: MarkovHeadType = "vanilla"


def make_block_spec(
    fields: DraftFields,
    layer: ModelConfig,
    first_proposing_row: int,
    windows_end_at_root: bool = True,
    **spec_fields: Any,
) -> DraftSpec:
    """Returns the spec of a block draft.
    fields: config.json, with the fields of its nested objects at the top level.  layer: the config of the decoder
    layers.  first_proposing_row, windows_end_at_root: fields of DraftSpec.
    spec_fields: further fields of DraftSpec.  By default, algorithm is "block" and vocab_size is that of `layer`."""
    block_rows, layer_specs = fields.integer("block_size"), layer_specs_of(layer)
    if windows_end_at_root:
        # A window in config.json counts only the tokens before the root.  LayerSpec.window counts the root too.
        layer_specs = tuple(
            spec if spec.window is None else replace(spec, window=spec.window + 1) for spec in layer_specs
        )
    return DraftSpec(
        **{"algorithm": "block", "vocab_size": layer.vocab_size, **spec_fields},
        layer_specs=layer_specs,
        block_rows=block_rows,
        max_steps=block_rows - first_proposing_row,
        mask_token_id=fields.mask_token(layer.vocab_size),
        first_proposing_row=first_proposing_row,
        windows_end_at_root=windows_end_at_root,
        target_output="captured",
        hidden_size=layer.hidden_size,
    )


def read_block(path: Path, config_json: Json, target: ModelConfig) -> BlockConfig:
    """Returns the config of the draft at `path`, checked against the target's config.  Loads no weights.
    Raises EspalierError if the draft does not fit this target, or has a format that is not supported."""
    read = _read_publisher_config if config_json.get("speculators_model_type") is None else read_speculators_config
    config = read(DraftFields(config_json, path), target)
    refuse_mismatch(config, target, path)
    return config


def _read_publisher_config(fields: DraftFields, target: ModelConfig) -> BlockConfig:
    """Returns the config of a draft in the format of z-lab or of DeepSpec, not yet checked against the target."""
    is_deep_spec = architecture_of(dict(fields.raw)) == DEEP_SPEC_ARCHITECTURE
    dflash_fields = read_dflash_fields(fields, DFLASH_FIELDS)
    layer = read_layer_config(fields, target, dflash_fields.get("target_hidden_size"))
    if any(layer.windows):
        raise fields.error(
            "sliding windows are supported for block drafts in speculators' form only, because public code "
            "disagrees about them in this one; use a draft with full attention, or convert it with speculators"
        )
    causal = dflash_fields.is_set("causal_head")
    for name in ("is_causal", "causal"):
        if fields.get(name) and not causal:
            raise fields.error(
                f"{name} = {fields.get(name)!r} is not supported in this form, because public code disagrees about "
                "it; use a draft without it, or convert it with speculators"
            )
    merged = fields.with_defaults(dflash_fields.raw)
    if not is_deep_spec:
        ids = dflash_fields.get("target_layer_ids") or _default_target_layers(target.num_layers, layer.num_layers)
        merged = DraftFields({**merged.raw, "target_layer_ids": ids}, fields.path)
    spec = make_block_spec(
        *(merged, layer),
        captured_layers=tuple(k + 1 for k in merged.target_layers("target_layer_ids")),
        first_proposing_row=0 if is_deep_spec else 1,
        is_causal_layer=(causal,) * layer.num_layers,
    )
    return BlockConfig(layer, spec, *(_read_markov_fields(fields) if is_deep_spec else ()))


def read_speculators_config(fields: DraftFields, target: ModelConfig) -> BlockConfig:
    """Returns the config of a draft in the format of speculators, not yet checked against the target."""
    layer = read_layer_config(DraftFields(fields.layer_config(), fields.path), target, fields.get("target_hidden_size"))
    is_dspark = fields.get("speculators_model_type") == "dspark"
    slides_causally = not fields.is_set("sliding_window_non_causal")
    spec = make_block_spec(
        *(fields, layer),
        captured_layers=fields.target_layers("aux_hidden_state_layer_ids"),
        first_proposing_row=0 if fields.is_set("sample_from_anchor", is_dspark) else 1,
        is_causal_layer=tuple(window is not None and slides_causally for window in layer.windows),
        vocab_size=fields.draft_vocab(layer.vocab_size),
    )
    if not is_dspark:
        return BlockConfig(layer, spec)
    rank, head_type = _read_markov_fields(fields.with_defaults({"markov_rank": 256}))
    if rank and head_type == "rnn" and spec.first_proposing_row:
        # Such a head was trained to read the root token twice, at the root's row and at depth 1 (not implemented here).
        raise fields.error(
            "markov_head_type = 'rnn' with sample_from_anchor = False is not supported; use a draft that "
            "samples from the anchor"
        )
    return BlockConfig(layer, spec, rank, head_type)


def read_layer_config(fields: DraftFields, target: ModelConfig, target_hidden: int | None = None) -> ModelConfig:
    """Returns the config of the draft's decoder layers, which must be Qwen3 layers of the target's hidden size.
    target_hidden: the target's hidden size according to the draft's config; None if the config does not have it.
    Raises EspalierError for layers of another family or hidden size."""
    declared, supported = fields.get("model_type"), QWEN3.model_type
    if declared != supported:
        raise fields.error(
            f"a block draft's layers of model_type {declared!r} are not supported; supported: {supported}"
        )
    layer = parse_config({"max_position_embeddings": target.max_position, **fields.raw}, QWEN3, fields.path)
    if target_hidden not in (None, layer.hidden_size):
        raise fields.error(
            f"target_hidden_size = {target_hidden} differs from the draft's hidden_size = {layer.hidden_size}, which "
            "is not supported; use a draft of the target's hidden size"
        )
    return layer


def _default_target_layers(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Returns the target layers that z-lab's drafts read by default: from 1 to the last but two, evenly spaced."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    last = num_target_layers - 3
    return [round(1 + i * (last - 1) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def _read_markov_fields(fields: DraftFields) -> tuple[int, MarkovHeadType]:
    """Returns the rank and the type of the Markov head; the rank is 0 if there is no head."""
    rank = fields.integer("markov_rank", min_value=0) if fields.get("markov_rank") else 0
    if not rank:
        return 0, "vanilla"
    remedy = f"a draft whose Markov head is one of {', '.join(MARKOV_HEAD_TYPES)}"
    return rank, fields.choice("markov_head_type", MARKOV_HEAD_TYPES, remedy)


def read_dflash_fields(fields: DraftFields, supported: Sequence[str]) -> DraftFields:
    """Returns the fields of `dflash_config`, an object in the config.json of z-lab's drafts.
    Raises EspalierError for a field that is not in `supported`, because such a field may change the results."""
    dflash_fields, path = fields.nested_object("dflash_config"), fields.path
    for name, value in dflash_fields.raw.items():
        if name not in supported or (name == "draft_shift" and value):
            raise fields.error(
                f"dflash_config has {name} = {value!r}, which is not supported; supported fields are "
                f"{', '.join(supported)}; use a draft without it"
            )
    if (path / MASK_EMBEDDING).exists():
        raise EspalierError(
            f"{path} holds {MASK_EMBEDDING}, a mask that is no token of the vocabulary; this is not supported: use a "
            "draft whose mask_token_id is a token"
        )
    return dflash_fields


def refuse_mismatch(config: BlockConfig, target: ModelConfig, path: Path) -> None:
    """Raises EspalierError if the sizes or captured layers of the draft (`config`, in `path`) do not fit the target."""
    refuse_wrong_sizes(path, target, config.layer.hidden_size, config.layer.vocab_size, config.spec.vocab_size)
    # A captured layer with the index num_layers would mean the input of the final norm.  It is not supported, because
    # some public implementations apply the norm to this input, and others do not.
    outside = [layer for layer in config.spec.captured_layers if not 0 <= layer < target.num_layers]
    if outside:
        raise EspalierError(
            f"{path} fuses the input of layer {outside[0]} of its target, whose layers are 0 .. "
            f"{target.num_layers - 1}; use the target that the draft was trained for"
        )


@dataclass(frozen=True)
class MarkovHead:
    """DSpark's Markov head: scores a token given the parent token, by a product of two low-rank matrices.

    parent_vectors: [V, rank]; token_vectors: [draft vocabulary, rank].
    hidden_projection: the columns of the head's gate projection or recurrent projection that read hidden states.
    row_projection: the other columns of this projection (FactorProjection.weight).  hidden_projection and
    row_projection are None if the head reads only the parent token.
    is_recurrent: whether the head reads all earlier tokens of the path (type "rnn")."""

    parent_vectors: Tensor
    token_vectors: Tensor
    hidden_projection: Linear | None = None
    row_projection: Tensor | None = None
    is_recurrent: bool = False

    def score_edges(self, logits: Tensor, hidden: Tensor) -> LowRankEdges:
        """Returns the scores of edges.  logits: [B, S, draft vocabulary].  hidden: [B, S, H], the lm_head's inputs."""
        projection = None
        if self.hidden_projection is not None and self.row_projection is not None:
            projection = FactorProjection(self.hidden_projection(hidden), self.row_projection, self.is_recurrent)
        return LowRankEdges(logits, self.parent_vectors, self.token_vectors, projection=projection)


@dataclass(eq=False)
class BlockDraft:
    """A loaded block draft: a BlockModel (espalier/models/draft.py).
    layer_specs: what this rank's part of each layer stores in the KV cache.  fc, context_norm: compute, from the
    target's captured hidden states, the vector that context_kv projects.  context_kv: the K and V projections of each
    layer, as views of the layer's stacked q, k and v weights.
    d2t: the target id of each draft id; None if both vocabularies are the same.  edge_scorer: None if the draft has no
    Markov head."""

    modules = ()
    has_experts = False

    config: BlockConfig
    layer_specs: tuple[LayerSpec, ...]
    rope: RopeTables
    embed: Embedding
    fc: Linear
    context_norm: RMSNorm
    layers: list[DecoderLayer]
    norm: RMSNorm
    head: Linear
    d2t: Tensor | None
    edge_scorer: EdgeScorer | None

    def __post_init__(self) -> None:
        self.spec = self.config.spec
        q_rows = self.layer_specs[0].heads * self.config.layer.head_size
        self.context_kv = [_attention_of(layer).qkv.rows_from(q_rows) for layer in self.layers]

    def __call__(self, p: Pass) -> Tensor:
        """Returns the inputs of the lm_head, [B, Q, H].  p: a pass over the block of each request."""
        s = self.embed(p, self.rope)
        for layer in self.layers:
            layer(s, p)
        return s.final_norm(self.norm, p.out_shape)[1]

    def block_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [..., draft vocabulary].  hidden: [..., H], the inputs of the lm_head."""
        return self.head(hidden)

    def fuse(self, features: Tensor) -> Tensor:
        """Returns [..., H], the vectors that `context_kv` projects.  features: [..., F], the target's hidden states."""
        return self.context_norm(self.fc(features))

    def write_context(self, features: Tensor, p: Pass) -> None:
        """Writes K and V of every layer to the cache.  features: [B, W, F], the target's hidden states at W tokens."""
        context = self.fuse(features).flatten(0, 1)
        for layer, project in zip(self.layers, self.context_kv, strict=True):
            heads = project(context).unflatten(1, (-1, self.config.layer.head_size))
            p.write(layer.index, heads, p.rotation(self.rope), _attention_of(layer).norms)


def _attention_of(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.attention, Attention)
    return layer.attention


def make_block(weights: Weights, config: BlockConfig, target: CausalLM, position_rows: int) -> BlockDraft:
    """Builds the draft from its weights.  A draft without an embedding or a head uses the target's.
    position_rows: the number of positions in the RoPE tables.
    Raises EspalierError naming a weight that does not fit or is not used."""
    draft = BlockDraft(
        **load_block_fields(weights, config, target, position_rows), edge_scorer=_load_markov_head(weights, config)
    )
    weights.require_all_used()
    return draft


def load_block_fields(weights: Weights, config: BlockConfig, target: CausalLM, position_rows: int) -> dict[str, Any]:
    """Loads the fields of a BlockDraft, without `edge_scorer`.  Returns them by name.  weights: the draft's."""
    layer, spec, eps = config.layer, config.spec, config.layer.rms_norm_eps
    hidden = layer.hidden_size
    embed = draft_embedding(weights, (layer.vocab_size, hidden), target)
    if weights.has_matrix("confidence_head.proj"):
        # The confidence head decides when drafting stops.  A tree ranks its paths by probability, so it does not need
        # the confidence head.
        log.info("draft %s: its confidence head is not used", weights.path)
        weights.allow_unused_prefixes(("confidence_head.",))
    weights.allow_unused(["t2d"])
    rope = RopeTables(layer.rope, position_rows, weights.dtype, weights.device)
    return {
        "config": config,
        "layer_specs": specs_of_rank(spec.layer_specs, weights.shards),
        "rope": rope,
        "embed": embed,
        "fc": weights.linear("", ("fc",), (whole_part(hidden),), len(spec.captured_layers) * hidden, bias=False),
        "context_norm": weights.norm("hidden_norm", hidden, eps),
        "layers": [load_layer(weights, layer, f"layers.{i}.", i, rope) for i in range(layer.num_layers)],
        "norm": weights.norm("norm", hidden, eps),
        "head": draft_head(weights, layer, spec.vocab_size, target, embed),
        "d2t": draft_to_target(weights, layer.vocab_size, spec.vocab_size),
    }


def _load_markov_head(weights: Weights, config: BlockConfig) -> MarkovHead | None:
    rank, hidden, head_type = config.markov_rank, config.layer.hidden_size, config.markov_head_type
    if not rank:
        return None
    parent_vectors = weights.load("markov_head.markov_w1.weight", config.layer.vocab_size, rank)
    token_vectors = weights.load_dense_matrix("markov_head.markov_w2", whole_part(config.spec.vocab_size), rank)
    if head_type == "vanilla":
        return MarkovHead(parent_vectors, token_vectors)
    is_recurrent = head_type == "rnn"
    name = "markov_head.joint_proj" if is_recurrent else "markov_head.gate_proj"
    num_outputs, num_inputs = (multiple * rank for multiple in MARKOV_PROJECTION_SIZES[head_type])
    projection = weights.load_dense_matrix(name, whole_part(num_outputs), hidden + num_inputs)
    bias = weights.load(f"{name}.bias", num_outputs)
    hidden_projection, row_projection = split_projection_columns(projection, hidden, is_recurrent)
    return MarkovHead(
        *(
            parent_vectors,
            token_vectors,
            Linear(dense_weight(hidden_projection.contiguous()), bias),
            row_projection.contiguous(),
            is_recurrent,
        )
    )
