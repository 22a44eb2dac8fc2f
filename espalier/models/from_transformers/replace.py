"""Our layers in the place of transformers' where both compute the same: there speed and quantised formats come from.

Linear layers are known by their class.  Norms and experts are compared with ours on random rows of a tiny model.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from espalier.kernels.ops.activation import GELU_TANH, SILU, Activation
from espalier.kernels.ops.experts import grouped_experts
from espalier.kernels.ops.linear import sum_parts
from espalier.models.from_transformers.attention import RUNNING
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_formats import dense_weight

# Makes our module of one of transformers'.
Make = Callable[[Any], nn.Module]
# The names that norms give their epsilon.
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
TOLERANCE = 1e-5
EXPERT_INPUTS = ("hidden_states", "top_k_index", "top_k_weights")


class OurLinear(nn.Module):
    """A linear layer.  weight: empty; for code that asks for its dtype or device, or whether there is a bias."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        weight = module.weight.data
        self.bias = None if module.bias is None else module.bias.data
        self.linear = Linear(dense_weight(weight), self.bias)
        self.weight = weight.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OurNorm(nn.Module):
    """An RMS norm of the last dimension.  offset: what is added to its weight."""

    def __init__(self, module: Any, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = module.weight.data
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        eps = next(getattr(module, name) for name in EPSILONS if hasattr(module, name))
        self.norm = RMSNorm(self.weight.to(exact) + offset if offset else self.weight, float(eps))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.contiguous())


class OurExperts(nn.Module):
    """Gated experts in two stacked matrices, gate over up."""

    def __init__(self, module: Any, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = module.gate_up_proj.data, module.down_proj.data, activation

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        run, weights = RUNNING.get(None), top_k_weights.to(torch.promote_types(hidden_states.dtype, torch.float32))
        parts = grouped_experts(
            *(hidden_states, self.gate_up, self.down, top_k_index, weights),
            live=None if run is None else run.live,
            activation=self.activation,
        )
        return sum_parts(parts, hidden_states.dtype)


# What may compute the same as a norm, and as experts.
NORMS: tuple[Make, ...] = (OurNorm, partial(OurNorm, offset=1.0))
EXPERTS: tuple[Make, ...] = (partial(OurExperts, activation=SILU), partial(OurExperts, activation=GELU_TANH))


def find_equal(model: nn.Module) -> dict[type, Make]:
    """What makes our modules of those of a model's classes that compute the same.  model: a tiny random one."""
    found: dict[type, Make] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in found and (make := _equal_to(module)) is not None:
            found[kind] = make
    return found


def _equal_to(module: nn.Module) -> Make | None:
    if type(module) is nn.Linear:
        return OurLinear
    names = sorted(name for name, _ in module.named_parameters())
    if names == ["weight"] and type(module).__name__.endswith("Norm") and any(hasattr(module, n) for n in EPSILONS):
        return next((make for make in NORMS if _are_equal(module, make, _rows_of_norm(module))), None)
    if names == ["down_proj", "gate_up_proj"] and _inputs_of(module) == EXPERT_INPUTS:
        return next((make for make in EXPERTS if _are_equal(module, make, _rows_of_experts(module))), None)
    return None


def _inputs_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def _rows_of_norm(module: Any) -> list[tuple[Tensor, ...]]:
    """Large rows, and small ones, in which the epsilon counts."""
    x = torch.randn(7, module.weight.numel())
    return [(x,), (x * 1e-3,)]


def _rows_of_experts(module: Any) -> list[tuple[Tensor, ...]]:
    (count, _, hidden), rows = module.gate_up_proj.shape, 9
    ids = torch.rand(rows, count).topk(min(2, count)).indices
    return [(torch.randn(rows, hidden), ids, torch.rand(ids.shape))]


def _are_equal(module: nn.Module, make: Make, inputs: list[tuple[Tensor, ...]]) -> bool:
    try:
        ours = make(module)
        pairs = [(ours(*each), module(*each)) for each in inputs]
    except Exception:  # any: it is another's code, of other shapes than it seemed
        return False
    return all(one.shape == other.shape and torch.allclose(one, other, TOLERANCE, TOLERANCE) for one, other in pairs)


def replace(model: nn.Module, equal: Mapping[type, Make]) -> None:
    """Put our modules in the place of those of the classes in `equal`."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            # Some classes of norms have weights or not, as their place asks.
            if type(module) in equal and any(True for _ in module.parameters()):
                setattr(parent, name, equal[type(module)](module))
