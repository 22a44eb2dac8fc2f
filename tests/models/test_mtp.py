"""Multi-token prediction layers on disk: one layer against transformers' parts, what is shared, and what is refused."""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from espalier.config import EngineConfig, SpeculationConfig
from espalier.errors import EspalierError
from espalier.models import ModelConfig, load_target, read_config
from espalier.models.mtp import MTPDraft
from espalier.speculate.drafters.registry import load_draft, read_draft
from espalier.startup import load
from tests.builders import make_target
from tests.checkpoints import edit_config, edit_weights
from tests.models.reference import in_float64, load_reference
from tests.mtp import LAYERS, QWEN, mtp_directories, types_of
from tests.oracles.dense import DensePass
from tests.oracles.plain_mtp import plain_modules

WIDTH = 12
LOADING: dict[str, Any] = {"dtype": torch.float64, "device": "cpu", "position_rows": WIDTH}
OWN = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "mimo")


def copied(family: str, path: Path) -> tuple[Path, Path]:
    """(target, draft) of three layers, to be edited."""
    target, draft = mtp_directories(family, 3)
    own = Path(copytree(target, path / "target"))
    return own, own if draft == target else Path(copytree(draft, path / "draft"))


def loaded(target: Path, draft: Path) -> tuple[Any, MTPDraft]:
    model = load_target(target, **LOADING)
    made = load_draft(draft, model, **LOADING)
    assert isinstance(made, MTPDraft)
    return model, made


@pytest.mark.parametrize("family", [*OWN, *QWEN, "llama", "qwen3_moe"])
def test_a_layer_is_transformers_decoder_layer_behind_the_papers_projection(family: str, tmp_path: Path) -> None:
    """The modules' layers are the last ones of a longer model, which transformers runs."""
    target_path, draft_path = mtp_directories(family, 3)
    how: dict[str, Any] = {"layers": LAYERS + 3, "seed": 40, "vocab": 16, **types_of(family, 3)}
    whole = make_target(tmp_path / "whole", "qwen2" if family == "mimo" else family, **how)
    theirs = load_reference(whole, torch.float64).model
    target, draft = loaded(target_path, draft_path)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 16, (1, WIDTH), generator=generator)
    hidden = torch.randn(1, WIDTH, 32, generator=generator, dtype=torch.float64)
    positions = torch.arange(WIDTH)[None]
    # An indexer needs the mask itself.
    mask = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()[None, None] if "index_topk" in target.config.raw else None
    for i, plain in enumerate(plain_modules(target_path, draft_path, target, draft)):
        out = draft.modules[i](DensePass(tokens, draft.layer_specs[i : i + 1], positions), hidden)
        x = plain.joined(tokens, hidden)
        angles = in_float64(theirs.rotary_emb)(x, positions)
        x = in_float64(theirs.layers[LAYERS + i])(x, position_embeddings=angles, attention_mask=mask)
        expected = plain.norm(x[0] if isinstance(x, tuple) else x, "norm")
        torch.testing.assert_close(out.hidden, expected)
        torch.testing.assert_close(draft.modules[i].logits(out), expected @ plain.head.T)


def test_a_stored_copy_of_the_targets_matrices_is_shared(tmp_path: Path) -> None:
    """A target's own layer may store a copy of its embedding and head, or matrices of its own."""
    paths = copied("deepseek_v3", tmp_path)
    other = torch.randn(16, 32, dtype=torch.float64)

    def store(weights: dict[str, Tensor]) -> None:
        weights["model.layers.3.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.3.shared_head.head.weight"] = weights["lm_head.weight"].clone()
        weights["model.layers.4.embed_tokens.weight"] = other
        weights["model.layers.4.shared_head.head.weight"] = other.clone()

    edit_weights(paths[1], store)
    target, draft = loaded(*paths)
    assert [m.embed.weight is target.embed.weight for m in draft.modules] == [True, False, True]
    assert [m.head is target.head for m in draft.modules] == [True, False, True]
    assert torch.equal(draft.modules[1].embed.weight, other)
    assert torch.equal(draft.modules[1].head(torch.eye(32, dtype=torch.float64)), other.T)


