"""A synthetic target whose linear layers, or whose stacked experts, are stored in a quantised format.

Every tensor is made as it is for a dense target, and then quantised.  What stays dense is what published checkpoints
leave dense: the embedding, the head, routers and norms.
"""

import functools
from typing import Any

from torch import Tensor

from espalier.errors import EspalierError
from espalier.models.config import ModelConfig
from espalier.models.quantisers import find_quantiser
from espalier.models.weight_formats import FormatOf, StoredTensor
from espalier.synthetic.target import TargetTensors

EXPERTS = "mlp.experts"


class QuantisedTensors:
    """The tensors of a target as its checkpoint stores them.  weights: a name of QUANTISERS.

    Raises EspalierError for a target that the format does not store.
    """

    def __init__(self, target: TargetTensors, weights: str) -> None:
        self.target, self.dtype, self.device = target, target.dtype, target.device
        self.quantiser = find_quantiser(weights)
        require_stored(target.config, weights)
        # Codes are read once.  Scales are small and may be read twice.
        self._scales: dict[str, Tensor] = {}

    @property
    def config(self) -> ModelConfig:
        return self.target.config

    @functools.cached_property
    def _dense(self) -> list[str]:
        """Matrices that stay dense because of their columns."""
        matrices = {
            name.removesuffix(".weight"): size for name, size in self.target.shapes.items() if _is_matrix(name, size)
        }
        unit = self.quantiser.columns
        return [name for name, size in matrices.items() if not self.quantiser.experts and size[1] % unit]

    @functools.cached_property
    def quantisation(self) -> dict[str, Any]:
        """quantization_config of config.json."""
        return dict(self.quantiser.config(self._dense))

    @functools.cached_property
    def formats(self) -> FormatOf:
        return self.quantiser.formats(self._dense)

    @functools.cached_property
    def stored(self) -> dict[str, tuple[str, StoredTensor]]:
        """(name of the dense tensor, what is stored), by name, of quantised matrices."""
        found = {}
        for name, size in self.target.shapes.items():
            for each in self._stored_of(name, size):
                found[f"{name.removesuffix('.weight')}{each.suffix}"] = name, each
        return found

    def _stored_of(self, name: str, size: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        module = name.removesuffix(".weight")
        if self.quantiser.experts and len(size) == 3:
            experts, num_in, num_out = size
            return self.formats(module.rpartition(".")[0]).expert_tensors(experts, num_out, num_in)
        if _is_matrix(name, size) and self.quantiser.takes(module, size[1]):
            return self.formats(module).tensors(*size)
        return ()

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        quantised = {name for name, _ in self.stored.values()}
        dense = {name: size for name, size in self.target.shapes.items() if name not in quantised}
        return {**dense, **{name: each.shape for name, (_, each) in self.stored.items()}}

    def itemsize(self, name: str) -> int:
        """Bytes of a value of a stored tensor."""
        if name not in self.stored:
            return self.dtype.itemsize
        dtype = self.stored[name][1].dtype
        if isinstance(dtype, tuple):
            dtype = self.dtype if self.dtype in dtype and self.quantiser.columns > 1 else dtype[0]
        return (dtype or self.dtype).itemsize

    def tensor(self, name: str) -> Tensor:
        if name not in self.stored:
            return self.target.tensor(name)
        if name not in self._scales:
            name_of_dense, wanted = self.stored[name]
            dense, module = self.target.tensor(name_of_dense), name.removesuffix(wanted.suffix)
            # Dense experts are stored [count, in, out].
            made = self.quantiser.stored(dense.transpose(1, 2) if dense.ndim == 3 else dense, self.device)
            codes = next(iter(made))
            self._scales |= {f"{module}{suffix}": tensor for suffix, tensor in made.items() if suffix != codes}
            if wanted.suffix == codes:
                return made[codes]
        return self._scales[name]


def require_stored(config: ModelConfig, weights: str) -> None:
    """Raises EspalierError for a target that the format does not store."""
    is_stacked = config.experts is not None and config.experts.stored == "stacked"
    if find_quantiser(weights).experts != is_stacked:
        what = "stacked experts, which this shape has not" if not is_stacked else "linear layers, not stacked experts"
        raise EspalierError(f"weights {weights!r} are for {what}; use {'mxfp4' if is_stacked else 'fp8 or int4'}")


def _is_matrix(name: str, size: tuple[int, ...]) -> bool:
    return len(size) == 2 and name.endswith(".weight")
