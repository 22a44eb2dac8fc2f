"""Gemma 4's assistants: drafts of a few layers that read the target's K and V and store no K and V of their own.

The input of a row is the target's embedding of the row's token and a hidden state.  The root's row reads the
target's hidden state after the final norm, at the token before the root.  All other rows read the draft's output at
the parent.  All rows have the root's position and attend to committed rows only (transformers'
SinglePositionMultiTokenCandidateGenerator)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import LayerSpec, specs_of_rank
from espalier.errors import EspalierError, shown
from espalier.kernels.ops.tree import gather_rows
from espalier.models.base import CausalLM, Layer
from espalier.models.config import Json, ModelConfig, parse_config
from espalier.models.draft import DraftOutput, DraftSpec, refuse_wrong_sizes
from espalier.models.draft_parts import DraftFields, gathered_embedding
from espalier.models.families.gemma4 import FAMILY, GEMMA4_UNIFIED
from espalier.models.layer_loading import layer_specs_of
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.residual import Residual
from espalier.models.rope import RopeTables
from espalier.models.weight_formats import dense_weight, quantisation_of
from espalier.models.weights import Weights
from espalier.shards import SINGLE_RANK, Shards, whole_part

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
# Fields that must be 0 or false in an assistant's config.  Transformers has the same requirement.
DISABLED_FIELDS = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")


@dataclass(frozen=True)
class AssistantConfig:
    """An assistant's config.json, checked against its target's.
    layer: the config of the draft's layers.  num_clusters: the number of clusters of the draft's vocabulary; 0 without
    clusters.
    num_scored_clusters: the number of clusters whose tokens get scores."""

    layer: ModelConfig
    spec: DraftSpec
    num_clusters: int = 0
    num_scored_clusters: int = 0


def read_assistant(path: Path, config_json: Json, target: ModelConfig) -> AssistantConfig:
    """Returns the config of the draft at `path`.  Raises EspalierError if the draft does not fit its target."""
    fields = DraftFields(config_json, path)
    text_fields = fields.nested_object("text_config").raw
    family = GEMMA4_UNIFIED if text_fields.get("model_type") == GEMMA4_UNIFIED.model_type else FAMILY
    is_tied = fields.is_set("tie_word_embeddings", True)
    fixed_fields = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "tie_word_embeddings": is_tied}
    if enabled := [name for name in DISABLED_FIELDS if text_fields.get(name)]:
        raise fields.error(f"{enabled[0]} = {shown(text_fields[enabled[0]])} is not supported in an assistant; use 0")
    layer = parse_config({**text_fields, **fixed_fields, **quantisation_of(config_json)}, family, path)
    hidden = fields.integer("backbone_hidden_size")
    refuse_wrong_sizes(path, target, hidden, layer.vocab_size)
    target_specs = layer_specs_of(target)
    specs = tuple(_spec_reading_target(spec, target_specs, path) for spec in layer_specs_of(layer))
    spec = DraftSpec(
        "assistant", specs, num_modules=1, target_output="hidden", hidden_size=hidden, vocab_size=layer.vocab_size
    )
    layer = replace(layer, family=replace(layer.family, layer_specs=lambda config: specs))
    if not fields.is_set("use_ordered_embeddings"):
        return AssistantConfig(layer, spec)
    num_clusters = fields.integer("num_centroids", min_value=1, max_value=layer.vocab_size)
    if layer.vocab_size % num_clusters:
        raise fields.error(f"num_centroids = {num_clusters} does not divide {layer.vocab_size} tokens; correct it")
    return AssistantConfig(layer, spec, num_clusters, fields.integer("centroid_intermediate_top_k", 1, num_clusters))


def _spec_reading_target(spec: LayerSpec, target_specs: Sequence[LayerSpec], path: Path) -> LayerSpec:
    """Returns `spec` with `shares_with` set to the target layer whose rows the draft layer reads.
    If `spec` has a sliding window, this is the target's last layer with a window, else its last layer without a window.
    Layers that read the rows of other layers do not count.
    Raises EspalierError if the target has no such layer.  path: the draft's directory, for the error."""
    candidates = [
        i
        for i, target_spec in enumerate(target_specs)
        if target_spec.shares_with is None and (target_spec.window is None) == (spec.window is None)
    ]
    target_rows = target_specs[candidates[-1]].cache_spec if candidates else "no such layer"
    if target_rows != spec.cache_spec:
        raise EspalierError(
            f"{path} does not fit its target: its layers read {spec.cache_spec}, the target has {target_rows}; use the "
            "draft trained for it"
        )
    # The layer attends to the last committed row, one position before the root, and to `window` rows before that row.
    # LayerSpec.window counts all these rows and the root's own position.
    return replace(spec, shares_with=candidates[-1], window=None if spec.window is None else spec.window + 2)


