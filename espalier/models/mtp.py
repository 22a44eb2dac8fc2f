"""Multi-token prediction (MTP) layers as a draft.  From the target's hidden state at token t, module k (counted from 1)
predicts token t + k + 1.

A module computes x = project(cat(norm(embedding of token q), norm(hidden state))), then one decoder layer, then a norm.
The head and the child rows read the normed output (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

Every row reads its token's embedding, as in the paper.  vLLM sets the embedding to zero at RoPE position 0, "as not
needed by MTP".  In vLLM, position 0 belongs to token 0, which has no row in Espalier.  In Espalier, position 0 belongs
to token 1, whose embedding is used in training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import specs_of_rank
from espalier.kernels.ops.drafts import DraftHidden
from espalier.models.base import CausalLM, Layer
from espalier.models.config import Family, Json, ModelConfig, architecture_of, parse_config
from espalier.models.draft import MAX_MODULES, DraftOutput, DraftSpec, HiddenSource, refuse_wrong_sizes
from espalier.models.draft_parts import DraftFields, draft_embedding, uses_target_matrix
from espalier.models.families import FAMILIES
from espalier.models.latent_config import FREQ_FIELD, FULL_INDEXER, PATTERN_FIELD, TYPES_FIELD, indexer_types
from espalier.models.layer_loading import layer_specs_of, load_head, load_layer
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.residual import Residual
from espalier.models.rope import RopeTables
from espalier.models.stored_names import SPECULATORS, MTPFamily
from espalier.models.weight_formats import QUANTISATION_FIELDS, dense_weight, quantisation_of
from espalier.models.weights import Weights
from espalier.shards import SINGLE_RANK, Shards, whole_part

# Targets whose own MTP layers are supported.
TARGETS_WITH_MTP = tuple(family.architecture for family in FAMILIES.values() if family.mtp is not None)
MTP_HEAD_ARCHITECTURES = ("MTPDraftModel",)
ARCHITECTURES = (*MTP_HEAD_ARCHITECTURES, *TARGETS_WITH_MTP)
NUM_MTP_LAYERS_FIELD, HIDDEN_SOURCE_FIELD = "num_nextn_predict_layers", "mtp_form"
HIDDEN_SOURCES: tuple[HiddenSource, ...] = get_args(HiddenSource)
# The config fields with one entry per layer.  The entries of MTP layers are appended to these lists.
FIELDS_BY_LAYER = ("layer_types", "mlp_layer_types")


@dataclass(frozen=True)
class MTPConfig:
    """The config of MTP layers, checked against their target's.
    layer: the config of a model that consists of the target's layers and of `spec.num_modules` MTP layers."""

    layer: ModelConfig
    family: MTPFamily
    spec: DraftSpec

    @property
    def num_target_layers(self) -> int:
        return self.layer.num_layers - self.spec.num_modules

    def prefix(self, module: int) -> str:
        """Returns the name prefix of a module's decoder layer weights.  module: counted from 0."""
        return self.family.layer_prefix(module, self.num_target_layers)

    def weights_prefix(self, module: int) -> str:
        """Returns the name prefix of all weights of a module (MTPFamily.weights_prefix).  module: counted from 0."""
        return self.family.weights_prefix(module, self.num_target_layers)


def read_mtp(path: Path, config_json: Json, target: ModelConfig) -> MTPConfig:
    """Returns the config of the MTP layers at `path`, checked against the target's config.  Loads no weights.
    If the config has the target's architecture, the layers belong to the target's checkpoint and get its overrides.
    Raises EspalierError if the layers do not fit this target."""
    is_speculators = config_json.get("speculators_model_type") is not None
    if is_speculators or architecture_of(config_json) in MTP_HEAD_ARCHITECTURES:
        base = {"max_position_embeddings": target.max_position, **DraftFields(config_json, path).layer_config()}
        mtp, family = SPECULATORS, _family_of(DraftFields(base, path))
    else:
        base = config_json
        if config_json.get("architectures") == target.raw.get("architectures"):
            base = target.raw if path == target.path else _with_storage_fields(target.raw, config_json)
        family = FAMILIES[config_json["architectures"][0]]
        assert family.mtp is not None
        mtp = family.mtp
    num_modules = DraftFields({**base, **config_json}, path).integer(NUM_MTP_LAYERS_FIELD, 1, MAX_MODULES)
    hidden_source = DraftFields(config_json, path).choice(
        HIDDEN_SOURCE_FIELD, HIDDEN_SOURCES, " or ".join(map(repr, HIDDEN_SOURCES))
    )
    layer = parse_config(_with_mtp_layers(base, num_modules, mtp.layer_type), family, path)
    refuse_wrong_sizes(path, target, layer.hidden_size, layer.vocab_size)
    num_target_layers = layer.num_layers - num_modules
    spec = DraftSpec(
        algorithm="mtp",
        layer_specs=layer_specs_of(layer)[num_target_layers:],
        num_modules=num_modules,
        hidden_source=hidden_source,
        target_output="hidden",
        hidden_size=layer.hidden_size,
        vocab_size=layer.vocab_size,
    )
    return MTPConfig(layer, mtp, spec)


