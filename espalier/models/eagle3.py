"""The EAGLE-3 draft head (arXiv:2503.01840), in the formats of SafeAILab and of vLLM's speculators.

The head is one decoder layer over cat(norm(embedding of token q), norm(hidden state at q-1)).  The hidden state is the
target's feature (`fc` over the captured inputs of some target layers) or, inside a tree, the draft's output at the
parent.

P-EAGLE heads may have more layers.  They propose all depths of a tree in one causal pass.  The root's row is computed
as in EAGLE-3 and proposes depth 1.  The next rows are mask rows, which propose depths 2, 3 and so on.  All mask rows
have the same input: a mask token, and a learned vector that replaces the target's features.  A mask row attends to all
earlier rows.  Pages keep no mask rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import LayerSpec, specs_of_rank
from espalier.errors import EspalierError
from espalier.kernels.ops.drafts import DraftHidden
from espalier.models.base import CausalLM
from espalier.models.config import Family, Json, ModelConfig, architecture_of, parse_config
from espalier.models.draft import DraftOutput, DraftSpec, refuse_wrong_sizes
from espalier.models.draft_parts import DraftFields, draft_embedding, draft_head, draft_to_target
from espalier.models.families import FAMILIES
from espalier.models.families.deepseek import V2, V3
from espalier.models.layer_loading import layer_specs_of, load_attention, load_layer
from espalier.models.layers.decoder import DecoderLayer
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.weights import Weights
from espalier.shards import whole_part

# Architectures of heads whose layer has latent attention.
LATENT_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    *LATENT_ARCHITECTURES,
)
# Values of model_type that name the head's format instead of the family of its layer.  Such heads have a Llama layer.
FORMAT_MODEL_TYPES = ("eagle", "eagle3", "speculators", "speculator_model")
# For these target architectures, the layer ids in eagle_config mean inputs of layers, not outputs (_captured_layers).
TARGETS_WITH_INPUT_LAYER_IDS = (V2.architecture, V3.architecture)
EAGLE_1_2_ARCHITECTURES = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "EagleSpeculator")
LEGACY_FC_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


@dataclass(frozen=True)
class Eagle3Config:
    """The config of an EAGLE-3 or P-EAGLE head, read from its config.json and the target's config.
    layer: the config of the head's decoder layers; `layer.vocab_size` is the size of the target's vocabulary.
    target_hidden: the target's hidden size.  norm_output: whether child rows read the output after the final norm.
    norm_before_residual: whether the residual stream starts with the normed hidden state.
    norm_before_fc: whether one norm over all captured inputs stands before fc.  fc_norm: whether each captured input
    has a norm of its own before fc."""

    layer: ModelConfig
    spec: DraftSpec
    target_hidden: int
    fc_bias: bool
    norm_before_residual: bool
    norm_output: bool
    norm_before_fc: bool
    fc_norm: bool


def read_eagle3(path: Path, config_json: Json, target: ModelConfig) -> Eagle3Config:
    """Returns the config of the head at `path`, checked against the target's config.  Loads no weights.
    Raises EspalierError if the head does not fit this target."""
    config = read_eagle_head(path, config_json, target, TARGETS_WITH_INPUT_LAYER_IDS)
    if config.layer.num_layers != 1:
        raise DraftFields(config_json, path).error(
            f"num_hidden_layers = {config.layer.num_layers}; only EAGLE-3 heads with one layer are supported; use such "
            "a draft"
        )
    refuse_mismatch(config, target, path)
    return config


def read_eagle_head(
    path: Path, config_json: Json, target: ModelConfig, targets_with_input_layer_ids: Sequence[str] | None
) -> Eagle3Config:
    """Returns the config of an EAGLE-3 or P-EAGLE head.  The caller checks the config against the target's.
    targets_with_input_layer_ids: the target architectures for which the layer ids in the head's eagle_config mean
    inputs of layers (_captured_layers); None for all architectures."""
    fields = DraftFields(config_json, path)
    defaults = {"num_hidden_layers": 1, "max_position_embeddings": target.max_position}
    flat_fields = {**defaults, **config_json, **fields.layer_config()}
    eagle_fields = fields.nested_object("eagle_config")
    family = _layer_family(DraftFields(flat_fields, path))
    # The layer of a head with latent attention has a dense MLP, even if the head's config has the target's fields for
    # experts.
    layer = parse_config({**flat_fields, "n_routed_experts": None} if family.uses_mla else flat_fields, family, path)
    spec = DraftSpec(
        algorithm="eagle3",
        layer_specs=layer_specs_of(layer),
        num_modules=1,
        target_output="captured",
        captured_layers=_captured_layers(fields, eagle_fields, target, targets_with_input_layer_ids),
        hidden_size=layer.hidden_size,
        vocab_size=fields.draft_vocab(layer.vocab_size),
    )
    return Eagle3Config(
        layer,
        spec,
        target_hidden=fields.get("target_hidden_size") or layer.hidden_size,
        fc_bias=fields.is_set("bias"),
        norm_before_residual=fields.is_set("norm_before_residual"),
        norm_output=fields.is_set("norm_output"),
        norm_before_fc=fields.is_set("norm_before_fc", eagle_fields.is_set("norm_before_fc")),
        fc_norm=fields.is_set("fc_norm"),
    )


def refuse_eagle3_called_eagle(name: str, path: Path) -> None:
    """Raises EspalierError if `path` holds an EAGLE-3 head whose config names the EAGLE-1/2 architecture `name`."""
    if looks_like_eagle3(Weights(path, torch.float32, "cpu", allow_bin=True)):
        raise EspalierError(
            f"{path} is declared as EAGLE ({name}) but holds an EAGLE-3 head (it has hidden_norm); set its "
            f"architectures to [{ARCHITECTURES[0]!r}]"
        )


def looks_like_eagle3(weights: Weights) -> bool:
    return "midlayer.hidden_norm.weight" in weights or "layers.0.hidden_norm.weight" in weights


def _layer_family(flat_fields: DraftFields) -> Family:
    """Returns the family of the draft's layer: Llama, unless model_type names another supported family.
    A head with latent attention has a DeepSeek-V3 layer, unless model_type names another family with latent attention.
    Raises EspalierError for an unknown model_type, unless the architecture is one of LATENT_ARCHITECTURES."""
    named_latent = architecture_of(dict(flat_fields.raw)) in LATENT_ARCHITECTURES
    is_latent = bool(flat_fields.get("kv_lora_rank")) or named_latent
    usable = (family for family in FAMILIES.values() if family.uses_mla == is_latent and family.usable_in_drafts)
    by_type = {family.model_type: family for family in usable}
    declared = flat_fields.get("model_type", "llama")
    if declared not in (*by_type, *FORMAT_MODEL_TYPES) and not named_latent:
        raise flat_fields.error(
            f"a draft layer of model_type {declared!r} is not supported; supported: {', '.join(by_type)}"
        )
    if is_latent:
        return by_type.get(declared, V3)
    if (
        flat_fields.get("sliding_window")
        and flat_fields.get("use_sliding_window", True)
        and declared not in ("qwen2", "qwen3")
    ):
        return by_type["mistral"]  # a Llama layer with a sliding window
    return by_type.get(declared, by_type["llama"])


def _captured_layers(
    fields: DraftFields,
    eagle_fields: DraftFields,
    target: ModelConfig,
    targets_with_input_layer_ids: Sequence[str] | None,
) -> tuple[int, ...]:
    """Returns the target layers whose inputs the head reads.

    The ids of layers differ by one between the two formats.  In the format of speculators, top-level ids are the layers
    whose inputs are captured (by default [2, L/2, L-3]).  In the format of SafeAILab and SpecForge, the ids in
    eagle_config are the layers whose outputs are captured; the output of layer i is the input of layer i + 1.

    Heads for DeepSeek targets are an exception: the ids in their eagle_config are the layers whose inputs are captured.
    But if the first id is 1, the ids are the layers whose outputs are captured, as in the default list, which begins
    with 1."""
    num_layers = target.num_layers
    name = "eagle_aux_hidden_state_layer_ids"
    if eagle_fields.get("use_aux_hidden_state", True) is False:
        raise fields.error("use_aux_hidden_state = False is not supported; use a head that fuses target layers")
    if fields.get(name):
        ids = fields.target_layers(name)
    elif eagle_fields.get(name):
        ids = eagle_fields.target_layers(name)
        is_input = targets_with_input_layer_ids is None or (
            target.architecture in targets_with_input_layer_ids and ids[0] != 1
        )
        ids = ids if is_input else tuple(i + 1 for i in ids)
    else:
        ids = (2, num_layers // 2, num_layers - 3)
    if any(not 0 <= i <= num_layers for i in ids):
        raise EspalierError(
            f"{fields.path} fuses the inputs of target layers {ids}, but the target has {num_layers} layers; use the "
            "target that the draft was trained for"
        )
    expected = fields.get("num_aux_hidden_states") or len(ids)
    if len(ids) != expected:
        raise fields.error(
            f"num_aux_hidden_states = {expected}, but {len(ids)} layers {ids} are captured; correct one of "
            "num_aux_hidden_states and eagle_aux_hidden_state_layer_ids"
        )
    return ids


def refuse_mismatch(config: Eagle3Config, target: ModelConfig, path: Path) -> None:
    """Raises EspalierError for a head (`config`, in `path`) that does not fit the target, or with contradictory
    options."""
    if config.layer.experts is not None:
        raise EspalierError(
            f"{path}: a draft layer of {config.layer.architecture} has experts, which is not supported; use a draft "
            "with a dense MLP"
        )
    refuse_wrong_sizes(path, target, config.target_hidden, config.layer.vocab_size, config.spec.vocab_size)
    if config.norm_before_fc and config.fc_norm:
        raise EspalierError(
            f"{path}: norm_before_fc and fc_norm are both set, but they exclude each other; correct the config"
        )


@dataclass(eq=False)
class Eagle3Draft:
    """A loaded EAGLE-3 head.  The object is a DraftModel and also the only DraftModule of this DraftModel
    (espalier/models/draft.py).

    layer_specs: what this rank's part of each layer stores in the KV cache.
    layers: the first layer reads the normed embedding and the normed hidden state, which `embed` computes."""

    has_experts = False

    config: Eagle3Config
    layer_specs: tuple[LayerSpec, ...]
    rope: RopeTables
    embed: Embedding
    fuse: "FeatureFuser"
    embed_norm: RMSNorm
    hidden_norm: RMSNorm
    layers: list[DecoderLayer]
    norm: RMSNorm
    head: Linear
    d2t: Tensor | None

    def __post_init__(self) -> None:
        self.spec = self.config.spec

    @property
    def modules(self) -> tuple["Eagle3Draft"]:
        """The parts of the draft that run as passes of their own (models/draft.py).  Here only this object."""
        return (self,)

    def __call__(self, p: Pass, hidden: Tensor, parents: Tensor | None = None) -> DraftOutput:
        """Returns the outputs for the rows of a pass.  hidden: [B, R, H], R vectors of each request.  parents: [B, Q],
        for each row the index of the vector in `hidden` that it reads; None if row i reads vector i."""
        norms = (self.embed_norm.weight, self.embed_norm.eps, self.hidden_norm.weight, self.hidden_norm.eps)
        s = self.embed(p, self.rope, DraftHidden(hidden, parents, *norms, self.config.norm_before_residual))
        for layer in self.layers:
            layer(s, p)
        x, normed = s.final_norm(self.norm, p.out_shape)
        return DraftOutput(normed if self.config.norm_output else x, normed)

    def output_from_hidden(self, hidden: Tensor) -> DraftOutput:
        """Returns the DraftOutput of rows from their `hidden` [..., H], without running the layers."""
        return DraftOutput(hidden, hidden if self.config.norm_output else self.norm(hidden))

    def logits(self, out: DraftOutput) -> Tensor:
        """Returns the logits [B, Q, draft vocabulary] of the head's output `out`."""
        return self.head(out.normed)