@dataclass(frozen=True)
class ClusteredHead:
    """An lm_head that scores only the tokens of the likeliest clusters.
    head: [V, H].  centroids: computes the scores of clusters.  tokens: [clusters, size], the tokens of each cluster.
    num_scored_clusters: the number of clusters whose tokens get scores."""

    head: Tensor
    centroids: Linear
    tokens: Tensor
    num_scored_clusters: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, Q, H] -> scores [B, Q, V].  Tokens without a computed score get a score below all computed scores."""
        tokens = self.tokens[self.centroids(x).topk(self.num_scored_clusters).indices].flatten(2)
        scores = (self.head[tokens] @ x[..., None])[..., 0]
        low_score = scores.amin(-1, keepdim=True) - 1
        return low_score.repeat(1, 1, len(self.head)).scatter_(2, tokens, scores)


@dataclass(eq=False)
class Assistant:
    """A loaded assistant.  It is a DraftModel and also the only DraftModule of that model (espalier/models/draft.py).
    embed: the target's embedding.  input_projection: maps (embedding, hidden state) to H.  output_projection: maps H to
    the target's hidden size."""

    has_experts = False

    config: AssistantConfig
    embed: Embedding
    input_projection: Linear
    layers: Sequence[Layer]
    norm: RMSNorm
    output_projection: Linear
    head: Linear | ClusteredHead
    d2t: Tensor | None = None
    shards: Shards = SINGLE_RANK

    def __post_init__(self) -> None:
        self.spec = self.config.spec
        self.layer_specs = specs_of_rank(self.spec.layer_specs, self.shards)

    @property
    def modules(self) -> tuple["Assistant"]:
        return (self,)

    @staticmethod
    def fuse(features: Tensor) -> Tensor:
        """Returns the features unchanged: the assistant reads the target's hidden states [..., H] as they are."""
        return features

    def __call__(self, p: Pass, hidden: Tensor, parents: Tensor | None = None) -> DraftOutput:
        """Returns the outputs for the rows of a pass.  hidden: [B, R, H], R vectors of each request.  parents: [B, Q],
        for each row the index of the vector in `hidden` that it reads; None if row i reads vector i."""
        rows = hidden if parents is None else gather_rows(parents, hidden)
        tokens = F.embedding(p.tokens.clamp(min=0), self.embed.weight) * self.embed.scale
        s = Residual(self.input_projection(torch.cat((tokens, rows), -1).flatten(0, 1)))
        for layer in self.layers:
            layer(s, p)
        _, normed = s.final_norm(self.norm, p.out_shape)
        return DraftOutput(self.output_projection(normed), normed)

    def output_from_hidden(self, hidden: Tensor) -> DraftOutput:
        raise NotImplementedError("a hidden state is a row's input here: AssistantDrafter runs the root's row")

    def logits(self, out: DraftOutput) -> Tensor:
        """Returns the logits [B, Q, vocabulary] of the assistant's output `out`."""
        return self.head(out.normed)


def make_assistant(weights: Weights, config: AssistantConfig, target: CausalLM, position_rows: int) -> Assistant:
    """Builds the draft from its weights.  Raises EspalierError if a weight does not fit, is missing or is not used."""
    layer, hidden, target_hidden = config.layer, config.layer.hidden_size, config.spec.hidden_size
    tables = {rope: RopeTables(rope, position_rows, weights.dtype, weights.device) for rope in set(layer.layer_ropes)}
    load = layer.family.load_layer
    assert load is not None
    embed = weights.load("model.embed_tokens.weight", layer.vocab_size, hidden)
    head = embed
    if "lm_head.weight" in weights:
        untied_head = weights.load("lm_head.weight", layer.vocab_size, hidden)
        head = embed if layer.tie_word_embeddings else untied_head
    draft = Assistant(
        config,
        embed=gathered_embedding(target),
        input_projection=weights.linear("", ("pre_projection",), (whole_part(hidden),), 2 * target_hidden, bias=False),
        layers=[
            load(weights, layer, f"model.layers.{i}.", i, tables[rope]) for i, rope in enumerate(layer.layer_ropes)
        ],
        norm=weights.norm("model.norm", hidden, layer.rms_norm_eps),
        output_projection=weights.linear("", ("post_projection",), (whole_part(target_hidden),), hidden, bias=False),
        head=_load_clustered_head(weights, config, head) if config.num_clusters else Linear(dense_weight(head)),
        shards=weights.shards,
    )
    weights.require_all_used()
    return draft


def _load_clustered_head(weights: Weights, config: AssistantConfig, head: Tensor) -> ClusteredHead:
    """Returns the lm_head that scores only the tokens of the likeliest clusters.  head: the rows of all tokens."""
    vocab, prefix = config.layer.vocab_size, "masked_embedding."
    order = weights.load_raw(f"{prefix}token_ordering", vocab).to(weights.device, torch.int64)
    if not torch.equal(order.sort().values, torch.arange(vocab, device=order.device)):
        raise EspalierError(f"{weights.path}: token_ordering does not name each token once; download the draft again")
    centroids = weights.linear(
        prefix, ("centroids",), (whole_part(config.num_clusters),), config.layer.hidden_size, bias=False
    )
    return ClusteredHead(head, centroids, order.view(config.num_clusters, -1), config.num_scored_clusters)