def _with_storage_fields(target: Json, config_json: Json) -> Json:
    """Returns the target's config, with the quantisation fields of `config_json` in place of the target's."""
    return {name: target[name] for name in target if name not in QUANTISATION_FIELDS} | quantisation_of(config_json)


def holds_mtp_layers(path: Path, target: ModelConfig) -> bool:
    """Whether the target's directory contains MTP layers."""
    count, mtp = target.raw.get(NUM_MTP_LAYERS_FIELD), target.family.mtp
    if mtp is None or not isinstance(count, int) or count < 1:
        return False
    weights = Weights(path, torch.float32, "cpu", stored_names=target.stored_names)
    prefixes = (mtp.weights_prefix(layer, target.num_layers) for layer in range(count))
    return all(weights.has_matrix(f"{prefix}{mtp.project}") for prefix in prefixes)


def _family_of(layer_fields: DraftFields) -> Family:
    """Returns the family of an MTP head's layers, by model_type.  Raises EspalierError for an unsupported family."""
    by_type = {family.model_type: family for family in FAMILIES.values() if family.usable_in_drafts}
    declared = layer_fields.get("model_type")
    if declared not in by_type:
        raise layer_fields.error(
            f"MTP layers of model_type {declared!r} (in transformer_layer_config) are not supported; supported: "
            f"{', '.join(by_type)}"
        )
    return by_type[declared]


def _with_mtp_layers(base: Mapping[str, Any], num_modules: int, layer_type: str | None) -> Json:
    """Returns `base`, a config of the target's layers, with the MTP layers added as last layers.
    layer_type: the type of each MTP layer; by default, the type of the target's last layer."""
    new_fields: Json = {
        name: [*base[name], *base[name][-1:] * num_modules] for name in FIELDS_BY_LAYER if base.get(name)
    }
    if layer_type is not None and base.get("layer_types"):
        new_fields["layer_types"][-num_modules:] = [layer_type] * num_modules
    if base.get("index_topk") is not None:
        # Every MTP layer has its own indexer, even if layers of the target share indexers.
        new_fields |= {
            TYPES_FIELD: [*indexer_types({**base}), *[FULL_INDEXER] * num_modules],
            PATTERN_FIELD: None,
            FREQ_FIELD: None,
        }
    return {**base, **new_fields, "num_hidden_layers": base["num_hidden_layers"] + num_modules}


@dataclass(frozen=True)
class MTPModule:
    """One MTP layer: a DraftModule (espalier/models/draft.py).  has_experts: whether `layer` has experts."""

    embed: Embedding
    rope: RopeTables
    embed_norm: RMSNorm
    hidden_norm: RMSNorm
    project: Linear
    layer: Layer
    norm: RMSNorm
    head: Linear
    has_experts: bool

    def __call__(self, p: Pass, hidden: Tensor, parents: Tensor | None = None) -> DraftOutput:
        """Returns the outputs for the rows of a pass.  hidden: [B, R, H], R vectors of each request.  parents: [B, Q],
        for each row the index of the vector in `hidden` that it reads; None if row i reads vector i."""
        norms = (self.embed_norm.weight, self.embed_norm.eps, self.hidden_norm.weight, self.hidden_norm.eps)
        joined = self.embed(p, self.rope, DraftHidden(hidden, parents, *norms, normed_residual=False))
        assert joined.first_input is not None
        s = Residual(self.project(joined.first_input), joined.live)
        self.layer(s, p)
        return output_from_normed(*s.final_norm(self.norm, p.out_shape))

    def output_from_hidden(self, hidden: Tensor) -> DraftOutput:
        """Returns the DraftOutput of rows from their `hidden` [..., H], without running the layer."""
        return DraftOutput(hidden, hidden)

    def logits(self, out: DraftOutput) -> Tensor:
        """Returns the logits [B, Q, vocabulary] of the module's output `out`."""
        return self.head(out.normed)


