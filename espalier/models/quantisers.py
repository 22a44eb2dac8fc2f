"""Quantises dense matrices to the tensors of a storage format, and writes quantised copies of checkpoints.

fp8: E4M3 with a scale for each row of a matrix; inputs are rounded to FP8 too, with a scale for each token.
int4: groups of 128 columns with a symmetric scale; 64 or 32 columns if 128 does not divide a matrix's columns.  For
each group, a few scales are tried, and the scale with the least squared error is used.  No calibration text is needed.
fp8-block, nvfp4, mxfp4: the formats of published checkpoints with these names.

`espalier quantize` writes a copy of a target or a draft (`quantise`) in the format of compressed-tensors, file by file.
It quantises linear layers, experts that are stored one by one, and a draft's own head.  All other weights stay dense.
Synthetic models (with random weights) use the quantised tensors directly.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import E2M1_VALUES, E8M0_BIAS, FP8, FP8_MAX, QuantisedMatrix, pack_nibbles
from espalier.models.loading import read_config, read_raw_config
from espalier.models.weight_files import INDEX_FILE, safetensors_files, write_weights
from espalier.models.weight_formats import QUANTISATION_FIELDS, FormatLookup, read_formats
from espalier.models.weight_formats.e2m1 import MXFP4_BLOCK_SIZE, NVFP4_GROUP_SIZE
from espalier.models.weights import PLAIN_DTYPES

# An int4 group has as many columns as the first of GROUP_SIZES that divides the matrix's columns.
# FP8_BLOCK: the number of rows, and of columns, that share a scale in FP8 blocks.
GROUP_SIZE = 128
GROUP_SIZES = (GROUP_SIZE, 64, 32)
FP8_BLOCK = 128
# The factors that are tried for a group's scale.  Factor 1 maps the group's largest magnitude to 7.5.
SCALE_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
# The number of values that are quantised in one step.
VALUES_PER_STEP = 2**24
NUMBER_PATTERN = re.compile("[0-9]+")
HEAD_NAME = "lm_head"
# The names of matrices that stay dense in targets and in drafts.  Published checkpoints have a dense weights_proj.
DENSE_NAMES = (
    *("embed_tokens", "embeddings", "gate", "router", "router.proj", "router.layer", "shared_expert_gate"),
    *("eh_proj", "shared_head.head"),
    "indexer.weights_proj",
    # The gates of the delta rule are exponentials of these matrices' products, so quantisation errors would grow.
    *("in_proj_a", "in_proj_b", "in_proj_ba"),
)
# A draft's own head is quantised.  Its quantisation errors do not change the output, because the target decides it.
DENSE_IN_TARGETS = (*DENSE_NAMES, HEAD_NAME)
# Block drafts read these matrices as plain tensors, so they stay dense.
EDGE_MATRICES = ("markov_w1", "markov_w2", "markov_head.gate_proj", "markov_head.joint_proj")
DENSE_IN_DRAFTS = (*DENSE_NAMES, *EDGE_MATRICES, "kernel_projection")
# The exponent of the largest value of E2M1, 6 = 1.5 · 2^2.
E2M1_MAX_EXPONENT = 2

# The stored tensors of one matrix, by the suffix that is added to the matrix's name.
TensorsBySuffix = dict[str, Tensor]
QuantisedCopyFormat = Literal["fp8", "int4"]


def _names_pattern(names: Sequence[str]) -> str:
    """Returns a regular expression for matrix names that end with one of these names."""
    return rf"(.*\.)?({'|'.join(map(re.escape, names))})$"


@dataclass(frozen=True)
class Quantiser:
    """A quantised format: functions that quantise matrices, and the rules that decide which matrices are quantised.

    quantise: returns the stored tensors of a matrix [out, in] or, if `quantises_only_experts`, of experts [count, out,
    in].
    make_config: returns quantization_config, given `dense_pattern` and the names of other matrices that stay dense.
    group_sizes: the numbers of columns that may share a scale.  A matrix gets the first size that divides its columns.
    quantises_only_experts: whether the format is for stacked experts.  dense_pattern: the names of matrices that stay
    dense."""

    quantise: Callable[[Tensor, torch.device], TensorsBySuffix]
    make_config: Callable[[str, Sequence[str]], Mapping[str, Any]]
    group_sizes: tuple[int, ...] = (1,)
    quantises_only_experts: bool = False
    dense_pattern: str = _names_pattern(DENSE_IN_TARGETS)

    def for_draft(self, is_draft: bool) -> "Quantiser":
        """Returns this format for a target or for a draft.  In a draft, the lm_head is quantised too."""
        return replace(self, dense_pattern=_names_pattern(DENSE_IN_DRAFTS)) if is_draft else self

    def quantization_config(self, columns_by_matrix: Mapping[str, int]) -> Mapping[str, Any]:
        """Returns quantization_config.  columns_by_matrix: name of a matrix to quantise -> number of columns."""
        groups = {name: self.group_size_for(columns) for name, columns in columns_by_matrix.items()}
        config = dict(self.make_config(self.dense_pattern, [name for name, group in groups.items() if group is None]))
        for group in self.group_sizes[1:]:
            if names := [name for name, group_size in groups.items() if group_size == group]:
                first_group = config["config_groups"]["group_0"]
                own_fields = {
                    "targets": _patterns_of_layers(names, groups),
                    "weights": first_group["weights"] | {"group_size": group},
                }
                config["config_groups"] = {**config["config_groups"], f"group_{group}": first_group | own_fields}
        return config

    def stays_dense(self, name: str) -> bool:
        """Whether a matrix stays dense in this format.  name: the matrix's name without `.weight`."""
        return re.match(self.dense_pattern, name) is not None

    def group_size_for(self, columns: int) -> int | None:
        """Returns how many columns share a scale; None for a matrix that stays dense."""
        sizes = () if self.quantises_only_experts else self.group_sizes
        return next((size for size in sizes if columns % size == 0), None)

    def is_quantised(self, name: str, columns: int) -> bool:
        """Whether a matrix with this number of columns is quantised.  name: its name without `.weight`."""
        return self.group_size_for(columns) is not None and not self.stays_dense(name)

    def storage_formats(self, columns_by_matrix: Mapping[str, int]) -> FormatLookup:
        """Returns the storage format of each matrix.  columns_by_matrix: the number of columns, by matrix name."""
        return read_formats({"quantization_config": self.quantization_config(columns_by_matrix)})

    def quantise_matrix(self, dense: Tensor) -> QuantisedMatrix:
        """Quantises a matrix [out, in].  The result is the same as after storing and loading the matrix."""
        if self.quantises_only_experts:
            return self.quantise_experts(dense[None])[0]
        format, stored = self.storage_formats({"layer": dense.shape[1]})("layer"), self.quantise(dense, dense.device)
        declared = format.stored_tensors(*dense.shape)
        tensors = {each.suffix: stored[each.suffix][None if each.row_dim is None else ...] for each in declared}
        matrix = format.matrix(tensors, [len(dense)], dense.shape[1])
        assert isinstance(matrix, QuantisedMatrix)
        return matrix

    def quantise_experts(self, dense: Tensor) -> QuantisedMatrix:
        """Quantises experts [count, out, in].  The result is the same as after storing and loading the experts."""
        if not self.quantises_only_experts:
            return self.quantise_matrix(dense.flatten(0, 1)).experts(len(dense))
        return self.storage_formats({})("mlp.experts").expert_matrix(self.quantise(dense, dense.device))