@dataclass(frozen=True)
class FeatureFuser:
    """Computes features [..., H] from the inputs of n captured target layers, [..., n·H_target].
    One norm over all inputs, or a norm for each input, or no norm is applied.  Then `fc` projects the result."""

    fc: Linear
    all_features_norm: RMSNorm | None
    feature_norms: list[RMSNorm]

    def __call__(self, captured: Tensor) -> Tensor:
        if self.all_features_norm is not None:
            captured = self.all_features_norm(captured)
        if self.feature_norms:
            chunks = captured.chunk(len(self.feature_norms), dim=-1)
            captured = torch.cat([norm(chunk) for norm, chunk in zip(self.feature_norms, chunks, strict=True)], dim=-1)
        return self.fc(captured)


def make_eagle3(weights: Weights, config: Eagle3Config, target: CausalLM, position_rows: int) -> Eagle3Draft:
    """Builds the draft from its weights.  A draft without an embedding or a head uses the target's.
    position_rows: the number of positions in the RoPE tables.
    Raises EspalierError naming a weight that does not fit or is not used."""
    draft = Eagle3Draft(**load_head_fields(weights, config, target, position_rows))
    weights.require_all_used()
    return draft


def load_head_fields(weights: Weights, config: Eagle3Config, target: CausalLM, position_rows: int) -> dict[str, Any]:
    """Loads the fields of an Eagle3Draft.  Returns them by name.  weights: the draft's."""
    _refuse_eagle1_and_2(weights, config)
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in weights else "layers.0."
    spec, hidden, eps = config.spec, config.layer.hidden_size, config.layer.rms_norm_eps
    layer = replace(config.layer, qk_norm=f"{prefix}self_attn.q_norm.weight" in weights)
    embed = draft_embedding(weights, (layer.vocab_size, hidden), target)
    weights.allow_unused(["t2d"])
    rope = RopeTables(layer.rope, position_rows, weights.dtype, weights.device)
    first = DecoderLayer(
        index=0,
        attention_norm=None,
        attention=load_attention(weights, layer, f"{prefix}self_attn.", 2 * hidden, rope),
        mlp_norm=weights.norm(f"{prefix}post_attention_layernorm", hidden, eps),
        mlp=weights.mlp(f"{prefix}mlp.", layer.hidden_size, layer.intermediate_size, layer.mlp_bias),
    )
    rest = [load_layer(weights, layer, f"layers.{i}.", i, rope) for i in range(1, layer.num_layers)]
    return {
        "config": config,
        "layer_specs": specs_of_rank(spec.layer_specs, weights.shards),
        "rope": rope,
        "embed": embed,
        "fuse": _load_fuser(weights, config, target.config.num_layers),
        "embed_norm": weights.norm(f"{prefix}input_layernorm", hidden, eps),
        "hidden_norm": weights.norm(f"{prefix}hidden_norm", hidden, eps),
        "layers": [first, *rest],
        "norm": weights.norm("norm", hidden, eps),
        "head": draft_head(weights, config.layer, spec.vocab_size, target, embed),
        "d2t": draft_to_target(weights, config.layer.vocab_size, spec.vocab_size),
    }


