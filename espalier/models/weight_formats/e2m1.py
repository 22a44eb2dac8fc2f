"""Storage formats with values in E2M1 (FP4): GPT-OSS's MXFP4 experts, and NVFP4.

MXFP4 has a scale, a power of two, for each block of 32 values (OCP Microscaling Formats 1.0).  NVFP4 has a scale in
E4M3 for each group of 16 columns, and one factor in float32 for the matrix.

compressed-tensors divides NVFP4's scales by the stored factor; ModelOpt multiplies scales by the factor.  Most
checkpoints also declare 4-bit inputs, which only Blackwell supports.  Here, as in other engines on Hopper, inputs keep
the model's dtype, and loading logs a warning.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from espalier.config import FP8_KV
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8, QuantisedMatrix, make_nibble_matrix
from espalier.model_files import read_json
from espalier.models.weight_formats.base import FormatLookup, StoredTensor, WeightFormat
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.models.weight_formats.fp8 import Fp8Format
from espalier.models.weight_formats.quantised import (
    QuantisedFormat,
    dense_if_skipped,
    matches_module,
    module_names,
    read_field,
    read_object,
    require_multiple_of,
)

MXFP4_BLOCK_SIZE = 32
MODELOPT = "modelopt"
HF_QUANT_CONFIG = "hf_quant_config.json"
# With this quant_algo, the field `quantized_layers` has the algorithm of each matrix.
MIXED_ALGORITHM = "MIXED_PRECISION"


@dataclass(frozen=True)
class Mxfp4Format(QuantisedFormat):
    """Stacked experts in MXFP4.
    The tensors are _blocks uint8 [experts, out, in / 32, 16], low nibble first, and _scales [experts, out, in / 32]."""

    name = "mxfp4"
    supports_shards = True

    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        raise EspalierError(f"format {self.name} is supported for stacked experts only")

    def stored_matrix(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> QuantisedMatrix:
        raise EspalierError(f"format {self.name} is supported for stacked experts only")

    def expert_tensors(self, num_experts: int, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        require_multiple_of(self.name, "columns", columns, MXFP4_BLOCK_SIZE)
        shape = (num_experts, rows, columns // MXFP4_BLOCK_SIZE)
        return (
            StoredTensor(
                "_blocks", (*shape, MXFP4_BLOCK_SIZE // 2), torch.uint8, 1, 2, columns_per_entry=MXFP4_BLOCK_SIZE
            ),
            StoredTensor("_scales", shape, torch.uint8, 1, 2, columns_per_entry=MXFP4_BLOCK_SIZE),
        )

    def expert_matrix(self, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
        """Returns [experts, rows, columns].  tensors: _blocks and _scales, by these suffixes."""
        return make_nibble_matrix("mxfp4", tensors["_blocks"].flatten(2), tensors["_scales"], MXFP4_BLOCK_SIZE)

    def keeps_stored_dtype(self, name: str, dtype: torch.dtype) -> bool:
        return name.endswith(("_blocks", "_scales"))


def read_mxfp4(quantisation: Mapping[str, Any]) -> FormatLookup:
    """Returns the format of each matrix, for quant_method "mxfp4": only the experts are quantised."""
    skipped, format = module_names(quantisation, "modules_to_not_convert"), Mxfp4Format()

    def format_of(matrix_name: str) -> Any:
        is_expert = matches_module(matrix_name, "mlp.experts") and not any(
            matches_module(matrix_name, pattern) for pattern in skipped
        )
        return format if is_expert else DENSE_FORMAT

    return format_of


NVFP4_NAME = "nvfp4"
NVFP4_GROUP_SIZE = 16
# E4M3 bytes of at least this value are NaN or negative.
FIRST_INVALID_SCALE = 0x7F
# The warning for a checkpoint that declares 4-bit inputs.
W4A4_WARNING = (
    "asks for inputs in 4 bits too (W4A4), which Espalier does not compute: weights stay in NVFP4 and inputs keep the "
    "model's dtype, so results differ from W4A4's; they are closer to the unquantised model's"
)


@dataclass(frozen=True)
class Nvfp4Suffixes:
    """The name suffixes of a matrix's tensors, in compressed-tensors or in ModelOpt.
    codes: uint8 [out, in / 2], low nibble first.  scales: E4M3 [out, in / 16].  factor: float32 [1].  factor_use:
    whether scales are multiplied or divided by the factor.  input_scale: float32 [1], the scale of 4-bit inputs."""

    codes: str
    scales: str
    factor: str
    factor_use: Literal["multiplied", "divided"]
    input_scale: str


COMPRESSED_TENSORS_SUFFIXES = Nvfp4Suffixes(
    ".weight_packed", ".weight_scale", ".weight_global_scale", "divided", ".input_global_scale"
)
MODELOPT_SUFFIXES = Nvfp4Suffixes(".weight", ".weight_scale", ".weight_scale_2", "multiplied", ".input_scale")


@dataclass(frozen=True)
class Nvfp4Format(QuantisedFormat):
    """A matrix in NVFP4.  has_input_scales: whether scales of 4-bit inputs are stored, which Espalier ignores."""

    suffixes: Nvfp4Suffixes
    has_input_scales: bool = False
    name = NVFP4_NAME
    supports_shards = True

    @property
    def load_warning(self) -> str | None:
        return W4A4_WARNING if self.has_input_scales else None

    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        require_multiple_of(self.name, "columns", columns, NVFP4_GROUP_SIZE)
        suffixes = self.suffixes
        inputs = (StoredTensor(suffixes.input_scale, (1,), torch.float32),) if self.has_input_scales else ()
        return (
            StoredTensor(suffixes.codes, (rows, columns // 2), torch.uint8, 0, 1, columns_per_entry=2),
            StoredTensor(
                suffixes.scales, (rows, columns // NVFP4_GROUP_SIZE), FP8, 0, 1, columns_per_entry=NVFP4_GROUP_SIZE
            ),
            StoredTensor(suffixes.factor, (1,), torch.float32),
            *inputs,
        )

    def stored_matrix(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> QuantisedMatrix:
        """Returns the stacked matrix.  tensors: by suffix.  row_counts: the number of rows of each matrix in it."""
        scales, factor = tensors[self.suffixes.scales], tensors[self.suffixes.factor].flatten().double()
        wrong = factor[~((factor > 0) & factor.isfinite())]
        if wrong.numel():
            raise EspalierError(
                f"{self.suffixes.factor.lstrip('.')} has the value {float(wrong[0])}; a positive number is needed: the "
                "file is corrupt, download it again"
            )
        if bool((scales.view(torch.uint8) >= FIRST_INVALID_SCALE).any()):
            raise EspalierError(
                f"{self.suffixes.scales.lstrip('.')} has a value that is negative or no number; the file is corrupt, "
                "download it again"
            )
        matrix_scales = factor if self.suffixes.factor_use == "multiplied" else 1 / factor
        lengths = torch.tensor(row_counts, device=scales.device)
        row_scales = matrix_scales.repeat_interleave(lengths)
        return make_nibble_matrix(
            "nvfp4", tensors[self.suffixes.codes], scales, NVFP4_GROUP_SIZE, row_scales=row_scales
        )

    def keeps_stored_dtype(self, name: str, dtype: torch.dtype) -> bool:
        suffixes = self.suffixes
        return dtype.itemsize == 1 or name.endswith((suffixes.scales, suffixes.factor, suffixes.input_scale))


MODELOPT_FORMATS: Mapping[str, WeightFormat] = {
    "FP8": Fp8Format((None, None), inputs="static"),
    "NVFP4": Nvfp4Format(MODELOPT_SUFFIXES, has_input_scales=True),
    "W4A16_NVFP4": Nvfp4Format(MODELOPT_SUFFIXES),
}


def read_modelopt(quantisation: Mapping[str, Any]) -> FormatLookup:
    """Returns the format of each matrix, for quant_method "modelopt".
    Raises EspalierError naming an algorithm that is not supported: W4A8_AWQ, NVFP4_AWQ and others."""
    if quantisation.get("quant_algo") == MIXED_ALGORITHM:
        layers = read_object(quantisation, "quantized_layers")
        if not layers:
            raise EspalierError(
                f"quantization_config: quant_algo = {MIXED_ALGORITHM!r} needs quantized_layers; download it again"
            )
        formats = {name: _read_format(read_object(layers, name)) for name in layers}
        return lambda name: formats.get(name, DENSE_FORMAT)
    names = module_names(quantisation, "ignore") + module_names(quantisation, "exclude_modules")
    skipped = [f"re:{fnmatch.translate(name)}" if "*" in name else name for name in names]
    # The lm_head is quantised, unless it is among the skipped names.
    return dense_if_skipped(skipped, _read_format(quantisation), quantises_head=True)


def _read_format(scheme: Mapping[str, Any]) -> WeightFormat:
    """Returns the format that a scheme declares.  scheme: an object with quant_algo and group_size."""
    format = MODELOPT_FORMATS[read_field(scheme, "quant_algo", tuple(MODELOPT_FORMATS))]
    if isinstance(format, Nvfp4Format):
        read_field(scheme, "group_size", (NVFP4_GROUP_SIZE, None))
    return format


def read_hf_quant_config(path: Path) -> dict[str, Any]:
    """Returns the fields of config.json that a directory's hf_quant_config.json adds; {} if there is no such file."""
    file = path / HF_QUANT_CONFIG
    if not file.exists():
        return {}
    return {"quantization_config": {"quant_method": MODELOPT, **read_object(read_json(file), "quantization")}}


