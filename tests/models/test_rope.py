"""Rotary frequencies agree to the bit with transformers' own, for every scaling type and both spellings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from espalier.kernels.ops.rope import rotate
from espalier.models import load_target, read_config
from espalier.models.rope import RopeTables
from tests.builders import CONFIGS, make_target
from tests.models.reference import load_reference, reference_logits
from tests.models.test_families import relative
from tests.models.test_refusals import edit_config, refused
from tests.oracles.dense import DensePass
from tests.pairwise import in_turn_params

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn, given ramp": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}


@pytest.mark.parametrize(("scaling", "head_dim", "theta"), in_turn_params(list(SCALINGS), [8, 64], [10000.0, 500000.0]))
def test_frequencies(scaling: str, head_dim: int, theta: float, tmp_path: Path) -> None:
    parameters = {**SCALINGS[scaling], "rope_theta": theta}
    path = make_target(tmp_path, head_dim=head_dim, rope_parameters=dict(parameters))
    rope = read_config(path).rope
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](CONFIGS["llama"].from_pretrained(path), "cpu")
    assert torch.equal(rope.inverse_frequencies(), theirs)
    assert rope.attention_factor == pytest.approx(factor, abs=0)


def test_frequencies_of_longrope(tmp_path: Path) -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 7.0], "long_factor": [1.0, 3.0, 5.0, 20.0]}
    for own in ({}, {"factor": 8.0}, {"factor": 0.5}, {"attention_factor": 1.3}):
        parameters = {**scaling, **own, "rope_theta": 5e5, "original_max_position_embeddings": 256}
        path = make_target(tmp_path, rope_parameters=parameters)
        rope = read_config(path).rope
        for context in (256, 257):
            config = CONFIGS["llama"].from_pretrained(path)
            theirs, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=context)
            assert torch.equal(rope.inverse_frequencies(context), theirs)
            assert rope.attention_factor == pytest.approx(factor, abs=0)


# Every YaRN where it has factors of the scores.  Other readers, for a part of a head or by kind of layer, with the
# scaling that changes frequencies and sizes; `test_frequencies` has the rest.
OWN_READERS = ("llama", "deepseek_v3", "gpt_oss", "glm4_moe")
CHANGES_ALL = "yarn, given ramp"
USUAL = {
    "dynamic": ("llama",),
    "yarn": ("deepseek_v3",),
    "yarn, mscale": ("llama", "deepseek_v3"),
}
USUAL[CHANGES_ALL] = (
    *OWN_READERS,
    "gemma3",
    "ministral3",
    "mistral",
    "deepseek_v32",
    "smollm3",
    "laguna",
    "qwen3_next",
)
FULL = pytest.mark.full
# Ministral 3 has no RoPE without these.
MINISTRAL3 = {"llama_4_scaling_beta": 0.3, "max_position_embeddings": 4096}
CELLS = [
    pytest.param(scaling, family, marks=() if family in USUAL.get(scaling, ()) else FULL)
    for scaling in SCALINGS
    for family in CONFIGS
    # Transformers does not find `truncate` among the parameters of a layer type.
    if not (family.startswith(("gemma3", "gemma4", "olmo3", "laguna")) and "truncate" in SCALINGS[scaling])
    # Phi-3 has LongRoPE alone.  Starcoder2 has transformers' own rotary tables, in float32.
    and family not in ("phi3", "starcoder2")
    and not (family == "ministral3" and "original_max_position_embeddings" not in SCALINGS[scaling])
]


@pytest.mark.parametrize(("scaling", "family"), CELLS)
def test_logits(scaling: str, family: str, tmp_path: Path) -> None:
    own = MINISTRAL3 if family == "ministral3" else {}
    if scaling == "dynamic" and family.startswith(("qwen3_next", "qwen3_5")):
        # With two rotated values of a head, transformers divides by zero.
        own = {"partial_rotary_factor": 0.5}
    path = make_target(tmp_path, family, rope_parameters={**SCALINGS[scaling], **own, "rope_theta": 10000.0})
    tokens = torch.randint(0, 16, (1, 300), generator=torch.Generator().manual_seed(1))
    # Which numbers are rounded to float32, and where, depends on the reader alone.
    in_float32 = ((torch.float32, 1e-5),) if scaling == CHANGES_ALL and family in OWN_READERS else ()
    for dtype, tolerance in ((torch.float64, 1e-10), *in_float32):
        model = load_target(path, dtype=dtype, device="cpu", position_rows=300)
        out = model(DensePass(tokens, model.layer_specs, torch.arange(300)[None]))
        logits, _ = reference_logits(load_reference(path, dtype), tokens)
        assert relative(model.logits(out.hidden), logits) <= tolerance


def test_both_spellings_read_alike(tmp_path: Path) -> None:
    llama3 = SCALINGS["llama3"]
    new = make_target(tmp_path / "new", rope_parameters={**llama3, "rope_theta": 5e5})
    plain = make_target(tmp_path / "plain")
    old = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {**llama3, "type": "llama3"}}
    assert read_config(plain, old).rope == read_config(new).rope


def test_a_yarn_override_extends_the_context(tmp_path: Path) -> None:
    path = make_target(tmp_path, max_position_embeddings=256)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = read_config(path, {"rope_scaling": yarn, "rope_theta": 77.0})
    assert (config.rope.type, config.rope.theta, config.max_position) == ("yarn", 77.0, 1024)


STORED = {"rope_scaling": {"type": "llama3", **SCALINGS["llama3"]}, "rope_parameters": None}


@pytest.mark.parametrize("stored", [STORED, {"rope_parameters": {**SCALINGS["llama3"], "rope_theta": 5e5}}], ids=str)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_an_override_in_either_spelling_takes_effect(stored: dict, field: str, kind: str, tmp_path: Path) -> None:
    path = make_target(tmp_path)
    edit_config(path, **stored)
    rope = read_config(path, {field: {kind: "yarn", "factor": 4.0}}).rope
    kept = SCALINGS["llama3"]["original_max_position_embeddings"]
    assert (rope.type, rope.factor, rope.original_max_position) == ("yarn", 4.0, kept)
    assert read_config(path, {field: {kind: "yarn", "factor": 4.0}, "rope_theta": 77.0}).rope.theta == 77.0


def test_an_override_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    path = make_target(tmp_path, rope_parameters={**SCALINGS["llama3"], "rope_theta": 5e5})
    refused(lambda: read_config(path, {"rope_scaling": None}), "rope_scaling = None does not change rope_parameters")
    assert read_config(path, {"rope_scaling": {"rope_type": "default", "factor": None}}).rope.type == "default"


def test_rope_scaling_is_whole(tmp_path: Path) -> None:
    """GPT-OSS has a default for rope_parameters.  As in transformers, none of its values joins a rope_scaling."""
    path = make_target(tmp_path, "gpt_oss", max_position_embeddings=64)
    edit_config(path, rope_parameters=None, rope_scaling={"rope_type": "yarn", "factor": 8.0})
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](CONFIGS["gpt_oss"].from_pretrained(path), "cpu")
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    (path / "config.json").write_text(json.dumps(config))
    assert torch.equal(read_config(path).rope.inverse_frequencies(), theirs)


def test_rotation_is_a_rotation(tmp_path: Path) -> None:
    """Scores depend on the distance of positions alone."""
    tables = RopeTables(read_config(make_target(tmp_path)).rope, 50, torch.float64, "cpu")
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, tables.cos[position], tables.sin[position])

    scores = [(turned(q, p + 7) * turned(k, p)).sum() for p in (0, 31)]
    torch.testing.assert_close(*scores)
