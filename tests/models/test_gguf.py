"""A GGUF file is the model that it was made from; a field, type, size or file that is not understood is refused."""

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from espalier.errors import EspalierError
from espalier.kernels.layers.blocks import BLOCK_TYPES
from espalier.model_files import find_gguf, read_gguf
from espalier.models import load_target, read_config
from espalier.models.loading import read_raw_config
from espalier.models.weight_files import WeightSize, count_weights_in
from espalier.models.weight_formats.base import StackedWeights
from espalier.models.weight_formats.gguf import BlockWeight
from espalier.startup.generation_config import end_tokens
from espalier.text import load_tokenizer
from tests.builders import make_target
from tests.folders import new_folder
from tests.gguf import Stored, convert, plain, write_gguf
from tests.oracles.dense import DensePass

LOADING: dict[str, Any] = {"dtype": torch.float64, "device": "cpu", "position_rows": 64}
TOKENS = torch.randint(0, 16, (2, 24), generator=torch.Generator().manual_seed(3))
# By family: fields with which GGUF can say what the config says.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"eos_token_id": 2}),
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, head size apart": ("llama", {"head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 8}),
}
# As llama.cpp mixes them in files that it calls Q4_K_M.
Q4_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q4_K", "output": "Q6_K"}


def logits(path: Path, **how: Any) -> torch.Tensor:
    target = load_target(path, **LOADING | how)
    return target.logits(target(DensePass(TOKENS, target.layer_specs)).hidden)


def dense(path: Path, out: Path, meant: dict[str, torch.Tensor]) -> Path:
    """The checkpoint at `path` with other weights."""
    shutil.copytree(path, out)
    save_file(meant, out / "model.safetensors")
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_computes_what_its_checkpoint_computes(tmp_path: Path, name: str) -> None:
    family, fields = FAMILIES[name]
    path = make_target(tmp_path / "target", family, **fields)
    meant = convert(path, tmp_path / "model.gguf")
    # A norm of Gemma is stored with 1 added, in float32.
    rounding = 1e-5 if "gemma" in family else 1e-12
    expected = logits(dense(path, tmp_path / "dense", meant))
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), expected, rtol=rounding, atol=rounding)
    config = read_config(tmp_path / "model.gguf")
    assert config.eos_token_ids == read_config(path).eos_token_ids
    assert config.rms_norm_eps == read_config(path).rms_norm_eps


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_of_several_formats_stay_blocks(tmp_path: Path, tied: bool) -> None:
    path = make_target(tmp_path / "target", hidden=256, head_dim=64, layers=2, tie_word_embeddings=tied)
    meant = convert(path, tmp_path / "model.gguf", lambda name: Q4_K_M.get(name.split(".")[-2], "Q4_K"))
    other = dense(path, tmp_path / "dense", meant)
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), logits(other), rtol=1e-9, atol=1e-9)
    target = load_target(tmp_path / "model.gguf", **LOADING)
    qkv, mlp = target.layers[0].attention.qkv.weight, target.layers[0].mlp
    assert isinstance(qkv, StackedWeights) and qkv.format == "Q4_K over Q6_K"
    assert isinstance(mlp.gate_up.weight, BlockWeight) and isinstance(target.head.weight, BlockWeight)
    weights = [part for layer in target.layers for part in (layer.attention.qkv, layer.attention.out)]
    weights += [part for layer in target.layers for part in (layer.mlp.gate_up, layer.mlp.down)] + [target.head]
    counted = count_weights_in(tmp_path / "model.gguf", read_config(tmp_path / "model.gguf").formats)
    assert counted == WeightSize(16 * 256 + 5 * 256, sum(part.weight.nbytes for part in weights))


@pytest.mark.parametrize("kind", [name for name, kind in BLOCK_TYPES.items() if kind.block_values == 32])
def test_formats_of_32_values(tmp_path: Path, kind: str) -> None:
    path = make_target(tmp_path / "target", layers=2)
    meant = convert(path, tmp_path / "model.gguf", lambda name: kind)
    torch.testing.assert_close(
        logits(tmp_path / "model.gguf"), logits(dense(path, tmp_path / "dense", meant)), rtol=1e-9, atol=1e-9
    )