def _refuse_eagle1_and_2(weights: Weights, config: Eagle3Config) -> None:
    """Raises EspalierError for an EAGLE-1/2 head whose config declares an EAGLE-3 architecture."""
    if looks_like_eagle3(weights):
        return
    hidden = config.layer.hidden_size
    if weights.has_matrix_of_shape("fc", hidden, 2 * hidden):
        raise EspalierError(
            f"{weights.path} is declared as EAGLE-3 but fc [{hidden}, {2 * hidden}] without hidden_norm is an "
            "EAGLE-1/2 head, not supported yet; use an EAGLE-3 head"
        )


def _load_fuser(weights: Weights, config: Eagle3Config, num_target_layers: int) -> FeatureFuser:
    hidden, eps, num_captured = config.layer.hidden_size, config.layer.rms_norm_eps, len(config.spec.captured_layers)
    fc_columns = num_captured * config.target_hidden
    _refuse_wrong_fc_width(weights, config, num_target_layers)
    fc = weights.linear("", ("fc",), (whole_part(hidden),), fc_columns, config.fc_bias)
    all_features_norm = weights.norm("input_norm", fc_columns, eps) if config.norm_before_fc else None
    is_legacy = f"{LEGACY_FC_NORMS[0]}.weight" in weights
    names = LEGACY_FC_NORMS if is_legacy else [f"fc_norm.{i}" for i in range(num_captured)]
    norms = [weights.norm(name, config.target_hidden, eps) for name in names] if config.fc_norm or is_legacy else []
    return FeatureFuser(fc, all_features_norm, norms)


