"""Checkpoints in quantised formats, packed here by hand from the formats' definitions.

Nothing here uses the engine's code, so that a wrong reading cannot agree with itself.  Each kind also says what its
tensors mean, as dense float64 weights.  tests/fixtures/quantised/ has tensors that the formats' own libraries wrote.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
BLOCK = 16
FP8 = torch.float8_e4m3fn
AWQ_NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Stored = dict[str, Tensor]


def integers(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(q 0..15 [out, in], zeros [out, groups], scales float16 [out, groups]) of weight [out, in]."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    largest = torch.maximum(-low, high)
    scales = ((largest / 7) if symmetric else (high - low) / 15).half().clamp(min=1e-4)
    zeros = torch.full_like(low, 8) if symmetric else (-low / scales).round().clamp(1, 15)
    q = (grouped / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    return q.flatten(1).long(), zeros.long(), scales


def meaning(q: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    group = q.shape[1] // zeros.shape[1]
    zeros, scales = zeros.repeat_interleave(group, 1), scales.double().repeat_interleave(group, 1)
    return (q - zeros).double() * scales


def words(nibbles: Tensor) -> Tensor:
    """[..., 8·n] -> int32 [..., n]: the first nibble in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    word = (nibbles.unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).contiguous()


def fp8(weight: Tensor, rows: int, columns: int, scale: str, **extra: Tensor) -> tuple[Stored, Tensor]:
    """Scales for blocks [rows, columns]; a block of all columns and rows has one scale [1]."""
    out, num_in = weight.shape
    scales = torch.empty(-(-out // rows), -(-num_in // columns), dtype=torch.float32)
    codes, meant = torch.empty(out, num_in, dtype=FP8), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[i, j]).float().to(FP8)
            meant[block] = codes[block].double() * scales[i, j].double()
    shape = (1,) if rows >= out and columns >= num_in and scale == "weight_scale" else scales.shape
    shape = () if "activation_scale" in extra else shape
    return {"weight": codes, scale: scales.reshape(shape), **extra}, meant


def awq(weight: Tensor) -> tuple[Stored, Tensor]:
    q, zeros, scales = integers(weight, GROUP, symmetric=False)

    def packed(values: Tensor) -> Tensor:
        return words(values.T.unflatten(1, (-1, 8))[:, :, list(AWQ_NIBBLE_ORDER)].flatten(1))

    stored = {"qweight": packed(q), "qzeros": packed(zeros), "scales": scales.T.contiguous()}
    return stored, meaning(q, zeros, scales)


def order_of(weight: Tensor) -> Tensor:
    """One order for all matrices with the same inputs, as the Hessian is theirs."""
    num_in = weight.shape[1]
    return torch.randperm(num_in, generator=torch.Generator().manual_seed(num_in))


def gptq(weight: Tensor, version: int, ordered: bool) -> tuple[Stored, Tensor]:
    order = order_of(weight) if ordered else torch.arange(weight.shape[1])
    q, zeros, scales = integers(weight[:, order], GROUP, symmetric=False)
    back = order.argsort()
    stored = {
        "qweight": words(q[:, back]).T.contiguous(),
        "qzeros": words((zeros - (1 if version == 1 else 0)).T),
        "scales": scales.T.contiguous(),
        "g_idx": (back // GROUP).to(torch.int32),
    }
    return stored, meaning(q, zeros, scales)[:, back]


def packed(weight: Tensor, group: int, symmetric: bool) -> tuple[Stored, Tensor]:
    group = group or weight.shape[1]
    q, zeros, scales = integers(weight, group, symmetric)
    stored = {"weight_packed": words(q), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        stored["weight_zero_point"] = words(zeros.T).T.contiguous()
    return stored, meaning(q, zeros, scales)


def packed_in_order(weight: Tensor) -> tuple[Stored, Tensor]:
    order = order_of(weight)
    stored, meant = packed(weight[:, order], GROUP, symmetric=True)
    back, codes = order.argsort(), integers(weight[:, order], GROUP, symmetric=True)[0]
    of_columns = {"weight_packed": words(codes[:, back]), "weight_g_idx": (back // GROUP).to(torch.int32)}
    return {**stored, **of_columns}, meant[:, back]


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def nvfp4(weight: Tensor, names: tuple[str, str, str], divides: bool, **inputs: Tensor) -> tuple[Stored, Tensor]:
    """names: of the codes, the scales and the factor, a power of two of its own for each matrix."""
    grouped = weight.unflatten(1, (-1, 16))
    factor = 2.0 ** (448 * 6 / weight.abs().max()).log2().floor()
    scales = (grouped.abs().amax(2) / 6 * factor).float().to(FP8)
    exact = scales.double() / factor
    table = torch.cat([E2M1, -E2M1])
    q = (grouped / exact[:, :, None]).nan_to_num()[..., None].sub(table).abs().argmin(-1)
    pairs = q.flatten(1).unflatten(1, (-1, 2))
    codes = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8).contiguous()
    stored = (factor if divides else 1 / factor).float()
    tensors = dict(zip(names, (codes, scales, stored.reshape(1) if divides else stored), strict=True))
    return {**tensors, **inputs}, (table[q] * exact[:, :, None]).flatten(1)


def group_of(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, format: str) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignore = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]
    return {"quant_method": "compressed-tensors", "format": format, "ignore": ignore, "config_groups": {"g": scheme}}


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
INT = {"num_bits": 4, "type": "int"}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
CT_NVFP4 = ("weight_packed", "weight_scale", "weight_global_scale")
GATES = ["mlp.gate", "shared_expert_gate"]
INPUT = torch.tensor([0.03])
# By kind: quantization_config, and a function weight -> (tensors by suffix, what they mean).
KINDS: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Stored, Tensor]]]] = {
    "fp8-tensor-static": (
        group_of({**FLOAT, "strategy": "tensor"}, {**FLOAT, "strategy": "tensor", "dynamic": False}, "float-quantized"),
        lambda w: fp8(w, len(w), w.shape[1], "weight_scale", input_scale=INPUT.clone()),
    ),
    "fp8-channel-token": (
        group_of({**FLOAT, "strategy": "channel"}, {**FLOAT, "strategy": "token", "dynamic": True}, "float-quantized"),
        lambda w: fp8(w, 1, w.shape[1], "weight_scale"),
    ),
    "fp8-channel-weights": (
        group_of({**FLOAT, "strategy": "channel"}, None, "naive-quantized"),
        lambda w: fp8(w, 1, w.shape[1], "weight_scale"),
    ),
    "fp8-mistral": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
         "modules_to_not_convert": GATES},
        lambda w: fp8(w, len(w), w.shape[1], "weight_scale_inv", activation_scale=INPUT.clone()),
    ),
    "fp8-block": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": GATES,
        },
        lambda w: fp8(w, BLOCK, BLOCK, "weight_scale_inv"),
    ),
    "fp8-block-32": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": GATES},
        lambda w: fp8(w, 32, 32, "weight_scale_inv"),
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": GATES},
        lambda w: fp8(w, len(w), w.shape[1], "weight_scale"),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True,
         "modules_to_not_convert": GATES},
        awq,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "modules_to_not_convert": GATES},
        lambda w: gptq(w, 1, ordered=False),
    ),
    "gptq-v2-ordered": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2",
         "modules_to_not_convert": GATES},
        lambda w: gptq(w, 2, ordered=True),
    ),
    "packed-group": (
        group_of({**INT, "strategy": "group", "group_size": GROUP, "symmetric": True}, None, "pack-quantized"),
        lambda w: packed(w, GROUP, symmetric=True),
    ),
    "packed-ordered": (
        group_of(
            {**INT, "strategy": "group", "group_size": GROUP, "symmetric": True, "actorder": "group"}, None,
            "pack-quantized",
        ),
        packed_in_order,
    ),
    "packed-channel-zeros": (
        group_of({**INT, "strategy": "channel", "symmetric": False}, None, "pack-quantized"),
        lambda w: packed(w, 0, symmetric=False),
    ),
    "nvfp4": (group_of(FLOAT4, None, "nvfp4-pack-quantized"), lambda w: nvfp4(w, CT_NVFP4, divides=True)),
    "nvfp4-inputs": (
        group_of(FLOAT4, {**FLOAT4, "dynamic": "local"}, "nvfp4-pack-quantized"),
        lambda w: nvfp4(w, CT_NVFP4, divides=True, input_global_scale=w.abs().max().float().reshape(1)),
    ),
    "nvfp4-modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
         "exclude_modules": ["lm_head", "*mlp.gate", "*shared_expert_gate"]},
        lambda w: nvfp4(w, ("weight", "weight_scale", "weight_scale_2"), False, input_scale=torch.tensor(0.5)),
    ),
}  # fmt: skip
# Those whose inputs have a stored scale.
STATIC = ("fp8-tensor-static", "fp8-mistral")
# Those whose columns have an order, which experts of one matrix may not share.
ORDERED = ("gptq-v2-ordered", "packed-ordered")
ROUNDS_INPUTS = (*STATIC, "fp8-channel-token", "fp8-block", "fp8-block-32", "fp8-tensor")
WEIGHTS_ONLY = tuple(kind for kind in KINDS if kind not in ROUNDS_INPUTS)
DENSE = ("embed", "lm_head", "mlp.gate.weight", "shared_expert_gate", "router")


