"""Writes tests/fixtures/quantised/: small matrices packed, and read back, by the libraries that define the formats.

    python -m venv quantisers
    quantisers/bin/pip install torch compressed-tensors numpy
    quantisers/bin/pip download --no-deps --no-binary autoawq autoawq && tar xzf autoawq-*.tar.gz
    quantisers/bin/pip download --no-deps auto-gptq==0.7.1 && unzip auto_gptq-*.whl -d auto_gptq
    quantisers/bin/pip download --no-deps nvidia-modelopt && unzip nvidia_modelopt-*.whl -d modelopt
    quantisers/bin/python scripts/make_quantised_fixtures.py --autoawq autoawq-0.2.9 --autogptq auto_gptq \\
        --modelopt modelopt

AutoAWQ, AutoGPTQ and ModelOpt need old versions of other packages, or many, so only their packing modules are loaded,
from their files.
Each fixture is one matrix: the stored tensors, `meant` (what the library reads back), and quantization_config as JSON.
"""

import argparse
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUT = Path(__file__).parents[1] / "tests" / "fixtures" / "quantised"
ROWS, COLUMNS, GROUP = 32, 64, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--autoawq", type=Path, required=True, help="folder of AutoAWQ's source")
    parser.add_argument("--autogptq", type=Path, required=True, help="folder of AutoGPTQ's unpacked wheel")
    parser.add_argument("--modelopt", type=Path, required=True, help="folder of ModelOpt's unpacked wheel")
    args = parser.parse_args()
    torch.manual_seed(0)
    for name, (scheme, format) in compressed_tensors_schemes().items():
        write(name, *compressed(scheme, format))
    write("awq", *awq(args.autoawq))
    for ordered in (False, True):
        write(f"gptq{'-desc-act' * ordered}", *gptq(args.autogptq, ordered))
    torch.manual_seed(1)
    for has_inputs in (False, True):
        write(f"ct-nvfp4{'-inputs' * has_inputs}", *compressed_nvfp4(has_inputs))
    write("modelopt-nvfp4", *modelopt_nvfp4(args.modelopt))


def write(name: str, stored: dict[str, Tensor], meant: Tensor, config: dict[str, Any]) -> None:
    tensors = {**stored, "meant": meant.float()}
    contiguous = {key: tensor.detach().contiguous().clone() for key, tensor in tensors.items()}
    save_file(contiguous, OUT / f"{name}.safetensors", {"quantization_config": json.dumps(config)})


def compressed_tensors_schemes() -> dict[str, tuple[dict[str, Any], str]]:
    float8, int4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"}
    group = {"strategy": "group", "group_size": GROUP}
    return {
        "ct-fp8-tensor": ({**float8, "strategy": "tensor"}, "float-quantized"),
        "ct-fp8-channel": ({**float8, "strategy": "channel"}, "float-quantized"),
        "ct-fp8-block": ({**float8, "strategy": "block", "block_structure": [16, 16]}, "float-quantized"),
        "ct-int4-group": ({**int4, **group}, "pack-quantized"),
        "ct-int4-group-zeros": ({**int4, **group, "symmetric": False}, "pack-quantized"),
        "ct-int4-channel": ({**int4, "strategy": "channel"}, "pack-quantized"),
    }


def compressed(weights: dict[str, Any], format: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weight, args = torch.randn(ROWS, COLUMNS), QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, columns = {"tensor": (ROWS, COLUMNS), "channel": (1, COLUMNS), "group": (1, GROUP), "block": (16, 16)}[
        args.strategy
    ]
    blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scale, zero_point = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    if args.strategy == "tensor":
        scale, zero_point = scale.flatten(), zero_point.flatten()
    compressor = BaseCompressor.get_value_from_registry(format)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    stored = compressor.compress(state, scheme)
    meant = compressor.decompress(dict(stored), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "format": format, "ignore": [], "config_groups": {"0": group}}
    return stored, meant, config


def compressed_nvfp4(has_inputs: bool) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    preset, weight = NVFP4 if has_inputs else NVFP4A16, torch.randn(ROWS, COLUMNS)
    scheme = QuantizationScheme(targets=["Linear"], **preset)
    assert scheme.weights is not None
    factor = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    groups = weight.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights, factor)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": factor}
    if has_inputs:
        state["input_global_scale"] = torch.tensor([37.0])
    stored = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").compress(state, scheme)
    # As decompress does it, but in float32, where it takes bfloat16.
    codes = unpack_fp4_from_uint8(stored["weight_packed"], ROWS, COLUMNS, dtype=torch.float32)
    meant = dequantize(
        codes, stored["weight_scale"].float(), args=scheme.weights, dtype=torch.float32, global_scale=factor
    )
    group = scheme.model_dump(mode="json") | {"format": "nvfp4-pack-quantized"}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": []}
    return stored, meant, {**config, "config_groups": {"0": group}}


