"""The scales of an FP8 K/V cache: what config.json declares, how checkpoints name and shape them, what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier import LLM
from espalier.config import FP8_KV, EngineConfig
from espalier.errors import EspalierError
from espalier.models import load_target
from espalier.models.weight_formats import declared_kv_dtype
from espalier.startup.build import kv_scales
from espalier.startup.load import find_checkpoint, resolve_config
from tests.builders import make_target
from tests.checkpoints import edit_config, replace_weights

STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
HEADS, LAYERS = 2, 3
# As published checkpoints write K's and V's, not as the loader lists them.
NAMES = [
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("kv_scale", "kv_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]


def with_scales(path: Path, scales: dict[str, torch.Tensor], scheme: object = None) -> Path:
    """A target with these tensors under each layer's attention, and with a kv_cache_scheme."""
    target = make_target(path)
    weights = load_file(target / "model.safetensors")
    for layer in range(LAYERS):
        weights |= {f"model.layers.{layer}.self_attn.{name}": scale * (1 + layer) for name, scale in scales.items()}
    save_file(weights, target / "model.safetensors")
    if scheme is not None:
        edit_config(target, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})
    return target


def loaded(target: Path):
    return load_target(target, dtype=torch.float32, device="cpu", position_rows=64)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
@pytest.mark.parametrize("shape", [(), (1,), (HEADS,), (HEADS, 1, 1)], ids=str)
def test_every_name_and_shape(tmp_path, names, shape):
    stored = {name: torch.rand(shape) + 0.1 for name in dict.fromkeys(names)}
    found = kv_scales(loaded(with_scales(tmp_path, stored)))
    for layer in range(LAYERS):
        for scale, name in zip((found[layer].k, found[layer].v), names, strict=True):
            torch.testing.assert_close(scale, (stored[name] * (1 + layer)).flatten().expand(HEADS))


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
def test_a_latent_row_has_the_scale_of_k(tmp_path, family):
    """It is stored once, and is both K and V."""
    target = make_target(tmp_path, family)
    weights = load_file(target / "model.safetensors")
    for layer in range(LAYERS):
        weights |= {
            f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(0.5 + i) for i, name in enumerate("kv")
        }
    save_file(weights, target / "model.safetensors")
    for scales in kv_scales(loaded(target)).values():
        assert (scales.k.tolist(), scales.v.tolist()) == ([0.5], [0.5])


PAIR = {"k_scale": torch.tensor([0.1]), "v_scale": torch.tensor([0.2])}


@pytest.mark.parametrize(
    ("scales", "refusal"),
    [
        ({"k_scale": PAIR["k_scale"]}, r"'model.layers.0.self_attn.v_scale' \[1\] is missing"),
        ({**PAIR, "k_scale": torch.ones(3)}, r"'model.layers.0.self_attn.k_scale' in .* has shape \[3\]"),
        (
            {**PAIR, "v_scale": torch.tensor([0.0])},
            r"'model.layers.0.self_attn.v_scale' is \[0.0, 0.0\], not a positive",
        ),
        ({**PAIR, "k_scale": torch.tensor([torch.nan])}, r"'model.layers.0.self_attn.k_scale' is \[nan, nan\]"),
    ],
    ids=["one without the other", "shape", "zero", "NaN"],
)
def test_wrong_scales_are_refused_by_name(tmp_path, scales, refusal):
    with pytest.raises(EspalierError, match=refusal):
        kv_scales(loaded(with_scales(tmp_path, scales)))


@pytest.mark.parametrize("declares", [False, True])
def test_a_layer_without_scales_is_refused(tmp_path, declares):
    """Where others have them, or where config.json declares them."""
    target = with_scales(tmp_path, {} if declares else PAIR, STATIC if declares else None)
    if not declares:
        replace_weights(target, **{f"model.layers.0.self_attn.{name}_scale": None for name in "kv"})
    with pytest.raises(EspalierError, match=r"'model.layers.0.self_attn.k_scale' is missing, and kv_dtype=fp8_e4m3"):
        kv_scales(loaded(target))


def test_without_scales_there_are_none(tmp_path):
    assert kv_scales(loaded(with_scales(tmp_path, {}))) == {}


@pytest.mark.parametrize(
    ("scheme", "declared"),
    [(None, None), ("static", FP8_KV), (STATIC, FP8_KV), ({**STATIC, "strategy": "attn_head"}, FP8_KV)],
)
def test_declared_schemes(scheme, declared):
    assert declared_kv_dtype({"quantization_config": {"kv_cache_scheme": scheme}}) == declared


@pytest.mark.parametrize("wrong", [{"num_bits": 4}, {"type": "int"}, {"dynamic": True}, {"strategy": "token"}], ids=str)
def test_other_schemes_are_refused(tmp_path, wrong):
    target = with_scales(tmp_path, PAIR, {**STATIC, **wrong})
    config = EngineConfig(model=target, max_context=64, speculation=None)
    with pytest.raises(EspalierError, match=r"kv_cache_scheme .* is not supported, only static FP8"):
        resolve_config(config, find_checkpoint(config))
    # The way out that the message names.
    other = EngineConfig(model=target, max_context=64, speculation=None, kv_dtype="float32")
    assert resolve_config(other, find_checkpoint(other)).kv_dtype == "float32"


@pytest.mark.parametrize(
    ("settings", "kv_dtype"), [({}, FP8_KV), ({"kv_dtype": "float32"}, "float32"), ({"kv_dtype": FP8_KV}, FP8_KV)]
)
def test_auto_is_what_the_checkpoint_declares(tmp_path, settings, kv_dtype, caplog):
    """And half of the bytes: the pages hold four times as many tokens of float32's."""
    caplog.set_level("INFO", "espalier")
    target = with_scales(tmp_path, PAIR, STATIC)
    with LLM(model=target, max_context=64, speculation=None, num_pages=9, **settings) as llm:
        planes = llm.engine.executor.runner.pages.layers[0]
        staged = llm.engine.executor.runner.cache.staging.layers[0]
        out = llm.generate([[1, 2, 3]])[0]
    wanted = torch.float8_e4m3fn if kv_dtype == FP8_KV else torch.float32
    assert {plane.dtype for plane in (*planes, *staged)} == {wanted} and out.error is None
    assert (f"kv_dtype={FP8_KV}, as the checkpoint's" in caplog.text) == (not settings)
    each = 2 * HEADS * 8 * LAYERS * wanted.itemsize
    assert f"pages hold {9 * 16} tokens, {each} bytes each" in caplog.text


def test_scales_of_one_are_told(tmp_path, caplog):
    with LLM(model=make_target(tmp_path), max_context=64, speculation=None, kv_dtype=FP8_KV):
        pass
    assert "the checkpoint has no K/V scales" in caplog.text
