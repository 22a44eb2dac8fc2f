"""Reads weights from disk, one tensor at a time.

Each weight is checked, cast and copied to the device.  If a weight is missing, unused, truncated or has a wrong shape,
an error names the file and the weight.
"""

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from espalier.errors import EspalierError, one_line
from espalier.kernels.layers.quantised import QuantisedMatrix, dequantise
from espalier.kernels.layers.quantised_plans import require_supported_weight
from espalier.kernels.ops.activation import SILU, Activation
from espalier.model_files import is_gguf, require_regular
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.norm import RMSNorm
from espalier.models.stored_names import GATE_UP_DOWN, SAME_NAMES, MLPNames, StoredNames, stored_matrices
from espalier.models.weight_files import GGUFTensors, read_bin, safetensors_files
from espalier.models.weight_formats import FormatLookup, StoredTensor, Weight, WeightFormat, all_dense
from espalier.models.weight_formats.base import StackedWeights
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.models.weight_formats.gguf import BlockWeight
from espalier.models.weight_formats.sharded import SummedWeight
from espalier.shards import SINGLE_RANK, RankPart, Shards, SizeOrPart, as_rank_part

# Stored tensors that may stay unused: buffers that old exporters stored and Espalier computes; scales of queries, which
# Espalier never quantises; and scales of K and V in drafts.
IGNORABLE_NAMES = re.compile(
    r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|self_attn\.(bias|masked_bias)"
    r"|self_attn\.((k_proj\.)?k_scale|(v_proj\.)?v_scale|(q_proj\.)?q_scale|kv_scale))$"
)
# A slice for each dimension of a stored tensor.
Slices = tuple[slice, ...]
# Dtypes that may be cast to the model's dtype.  Narrower dtypes need the scales of their storage format.
PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The names of these dtypes in safetensors files.
PLAIN_DTYPE_NAMES = ("F64", "F32", "BF16", "F16")
log = logging.getLogger(__name__)