def _patterns_of_layers(names: Sequence[str], group_sizes: Mapping[str, int | None]) -> list[str]:
    """Returns patterns that match the matrices `names` in any layer and expert.  If a pattern would also match a matrix
    that is not in `names`, returns the full names instead.  group_sizes: the group size of each matrix, by name."""
    patterns: dict[str, list[str]] = {}
    for name in names:
        patterns.setdefault(_any_number_pattern(name), []).append(name)
    others = {_any_number_pattern(name) for name in group_sizes.keys() - set(names)}
    return [name for pattern, full in patterns.items() for name in (full if pattern in others else [pattern])]


def _any_number_pattern(name: str) -> str:
    """Returns a regular expression that matches the name with any other numbers in place of its numbers."""
    return f"re:{NUMBER_PATTERN.sub('[0-9]+', re.escape(name))}$"


def _row_blocks(matrix: Tensor, device: torch.device, row_multiple: int = 1) -> Iterator[Tensor]:
    """Yields blocks of rows in float32 on the device.  All but the last block have a multiple of `row_multiple`
    rows."""
    for block in matrix.split(max(VALUES_PER_STEP // matrix.shape[1] // row_multiple, 1) * row_multiple):
        yield block.to(device, torch.float32)


def to_fp8(matrix: Tensor, device: torch.device) -> TensorsBySuffix:
    """Quantises a matrix to E4M3 with a scale for each row."""
    codes, scales = [], []
    for block in _row_blocks(matrix, device):
        scale = _fp8_scale(block.abs().amax(1, keepdim=True))
        codes.append(_encode_fp8(block / scale).to(matrix.device))
        scales.append(scale.to(matrix.device))
    return {".weight": _join_codes(codes), ".weight_scale": torch.cat(scales)}


def to_fp8_block(matrix: Tensor, device: torch.device) -> TensorsBySuffix:
    """Quantises a matrix to E4M3 with a scale per block of FP8_BLOCK rows and columns.  Last blocks may be smaller."""
    columns = matrix.shape[1]
    codes, scales = [], []
    for block in _row_blocks(matrix, device, FP8_BLOCK):
        tiles = F.pad(block, (0, -columns % FP8_BLOCK, 0, -len(block) % FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
        tiles = tiles.unflatten(0, (-1, FP8_BLOCK))
        scale = _fp8_scale(tiles.abs().amax((1, 3)))
        scaled = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)
        codes.append(_encode_fp8(scaled[: len(block), :columns]).to(matrix.device))
        scales.append(scale.to(matrix.device))
    return {".weight": _join_codes(codes), ".weight_scale_inv": torch.cat(scales)}


def _fp8_scale(max_magnitude: Tensor) -> Tensor:
    return torch.where(max_magnitude == 0, 1.0, max_magnitude / FP8_MAX)


def _join_codes(codes: Sequence[Tensor]) -> Tensor:
    """Concatenates codes as bytes, because torch.cat may not support FP8 on every device."""
    return torch.cat([part.view(torch.uint8) for part in codes]).view(FP8)


def _encode_fp8(values: Tensor) -> Tensor:
    """Rounds values to FP8, limited to -FP8_MAX .. FP8_MAX."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous()


def to_int4(matrix: Tensor, device: torch.device) -> TensorsBySuffix:
    """Quantises a matrix to int4, with a symmetric scale (_best_scales) for each group of columns (GROUP_SIZES)."""
    # Other engines expect the scales in the model's dtype.
    dtype = matrix.dtype if matrix.dtype in (torch.bfloat16, torch.float16) else torch.float32
    group = next(size for size in GROUP_SIZES if matrix.shape[1] % size == 0)
    codes, scales = [], []
    for block in _row_blocks(matrix, device):
        groups = block.unflatten(1, (-1, group))
        scale = _best_scales(groups, dtype)
        block_codes = (groups / scale.float()).round().clamp(-8, 7) + 8
        codes.append(pack_nibbles(block_codes.flatten(1).to(torch.uint8)).to(matrix.device))
        scales.append(scale.squeeze(2).to(matrix.device))
    packed = torch.cat(codes).contiguous().view(torch.int32)
    shape = torch.tensor(matrix.shape, dtype=torch.int64)
    return {".weight_packed": packed, ".weight_scale": torch.cat(scales), ".weight_shape": shape}


def _best_scales(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scales [rows, n, 1] with the least squared error among SCALE_FACTORS.  groups: [rows, n, group]."""
    max_magnitude = groups.abs().amax(2, keepdim=True)
    base_scale = torch.where(max_magnitude == 0, 1.0, max_magnitude / 7.5)
    best, least_error = base_scale.to(dtype), torch.full_like(max_magnitude, torch.inf)
    for factor in SCALE_FACTORS:
        scale = (base_scale * factor).to(dtype)
        scale_values = scale.float()
        error = ((groups / scale_values).round().clamp(-8, 7) * scale_values - groups).square().sum(2, keepdim=True)
        best, least_error = torch.where(error < least_error, scale, best), torch.minimum(error, least_error)
    return best


def to_mxfp4(experts: Tensor, device: torch.device) -> TensorsBySuffix:
    """Quantises experts [count, out, in] to GPT-OSS's MXFP4: E2M1 with a power of two for each block of columns.
    The power of two comes from the block's largest magnitude (OCP Microscaling Formats 1.0, 6.3).  Each scaled value is
    rounded to the nearest value of E2M1.  Scaled magnitudes above 6, the largest value of E2M1, become 6."""
    codes, scales = [], []
    for matrix in experts:
        values = matrix.to(device, torch.float32).unflatten(1, (-1, MXFP4_BLOCK_SIZE))
        max_magnitude = values.abs().amax(2)
        exponent = torch.frexp(max_magnitude)[1] - 1 - E2M1_MAX_EXPONENT
        exponent = torch.where(max_magnitude == 0, 0, exponent).clamp(-E8M0_BIAS, E8M0_BIAS)
        scaled = torch.ldexp(values, -exponent[:, :, None])
        codes.append(pack_nibbles(_encode_e2m1(scaled)).to(experts.device))
        scales.append((exponent + E8M0_BIAS).to(torch.uint8).to(experts.device))
    return {"_blocks": torch.stack(codes), "_scales": torch.stack(scales)}


def to_nvfp4(matrix: Tensor, device: torch.device) -> TensorsBySuffix:
    """Quantises a matrix to NVFP4: E2M1, an E4M3 scale for each group of columns, and one divisor of all scales."""
    max_magnitude = matrix.abs().amax().to(device, torch.float32)
    divisor = torch.where(max_magnitude == 0, 1.0, FP8_MAX * E2M1_VALUES[-1] / max_magnitude)
    codes, scales = [], []
    for block in _row_blocks(matrix, device):
        groups = block.unflatten(1, (-1, NVFP4_GROUP_SIZE))
        scale = _encode_fp8(groups.abs().amax(2) / E2M1_VALUES[-1] * divisor)
        decoded_scale = scale.float() / divisor
        scaled = groups / torch.where(decoded_scale == 0, 1.0, decoded_scale)[:, :, None]
        codes.append(_encode_e2m1(scaled).flatten(1).to(matrix.device))
        scales.append(scale.to(matrix.device))
    packed = pack_nibbles(torch.cat(codes))
    global_scale = divisor.reshape(1).to(matrix.device)
    return {".weight_packed": packed, ".weight_scale": _join_codes(scales), ".weight_global_scale": global_scale}


def _encode_e2m1(scaled_values: Tensor) -> Tensor:
    """Returns the 4-bit codes of the E2M1 values nearest to `scaled_values`.  Magnitudes above 6 get the code of 6."""
    midpoints = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1_VALUES)], device=scaled_values.device)
    magnitudes = torch.bucketize(scaled_values.abs().contiguous(), midpoints).to(torch.uint8)
    return magnitudes | (scaled_values < 0).to(torch.uint8) << 3