def output_from_normed(x: Tensor, normed: Tensor) -> DraftOutput:
    """Returns the DraftOutput of a module.  Child rows read the normed residual.  x, normed: [B, Q, H], the residual
    before and after the module's final norm."""
    return DraftOutput(normed, normed)


class MTPDraft:
    """Loaded MTP layers: a DraftModel (espalier/models/draft.py).  Its vocabulary is the target's."""

    d2t: Tensor | None = None

    def __init__(self, config: MTPConfig, modules: tuple[MTPModule, ...], shards: Shards = SINGLE_RANK) -> None:
        self.spec = config.spec
        self.layer_specs = specs_of_rank(config.spec.layer_specs, shards)
        self.modules = modules
        self.has_experts = any(module.has_experts for module in modules)

    @property
    def fuse(self) -> Callable[[Tensor], Tensor]:
        return lambda features: features


def make_mtp(weights: Weights, config: MTPConfig, target: CausalLM, position_rows: int) -> MTPDraft:
    """Builds the draft from the weights of its layers.  All other weights in the directory belong to the target.
    position_rows: the number of positions in the RoPE tables.
    Raises EspalierError naming a weight of a module that is missing, misshapen or not used."""
    rope = RopeTables(config.layer.rope, position_rows, weights.dtype, weights.device)
    # Embeddings and heads are cached by name, because modules may share them.
    load_embed = cache(partial(draft_embedding, weights, target.embed.shape, target))
    load_named_head = cache(partial(_load_head, weights, target))
    modules = tuple(
        _load_module(weights, config, rope, load_embed, load_named_head, module)
        for module in range(config.spec.num_modules)
    )
    if config.family is not SPECULATORS:
        weights.allow_unused_except_prefixes(
            tuple(config.weights_prefix(module) for module in range(config.spec.num_modules))
        )
    weights.require_all_used()
    return MTPDraft(config, modules, weights.shards)


def _load_module(
    weights: Weights,
    config: MTPConfig,
    rope: RopeTables,
    load_embed: Callable[[str], Embedding],
    load_named_head: Callable[[str], Linear],
    module: int,
) -> MTPModule:
    """Loads the module number `module`, from 0.  load_embed, load_named_head: load an embedding or a head by name."""
    layer, family, prefix = config.layer, config.family, config.weights_prefix(module)
    hidden, index = layer.hidden_size, config.num_target_layers + module
    stored_index = family.stored_index(module, config.num_target_layers)
    eps_and_offset = layer.rms_norm_eps, layer.family.norm_offset
    load = layer.family.load_layer or load_layer
    return MTPModule(
        embed=load_embed(family.embed.format(stored_index)),
        rope=rope,
        embed_norm=weights.norm(f"{prefix}{family.embed_norm}", hidden, *eps_and_offset),
        hidden_norm=weights.norm(f"{prefix}{family.hidden_norm}", hidden, *eps_and_offset),
        project=_load_projection(weights, f"{prefix}{family.project}", family, hidden),
        layer=load(weights, layer, config.prefix(module), index, rope, 0),
        norm=weights.norm(f"{prefix}{family.norm}", hidden, *eps_and_offset),
        head=load_named_head(family.head.format(stored_index)),
        has_experts=layer.experts is not None and index in layer.experts.layers,
    )


def _load_projection(weights: Weights, name: str, family: MTPFamily, hidden: int) -> Linear:
    """Loads the projection [H, 2·H], stored as `name`.  In the result, the first H columns read the embedding, and the
    last H columns the hidden state."""
    if not family.hidden_before_embedding:
        return weights.linear("", (name,), (whole_part(hidden),), 2 * hidden, bias=False)
    matrix = weights.load_dense_matrix(name, whole_part(hidden), 2 * hidden)
    return Linear(dense_weight(matrix.roll(hidden, 1).contiguous()))


def _load_head(weights: Weights, target: CausalLM, name: str) -> Linear:
    """Returns the draft's own head `name` in its stored format, or the target's head if the draft has none."""
    if uses_target_matrix(weights, name, "lm_head", target.head.shape, target.head.shape):
        return target.head
    return load_head(weights, name, *target.head.shape)
