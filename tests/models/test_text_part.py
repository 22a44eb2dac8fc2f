"""Of a multimodal checkpoint the text part is a target: transformers computes the same of a text without images."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)

from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.models import load_target, read_config
from espalier.models.quantisers import quantise
from espalier.models.stored_names import TEXT_PART_NAMES
from espalier.models.weight_files import count_weights_in
from espalier.models.weight_formats import all_dense
from espalier.speculate.drafters.registry import is_draft
from espalier.startup import load
from tests.builders import DEFAULTS, VISION, WHOLES_OF, draw_weights
from tests.models.reference import in_float64
from tests.models.test_families import relative
from tests.oracles.dense import DensePass
from tests.pairwise import in_turn_params

TEXT = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096, "eos_token_id": None}
WHOLES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ministral3": (Mistral3ForConditionalGeneration, Mistral3Config, {"image_token_index": 3}),
    "mistral": (Mistral3ForConditionalGeneration, Mistral3Config, {"image_token_index": 3}),
    "gemma3": (Gemma3ForConditionalGeneration, Gemma3Config, {"image_token_index": 3, "mm_tokens_per_image": 4}),
    "gemma4": (Gemma4ForConditionalGeneration, Gemma4Config, {"image_token_id": 3, "audio_config": None}),
    "gemma4_unified": (
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedConfig,
        {"image_token_id": 3, "audio_config": None},
    ),
    "muse_glimmer": (MuseGlimmerForConditionalGeneration, MuseGlimmerConfig, WHOLES_OF["muse_glimmer"]),
}
KINDS = {"mistral": "mistral", "ministral3": "ministral3"}
VISIONS: dict[str, dict[str, Any]] = {
    **{family: {**VISION, "model_type": "pixtral"} for family in ("mistral", "ministral3")},
    "gemma4": {**VISION, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
}
OTHERS = {
    "gemma4": "embed_vision, vision_tower",
    "gemma4_unified": "none",
    "muse_glimmer": "vision_adapter, vision_projection, vision_tower",
}


def make_whole(path: Path, family: str, as_in_memory: bool = False) -> Path:
    """A random multimodal checkpoint, float64.  as_in_memory: with the names that transformers 5 has in memory."""
    make, config, own = WHOLES[family]
    text = {"model_type": KINDS.get(family, f"{family}_text"), **TEXT, **DEFAULTS.get(family, {})}
    vision = None if family == "gemma4_unified" else VISIONS.get(family, VISION)
    tied = text.setdefault("tie_word_embeddings", False)
    model = make(config(text_config=text, vision_config=vision, tie_word_embeddings=tied, **own)).to(torch.float64)
    draw_weights(model, seed=5)
    model.save_pretrained(path)
    if as_in_memory:
        save_file({name: x.clone() for name, x in model.state_dict().items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("family", "as_in_memory"), in_turn_params(list(WHOLES), [False, True]))
def test_its_text_part_computes_what_transformers_computes(family, as_in_memory, tmp_path, caplog) -> None:
    path = make_whole(tmp_path, family, as_in_memory)
    tokens = torch.tensor([[1, 2, 5, 9, 4, 7, 8, 2, 11, 6, 14, 0, 13, 5, 5, 1, 2, 9]])
    theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = in_float64(theirs)(tokens).logits
    with caplog.at_level(logging.INFO, "espalier"):
        model = load_target(path, dtype=torch.float64, device="cpu", position_rows=32)
    assert relative(model.logits(model(DensePass(tokens, model.layer_specs)).hidden), expected) < 1e-10
    [said] = [record.getMessage() for record in caplog.records if "text part" in record.getMessage()]
    others = OTHERS.get(family, "multi_modal_projector, vision_tower")
    assert WHOLES[family][0].__name__ in said and f"(other parts: {others})" in said
    assert load.find_checkpoint(EngineConfig(model=path)).target == model.config and not is_draft(path)
    # Only what is read counts.
    counted = count_weights_in(path, model.config.formats, stored_names=model.config.stored_names)
    text_only = sum(
        x.numel() for name, x in load_file(path / "model.safetensors").items() if TEXT_PART_NAMES.own_name(name)
    )
    assert counted.num_cast_values == text_only
    assert (text_only < count_weights_in(path, model.config.formats).num_cast_values) == (others != "none")


@pytest.mark.parametrize(
    "stored",
    ["language_model.model.layers.3.mlp.up_proj", "language_model.lm_head", "model.language_model.norm", "lm_head"],
)
def test_formats_are_asked_with_the_names_in_the_file(stored: str) -> None:
    """quantization_config names modules as the checkpoint does."""
    asked = []
    formats = TEXT_PART_NAMES.formats_by_own_name(
        lambda name: asked.append(name) or all_dense(name), [f"{stored}.weight", "vision.x"]
    )
    own = TEXT_PART_NAMES.own_name(f"{stored}.weight")
    assert own is not None
    formats(own.removesuffix(".weight"))
    assert asked == [stored]
    assert TEXT_PART_NAMES.own_name(f"vision_tower.{stored}.weight") is None


def test_the_whole_says_what_its_text_part_leaves_out(tmp_path: Path) -> None:
    """Whether the head is tied is the whole's to say; other fields are the text part's, where it has them."""
    path = make_whole(tmp_path, "mistral")
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"] |= {"tie_word_embeddings": True, "eos_token_id": 5}
    (path / "config.json").write_text(json.dumps({**raw, "eos_token_id": 7, "bos_token_id": 3}))
    config = read_config(path)
    assert not config.tie_word_embeddings and config.eos_token_ids == (5,)


def test_what_is_no_text_part_is_refused(tmp_path: Path) -> None:
    path = make_whole(tmp_path / "whole", "ministral3")
    raw = json.loads((path / "config.json").read_text())
    for change, message in (
        ({"text_config": None}, "Mistral3ForConditionalGeneration needs an object text_config, not None"),
        ({"text_config": {"model_type": "llama"}}, "is of model_type 'llama', .* supported are mistral, ministral3"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "'LlavaForConditionalGeneration' is not supported"),
    ):
        (path / "config.json").write_text(json.dumps({**raw, **change}))
        with pytest.raises(EspalierError, match=f"^{path}.*{message}"):
            read_config(path)
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(EspalierError, match="which quantize does not support"):
        quantise(path, tmp_path / "out", "fp8", torch.device("cpu"), lambda: None)
