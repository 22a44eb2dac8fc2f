"""Checks, before weights are read, that a number of ranks can divide a model.  Only config.json is needed.

This module runs the code that loads layers, on weights without data.  That code declares which part of each weight a
rank holds, and this module checks the parts.  So families need no list of divided sizes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from espalier.cache.layer_spec import specs_of_rank
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.models.config import ModelConfig
from espalier.models.layer_loading import layer_specs_of, load_embedding, load_layer
from espalier.models.rope import RopeTables
from espalier.models.weight_formats import StoredTensor, Weight, WeightFormat, quantisation_of
from espalier.models.weight_formats.dense import DENSE_FORMAT, DenseWeight
from espalier.models.weights import Weights
from espalier.shards import IndivisibleError, Part, Shards, Size, part_of

# On the meta device, tensors have shapes but no data.
META_DEVICE = torch.device("meta")
# The largest number of ranks that an error message suggests.
MAX_NAMED_COUNTS = 16


def require_shards(config: ModelConfig, count: int) -> None:
    """Raises EspalierError if `count` ranks cannot divide a model.  The message names a size that is not divisible, and
    possible numbers of ranks."""
    try:
        _require_divisible_sizes(config, count)
    except IndivisibleError as error:
        numbers = possible_rank_counts(config, MAX_NAMED_COUNTS)
        raise EspalierError(f"{error}; use {' or '.join(map(str, numbers))}") from None


def _require_divisible_sizes(config: ModelConfig, count: int) -> None:
    if count == 1:
        return
    if config.probe_result is not None:
        raise EspalierError(
            f"tensor_parallel={count} is not supported for models that transformers runs; use 1, or model_impl='native'"
        )
    if any(described.get("desc_act") for described in quantisation_of(config.raw).values()):
        raise EspalierError(
            f"tensor_parallel={count} is not supported with desc_act, which puts a group's columns anywhere; use 1, or "
            "a checkpoint without it"
        )
    # All parts have equal sizes, so only the first rank's parts are checked.
    declared = DeclaredWeights(config, Shards(0, count))
    specs_of_rank(layer_specs_of(config), declared.shards)
    load = config.family.load_layer or load_layer
    ropes = {rope: RopeTables(rope, 1, declared.dtype, META_DEVICE) for rope in dict.fromkeys(config.layer_ropes)}
    for layer, rope in enumerate(config.layer_ropes):
        load(declared, config, f"model.layers.{layer}.", layer, ropes[rope])
    (config.family.load_embedding or load_embedding)(declared, config, 1.0)
    if not config.tie_word_embeddings:
        declared.weight(["lm_head"], [declared.shards.tokens(config.vocab_size)], config.hidden_size)


def possible_rank_counts(config: ModelConfig, max_ranks: int) -> list[int]:
    """Returns the numbers of ranks from 1 to `max_ranks` that can divide this model."""
    return [count for count in range(1, max_ranks + 1) if _can_divide(config, count)]


def _can_divide(config: ModelConfig, count: int) -> bool:
    try:
        _require_divisible_sizes(config, count)
    except EspalierError:
        return False
    return True


class DeclaredWeights(Weights):
    """A substitute for a checkpoint's weights without data.  Methods raise EspalierError for indivisible weights."""

    dtype = torch.float32

    def __init__(self, config: ModelConfig, shards: Shards) -> None:
        self.path, self.device, self.formats, self.shards = config.path, META_DEVICE, config.formats, shards
        self._unused = set()

    def __contains__(self, name: str) -> bool:
        """Whether the weight `name` is stored as a plain tensor according to its format."""
        return self.formats(name.rpartition(".")[0]) == DENSE_FORMAT

    def format_of(self, name: str) -> WeightFormat:
        return self.formats(name)

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Accepts every shape, because there is no stored shape to compare."""

    def load_number(self, name: str) -> float:
        return 1.0

    def load_entries(self, name: str, count: int, *shape: int) -> Iterator[Tensor]:
        """Yields no entries, because there is no data."""
        return iter(())

    def table(self, name: str, rows: Part, columns: int) -> Tensor:
        return self.empty(len(rows), columns)

    def weight(self, names: Sequence[str], rows: Sequence[Size], columns: Size) -> Weight:
        self.require_parts(names, (*rows, columns))
        for name, size in zip(names, rows, strict=True):
            with self._matrix_names_in_errors([name]):
                self._require_cut(self.formats(name), part_of(size), part_of(columns))
        return DenseWeight(self.empty(sum(len(part_of(size)) for size in rows), len(part_of(columns))))

    def matrix(self, names: Sequence[str], rows: Sequence[Size], columns: Size) -> Tensor:
        # All experts of a layer have the same sizes, so only the first expert is checked.
        self.weight(names[:1], rows[:1], columns)
        return self.empty(sum(len(part_of(size)) for size in rows), len(part_of(columns)))

    def stacked_matrix(
        self, name: str, matrix: str, count: int, rows: Sequence[Size], columns: Size
    ) -> QuantisedMatrix:
        with self._matrix_names_in_errors([name]):
            require_format_with_parts(self.formats(name))
        return super().stacked_matrix(name, matrix, count, rows, columns)

    def _require_cut(self, format: WeightFormat, rows: Part, columns: Part) -> None:
        require_format_with_parts(format)
        for stored in format.tensors(rows.size, columns.size):
            stored.part_slices(rows, columns)

    def _read_checked(self, name: str, stored: StoredTensor) -> Tensor:
        dtype = stored.dtype[0] if isinstance(stored.dtype, tuple) else stored.dtype
        return torch.empty(stored.shape, dtype=dtype or self.dtype, device=META_DEVICE)

    @contextmanager
    def _matrix_names_in_errors(self, names: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except EspalierError as error:
            raise EspalierError(f"tensor_parallel={self.shards.count}, {names[0]!r}: {error}") from None


def require_format_with_parts(format: WeightFormat) -> None:
    """Raises EspalierError for a format whose matrices cannot be divided among ranks."""
    if not format.has_shards:
        raise EspalierError(f"format {format.name} cannot be divided among ranks; use tensor_parallel=1")