KV_SCALE_STRATEGIES = ("tensor", "attn_head")


def read_kv_dtype(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Returns the kv_dtype that a config.json declares; None if there is no declaration.
    names: the fields that may hold the quantisation.  Raises EspalierError for a scheme that is not supported."""
    quantisation: Any = next((fields[name] for name in names if fields.get(name) is not None), None)
    if not isinstance(quantisation, Mapping):
        return None
    scheme, algorithm = quantisation.get("kv_cache_scheme"), quantisation.get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        raise EspalierError(
            f"quantization_config: kv_cache_quant_algo {algorithm!r} is not supported, only 'FP8'; set kv_dtype to the "
            "model's dtype"
        )
    if algorithm is not None:
        return FP8_KV
    if scheme is None or scheme == "static":
        return FP8_KV if scheme else None
    supported = {"type": ("float",), "num_bits": (8,), "dynamic": (False, None), "symmetric": (True, None)}
    scheme_fields = scheme if isinstance(scheme, Mapping) else {}
    unsupported = [name for name, values in supported.items() if scheme_fields.get(name) not in values]
    # ModelOpt's checkpoints have one scale per layer, but their config has no field for this.
    strategy = scheme_fields.get("strategy", "tensor" if quantisation.get("quant_method") == MODELOPT else None)
    if unsupported or strategy not in KV_SCALE_STRATEGIES:
        raise EspalierError(
            f"quantization_config: kv_cache_scheme {scheme!r} is not supported, only static FP8 by "
            f"{' or '.join(map(repr, KV_SCALE_STRATEGIES))}; set kv_dtype to the model's dtype"
        )
    return FP8_KV