def quantise(path: Path, kind: str) -> Stored:
    """Rewrite a float64 checkpoint in a kind of KINDS, "mxfp4" (GPT-OSS), or "fp8-joined", which has the stacks of
    experts [E, out, in] in FP8; returns what it means, dense."""
    stored: Stored = {}
    meant: Stored = {}
    config = json.loads((path / "config.json").read_text())
    for name, tensor in load_file(path / "model.safetensors").items():
        meant[name], parts = tensor, None
        if kind == "mxfp4":
            if name.endswith(("gate_up_proj", "down_proj")):
                parts, meant[name] = mxfp4(tensor, name + "_")
        elif kind == "fp8-joined":
            if ".experts." in name:
                parts, meant[name] = fp8_stack(tensor, name)
        elif tensor.ndim == 2 and not any(dense in name for dense in DENSE):
            prefix = name.removesuffix("weight")
            by_suffix, meant[name] = KINDS[kind][1](tensor)
            parts = {f"{prefix}{suffix}": part for suffix, part in by_suffix.items()}
        stored |= {name: tensor} if parts is None else parts
    save_file(stored, path / "model.safetensors")
    dense = [name.removesuffix(".weight") for name in meant if ".experts." not in name]
    of_stacks = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": dense}
    quantisation = {"mxfp4": {"quant_method": "mxfp4"}, "fp8-joined": of_stacks}.get(kind) or KINDS[kind][0]
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return meant


def fp8_stack(experts: Tensor, name: str) -> tuple[Stored, Tensor]:
    """Experts [E, out, in] with scales for blocks, as transformers names them."""
    made = [fp8(expert, BLOCK, BLOCK, "scale") for expert in experts]
    codes, scales = (torch.stack([each[part] for each, _ in made]) for part in ("weight", "scale"))
    return {name: codes, f"{name}_scale_inv": scales}, torch.stack([each for _, each in made])


def mxfp4(experts: Tensor, prefix: str) -> tuple[Stored, Tensor]:
    """Experts [E, in, out], as GPT-OSS stores dense ones, in blocks of 32 inputs."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([table, -table])
    blocks = experts.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (blocks.abs().amax(3).clamp(min=2.0**-100) / 6).log2().ceil()
    q = (blocks / 2.0 ** exponents[..., None])[..., None].sub(table).abs().argmin(-1)
    meant = (table[q] * 2.0 ** exponents[..., None]).flatten(2).transpose(1, 2)
    pairs = q.unflatten(3, (16, 2))
    stored = {
        f"{prefix}blocks": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8).contiguous(),
        f"{prefix}scales": (exponents + 127).to(torch.uint8).contiguous(),
    }
    return stored, meant.contiguous()