def _compressed_tensors_config(
    scheme: tuple[str, str, int, str, int | None], dense_pattern: str, dense_names: Sequence[str]
) -> dict[str, Any]:
    """Returns quantization_config in the format of compressed-tensors.  With a scale per row, inputs are quantised too.
    scheme: (format, type of weights, bits of weights, strategy of scales, columns of a group)."""
    format_name, kind, bits, strategy, group = scheme
    common_fields: dict[str, Any] = {"symmetric": True, "dynamic": False, "block_structure": None, "actorder": None}
    common_fields |= {"num_bits": bits, "type": kind}
    inputs = {**common_fields, "strategy": "token", "dynamic": True} if strategy == "channel" else None
    weights = {**common_fields, "strategy": strategy, "group_size": group}
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group_0, "format": format_name}},
        "ignore": [f"re:{dense_pattern}", *dense_names],
        "kv_cache_scheme": None,
    }


def _fp8_block_config(dense_pattern: str, dense_names: Sequence[str]) -> dict[str, Any]:
    """Returns quantization_config in the format of DeepSeek-V3.  For a quantised head, adds GPTQ's field `lm_head`."""
    head = {} if re.match(dense_pattern, HEAD_NAME) else {HEAD_NAME: True}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": [f"re:{dense_pattern}", *dense_names],
        **head,
    }


