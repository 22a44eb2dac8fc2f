"""Checks that ranks can divide a model, and counts the values of its matrices, from config.json alone.

This module runs the code that loads layers on weights without data.  That code declares the size of each matrix, and
the part of the matrix that a rank holds.  So families need no list of sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from espalier.cache.layer_spec import specs_of_rank
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.models.config import ModelConfig
from espalier.models.layer_loading import layer_specs_of, load_embedding, load_layer, load_mixer
from espalier.models.rope import RopeTables
from espalier.models.weight_formats import StoredTensor, Weight, WeightFormat, all_dense, quantisation_of
from espalier.models.weight_formats.dense import DENSE_FORMAT, DenseWeight
from espalier.models.weights import Weights
from espalier.shards import SINGLE_RANK, RankPart, Shards, SizeOrPart, as_rank_part
from espalier.shards.base import IndivisibleError

# On the meta device, tensors have shapes but no data.
META_DEVICE = torch.device("meta")
# The first arithmetic on the meta device imports torch._dynamo, which takes seconds.  So smaller tensors, on which
# families do arithmetic (norms, convolutions), are zeros on the CPU.
MIN_META_VALUES = 2**20
# The largest number of ranks that an error message suggests.
MAX_SUGGESTED_RANKS = 16


def require_shards(config: ModelConfig, num_ranks: int) -> None:
    """Raises EspalierError if `num_ranks` ranks cannot divide a model.  The message names a size that this number does
    not divide, and possible numbers of ranks."""
    try:
        _require_divisible_sizes(config, num_ranks)
    except IndivisibleError as error:
        rank_counts = possible_rank_counts(config, MAX_SUGGESTED_RANKS)
        raise EspalierError(f"{error}; use {' or '.join(map(str, rank_counts))}") from None


def _require_divisible_sizes(config: ModelConfig, num_ranks: int) -> None:
    if num_ranks == 1:
        return
    if config.probe_result is not None:
        raise EspalierError(
            f"tensor_parallel={num_ranks} is not supported for models that transformers runs; use 1, or "
            "model_impl='native'"
        )
    if any(quantisation.get("desc_act") for quantisation in quantisation_of(config.raw).values()):
        raise EspalierError(
            f"tensor_parallel={num_ranks} is not supported with desc_act, which puts a group's columns anywhere; use "
            "1, or a checkpoint without it"
        )
    # The parts of all ranks have equal sizes, so only the first rank's parts are checked.
    shards = Shards(0, num_ranks)
    specs_of_rank(layer_specs_of(config), shards)
    DeclaredWeights(config, shards).load_all()


def possible_rank_counts(config: ModelConfig, max_ranks: int) -> list[int]:
    """Returns the numbers of ranks from 1 to `max_ranks` that can divide this model."""
    return [count for count in range(1, max_ranks + 1) if ranks_can_divide(config, count)]


def ranks_can_divide(config: ModelConfig, num_ranks: int) -> bool:
    try:
        _require_divisible_sizes(config, num_ranks)
    except EspalierError:
        return False
    return True


def num_dense_values(config: ModelConfig) -> int:
    """Returns the number of values in the matrices that every token uses: all matrices except routers and routed
    experts.  The embedding counts only if it is also the lm_head."""
    probed = config.probe_result
    if probed is not None:
        embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        return probed.num_weights - probed.num_expert_weights - embedding
    declared = _dense_weights(config)
    declared.load_all()
    return declared.num_dense_values + (config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0)


def num_expert_values(config: ModelConfig) -> int:
    """Returns (number of values of one routed expert) × (number of layers with experts); 0 without experts."""
    if config.probe_result is not None:
        return config.probe_result.num_expert_weights // config.probe_result.num_experts
    experts = config.experts
    if experts is None:
        return 0
    return len(experts.layers) * (experts.activation.num_matrices + 1) * config.hidden_size * experts.intermediate_size


def num_mixer_values(config: ModelConfig) -> int:
    """Returns the number of values in the matrices of the first layer's mixer, which is usually attention."""
    declared = _dense_weights(config)
    load_mixer(declared, config, "model.layers.0.", 0, declared.rope_tables[config.layer_ropes[0]])
    return declared.num_dense_values


def _dense_weights(config: ModelConfig) -> "DeclaredWeights":
    """Returns the model's weights, all declared as dense, because the format does not change the number of values."""
    return DeclaredWeights(replace(config, formats=all_dense), SINGLE_RANK)


