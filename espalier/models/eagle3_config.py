"""What an EAGLE-3 draft's config.json asks for, in SafeAILab's and vLLM speculators' form, held against its target."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from espalier.errors import EspalierError
from espalier.models.config import Family, ModelConfig, parse, read_json
from espalier.models.loading import FAMILIES
from espalier.models.weights import Weights

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
# Types that name the form of the head and not of its layer, which is then Llama's.
WRAPPERS = ("eagle", "eagle3", "speculators", "speculator_model")
EARLIER = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "EagleSpeculator")


@dataclass(frozen=True)
class Eagle3Config:
    """What a draft's config.json asks for, completed from its target's.

    layer: the decoder layer's own shape (vocab_size is the target's).
    capture: target layers whose inputs are fused, in the order of the concat; num_layers means the last layer's output.
    """

    layer: ModelConfig
    draft_vocab: int
    target_hidden: int
    capture: tuple[int, ...]
    fc_bias: bool
    norm_before_residual: bool
    norm_output: bool
    norm_before_fc: bool
    fc_norm: bool


def draft_verifier(path: Path | str) -> str | None:
    """The target that a speculators-format draft names, so that a user may give the draft alone."""
    speculators = read_json(Path(path) / "config.json").get("speculators_config") or {}
    return (speculators.get("verifier") or {}).get("name_or_path")


def read_eagle3(path: Path | str, target: ModelConfig) -> Eagle3Config:
    """Parse and check a draft's config.json against its target's, before either is loaded.

    Raises EspalierError: not an EAGLE-3 head, or one that does not fit this target.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    _refuse_other_drafts(raw, path)
    nested: Mapping[str, Any] = raw.get("transformer_layer_config") or {}
    flat = {"num_hidden_layers": 1, "max_position_embeddings": target.max_position, **raw, **nested}
    eagle: Mapping[str, Any] = raw.get("eagle_config") or {}
    family = _layer_family(flat, path)
    layer = parse(flat, family, path)
    draft_vocab = raw.get("draft_vocab_size") or layer.vocab_size
    config = Eagle3Config(
        layer=layer,
        draft_vocab=draft_vocab,
        target_hidden=raw.get("target_hidden_size") or layer.hidden_size,
        capture=_captured_layers(raw, eagle, target.num_layers, path),
        fc_bias=bool(raw.get("bias", False)),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_output=bool(raw.get("norm_output", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", eagle.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm", False)),
    )
    _refuse_misfit(config, target, path)
    return config


def _refuse_other_drafts(raw: Mapping[str, Any], path: Path) -> None:
    """Other heads, by what the config declares."""
    name = (raw.get("architectures") or [raw.get("model_type")])[0]
    declared = raw.get("speculators_model_type")
    if declared == "eagle3" or (declared is None and name in ARCHITECTURES):
        return
    supported = f"supported are EAGLE-3 heads ({', '.join(ARCHITECTURES)})"
    if declared is not None:
        raise EspalierError(f"{path}: speculators_model_type {declared!r} is not supported; {supported}")
    if name in EARLIER:
        weights = Weights(path, torch.float32, "cpu", allow_bin=True)
        if looks_like_eagle3(weights):
            raise EspalierError(
                f"{path} is declared as EAGLE ({name}) but holds an EAGLE-3 head (it has a hidden_norm); "
                f"set its architectures to [{ARCHITECTURES[0]!r}]"
            )
        raise EspalierError(f"{path}: architecture {name!r} is an EAGLE-1/2 head, not supported yet; {supported}")
    if "deepseek" in str(name).lower():
        raise EspalierError(f"{path}: architecture {name!r} is an MLA draft, not supported yet; {supported}")
    raise EspalierError(f"{path}: architecture {name!r} is no draft that is known; {supported}")


def looks_like_eagle3(weights: Weights) -> bool:
    return "midlayer.hidden_norm.weight" in weights or "layers.0.hidden_norm.weight" in weights


def _layer_family(flat: Mapping[str, Any], path: Path) -> Family:
    """Drafts are Llama layers unless a supported model_type says otherwise."""
    by_type = {family.model_type: family for family in FAMILIES.values()}
    declared = flat.get("model_type", "llama")
    if "deepseek" in str(declared) or flat.get("kv_lora_rank"):
        raise EspalierError(f"{path}: an MLA draft ({declared}) is not supported yet; use a draft with plain attention")
    if flat.get("num_hidden_layers") != 1:
        raise EspalierError(
            f"{path}: num_hidden_layers = {flat.get('num_hidden_layers')}; EAGLE-3 heads of one layer are supported; "
            "use such a draft"
        )
    if declared not in (*by_type, *WRAPPERS):
        raise EspalierError(
            f"{path}: a draft layer of model_type {declared!r} is not supported; supported: {', '.join(by_type)}"
        )
    if flat.get("sliding_window") and flat.get("use_sliding_window", True) and declared not in ("qwen2", "qwen3"):
        return by_type["mistral"]  # Llama's layer behind a window
    return by_type.get(declared, by_type["llama"])


def _captured_layers(raw: Mapping[str, Any], eagle: Mapping[str, Any], num_layers: int, path: Path) -> tuple[int, ...]:
    """Which target layers' inputs are fused.

    Two spellings differ by one.  Speculators' top-level ids index what enters a layer (its own default, written out,
    is [2, L/2, L-3]); SafeAILab's and SpecForge's ids in eagle_config mean "after layer id", what enters id + 1.
    """
    top, nested = raw.get("eagle_aux_hidden_state_layer_ids"), eagle.get("eagle_aux_hidden_state_layer_ids")
    if eagle.get("use_aux_hidden_state", True) is False:
        raise EspalierError(
            f"{path}: use_aux_hidden_state = False is not supported; use a head that fuses target layers"
        )
    if top:
        ids = tuple(top)
    elif nested:
        ids = tuple(i + 1 for i in nested)
    else:
        ids = (2, num_layers // 2, num_layers - 3)
    if any(not 0 <= i <= num_layers for i in ids):
        raise EspalierError(
            f"{path} fuses the inputs of target layers {ids}, but the target has {num_layers} layers; "
            "use the target that it was trained for"
        )
    expected = raw.get("num_aux_hidden_states") or len(ids)
    if len(ids) != expected:
        raise EspalierError(
            f"{path}: num_aux_hidden_states = {expected}, but {len(ids)} layers {ids} are captured; "
            "give as many eagle_aux_hidden_state_layer_ids"
        )
    return ids


def _refuse_misfit(config: Eagle3Config, target: ModelConfig, path: Path) -> None:
    def refuse(what: str, have: int, need: int) -> None:
        if have != need:
            raise EspalierError(
                f"{path} does not fit its target: {what} {have}, the target has {need}; use the draft trained for it"
            )

    refuse("target hidden size", config.target_hidden, target.hidden_size)
    refuse("vocabulary", config.layer.vocab_size, target.vocab_size)
    if not 1 <= config.draft_vocab <= target.vocab_size:
        raise EspalierError(
            f"{path}: draft_vocab_size = {config.draft_vocab}, the target's vocabulary is {target.vocab_size}; "
            "use the draft trained for it"
        )
    if config.norm_before_fc and config.fc_norm:
        raise EspalierError(
            f"{path}: norm_before_fc and fc_norm are both set; only one of them can be: correct the config"
        )