# The make_config of the Quantisers whose format is compressed-tensors.
MAKE_COMPRESSED_TENSORS: Mapping[str, Callable[[str, Sequence[str]], Mapping[str, Any]]] = {
    "fp8": partial(_compressed_tensors_config, ("float-quantized", "float", 8, "channel", None)),
    "int4": partial(_compressed_tensors_config, ("pack-quantized", "int", 4, "group", GROUP_SIZE)),
    "nvfp4": partial(
        _compressed_tensors_config, ("nvfp4-pack-quantized", "float", 4, "tensor_group", NVFP4_GROUP_SIZE)
    ),
}
QUANTISERS: Mapping[str, Quantiser] = MappingProxyType(
    {
        "fp8": Quantiser(to_fp8, MAKE_COMPRESSED_TENSORS["fp8"]),
        "fp8-block": Quantiser(to_fp8_block, _fp8_block_config),
        "int4": Quantiser(to_int4, MAKE_COMPRESSED_TENSORS["int4"], group_sizes=GROUP_SIZES),
        "nvfp4": Quantiser(to_nvfp4, MAKE_COMPRESSED_TENSORS["nvfp4"], group_sizes=(NVFP4_GROUP_SIZE,)),
        "mxfp4": Quantiser(
            to_mxfp4,
            lambda pattern, dense_names: {"quant_method": "mxfp4", "modules_to_not_convert": list(dense_names)},
            group_sizes=(MXFP4_BLOCK_SIZE,),
            quantises_only_experts=True,
        ),
    }
)