class DeclaredWeights(Weights):
    """A substitute for Weights, without data.  names: stored matrices, which are stacked.  rows, columns: the size of a
    matrix, or this rank's part of it.  Methods raise EspalierError if ranks cannot divide a weight.
    num_dense_values: the number of values of the matrices that were loaded until now, without experts."""

    dtype = torch.float32

    def __init__(self, config: ModelConfig, shards: Shards) -> None:
        self.path, self.device, self.formats, self.shards = config.path, META_DEVICE, config.formats, shards
        self.config = config
        self.rope_tables = {rope: RopeTables(rope, 1, self.dtype, META_DEVICE) for rope in config.layer_ropes}
        self.num_dense_values = 0
        self._unused = set()
        self._names = frozenset()

    def load_all(self) -> None:
        """Loads all layers, the embedding and an lm_head that is not tied."""
        config, family = self.config, self.config.family
        load = family.load_layer or load_layer
        for layer, rope in enumerate(config.layer_ropes):
            load(self, config, f"model.layers.{layer}.", layer, self.rope_tables[rope])
        (family.load_embedding or load_embedding)(self, config, 1.0)
        if not config.tie_word_embeddings:
            self.weight(["lm_head"], [self.shards.vocab_part(config.vocab_size)], config.hidden_size)

    def __contains__(self, name: str) -> bool:
        """Whether the weight `name` is stored as a plain tensor according to its format."""
        return self.formats(name.rpartition(".")[0]) == DENSE_FORMAT

    def format_of(self, name: str) -> WeightFormat:
        """Returns the storage format of the matrix `name`, as config.json declares it."""
        return self.formats(name)

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Accepts every shape, because there is no stored shape to compare."""

    def load(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor of this shape: zeros if it is small, else a tensor without data."""
        return torch.zeros(shape, device="cpu" if prod(shape) < MIN_META_VALUES else META_DEVICE)

    load_exact = load

    def load_number(self, name: str) -> float:
        """Returns 1.0 in place of a stored number."""
        return 1.0

    def load_entries(self, name: str, num_entries: int, *shape: int) -> Iterator[Tensor]:
        """Yields no entries, because there is no data."""
        return iter(())

    def embedding_table(self, name: str, rows: RankPart, columns: int) -> Tensor:
        return self.empty(len(rows), columns)

    def weight(self, names: Sequence[str], rows: Sequence[SizeOrPart], columns: SizeOrPart) -> Weight:
        """Returns the stacked matrices as a weight without data, and counts its values."""
        tensor = self._declare(names, rows, columns)
        self.num_dense_values += tensor.numel()
        return DenseWeight(tensor)

    def load_dense_matrix(self, name: str, rows: SizeOrPart, columns: int) -> Tensor:
        tensor = self._declare([name], [rows], columns)
        self.num_dense_values += tensor.numel()
        return tensor

    def matrix(self, names: Sequence[str], rows: Sequence[SizeOrPart], columns: SizeOrPart) -> Tensor:
        """Returns the stacked matrices of a layer's experts, without data and without counting them."""
        # All experts of a layer have the same sizes, so only the first expert is checked.
        self._declare(names[:1], rows[:1], columns)
        return self.empty(sum(len(as_rank_part(size)) for size in rows), len(as_rank_part(columns)))

    def _declare(self, names: Sequence[str], rows: Sequence[SizeOrPart], columns: SizeOrPart) -> Tensor:
        """Returns the stacked matrices without data.  Raises EspalierError if ranks cannot divide a matrix."""
        self.require_parts(names, (*rows, columns))
        for name, size in zip(names, rows, strict=True):
            with self._matrix_names_in_errors([name]):
                format = self.formats(name)
                _require_divisible(format, format.stored_tensors, as_rank_part(size), as_rank_part(columns))
        return self.empty(sum(len(as_rank_part(size)) for size in rows), len(as_rank_part(columns)))

    def stacked_matrix(
        self, name: str, matrix_name: str, num_experts: int, rows: Sequence[SizeOrPart], columns: SizeOrPart
    ) -> QuantisedMatrix:
        """Checks that ranks can divide the experts' matrices.  Returns a small int4 matrix in their place: one expert
        with two columns, which one byte a row stores, and with all rows of this rank, because a layer may reorder
        rows."""
        format, column_part = self.formats(name), as_rank_part(columns)
        self.require_parts([f"{name}{matrix_name}"], (*rows, columns))
        with self._matrix_names_in_errors([name]):
            for part in map(as_rank_part, rows):
                _require_divisible(format, partial(format.expert_tensors, num_experts), part, column_part)
        placeholder = torch.zeros(1, sum(len(as_rank_part(size)) for size in rows), 1, dtype=torch.uint8)
        return QuantisedMatrix("int4", placeholder, placeholder, group_size=2)

    def _read_checked(self, name: str, declared: StoredTensor) -> Tensor:
        """Returns a tensor without data, with the declared shape and dtype."""
        dtype = declared.dtype[0] if isinstance(declared.dtype, tuple) else declared.dtype
        return torch.empty(declared.shape, dtype=dtype or self.dtype, device=META_DEVICE)

    @contextmanager
    def _matrix_names_in_errors(self, names: Sequence[str]) -> Iterator[None]:
        """Adds the number of ranks and the first of `names` to the text of errors."""
        try:
            yield
        except EspalierError as error:
            raise EspalierError(f"tensor_parallel={self.shards.count}, {names[0]!r}: {error}") from None


def _require_divisible(
    format: WeightFormat,
    tensors_of: Callable[[int, int], tuple[StoredTensor, ...]],
    rows: RankPart,
    columns: RankPart,
) -> None:
    """Raises EspalierError if a rank cannot hold this part of a matrix in a format.
    tensors_of: returns the tensors that store a matrix of (rows, columns)."""
    if not format.supports_shards:
        raise EspalierError(f"format {format.name} cannot be divided among ranks; use tensor_parallel=1")
    for declared in tensors_of(rows.size, columns.size):
        declared.part_slices(rows, columns)