def test_a_head_may_have_its_own_embedding_and_head(tmp_path: Path) -> None:
    paths = copied("llama", tmp_path)
    own = torch.randn(16, 32, dtype=torch.float64)
    edit_weights(paths[1], lambda weights: weights.update({"embed_tokens.weight": own, "lm_head.weight": own + 1}))
    target, draft = loaded(*paths)
    assert all(torch.equal(m.embed.weight, own) and m.head is not target.head for m in draft.modules)


@pytest.mark.parametrize(
    ("family", "name"),
    [("deepseek_v3", "model.layers.4.eh_proj.weight"), ("llama", "mtp_layers.1.input_proj.weight")],
)
def test_weights_that_do_not_fit_are_refused(family: str, name: str, tmp_path: Path) -> None:
    paths = copied(family, tmp_path)
    edit_weights(paths[1], lambda weights: weights.update({f"{name}x": torch.zeros(2)}))
    with pytest.raises(EspalierError, match=rf"{name}x.* belongs to no parameter"):
        loaded(*paths)
    edit_weights(paths[1], lambda weights: (weights.pop(f"{name}x"), weights.pop(name)))
    with pytest.raises(EspalierError, match=f"{name}.* is missing"):
        loaded(*paths)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0; 1 to 16 is needed"),
        ({"num_nextn_predict_layers": 17}, "num_nextn_predict_layers = 17; 1 to 16"),
        ({"mtp_form": "tree"}, "mtp_form = 'tree' is not supported; use 'chain' or 'target'"),
        ({"transformer_layer_config": {"model_type": "qwen3_next"}}, "model_type 'qwen3_next'"),
        (
            {"speculators_model_type": None, "architectures": ["Step3p5ForCausalLM"]},
            "Step3p5ForCausalLM. .the MTP layers of Step-3.5. is not supported yet; supported are",
        ),
    ],
    ids=str,
)
def test_configs_that_are_refused(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    target, draft = mtp_directories("llama", 3)
    path = Path(copytree(draft, tmp_path / "draft"))
    edit_config(path, **fields)
    with pytest.raises(EspalierError, match=says):
        read_draft(path, read_config(target))


def test_layers_of_another_target_are_refused() -> None:
    config = read_config(mtp_directories("llama", 1, vocab=24)[0])
    with pytest.raises(EspalierError, match="does not fit its target: vocabulary 16, the target has 24"):
        read_draft(mtp_directories("llama", 1)[1], config)


def found(target: Path, **fields: Any) -> load.Checkpoint:
    return load.find_checkpoint(EngineConfig(model=target, device="cpu", **fields))


@pytest.mark.parametrize("family", OWN)
def test_own_layers_are_the_draft_unless_something_else_is_asked(family: str) -> None:
    target, _ = mtp_directories(family, 1)

    def algorithm(name: str) -> str:
        return found(target, speculation=SpeculationConfig(algorithm=name)).spec.algorithm

    assert found(target).spec.algorithm == algorithm("mtp") == "mtp"
    assert (algorithm("ngram"), found(target, speculation=None).spec.algorithm) == ("ngram", "none")
    with pytest.raises(EspalierError, match="algorithm='eagle3' needs a draft"):
        algorithm("eagle3")


def test_a_config_that_promises_layers_that_are_not_stored_brings_no_draft(tmp_path: Path) -> None:
    target = make_target(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    assert found(target).spec.algorithm == "ngram"


def test_own_layers_follow_the_overrides_of_their_target() -> None:
    target, draft = mtp_directories("deepseek_v3", 1)

    def layer(config: ModelConfig) -> ModelConfig:
        return read_draft(draft, config).layer

    assert layer(read_config(target, {"rms_norm_eps": 0.5})).rms_norm_eps == 0.5
    assert layer(read_config(target)).num_layers == LAYERS + 1


def test_layers_that_are_not_the_draft_take_no_memory() -> None:
    path, _ = mtp_directories("deepseek_v3", 2)
    own, none = (
        load.count_weights(load.find_checkpoint(EngineConfig(model=path, speculation=how))) for how in ("auto", None)
    )
    stored = load_file(path / "model.safetensors")
    layers = [tensor for name, tensor in stored.items() if name.startswith(("model.layers.3.", "model.layers.4."))]
    assert layers and own.num_cast_values - none.num_cast_values == sum(tensor.numel() for tensor in layers)