def _refuse_wrong_fc_width(weights: Weights, config: Eagle3Config, num_target_layers: int) -> None:
    """Raises EspalierError if the number of captured layers does not match the width of fc."""
    # The input of every layer and the input of the final norm can be captured.
    counts = (len(config.spec.captured_layers), *range(1, num_target_layers + 2))
    hidden, size = config.layer.hidden_size, config.target_hidden
    num_fused = next((count for count in counts if weights.has_matrix_of_shape("fc", hidden, count * size)), None)
    if num_fused not in (None, len(config.spec.captured_layers)):
        raise EspalierError(
            f"{weights.path}: fc fuses {num_fused} layers, {len(config.spec.captured_layers)} are captured "
            f"{config.spec.captured_layers}; correct eagle_aux_hidden_state_layer_ids"
        )


@dataclass(eq=False)
class PEagleDraft(Eagle3Draft):
    """A loaded P-EAGLE head.
    mask_features: [1, 1, F], a learned vector that mask rows read instead of the target's captured inputs."""

    mask_features: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mask_hidden = self.fuse(self.mask_features)

    def run_mask_rows(self, p: Pass) -> DraftOutput:
        """Runs the head on a pass that consists of mask rows only."""
        return self(p, self.mask_hidden.expand(len(p.tokens), -1, -1), torch.zeros_like(p.tokens))