def modelopt_nvfp4(path: Path) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    class Base:
        def __init__(self, shape: torch.Size, dtype: torch.dtype, codes: Tensor) -> None:
            self.metadata, self._quantized_data = {"shape": shape, "dtype": dtype}, codes

    def block_largest(weight: Tensor, block_sizes: dict[int, int]) -> Tensor:
        return weight.unflatten(1, (-1, block_sizes[-1])).abs().amax(2)

    module = module_of(
        path / "modelopt" / "torch" / "quantization" / "qtensor" / "nvfp4_tensor.py",
        "stand_in.qtensor.nvfp4_tensor",
        stand_in={"__path__": []},
        stand_in_dot_qtensor={"__path__": []},
        stand_in_dot_qtensor_dot_base_qtensor={"BaseQuantizedTensor": Base},
        stand_in_dot_backends={"__path__": []},
        stand_in_dot_backends_dot_utils={"fp4_compatible": lambda: False},
        stand_in_dot_utils={
            "__path__": [],
            "reduce_amax": lambda weight: weight.abs().amax(),
            "reduce_block_amax": block_largest,
            "reduce_block_padding": lambda weight, block_sizes: weight,
        },
        stand_in_dot_utils_dot_numeric_utils={
            "E2M1_MAX": 6.0,
            "E4M3_MAX": 448.0,
            "fp8_max_for_normalization": lambda *args, **kwargs: 448.0,
        },
    )
    weight = torch.randn(ROWS, COLUMNS)
    tensor, scale, factor = module.NVFP4QTensor.quantize(weight, 16)
    meant = tensor.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
    stored = {"weight": tensor._quantized_data, "weight_scale": scale, "weight_scale_2": factor}
    stored["input_scale"] = torch.tensor(0.0123)
    return stored, meant, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}


def module_of(path: Path, name: str, **stand_ins: Any) -> Any:
    """A Python file as a module.  stand_ins: what it imports and does not need here, by name with _dot_ for dots."""
    for stand_in, content in stand_ins.items():
        module = types.ModuleType(stand_in.replace("_dot_", "."))
        module.__dict__.update(content)
        sys.modules[module.__name__] = module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def integers(weight: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, zeros), float [out, groups]: of groups of columns in this order."""
    grouped = weight[:, order].unflatten(1, (-1, GROUP))
    low, high = grouped.amin(2), grouped.amax(2)
    scales = ((high - low) / 15).half().float()
    return scales, (-low / scales).round().clamp(1, 15)


def on_grid(weight: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    s, z = scales[:, groups], zeros[:, groups]
    return ((weight / s + z).round().clamp(0, 15) - z) * s


def awq(path: Path) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    packing = module_of(path / "awq" / "utils" / "packing_utils.py", "awq.utils.packing_utils")
    gemm = module_of(
        path / "awq" / "modules" / "linear" / "gemm.py",
        "awq_gemm",
        awq={},
        awq_dot_utils={},
        awq_dot_utils_dot_module={"try_import": lambda name: (None, "")},
        awq_dot_utils_dot_utils={"get_best_device": lambda: "cpu"},
        awq_dot_utils_dot_packing_utils={"dequantize_gemm": packing.dequantize_gemm},
    )
    weight, groups = torch.randn(ROWS, COLUMNS), torch.arange(COLUMNS) // GROUP
    scales, zeros = integers(weight, torch.arange(COLUMNS))
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = on_grid(weight, scales, zeros, groups)
    layer = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    stored = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
    meant = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).T
    return stored, meant, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def gptq(path: Path, ordered: bool) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    pytorch_utils = {"Conv1D": nn.Identity}
    stand_ins = {
        "transformers": {"pytorch_utils": types.SimpleNamespace(**pytorch_utils)},
        "transformers_dot_pytorch_utils": pytorch_utils,
    }
    file = path / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda.py"
    module = module_of(file, "gptq_linear", **stand_ins)
    order = torch.randperm(COLUMNS) if ordered else torch.arange(COLUMNS)
    weight, groups = torch.randn(ROWS, COLUMNS), order.argsort() // GROUP
    scales, zeros = integers(weight, order)
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = on_grid(weight, scales, zeros, groups)
    layer = module.QuantLinear(4, GROUP, COLUMNS, ROWS, bias=False)
    layer.pack(linear, scales, zeros, groups.to(torch.int32))
    # The product with unit vectors is the matrix that the library reads back.
    meant = layer(torch.eye(COLUMNS)).T
    stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return stored, meant, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": ordered}


if __name__ == "__main__":
    main()