@dataclass
class QuantiseReport:
    """The numbers that `quantise` reports.  num_matrices: the number of quantised matrices.
    dense_names: the names of matrices that stay dense because no group size divides their number of columns.
    num_matrices_by_small_group_size: smaller group size than usual -> the number of matrices with that size."""

    num_matrices: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    dense_names: list[str] = field(default_factory=list)
    num_matrices_by_small_group_size: Counter[int] = field(default_factory=Counter)


def quantise(
    path: Path,
    out: Path,
    format_name: QuantisedCopyFormat,
    device: torch.device,
    on_file_done: Callable[[], None],
    is_draft: bool = False,
) -> QuantiseReport:
    """Writes a quantised copy of the target or draft at `path` to `out`.
    One quantised file at a time is held in memory.  on_file_done: a function that is called after each file.  After an
    error or Ctrl-C, `out` is emptied, so that the same command can run again.
    Raises EspalierError for a model that is already quantised or not supported, and if `out` is not empty or cannot be
    written."""
    config, quantiser = read_raw_config(path), QUANTISERS[format_name]
    _refuse_unsupported(path, out, config, is_draft)
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _write_copy(path, out, quantiser.for_draft(is_draft), device, config, on_file_done)
    except BaseException as error:
        for file in out.iterdir() if out.is_dir() else ():
            file.unlink()
        if isinstance(error, OSError):
            raise EspalierError(f"--out={out} cannot be written ({error.strerror}); name another directory") from None
        raise