def make_peagle(weights: Weights, config: Eagle3Config, target: CausalLM, position_rows: int) -> PEagleDraft:
    """Builds the draft from its weights.  A draft without an embedding or a head uses the target's.
    position_rows: the number of positions in the RoPE tables.
    Raises EspalierError naming a weight that does not fit or is not used."""
    name, size = "mask_hidden", len(config.spec.captured_layers) * config.target_hidden
    if name not in weights:
        raise EspalierError(f"{weights.path} has no {name!r}, which a P-EAGLE head needs; use a whole checkpoint")
    shape = weights.shape(name)
    if math.prod(shape) != size:
        raise EspalierError(
            f"{weights.path}: {name} has {math.prod(shape)} values, but {len(config.spec.captured_layers)} layers of "
            f"{config.target_hidden} are captured {config.spec.captured_layers}; correct "
            "eagle_aux_hidden_state_layer_ids"
        )
    features = weights.load(name, *shape).view(1, 1, size)
    draft = PEagleDraft(**load_head_fields(weights, config, target, position_rows), mask_features=features)
    weights.require_all_used()
    return draft


PEAGLE_ARCHITECTURES = ("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM", "PEagleSpeculator")
# If the config of a head with one of these architectures has a mask token, the head is a P-EAGLE head.
EAGLE3_ARCHITECTURES = (*ARCHITECTURES, "Eagle3Qwen3ForCausalLM")
MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")
# The number of depths that a P-EAGLE head proposes if its config does not have `speculative_tokens`.
DEFAULT_STEPS = 16


def read_peagle(path: Path, config_json: Json, target: ModelConfig) -> Eagle3Config:
    """Returns the config of the head at `path`, checked against the target's config.  Loads no weights.
    Raises EspalierError if the head does not fit this target."""
    head = read_eagle_head(path, config_json, target, targets_with_input_layer_ids=None)
    # In the format of speculators, the field proposal_methods contains the number of tokens that the head was trained
    # to propose.
    fields = DraftFields(config_json, path)
    methods = fields.nested_object("speculators_config").get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise fields.error(f"proposal_methods = {methods!r}; a list of objects is needed; correct the config")
    steps = DraftFields({"speculative_tokens": DEFAULT_STEPS, **methods[0]}, path).integer("speculative_tokens")
    mask_token = fields.mask_token(head.layer.vocab_size, MASK_TOKEN_FIELDS)
    spec = replace(head.spec, algorithm="peagle", block_rows=steps - 1, max_steps=steps, mask_token_id=mask_token)
    config = replace(head, spec=spec)
    if config.layer.latent is not None:
        raise fields.error("P-EAGLE heads with latent attention are not supported; use one with K and V heads")
    narrow_windows = [window for window in config.layer.windows if window is not None and window < steps]
    if narrow_windows:
        raise fields.error(
            f"sliding_window = {narrow_windows[0]} is below the {steps} depths of the head, which is not supported; "
            "use a head with a wider window"
        )
    refuse_mismatch(config, target, path)
    return config
