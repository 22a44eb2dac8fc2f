"""Each quantised format means what its definition says, alone and stacked; what is not built is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import FP8Linear, _dequantize_fp8_weight

from espalier.errors import EspalierError
from espalier.kernels.layers import quantised as kernels
from espalier.kernels.layers.quantised import QuantisedMatrix, dequantise
from espalier.models import load_target, read_config
from espalier.models.layers.mlp import MixtureMLP
from espalier.models.weight_files import count_weights_in
from espalier.models.weight_formats import gptq, quantised, read_formats
from espalier.models.weight_formats.compressed_tensors import read_compressed_tensors
from espalier.models.weight_formats.fp8 import SCALE_SUFFIXES, Fp8Format
from espalier.models.weight_formats.gptq import read_gptq
from espalier.models.weights import Weights
from tests.builders import make_target
from tests.checkpoints import edit_config, replace_weights
from tests.oracles.dense import DensePass
from tests.pairwise import in_turn_params
from tests.quantised import FLOAT4, FP8, INPUT, KINDS, ORDERED, ROUNDS_INPUTS, STATIC, Stored, quantise

DTYPE = torch.float64
LOADING: dict[str, Any] = {"dtype": DTYPE, "device": "cpu", "position_rows": 64}
LAYER = "model.layers.1."
QKV = ([f"{LAYER}self_attn.{name}_proj" for name in "qkv"], [32, 16, 16], 32)
GATE_UP = ([f"{LAYER}mlp.{name}_proj" for name in ("gate", "up")], [64, 64], 32)
DOWN = ([f"{LAYER}mlp.down_proj"], [32], 64)
STACKS = [QKV, GATE_UP, DOWN]


@pytest.fixture(autouse=True)
def rounded_inputs_on_a_cpu(monkeypatch):
    """Inputs are rounded where a checkpoint asks for it, as on a GPU."""
    monkeypatch.setattr(quantised, "adapt_to_device", lambda matrix: matrix)


def made(path: Path, kind: str, family: str = "llama", **config: Any) -> tuple[Path, Stored]:
    """A target in a kind of KINDS, and the dense weights that it means."""
    target = make_target(path / "target", family, attention_bias=True, **config)
    return target, quantise(target, kind)


def loaded(path: Path) -> Weights:
    return Weights(path, DTYPE, "cpu", read_config(path).formats)


def meant_of(meant: Stored, names: list[str]) -> Tensor:
    return torch.cat([meant[f"{name}.weight"] for name in names])


def rounded(x: Tensor, kind: str) -> Tensor:
    """The values that inputs have in FP8, row by row, written apart from the engine."""
    if kind not in ROUNDS_INPUTS:
        return x
    group = {"fp8-block": 16, "fp8-block-32": 32}.get(kind, x.shape[1])
    rows = []
    for row in x:
        parts = []
        for part in row.split(group):
            scale = INPUT.double() if kind in STATIC else part.abs().max() / 448
            parts.append((part / scale).clamp(-448, 448).to(FP8).double() * scale)
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize(("kind", "stack"), in_turn_params(list(KINDS), STACKS))
def test_stacked_matrices_mean_what_the_format_says(tmp_path, kind, stack):
    path, meant = made(tmp_path, kind)
    matrix = loaded(path).matrix(*stack)
    assert isinstance(matrix, QuantisedMatrix) and matrix.shape == (sum(stack[1]), stack[2])
    assert torch.equal(dequantise(matrix, DTYPE), meant_of(meant, stack[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_is_with_the_meant_weights(tmp_path, monkeypatch, kind):
    """In blocks of rows too small for the matrix, and with a bias."""
    monkeypatch.setattr(kernels, "DEQUANTISED_VALUES_PER_STEP", 32 * 16)
    path, meant = made(tmp_path, kind)
    x, bias = torch.randn(5, 32, dtype=DTYPE), torch.randn(64, dtype=DTYPE)
    weight = loaded(path).weight(*QKV)
    expected = F.linear(rounded(x, kind), meant_of(meant, QKV[0]), bias)
    torch.testing.assert_close(weight.apply(x, bias), expected, rtol=1e-11, atol=1e-11)
    gate, up = F.linear(rounded(x, kind), meant_of(meant, GATE_UP[0])).chunk(2, 1)
    torch.testing.assert_close(
        loaded(path).weight(*GATE_UP).activated_product(x, None), F.silu(gate) * up, rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_other_rows(tmp_path, kind):
    """Nor on NaN in them, nor on huge values, which would set a scale of the batch."""
    weight, x = loaded(made(tmp_path, kind)[0]).weight(*QKV), torch.randn(4, 32, dtype=DTYPE)
    before = weight.apply(x, None)
    x[1], x[2] = torch.nan, 1e6
    after = weight.apply(x, None)
    assert torch.equal(after[[0, 3]], before[[0, 3]]) and after[1].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_stored_bytes_are_what_memory_holds(tmp_path, kind):
    path, _ = made(tmp_path, kind)
    config = read_config(path)
    files = load_file(path / "model.safetensors")
    count = count_weights_in(path, config.formats)
    assert count.uncast_bytes == sum(t.nbytes for t in files.values() if t.dtype not in (DTYPE,))
    matrix = loaded(path).matrix(*GATE_UP)
    assert isinstance(matrix, QuantisedMatrix) and matrix.codes.nbytes == 128 * 32 // (1 if "fp8" in kind else 2)


@pytest.mark.parametrize("kind", ROUNDS_INPUTS)
def test_a_cpu_does_not_round_inputs(tmp_path, monkeypatch, kind):
    monkeypatch.undo()
    path, meant = made(tmp_path, kind)
    x = torch.randn(5, 32, dtype=DTYPE)
    product = F.linear(x, meant_of(meant, QKV[0]))
    torch.testing.assert_close(loaded(path).weight(*QKV).apply(x, None), product, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_q_k_and_v_may_be_stored_as_one_matrix(tmp_path, monkeypatch, kind):
    """And gate and up, as in Phi-3: they stay one, in every format."""
    monkeypatch.undo()
    path, meant = made(tmp_path, kind, "phi3")
    dense = make_target(tmp_path / "dense", "phi3")
    save_file(meant, dense / "model.safetensors")
    tokens = torch.arange(12)[None]
    stored, plain = (load_target(each, **LOADING) for each in (path, dense))
    assert stored.layers[1].attention.qkv.weight.format != "dense"
    out, expected = (each.logits(each(DensePass(tokens, each.layer_specs)).hidden) for each in (stored, plain))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


EXPERT_KINDS = tuple(kind for kind in KINDS if kind not in (*STATIC, *ORDERED))


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_experts(tmp_path, kind):
    """Each expert's result is that of its meant weights, weighted; live says which rows have experts."""
    path, meant = made(tmp_path, kind, "qwen3_moe", moe_intermediate_size=32, mlp_only_layers=[])
    mlp = load_target(path, **LOADING).layers[1].mlp
    assert isinstance(mlp, MixtureMLP) and isinstance(mlp.gate_up, QuantisedMatrix)
    prefix = f"{LAYER}mlp.experts."
    for expert in range(6):
        gate_up = meant_of(meant, [f"{prefix}{expert}.{half}_proj" for half in ("gate", "up")])
        assert torch.equal(dequantise(mlp.gate_up[expert], DTYPE), gate_up)
        assert torch.equal(dequantise(mlp.down[expert], DTYPE), meant[f"{prefix}{expert}.down_proj.weight"])
    x, live = torch.randn(7, 32, dtype=DTYPE), torch.arange(7) != 3
    parts = mlp(mlp.route_rows(x), live)
    scores = (x @ meant[f"{LAYER}mlp.gate.weight"].T).softmax(1)
    weights, ids = scores.topk(2)
    expected = torch.zeros(7, 32, dtype=DTYPE)
    for row in range(7):
        for expert, weight in zip(ids[row].tolist(), (weights[row] / weights[row].sum()).tolist(), strict=True):
            gate, up, down = (meant[f"{prefix}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            own = rounded(x[row : row + 1], kind)
            inner = rounded(F.silu(own @ gate.T) * (own @ up.T), kind)
            expected[row] += weight * (inner @ down.T)[0] * bool(live[row])
    torch.testing.assert_close(parts.sum(0), expected, rtol=1e-9, atol=1e-9)


def test_mxfp4_experts(tmp_path):
    path = make_target(tmp_path / "target", "gpt_oss", num_local_experts=4, intermediate_size=64)
    meant = quantise(path, "mxfp4")
    mlp = load_target(path, **LOADING).layers[1].mlp
    assert isinstance(mlp, MixtureMLP) and isinstance(mlp.gate_up, QuantisedMatrix) and mlp.biases is not None
    for expert in range(4):
        gate_up = meant[f"{LAYER}mlp.experts.gate_up_proj"][expert].T
        stacked = torch.cat((gate_up[::2], gate_up[1::2]))
        assert torch.equal(dequantise(mlp.gate_up[expert], DTYPE), stacked)
        assert torch.equal(dequantise(mlp.down[expert], DTYPE), meant[f"{LAYER}mlp.experts.down_proj"][expert].T)


def test_latent_attention_takes_dense_parts_of_a_quantised_matrix(tmp_path):
    path, meant = made(tmp_path, "fp8-block", "deepseek_v3", num_nextn_predict_layers=0)
    layer = load_target(path, **LOADING).layers[1].attention
    both = torch.cat((layer.k_up, layer.v_up), 1).flatten(0, 1)
    assert torch.equal(both, meant[f"{LAYER}self_attn.kv_b_proj.weight"])


def _shift_scales(patch):
    scales = Fp8Format._stacked_scales
    patch.setattr(Fp8Format, "_stacked_scales", lambda self, tensor, rows: scales(self, tensor.roll(1, 0), rows))


# Each fault is one line of a format; the test of its meaning must notice it.
FAULTS = {
    "scale off by one block": ("fp8-block", _shift_scales),
    "offset of a zero point": ("gptq", lambda patch: patch.setattr(gptq, "ONE_PER_NIBBLE", 0)),
    "nibbles in the wrong order": (
        "packed-group",
        lambda patch: patch.setattr(
            kernels,
            "unpack_nibbles",
            lambda packed, dtype: torch.stack([packed >> 4, packed & 15], -1).flatten(-2).to(dtype),
        ),
    ),
    "order of AWQ's nibbles": (
        "awq",
        lambda patch: patch.setattr("espalier.models.weight_formats.gptq.AWQ_NIBBLE_ORDER", tuple(range(8))),
    ),
    "g_idx is not honoured": (
        "gptq-v2-ordered",
        lambda patch: patch.setattr(gptq, "common_column_order", lambda groups, group: None),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_layout_is_noticed(tmp_path, monkeypatch, fault):
    kind, plant = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_stacked_matrices_mean_what_the_format_says(tmp_path, kind, GATE_UP)


UP = f"{LAYER}mlp.up_proj"


@pytest.mark.parametrize(
    ("kind", "suffix", "tensor", "says"),
    [
        ("fp8-channel-token", "weight_scale", None, r"up_proj.weight_scale' \[64, 1\] is missing"),
        ("fp8-block", "weight_scale_inv", torch.ones(4, 1), r"scale_inv' .*shape \[4, 1\], .* needs \[4, 2\]"),
        ("fp8-block", "weight", torch.ones(64, 32), "up_proj.weight' .* stored as float32, .* needs float8_e4m3fn"),
        ("fp8-tensor", "input_scale", torch.ones(1), "input_scale' .*belongs to no parameter"),
        ("fp8-tensor-static", "input_scale", torch.ones(1), "up_proj.*|gate_proj' and 1 more .*input_scale"),
        ("awq", "qzeros", None, r"up_proj.qzeros' \[2, 8\] is missing"),
        ("awq", "scales", torch.ones(1, 64).half(), r"scales' .*shape \[1, 64\], .* needs \[2, 64\]"),
        ("gptq", "g_idx", torch.zeros(32, dtype=torch.int32), "g_idx"),
        ("gptq-v2-ordered", "g_idx", torch.arange(32, dtype=torch.int32) // 16, "different values of g_idx"),
        ("packed-group", "weight_packed", torch.ones(64, 5, dtype=torch.int32), r"weight_packed' .*needs \[64, 4\]"),
        ("packed-group", "weight_scale", torch.ones(64, 2, dtype=torch.int8), "weight_scale' .*stored as int8"),
        ("packed-group", "weight_shape", torch.tensor([32, 64]), r"weight_shape is \[32, 64\], .* \[64, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, kind, suffix, tensor, says):
    path, _ = made(tmp_path, kind)
    replace_weights(path, **{f"{UP}.{suffix}": tensor})
    with pytest.raises(EspalierError, match=says):
        load_target(path, **LOADING)


@pytest.mark.parametrize(("scale", "of_inputs"), SCALE_SUFFIXES)
def test_one_scale_has_one_of_three_names(tmp_path, scale, of_inputs):
    """Whatever config.json says of blocks; transformers names them so, and reads Mistral's own as the same."""
    path, _ = made(tmp_path, "fp8-tensor-static")
    expected = load_target(path, **LOADING).layers[1].mlp.down.weight.matrix
    named = {".weight_scale": scale, ".input_scale": of_inputs}
    stored = load_file(path / "model.safetensors")
    for name in stored.keys() - {name for name in stored if not name.endswith(tuple(named))}:
        suffix = f".{name.rpartition('.')[2]}"
        stored[name.removesuffix(suffix) + named[suffix]] = stored.pop(name)
    save_file(stored, path / "model.safetensors")
    found = load_target(path, **LOADING).layers[1].mlp.down.weight.matrix
    assert torch.equal(found.scales, expected.scales) and torch.equal(
        found.input_scales.static_scale, expected.input_scales.static_scale
    )


def test_transformers_names_scales_and_means_them_as_we_do():
    layer = FP8Linear(32, 16, block_size=None, activation_scheme="static")
    assert {f".{name}" for name, _ in layer.named_parameters()} == {".weight", *SCALE_SUFFIXES[1]}
    codes, scale = torch.randn(16, 32).to(FP8), torch.tensor(0.25)
    ours = Fp8Format((None, None)).stored_matrix({".weight": codes, ".weight_scale": scale.view(1, 1)}, [16], 32)
    assert torch.equal(dequantise(ours, torch.float32), _dequantize_fp8_weight(codes, scale, None, torch.float32))


def ct(weights: dict[str, Any], inputs: dict[str, Any] | None = None, format: str = "pack-quantized", **more: Any):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"g": group}, **more}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(
    ("quantisation", "says"),
    [
        (ct({"num_bits": 4, "type": "float"}, format="nvfp4-pack-quantized"), "weights of NVFP4 with .*not supported"),
        (ct(FLOAT4, {**FLOAT4, "num_bits": 8}, "nvfp4-pack-quantized"), "input_activations of NVFP4 with .*not supp"),
        (ct({**INT4, "num_bits": 8}), "8 bits .*not supported, only float-quantized .* and nvfp4-pack-quantized"),
        (ct({**INT4, "strategy": "tensor_group"}), "4-bit weights by 'tensor_group'"),
        (ct({**INT4, "group_size": 48}), "group_size = 48 is not supported"),
        (ct(FLOAT8, {**FLOAT8, "strategy": "tensor", "dynamic": True}, "float-quantized"), "by 'tensor', dynamic True"),
        (ct(FLOAT8, {"num_bits": 8, "type": "int", "strategy": "token"}, "float-quantized"), r"8 bits \(int\)"),
        (
            ct({**FLOAT8, "strategy": "block", "block_structure": [1, 100]}, None, "float-quantized"),
            r"block of \[1, 100\]",
        ),
        (ct(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not supported"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "no config_groups"),
        (ct(INT4, ignore="lm_head"), "ignore = 'lm_head'; a list of module names is needed"),
        (ct(INT4, ignore=["re:(lm_head"]), r"ignore = \['re:\(lm_head'\]; a list of module names"),
        (ct(INT4, sparsity_config=3), "sparsity_config = 3; an object is needed"),
        (ct(INT4, config_groups={"g": None}), "format 'pack-quantized' with weights of None bits"),
        (ct(INT4, config_groups={"g": 3}), "g = 3; an object is needed"),
        (ct(FLOAT8, [8], "float-quantized"), r"input_activations = \[8\]; an object is needed"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [[1]]}, r"to_quantize = \[1\]; a list"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": [1]}, r"modules_to_not_convert = \[1\]; a list"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"block of \[128\]"),
        ({"quant_method": "awq", "bits": 8}, "bits = 8 is not supported, only 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported, only None or 'awq' or"),
        *(
            ({"quant_method": "modelopt", "quant_algo": algorithm}, f"quant_algo = {algorithm!r} is not supported")
            for algorithm in ("NVFP4_AWQ", "W4A8_AWQ", "W4A16_AWQ", "INT8_SQ", "FP8_PB_WO", None)
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION' needs quantized_layers"),
    ],
)
def test_schemes_that_are_not_built_are_refused_by_name(tmp_path, quantisation, says):
    path = make_target(tmp_path / "target")
    edit_config(path, quantization_config=quantisation)
    with pytest.raises(EspalierError, match=says):
        read_config(path)


@pytest.mark.parametrize(
    ("skipped", "dense"),
    [
        (["model.layers.1.mlp"], ["model.layers.1.mlp.up_proj"]),
        (["re:.*self_attn.*"], ["model.layers.0.self_attn.q_proj"]),
        (["model.layers.*.mlp.down_proj"], ["model.layers.2.mlp.down_proj"]),
        (["mlp.gate"], ["model.layers.3.mlp.gate"]),
        (["model.layers.0."], ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]),
        (["gate"], ["model.layers.3.mlp.gate", "model.layers.3.mlp.shared_expert_gate"]),
        ([], ["lm_head", "model.layers.61.eh_proj"]),
    ],
)
def test_layers_that_are_left_dense(skipped, dense):
    always = ["model.layers.1.mlp.gate_proj", "model.layers.10.self_attn.o_proj"]
    for formats in (
        quantised.dense_if_skipped(skipped, Fp8Format((None, None))),
        read_compressed_tensors(ct(INT4, ignore=[*skipped, "lm_head", "re:.*eh_proj"])),
    ):
        assert all(formats(name).name == "dense" for name in dense)
        left = [name for name in always if not any(quantised.matches_module(name, pattern) for pattern in skipped)]
        assert left and all(formats(name).name != "dense" for name in left)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_named_target_comes_before_all_linear_layers(reverse):
    token = {**FLOAT8, "strategy": "token", "dynamic": True}
    groups = {
        "a": {"targets": ["Linear"], "weights": FLOAT8, "input_activations": token},
        "b": {"targets": ["re:.*down_proj"], "weights": FLOAT8, "input_activations": None},
    }
    groups = dict(sorted(groups.items(), reverse=reverse))
    formats = read_compressed_tensors({**ct(FLOAT8, format="float-quantized"), "config_groups": groups})
    assert formats("model.layers.0.mlp.down_proj").inputs is None
    assert formats("model.layers.0.mlp.up_proj").inputs == "dynamic"


@pytest.mark.parametrize("blocks", [[["self_attn.q_proj"], ["mlp.up_proj"]], ["self_attn.q_proj", "mlp.up_proj"]])
def test_gptq_quantises_only_the_modules_that_it_names(blocks):
    formats = read_gptq({"bits": 4, "modules_in_block_to_quantize": blocks})
    names = [f"model.layers.7.{name}" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.shared_expert_gate")]
    assert [formats(name).name for name in names] == ["gptq", "gptq", "dense"]


def test_a_bias_of_zeros_changes_nothing(tmp_path):
    path, _ = made(tmp_path, "gptq")
    name = f"{LAYER}mlp.up_proj.bias"
    replace_weights(path, **{name: torch.zeros(64)})
    load_target(path, **LOADING)
    replace_weights(path, **{name: torch.tensor([0.0, 1e-6])})
    with pytest.raises(EspalierError, match=r"up_proj.bias' .*belongs to no parameter"):
        load_target(path, **LOADING)


def test_experts_with_static_scales_of_their_own_are_refused(tmp_path):
    path, _ = made(tmp_path, "fp8-tensor-static", "qwen3_moe", moe_intermediate_size=32, mlp_only_layers=[])
    replace_weights(path, **{f"{LAYER}mlp.experts.3.down_proj.input_scale": torch.tensor([0.5])})
    with pytest.raises(EspalierError, match=r"experts.0.down_proj' and 5 more .*different values of input_scale"):
        load_target(path, **LOADING)


def test_groups_that_do_not_divide_are_refused(tmp_path):
    path, _ = made(tmp_path, "awq", hidden=48)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 32
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EspalierError, match=r"q_proj' and 2 more .*columns in a multiple of 32, .*has 48"):
        load_target(path, **LOADING)


def test_scales_of_a_quantised_cache_may_be_in_the_file(tmp_path):
    path, _ = made(tmp_path, "fp8-channel-token")
    attention = f"{LAYER}self_attn."
    replace_weights(path, **{f"{attention}{name}": torch.ones(1) for name in ("k_proj.k_scale", "v_proj.v_scale")})
    load_target(path, **LOADING)


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "says"),
    [
        (
            "nvfp4",
            "weight_global_scale",
            torch.tensor([0.0]),
            "weight_global_scale has the value 0.0; a positive number",
        ),
        ("nvfp4-modelopt", "weight_scale_2", torch.tensor(torch.inf), "weight_scale_2 has the value inf"),
        ("nvfp4", "weight_global_scale", None, r"up_proj.weight_global_scale' \[1\] is missing"),
        ("nvfp4-inputs", "input_global_scale", None, r"up_proj.input_global_scale' \[1\] is missing"),
        ("nvfp4", "input_global_scale", torch.ones(1), "up_proj.input_global_scale' .*belongs to no parameter"),
        (
            "nvfp4",
            "weight_scale",
            torch.full((64, 2), -1.0).to(FP8),
            "weight_scale has a value that is negative or no n",
        ),
        ("nvfp4", "weight_scale", torch.full((64, 2), torch.nan).to(FP8), "weight_scale has a value that is negative"),
    ],
)
def test_scales_of_nvfp4_that_contradict_the_format_are_named(tmp_path, kind, name, tensor, says):
    path, _ = made(tmp_path, kind)
    replace_weights(path, **{f"{LAYER}mlp.up_proj.{name}": tensor})
    with pytest.raises(EspalierError, match=says):
        load_target(path, **LOADING)


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-inputs", "nvfp4-modelopt"])
def test_inputs_in_4_bits_that_are_not_computed_are_named(tmp_path, caplog, kind):
    load_target(made(tmp_path, kind)[0], **LOADING)
    said = [each.getMessage() for each in caplog.records if "W4A4" in each.getMessage()]
    assert len(said) == (0 if kind == "nvfp4" else 1) and all(str(tmp_path) in each for each in said)


def test_modelopt_names_the_format_of_each_layer(tmp_path):
    layers = {f"{LAYER}mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}, "lm_head": {"quant_algo": "FP8"}}
    quantisation = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    formats = read_formats({"quantization_config": quantisation})
    names = (f"{LAYER}mlp.up_proj", f"{LAYER}mlp.gate_proj", "lm_head")
    assert [formats(name).name for name in names] == ["nvfp4", "dense", "fp8"]