def test_matrices_of_16_bits_are_dense(tmp_path: Path) -> None:
    path = make_target(tmp_path / "target", layers=2)
    meant = convert(path, tmp_path / "model.gguf", lambda name: "BF16" if "attn" in name else "F16")
    expected = logits(dense(path, tmp_path / "dense", meant))
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), expected, rtol=1e-12, atol=1e-12)
    assert read_raw_config(tmp_path / "model.gguf")["dtype"] == "bfloat16"


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def test_scaled_positions(tmp_path: Path) -> None:
    """Divisors of frequencies are those of llama3's formula; linear and yarn have fields."""
    path = make_target(tmp_path / "target", rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3})
    scaled = read_config(path).rope.inverse_frequencies()
    unscaled = read_config(make_target(tmp_path / "unscaled")).rope.inverse_frequencies()
    convert(path, tmp_path / "plain.gguf")
    header = read_gguf(tmp_path / "plain.gguf")
    tensors = {
        name: Stored(
            place.shape, place.type, place.file.read_bytes()[place.begin :][: 4 * torch.Size(place.shape).numel()]
        )
        for name, place in header.tensors.items()
    }
    found = write_gguf(
        tmp_path / "model.gguf", header.metadata, {**tensors, "rope_freqs.weight": plain(unscaled / scaled)}
    )
    torch.testing.assert_close(read_config(found).rope.inverse_frequencies(), scaled, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits(found), logits(path), rtol=1e-4, atol=1e-4)
    for kind, more in (("linear", {}), ("yarn", {"llama.rope.scaling.original_context_length": 64})):
        extra = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0, **more}
        rope = read_config(write_gguf(tmp_path / "other.gguf", {**header.metadata, **extra}, tensors)).rope
        assert (rope.type, rope.factor) == (kind, 4.0) and rope.original_max_position == (64 if more else 4096)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    path = make_target(tmp_path / "target")
    (tmp_path / "split").mkdir()
    meant = convert(path, tmp_path / "split" / "m.gguf", files=3)
    first = find_gguf(tmp_path / "split")
    assert first.name == "m-00001-of-00003.gguf"
    assert torch.equal(logits(first), logits(dense(path, tmp_path / "dense", meant)))
    with pytest.raises(EspalierError, match="is not the first file of its model"):
        read_gguf(first.with_name("m-00002-of-00003.gguf"))
    shutil.copy(first, first.with_name("alone.gguf"))
    with pytest.raises(EspalierError, match="is one of 3 files of a model"):
        read_gguf(first.with_name("alone.gguf"))
    with pytest.raises(EspalierError, match=r"holds 2 models in GGUF \(alone.gguf, m-00001-of-00003.gguf\)"):
        find_gguf(first.parent)
    first.with_name("m-00003-of-00003.gguf").unlink()
    with pytest.raises(EspalierError, match=r"m-00003-of-00003.gguf is missing"):
        read_gguf(first)


