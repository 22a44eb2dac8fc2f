"""Reads an EAGLE-3 draft's config.json (formats of SafeAILab and vLLM's speculators); checks it against its target."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from espalier.errors import EspalierError
from espalier.models.config import Family, ModelConfig, Raw, architecture_of, parse
from espalier.models.draft import DraftSpec, refuse_sizes
from espalier.models.draft_parts import Fields
from espalier.models.families import FAMILIES
from espalier.models.families.deepseek import V2, V3
from espalier.models.layer_loading import layer_specs_of
from espalier.models.weights import Weights

# Architectures of heads whose layer has latent attention.
LATENT_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    *LATENT_ARCHITECTURES,
)
# Values of model_type that name the format of the head, not the kind of its layer.  The layer is then a Llama layer.
WRAPPERS = ("eagle", "eagle3", "speculators", "speculator_model")
# Targets whose heads list the captured layers in eagle_config by input and not by output (_captured_layers).
EAGLE3_IDS_BY_INPUT = (V2.architecture, V3.architecture)
EAGLE_1_2 = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "EagleSpeculator")


@dataclass(frozen=True)
class Eagle3Config:
    """A draft's config.json, completed from its target's.

    layer: the config of the draft's decoder layer; its vocab_size is the target's.
    """

    layer: ModelConfig
    spec: DraftSpec
    target_hidden: int
    fc_bias: bool
    norm_before_residual: bool
    norm_output: bool
    norm_before_fc: bool
    fc_norm: bool


def read_eagle3(path: Path, raw: Raw, target: ModelConfig) -> Eagle3Config:
    """Read the config.json `raw` of the head at `path` and check it against its target's config.  Loads no weights.

    Raises EspalierError if the head does not fit this target.
    """
    config = read_head(path, raw, target, EAGLE3_IDS_BY_INPUT)
    if config.layer.num_layers != 1:
        raise Fields(raw, path).error(
            f"num_hidden_layers = {config.layer.num_layers}; only EAGLE-3 heads with one layer are supported; use such "
            "a draft"
        )
    refuse_misfit(config, target, path)
    return config


def read_head(path: Path, raw: Raw, target: ModelConfig, by_input: Sequence[str] | None) -> Eagle3Config:
    """The config, not yet checked against the target.

    by_input: the target architectures for which ids in eagle_config name layers by their input; None: for all.
    """
    given = Fields(raw, path)
    flat = {"num_hidden_layers": 1, "max_position_embeddings": target.max_position, **raw, **given.layer()}
    eagle = given.object("eagle_config")
    family = _layer_family(Fields(flat, path))
    # The layer of a latent head is dense, even if its config repeats the target's experts.
    layer = parse({**flat, "n_routed_experts": None} if family.latent else flat, family, path)
    spec = DraftSpec(
        algorithm="eagle3",
        layers=layer_specs_of(layer),
        modules=1,
        reads="captured",
        capture=_captured_layers(given, eagle, target, by_input),
        hidden_size=layer.hidden_size,
        vocab_size=given.draft_vocab(layer.vocab_size),
    )
    return Eagle3Config(
        layer,
        spec,
        target_hidden=given.get("target_hidden_size") or layer.hidden_size,
        fc_bias=given.flag("bias"),
        norm_before_residual=given.flag("norm_before_residual"),
        norm_output=given.flag("norm_output"),
        norm_before_fc=given.flag("norm_before_fc", eagle.flag("norm_before_fc")),
        fc_norm=given.flag("fc_norm"),
    )


def refuse_eagle3_called_eagle(name: str, path: Path) -> None:
    """Raises EspalierError if the head at `path`, whose architecture `name` is an EAGLE-1/2 head's, is EAGLE-3."""
    if looks_like_eagle3(Weights(path, torch.float32, "cpu", allow_bin=True)):
        raise EspalierError(
            f"{path} is declared as EAGLE ({name}) but holds an EAGLE-3 head (it has hidden_norm); set its "
            f"architectures to [{ARCHITECTURES[0]!r}]"
        )


def looks_like_eagle3(weights: Weights) -> bool:
    return "midlayer.hidden_norm.weight" in weights or "layers.0.hidden_norm.weight" in weights


def _layer_family(flat: Fields) -> Family:
    """The family of the draft's layer: Llama, unless model_type names another supported family.

    A latent head has DeepSeek-V3's attention, unless model_type names another latent family.  Raises EspalierError for
    a model_type of no family, unless the architecture says that the layer is DeepSeek's.
    """
    named_latent = architecture_of(dict(flat.raw)) in LATENT_ARCHITECTURES
    is_latent = bool(flat.get("kv_lora_rank")) or named_latent
    able = (family for family in FAMILIES.values() if family.latent == is_latent and family.in_drafts)
    by_type = {family.model_type: family for family in able}
    declared = flat.get("model_type", "llama")
    if declared not in (*by_type, *WRAPPERS) and not named_latent:
        raise flat.error(f"a draft layer of model_type {declared!r} is not supported; supported: {', '.join(by_type)}")
    if is_latent:
        return by_type.get(declared, V3)
    if flat.get("sliding_window") and flat.get("use_sliding_window", True) and declared not in ("qwen2", "qwen3"):
        return by_type["mistral"]  # a Llama layer with a sliding window
    return by_type.get(declared, by_type["llama"])


def _captured_layers(
    given: Fields, eagle: Fields, target: ModelConfig, by_input: Sequence[str] | None
) -> tuple[int, ...]:
    """The target layers whose inputs are fused.

    Two formats differ by one.  The top-level ids of speculators name layers by their input (the default is
    [2, L/2, L-3]).  The ids in eagle_config of SafeAILab and SpecForge name layers by their output, which is the input
    of layer id + 1.

    Heads for DeepSeek targets are an exception: the ids in their eagle_config name layers by their input.  But if the
    first id is 1, all ids name outputs: the output of layer 1 is the input of layer 2, the first default layer.
    """
    num_layers = target.num_layers
    name = "eagle_aux_hidden_state_layer_ids"
    if eagle.get("use_aux_hidden_state", True) is False:
        raise given.error("use_aux_hidden_state = False is not supported; use a head that fuses target layers")
    if given.get(name):
        ids = given.layers(name)
    elif eagle.get(name):
        ids = eagle.layers(name)
        is_input = by_input is None or (target.architecture in by_input and ids[0] != 1)
        ids = ids if is_input else tuple(i + 1 for i in ids)
    else:
        ids = (2, num_layers // 2, num_layers - 3)
    if any(not 0 <= i <= num_layers for i in ids):
        raise EspalierError(
            f"{given.path} fuses the inputs of target layers {ids}, but the target has {num_layers} layers; use the "
            "target that the draft was trained for"
        )
    expected = given.get("num_aux_hidden_states") or len(ids)
    if len(ids) != expected:
        raise given.error(
            f"num_aux_hidden_states = {expected}, but {len(ids)} layers {ids} are captured; correct one of "
            "num_aux_hidden_states and eagle_aux_hidden_state_layer_ids"
        )
    return ids


def refuse_misfit(config: Eagle3Config, target: ModelConfig, path: Path) -> None:
    if config.layer.experts is not None:
        raise EspalierError(
            f"{path}: a draft layer of {config.layer.architecture} has experts, which is not supported; use a draft "
            "with a dense MLP"
        )
    refuse_sizes(path, target, config.target_hidden, config.layer.vocab_size, config.spec.vocab_size)
    if config.norm_before_fc and config.fc_norm:
        raise EspalierError(
            f"{path}: norm_before_fc and fc_norm are both set, but they exclude each other; correct the config"
        )