def _write_copy(
    path: Path,
    out: Path,
    quantiser: Quantiser,
    device: torch.device,
    config: Mapping[str, Any],
    on_file_done: Callable[[], None],
) -> QuantiseReport:
    """Writes the copy of `path` to `out`, with config.json last, so that a partial copy cannot be loaded."""
    report, weight_map, columns_by_matrix = QuantiseReport(), dict[str, str](), dict[str, int]()
    for file in safetensors_files(path):
        tensors = dict(_quantised_tensors(file, quantiser, device, report, columns_by_matrix))
        write_weights(out / file.name, tensors)
        weight_map |= dict.fromkeys(tensors, file.name)
        report.written_bytes += sum(tensor.nbytes for tensor in tensors.values())
        on_file_done()
    if (path / INDEX_FILE).exists():
        index = {"metadata": {"total_size": report.written_bytes}, "weight_map": weight_map}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for other in sorted(path.iterdir()):
        is_weights = other.suffix in (".safetensors", ".bin") or other.name == INDEX_FILE
        if other.is_file() and not is_weights and other.name != "config.json":
            shutil.copyfile(other, out / other.name)
    full_config = {**config, "quantization_config": quantiser.quantization_config(columns_by_matrix)}
    (out / "config.json").write_text(json.dumps(full_config, indent=1), encoding="utf-8")
    return report


def _refuse_unsupported(path: Path, out: Path, config: Mapping[str, Any], is_draft: bool) -> None:
    for name in QUANTISATION_FIELDS:
        if config.get(name) is not None:
            raise EspalierError(f"{path} is quantised already ({name}); give the unquantised model (bfloat16)")
    target = None if is_draft else read_config(path, model_impl="native")
    if target is not None and target.multimodal_architecture is not None:
        raise EspalierError(f"{path} is multimodal ({target.multimodal_architecture}), which quantize does not support")
    experts = None if target is None else target.experts
    is_stacked = experts is not None and experts.storage != "apart"
    if is_stacked or (is_draft and _stacks_experts(path)):
        raise EspalierError(f"{path} stores its experts stacked, which quantize does not support; use another model")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EspalierError(f"--out={out} exists and is not an empty directory; give a new one")
    if not safetensors_files(path):
        raise EspalierError(f"{path} holds no *.safetensors; save it with safe_serialization=True")


def _stacks_experts(path: Path) -> bool:
    """Whether a draft stores stacked experts, according to the shapes of its tensors."""
    for file in safetensors_files(path):
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if ".experts." in name]  # noqa: SIM118
            if any(len(opened.get_slice(name).get_shape()) > 2 for name in names):
                return True
    return False


def _quantised_tensors(
    file: Path, quantiser: Quantiser, device: torch.device, report: QuantiseReport, columns_by_matrix: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file's quantised copy.  Updates `report` and `columns_by_matrix`."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_tensor(name)
            report.read_bytes += tensor.nbytes
            module = name.removesuffix(".weight")
            is_matrix = tensor.ndim == 2 and module != name and tensor.dtype in PLAIN_DTYPES
            is_matrix = is_matrix and not quantiser.stays_dense(module)
            if is_matrix:
                columns_by_matrix[module] = tensor.shape[1]
            if is_matrix and (group := quantiser.group_size_for(tensor.shape[1])) is not None:
                report.num_matrices += 1
                if group != quantiser.group_sizes[0]:
                    report.num_matrices_by_small_group_size[group] += 1
                for suffix, part in quantiser.quantise(tensor, device).items():
                    yield f"{module}{suffix}", part
            else:
                if is_matrix:
                    report.dense_names.append(module)
                # The tensor is cloned, because a view would keep the whole memory-mapped file in memory.
                yield name, tensor.clone()