def changed(path: Path, metadata: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    """A small model with other fields (None: without one) and tensors."""
    target = make_target(path / "target", layers=1)
    convert(target, path / "whole.gguf")
    header = read_gguf(path / "whole.gguf")
    content = (path / "whole.gguf").read_bytes()
    found = {
        name: Stored(place.shape, place.type, content[place.begin :][: 4 * torch.Size(place.shape).numel()])
        for name, place in header.tensors.items()
    }
    fields = {**header.metadata, **(metadata or {})}
    kept = {name: each for name, each in {**found, **(tensors or {})}.items() if each is not None}
    return write_gguf(path / "model.gguf", {k: v for k, v in fields.items() if v is not None}, kept)


@pytest.mark.parametrize(
    ("metadata", "tensors", "says"),
    [
        (
            {"general.architecture": "mamba"},
            {},
            "architecture 'mamba' is not supported in GGUF files, only llama, qwen2",
        ),
        ({"general.architecture": None}, {}, "architecture None is not supported"),
        ({"llama.expert_count": 8}, {}, "field 'llama.expert_count' = 8 is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "rope.scaling.type = 'longrope' is not supported"),
        (
            {"llama.attention.key_length": 16, "llama.attention.value_length": 8},
            {},
            "keys of 16 values and values of 8",
        ),
        ({"llama.block_count": None}, {}, "has no field 'llama.block_count'"),
        ({"llama.block_count": 0}, {}, "num_hidden_layers = 0; a positive integer"),
        ({"llama.attention.head_count_kv": [1, 2]}, {}, r"num_key_value_heads = \[1, 2\]; a positive integer"),
        ({"general.alignment": 24}, {}, "general.alignment = 24; a power of two"),
        ({}, {"token_embd.weight": None}, "has no tensor 'token_embd.weight'"),
        ({}, {"output_norm.weight": None}, r"weight 'model.norm.weight' \[32\] is missing"),
        ({}, {"blk.0.attn_qkv.weight": plain(torch.ones(2, 2))}, "'blk.0.attn_qkv.weight' .*belongs to no parameter"),
        ({}, {"blk.0.ffn_up.weight": plain(torch.ones(8, 32))}, r"up_proj.weight' .*shape \[8, 32\], but"),
        (
            {},
            {"blk.0.ffn_up.weight": Stored((64, 32), 16, b"")},
            "'blk.0.ffn_up.weight' is of block type 16, which is not",
        ),
        ({}, {"blk.0.ffn_up.weight": Stored((64, 48), 2, b"")}, r"rows of 48 values, which blocks of 32 \(Q4_0\)"),
        ({}, {"z.weight": Stored((4096, 4096), 0, b"")}, "is cut short in tensor 'z.weight'"),
        ({}, {"z.weight": Stored((2**40, 2**40), 0, b"")}, "tensor 'z.weight' has the shape"),
        (
            {},
            {"rope_freqs.weight": plain(torch.tensor([1.0, 2.0]))},
            "rope parameter short_factor = .*a list of 4 positive",
        ),
        (
            {},
            {"rope_freqs.weight": plain(torch.tensor([1.0, 0, 1, 1]))},
            "rope parameter short_factor = .*a list of 4 positive",
        ),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, metadata: Any, tensors: Any, says: str) -> None:
    path = changed(tmp_path, metadata, tensors)
    with pytest.raises(EspalierError, match=says) as caught:
        load_target(path, **LOADING)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: b"", "is no GGUF file: it has 0 bytes"),
        (lambda content: b"GGML" + content[4:], "is no GGUF file: it begins with b'GGML'"),
        (lambda content: content[:4] + b"\1\0\0\0" + content[8:], "is of GGUF version 1; supported are 2 and 3"),
        (lambda content: content[:4] + b"\0\0\0\3" + content[8:], "is of GGUF version 50331648; .*little-endian"),
        (lambda content: content[:400], "is cut short: its header is longer than the file"),
        (lambda content: content[:-4], "is cut short in tensor"),
        (lambda content: content[:16] + b"\xff" * 8 + content[24:], "is cut short|cannot be read|unknown type|twice"),
    ],
)
def test_a_file_that_is_none_or_cut_short_is_named(tmp_path: Path, change: Any, says: str) -> None:
    path = changed(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(EspalierError, match=re.compile(says)):
        load_target(path, **LOADING)


def test_each_field_and_tensor_that_is_missing_is_named_or_has_gguf_s_default(tmp_path: Path) -> None:
    expected, header = logits(changed(tmp_path)), read_gguf(tmp_path / "model.gguf")
    # Without a head the embedding is it.
    defaults, is_model = {"general.alignment", "llama.rope.freq_base", "llama.rope.dimension_count"}, {"output.weight"}
    for name in {*header.metadata, *header.tensors} - is_model:
        without = {name: None}
        path = changed(tmp_path / name, *((without, {}) if name in header.metadata else ({}, without)))
        if name in defaults:
            assert torch.equal(logits(path), expected), name
        else:
            with pytest.raises(EspalierError):
                logits(path)
                pytest.fail(name)


VALUES = (2**31, -1, 0, 1.5, float("nan"), "x", True, [], [1, 2], ["x"])
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [chr(97 + i) for i in range(15)] + ["ab"],
    "tokenizer.ggml.token_type": [1] * 16,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}


def test_no_value_of_a_field_raises_another_error(tmp_path: Path) -> None:
    """Each field, with each of these: a model, or refused in one line."""
    whole = changed(tmp_path, TOKENIZER)
    content, fields, refused = whole.read_bytes(), read_gguf(whole).metadata | TOKENIZER, 0
    tensors = {
        name: Stored(place.shape, place.type, content[place.begin :][: 4 * torch.Size(place.shape).numel()])
        for name, place in read_gguf(whole).tensors.items()
    }
    assert load_tokenizer(whole, 16) is not None
    for name, value in ((name, value) for name in fields for value in VALUES):
        path = write_gguf(whole, {**fields, name: value}, tensors)
        try:
            end_tokens(path, load_target(path, **LOADING).config)
            load_tokenizer(path, 16)
        except EspalierError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1000, (name, value)
        except Exception as error:
            raise AssertionError(f"{name} = {value!r}: {error!r:.200}") from error
    assert refused > 60


@cache
def whole() -> tuple[Path, bytes]:
    path = changed(new_folder("gguf-"))
    return path.with_name("fuzzed.gguf"), path.read_bytes()


@given(
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=9), st.booleans()), max_size=3),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_any_other_bytes_are_a_model_or_refused_in_one_line(
    changes: list[tuple[float, bytes, bool]], end: float | None
) -> None:
    """Bytes of the header, or anywhere, replaced or put in, and a file cut anywhere."""
    path, content = whole()
    begin_of_data = content.rindex(b"blk.0") + 100
    for place, new, is_put_in in changes:
        at = int(place * begin_of_data)
        content = content[:at] + new + content[at + (0 if is_put_in else len(new)) :]
    path.write_bytes(content if end is None else content[: int(end * len(content))])
    try:
        load_target(path, **LOADING)
    except EspalierError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
