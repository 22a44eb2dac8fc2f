"""A synthetic target or draft whose linear layers, or whose stacked experts, are stored in a quantised format.

Every tensor is made as it is for a dense model, and then quantised.  What stays dense is what published checkpoints
leave dense: the embedding, a target's head, routers and norms.
"""

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.models.config import ModelConfig
from espalier.models.quantisers import QUANTISERS, Quantiser
from espalier.models.weight_formats import FormatLookup, StoredTensor

EXPERTS_MODULE = "mlp.experts"


class NamedTensors(Protocol):
    """The tensors of a model by name: `shapes` lists them, `tensor` makes one.  config: the config of its layers."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> Tensor: ...


def find_quantiser(weights: str) -> Quantiser:
    """Raises EspalierError for a name that is not in QUANTISERS."""
    if weights not in QUANTISERS:
        raise EspalierError(f"weights {weights!r} are not known; use one of {', '.join(QUANTISERS)}")
    return QUANTISERS[weights]


class QuantisedTensors:
    """The tensors of a model as its checkpoint stores them.

    model: the dense model.  weights: a name of QUANTISERS.  is_draft: if True, the head is quantised too.
    Raises EspalierError for a model that the format does not store.
    """

    def __init__(self, model: NamedTensors, weights: str, is_draft: bool = False) -> None:
        self.model, self.config, self.dtype, self.device = model, model.config, model.dtype, model.device
        quantiser = find_quantiser(weights)
        self.quantiser = quantiser.for_draft(is_draft)
        require_format_fits(model.config, weights, "draft weights" if is_draft else "weights")
        # Codes are read once.  Scales are small and may be read twice.
        self._scales: dict[str, Tensor] = {}

    @functools.cached_property
    def _columns(self) -> dict[str, int]:
        """The columns of each matrix that the format may quantise, by name; empty for a format of stacked experts."""
        if self.quantiser.quantises_only_experts:
            return {}
        matrices = ((name, size[1]) for name, size in self.model.shapes.items() if _is_matrix(name, size))
        modules = {name.removesuffix(".weight"): columns for name, columns in matrices}
        return {name: columns for name, columns in modules.items() if not self.quantiser.stays_dense(name)}

    @functools.cached_property
    def quantisation(self) -> dict[str, Any]:
        """quantization_config of config.json."""
        return dict(self.quantiser.quantization_config(self._columns))

    @functools.cached_property
    def formats(self) -> FormatLookup:
        return self.quantiser.storage_formats(self._columns)

    @functools.cached_property
    def tensors_by_stored_name(self) -> dict[str, tuple[str, StoredTensor]]:
        """(name of the dense tensor, its stored tensor), by stored name, for quantised matrices."""
        found = {}
        for name, size in self.model.shapes.items():
            for each in self._stored_of(name, size):
                found[f"{name.removesuffix('.weight')}{each.suffix}"] = name, each
        return found

    def _stored_of(self, name: str, size: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        module = name.removesuffix(".weight")
        if self.quantiser.quantises_only_experts and len(size) == 3:
            experts, num_in, num_out = size
            return self.formats(module.rpartition(".")[0]).expert_tensors(experts, num_out, num_in)
        if _is_matrix(name, size) and self.quantiser.is_quantised(module, size[1]):
            return self.formats(module).stored_tensors(*size)
        return ()

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        quantised = {name for name, _ in self.tensors_by_stored_name.values()}
        dense = {name: size for name, size in self.model.shapes.items() if name not in quantised}
        return {**dense, **{name: each.shape for name, (_, each) in self.tensors_by_stored_name.items()}}

    def itemsize(self, name: str) -> int:
        """Bytes of a value of a stored tensor."""
        if name not in self.tensors_by_stored_name:
            return self.dtype.itemsize
        dtype = self.tensors_by_stored_name[name][1].dtype
        if isinstance(dtype, tuple):
            dtype = self.dtype if self.dtype in dtype and self.quantiser.group_sizes[0] > 1 else dtype[0]
        return (dtype or self.dtype).itemsize

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors_by_stored_name:
            return self.model.tensor(name)
        if name not in self._scales:
            name_of_dense, wanted = self.tensors_by_stored_name[name]
            dense, module = self.model.tensor(name_of_dense), name.removesuffix(wanted.suffix)
            # Dense experts are stored [count, in, out].
            made = self.quantiser.quantise(dense.transpose(1, 2) if dense.ndim == 3 else dense, self.device)
            codes = next(iter(made))
            self._scales |= {f"{module}{suffix}": tensor for suffix, tensor in made.items() if suffix != codes}
            if wanted.suffix == codes:
                return made[codes]
        return self._scales[name]


def require_format_fits(config: ModelConfig, weights: str, setting: str = "weights") -> None:
    """Raises EspalierError for a model that the format cannot store.  setting: the setting that errors name."""
    is_stacked = config.experts is not None and config.experts.storage == "stacked"
    if find_quantiser(weights).quantises_only_experts != is_stacked:
        use = "stacked experts, of which there are none" if not is_stacked else "linear layers, not stacked experts"
        raise EspalierError(f"{setting} {weights!r} are for {use}; use {'mxfp4' if is_stacked else 'fp8 or int4'}")


def _is_matrix(name: str, size: tuple[int, ...]) -> bool:
    return len(size) == 2 and name.endswith(".weight")