class Weights:
    """The stored tensors of one directory, or of a GGUF file, by name.  `require_all_used` refuses unused weights.

    formats: the storage format of each matrix; all other weights are plain tensors: floating-point, without scales.  A
    matrix that is stored as a plain tensor is always dense, because some checkpoints have dense layers that config.json
    does not name.
    shards: the number of ranks, and which part of each divided matrix this rank holds.
    allow_bin: whether pytorch_model.bin, which many drafts have, may be read (with weights_only).
    stored_names: maps the names in files (stored names) to own names (stored_names.py).  All methods take own names.
    other_parts: the parts of a multimodal model that are not loaded, such as a vision tower, by name."""

    shards: Shards = SINGLE_RANK

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        formats: FormatLookup = all_dense,
        allow_bin: bool = False,
        stored_names: StoredNames = SAME_NAMES,
        shards: Shards = SINGLE_RANK,
    ) -> None:
        self.shards = shards
        self.path = path
        self.stored_names = stored_names
        self.dtype = dtype
        self.device = device
        self.other_parts: set[str] = set()
        self._loaded: Mapping[str, Tensor] = {}
        # Own name -> (the open file, the name in the file).
        self._files: dict[str, tuple[safe_open, str]] = {}
        files = [] if is_gguf(path) else safetensors_files(path)
        for file in files:
            self._open_file(file)
        if not files:
            self._loaded = GGUFTensors(path) if is_gguf(path) else read_bin(path, allow_bin)
        self.formats = stored_names.formats_by_own_name(formats, [name for _, name in self._files.values()])
        self._names = frozenset((*self._files, *self._loaded))
        self._unused = set(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def has_matrix(self, name: str) -> bool:
        """Whether any tensor of the matrix `name` is stored, such as `.weight` or `.weight_packed`."""
        return self.has_prefix(f"{name}.")

    def has_prefix(self, prefix: str) -> bool:
        """Whether the name of any stored tensor begins with `prefix`."""
        return any(name.startswith(prefix) for name in self._names)

    def has_matrix_of_shape(self, name: str, rows: int, columns: int) -> bool:
        """Whether the matrix `name` is stored in its format with this shape.  No data is read.
        For a tensor without a row dimension (such as an input scale), only the name is checked, because a single value
        may have the shape [] or [1]."""
        try:
            declared = self.format_of(name).stored_tensors(rows, columns)
        except EspalierError:  # the format stores no such shape
            return False
        shapes = {f"{name}{tensor.suffix}": None if tensor.row_dim is None else tensor.shape for tensor in declared}
        return all(own_name in self and shape in (None, self.shape(own_name)) for own_name, shape in shapes.items())

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a stored weight.  No data is read."""
        if name in self._loaded:
            return tuple(self._loaded[name].shape)
        file, stored_name = self._files[name]
        return tuple(file.get_slice(stored_name).get_shape())

    def load(self, name: str, *shape: int) -> Tensor:
        """Returns a plain tensor, cast to the model's dtype, on the device.  Raises the errors of load_raw."""
        return self._cat_tensors([name], [StoredTensor("", shape, row_dim=0)])

    def load_number(self, name: str) -> float:
        """Returns the value of a plain tensor with one value, rounded to the model's dtype."""
        return float(self.load(name, 1))

    def load_parts(self, name: str, shape: tuple[int, ...], dim: int, parts: Sequence[RankPart]) -> Tensor:
        """Returns the concatenated `parts` of a plain tensor along dimension `dim`, cast as in `load`."""
        declared = StoredTensor("", shape, row_dim=dim)
        return self._cat_tensors(
            [name] * len(parts), [declared] * len(parts), [declared.part_slices(part, part) for part in parts]
        )

    def load_exact(self, name: str, *shape: int) -> Tensor:
        """Returns a plain tensor, cast to float32 (float64 for a float64 model), on the device."""
        exact_dtype = torch.promote_types(self.dtype, torch.float32)
        return self._read_checked(name, StoredTensor("", shape)).to(self.device, exact_dtype)

    def load_entries(self, name: str, num_entries: int, *shape: int) -> Iterator[Tensor]:
        """Yields the entries of a plain tensor [num_entries, *shape], cast to the model's dtype, on the device.
        Raises the errors of load_raw."""
        for entry in self._read_checked(name, StoredTensor("", (num_entries, *shape))):
            yield entry.to(self.device, self.dtype)

    def empty(self, *shape: int) -> Tensor:
        """Returns an uninitialised tensor of the model's dtype, on the device."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def load_raw(self, name: str, *shape: int) -> Tensor:
        """Returns a weight as it is stored, on the CPU.  Raises EspalierError if it is missing or has another shape."""
        self.require_shape(name, shape)
        self._unused.discard(name)
        tensor = self._loaded[name] if name in self._loaded else self._read_tensor(name)
        return tensor.reshape(shape)

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises EspalierError if the weight `name` is missing or has another shape.  No data is read."""
        if name not in self:
            raise EspalierError(
                f"weight {name!r} {list(shape)} is missing from {self.path}; the checkpoint is incomplete, or its "
                "config.json belongs to another model: download it again"
            )
        # Some exporters store a single value as [], others as [1].
        if self.shape(name) != shape and not shape == (1,) == (1, *self.shape(name)):
            raise EspalierError(
                f"weight {name!r} in {self.path} has shape {list(self.shape(name))}, but config.json needs "
                f"{list(shape)}; config.json and weights do not belong together: download both again"
            )

    def linear(
        self,
        prefix: str,
        names: Sequence[str],
        rows: Sequence[SizeOrPart],
        columns: SizeOrPart,
        bias: bool,
        sums_over_ranks: bool = True,
    ) -> Linear:
        """Returns a linear layer that stacks the matrices prefix + name, [rows, columns] each.  bias: whether the
        matrices have biases.  sums_over_ranks: if ranks divide the columns, whether the layer sums its outputs over the
        ranks; if false, the caller sums them."""
        weight, biases = self.weight([f"{prefix}{name}" for name in names], rows, columns), None
        if bias:
            parts = [as_rank_part(size) for size in rows]
            declared = [StoredTensor(".bias", (part.size,), row_dim=0) for part in parts]
            cuts = [tensor.part_slices(part, part) for tensor, part in zip(declared, parts, strict=True)]
            biases = self._cat_tensors([f"{prefix}{name}.bias" for name in names], declared, cuts)
        if as_rank_part(columns).is_whole:
            return Linear(weight, biases)
        if sums_over_ranks:
            return Linear(SummedWeight(weight, self.shards, weight.shape[0]), biases)
        return Linear(weight, self.bias_on_first_rank(biases))

    def bias_on_first_rank(self, bias: Tensor | None) -> Tensor | None:
        """Returns the bias on rank 0 and zeros on all other ranks, so that a sum over the ranks adds the bias once."""
        return bias if bias is None or self.shards.rank == 0 else torch.zeros_like(bias)

    def weight(self, names: Sequence[str], rows: Sequence[SizeOrPart], columns: SizeOrPart) -> Weight:
        """Returns one weight that stacks the matrices `names`, [rows, columns] each, in their storage formats.
        Raises the errors of require_parts."""
        weights = []
        for format, matrices in groupby(zip(names, rows, strict=True), lambda matrix: self.format_of(matrix[0])):
            group_names, group_rows = zip(*matrices, strict=True)
            build_arguments = self._read_parts(format, group_names, group_rows, columns)
            with self._matrix_names_in_errors(group_names):
                weights.append(format.build_weight(*build_arguments))
                weights[-1].require_kernels(self.dtype)
        return weights[0] if len(weights) == 1 else StackedWeights(weights)

    def require_parts(self, names: Sequence[str], sizes: Sequence[SizeOrPart]) -> None:
        """Raises EspalierError if there are several ranks but no size is a RankPart, so that nothing is divided."""
        if self.shards.count > 1 and not any(isinstance(size, RankPart) for size in sizes):
            raise EspalierError(
                f"{names[0]!r} has no part, so ranks cannot divide this architecture; use tensor_parallel=1"
            )

    def format_of(self, name: str) -> WeightFormat:
        """Returns the storage format of a matrix."""
        declared = self.formats(name).with_stored_suffixes(lambda suffix: f"{name}{suffix}" in self)
        if declared == DENSE_FORMAT or name in self._modules_with_scales or not self.has_plain_dtype(f"{name}.weight"):
            return declared
        return DENSE_FORMAT

    @functools.cached_property
    def _modules_with_scales(self) -> frozenset[str]:
        """The names of modules that store a tensor besides a weight and a bias, such as a scale."""
        parts = (name.rpartition(".") for name in self._names)
        return frozenset(module for module, _, kind in parts if kind not in ("weight", "bias"))

    def has_plain_dtype(self, name: str) -> bool:
        """Whether a tensor is stored as floating-point numbers without scales.  No data is read."""
        if name in self._loaded:
            return self._loaded[name].dtype in PLAIN_DTYPES
        file, stored_name = self._files.get(name, (None, name))
        return file is not None and file.get_slice(stored_name).get_dtype() in PLAIN_DTYPE_NAMES

    def matrix(self, names: Sequence[str], rows: Sequence[SizeOrPart], columns: SizeOrPart) -> Tensor | QuantisedMatrix:
        """Returns the stacked matrices as one dense or quantised matrix, not as a Weight.  The arguments are
        those of `weight`."""
        format = self._common_format(names)
        build_arguments = self._read_parts(format, names, rows, columns)
        with self._matrix_names_in_errors(names):
            matrix = format.matrix(*build_arguments)
            if not isinstance(matrix, Tensor):
                require_supported_weight(matrix, self.dtype)
        return matrix

    def stacked_matrix(
        self, name: str, matrix_name: str, num_experts: int, rows: Sequence[SizeOrPart], columns: SizeOrPart
    ) -> QuantisedMatrix:
        """Returns `num_experts` experts [rows, columns].  Each stored tensor holds all experts.  The tensor's name is
        name + matrix_name + a suffix of the format.

        rows: one or more parts of an expert's rows.  The result has the rows of all parts, in order."""
        format, parts, column_part = self.formats(name), [as_rank_part(size) for size in rows], as_rank_part(columns)
        self.require_parts([f"{name}{matrix_name}"], (*rows, columns))
        with self._matrix_names_in_errors([f"{name}{matrix_name}"]):
            tensors = {}
            for declared in format.expert_tensors(num_experts, parts[0].size, column_part.size):
                tensor = self._read_checked(f"{name}{matrix_name}{declared.suffix}", declared)
                cuts = [tensor[declared.part_slices(part, column_part)] for part in parts]
                part_tensor = cuts[0] if len(cuts) == 1 else torch.cat(cuts, declared.row_dim or 0)
                tensors[declared.suffix] = part_tensor.to(self.device)
            experts = format.expert_matrix(tensors)
            require_supported_weight(experts, self.dtype)
        return experts

    def embedding_table(self, name: str, part: RankPart, columns: int) -> Tensor:
        """Returns the rows `part` of an embedding [.., columns], in the model's dtype."""
        if not self.format_of(name).can_store_embedding:
            return self.load_parts(f"{name}.weight", (part.size, columns), 0, [part])
        weight, table = self.weight([name], [part], columns), self.empty(len(part), columns)
        assert isinstance(weight, BlockWeight)
        weight.dequantise_into(table)
        return table

    def load_dense_matrix(self, name: str, rows: SizeOrPart, columns: int) -> Tensor:
        """Returns a matrix of any format as a dense tensor [rows, columns] of the model's dtype."""
        matrix = self.matrix([name], [rows], columns)
        return matrix if isinstance(matrix, Tensor) else dequantise(matrix, self.dtype)

    def _common_format(self, names: Sequence[str]) -> WeightFormat:
        """Returns the common storage format of the matrices `names`.  Raises EspalierError if their formats differ."""
        format = self.format_of(names[0])
        if other := next((name for name in names if self.format_of(name) != format), None):
            raise EspalierError(
                f"{names[0]!r} and {other!r} in {self.path} are stored in different formats ({format.name} and "
                f"{self.format_of(other).name}) but computed as one; use a checkpoint that stores them alike"
            )
        return format

    def _read_parts(
        self, format: WeightFormat, names: Sequence[str], rows: Sequence[SizeOrPart], columns: SizeOrPart
    ) -> tuple[Mapping[str, Tensor], list[int], int]:
        """Returns the arguments of WeightFormat.build_weight for stacked matrices: tensors, rows and columns."""
        tensors: Mapping[str, Tensor] = {}
        self.require_parts(names, (*rows, columns))
        parts, column_part = [as_rank_part(size) for size in rows], as_rank_part(columns)
        with self._matrix_names_in_errors(names):
            tensors_by_matrix = [format.stored_tensors(part.size, column_part.size) for part in parts]
            cuts = [
                [tensor.part_slices(part, column_part) for tensor in declared_tensors]
                for declared_tensors, part in zip(tensors_by_matrix, parts, strict=True)
            ]
        for declared, slices in zip(zip(*tensors_by_matrix, strict=True), zip(*cuts, strict=True), strict=True):
            suffix = declared[0].suffix
            tensors = {**tensors, suffix: self._cat_tensors([f"{name}{suffix}" for name in names], declared, slices)}
        if not all(part.is_whole for part in (*parts, column_part)):
            with self._matrix_names_in_errors(names):
                tensors = format.tensors_of_part(tensors, parts, column_part)
        return tensors, [len(part) for part in parts], len(column_part)

    @contextmanager
    def _matrix_names_in_errors(self, names: Sequence[str]) -> Iterator[None]:
        """Adds the names of the matrices to the beginning of an EspalierError's text."""
        try:
            yield
        except EspalierError as error:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EspalierError(f"{names[0]!r}{more} in {self.path}: {error}") from None

    def _cat_tensors(
        self, names: Sequence[str], declared: Sequence[StoredTensor], cuts: Sequence[Slices] = ()
    ) -> Tensor:
        """Concatenates tensors along row_dim; if row_dim is None, the tensors are stacked.
        declared: the declaration of each tensor.  cuts: the slices of each tensor to read; by default, whole tensors.
        Each slice is copied directly to its place in the result; the rest of the file is not read."""
        cuts = cuts or [tuple(slice(0, size) for size in tensor.shape) for tensor in declared]
        shapes = [[part.stop - part.start for part in cut] for cut in cuts]
        # Shapes are checked before memory is allocated, because the sizes come from config.json.
        for name, tensor in zip(names, declared, strict=True):
            self.require_shape(name, tensor.shape)
        first, dtype = declared[0], declared[0].dtype or self.dtype
        if isinstance(dtype, tuple):
            dtypes = {self._read_checked(name, tensor).dtype for name, tensor in zip(names, declared, strict=True)}
            dtype = functools.reduce(torch.promote_types, dtypes)
        if first.row_dim is None:
            stacked = torch.empty(len(names), *shapes[0], dtype=dtype, device=self.device)
            parts = stacked.unbind(0)
        else:
            dim, lengths = first.row_dim, [shape[first.row_dim] for shape in shapes]
            shape = [*shapes[0][:dim], sum(lengths), *shapes[0][dim + 1 :]]
            stacked = torch.empty(shape, dtype=dtype, device=self.device)
            parts = stacked.split(lengths, dim)
        for part, name, tensor, cut in zip(parts, names, declared, cuts, strict=True):
            part.copy_(self._read_checked(name, tensor)[cut])
        return stacked

    def _read_checked(self, name: str, declared: StoredTensor) -> Tensor:
        """Returns a stored tensor.  Raises EspalierError if its shape or dtype is not the declared one."""
        tensor = self.load_raw(name, *declared.shape)
        dtypes = PLAIN_DTYPES if declared.dtype is None else declared.dtype
        expected = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        if tensor.dtype not in expected:
            needed = ", ".join(str(dtype).removeprefix("torch.") for dtype in expected)
            raise EspalierError(
                f"weight {name!r} in {self.path} is stored as {str(tensor.dtype).removeprefix('torch.')}, but its "
                f"format needs {needed}; config.json and weights do not belong together: download both again"
            )
        return tensor

    def norm_weight(self, name: str, size: int, offset: float) -> Tensor:
        """Returns the weight of a norm plus `offset`.  With an offset, the result is float32 or float64."""
        return self.load_exact(name, size) + offset if offset else self.load(name, size)

    def norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """Returns an RMS norm.  name: without `.weight`.  offset: a number that is added to the stored weight."""
        return RMSNorm(self.norm_weight(f"{name}.weight", size, offset), eps)

    def mlp(
        self,
        prefix: str,
        hidden: int,
        intermediate_size: int,
        bias: bool,
        activation: Activation = SILU,
        sums_over_ranks: bool = True,
        names: MLPNames = GATE_UP_DOWN,
    ) -> GatedMLP:
        """Returns the dense MLP under `prefix`.  hidden: its input and output size.  sums_over_ranks: see `linear`."""
        part = self.shards.part(intermediate_size, "intermediate size")
        gate_up = self.linear(prefix, *stored_matrices(names.gate_up, (part,) * activation.num_matrices), hidden, bias)
        return GatedMLP(gate_up, self.linear(prefix, (names.down,), (hidden,), part, bias, sums_over_ranks), activation)

    def allow_unused(self, names: Iterable[str]) -> None:
        """Allows these weights to stay unused."""
        self._unused.difference_update(names)

    def allow_unused_prefixes(self, prefixes: tuple[str, ...]) -> None:
        """Allows weights whose names begin with one of the prefixes to stay unused."""
        self.allow_unused([name for name in self._unused if name.startswith(prefixes)])

    def allow_unused_except_prefixes(self, prefixes: tuple[str, ...]) -> None:
        """Allows all weights to stay unused, except those whose names begin with one of the prefixes."""
        self.allow_unused([name for name in self._unused if not name.startswith(prefixes)])

    def require_all_used(self) -> None:
        """Raises EspalierError for a weight that was not loaded, because the model would be wrong without it."""
        unused = sorted(name for name in self._unused if not IGNORABLE_NAMES.search(name))
        # Old GPTQ exporters stored a bias of zeros for every layer.
        biases = {name: StoredTensor("", self.shape(name)) for name in unused if name.endswith(".bias")}
        unused = [name for name in unused if name not in biases or self._read_checked(name, biases[name]).any()]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise EspalierError(
                f"weight {unused[0]!r}{more} in {self.path} belongs to no parameter of this architecture; config.json "
                "is of another model, or needs a feature that is not supported: check its architectures field"
            )
        self._log_warnings()

    def _log_warnings(self) -> None:
        """Logs the load_warning of each storage format."""
        matrices = {name.rpartition(".")[0] for name in self._names}
        for warning in sorted({format.load_warning or "" for format in map(self.formats, matrices)} - {""}):
            log.warning("%s %s", self.path, warning)

    def _open_file(self, path: Path) -> None:
        try:
            require_regular(path)
            file = safe_open(path, framework="pt")
            names = list(file.keys())
        except FileNotFoundError:
            raise EspalierError(f"shard {path} is missing; download the checkpoint again") from None
        except (SafetensorError, OSError) as error:
            raise EspalierError(
                f"{path} is truncated or corrupt ({one_line(error)}); download the file again"
            ) from None
        for stored_name in names:
            name = self.stored_names.own_name(stored_name)
            if name is None:
                self.other_parts.add(stored_name.removeprefix("model.").partition(".")[0])
            elif name in self._files:
                raise EspalierError(f"weight {stored_name!r} is in two files of {self.path}; remove one of them")
            else:
                self._files[name] = file, stored_name

    def _read_tensor(self, name: str) -> Tensor:
        file, stored_name = self._files[name]
        try:
            return file.get_tensor(stored_name)
        except (SafetensorError, OSError) as error:
            raise EspalierError(
                f"weight {name!r} in {self.path} is truncated or corrupt ({one_line(error)}); download it again"
            ) from None
