"""Groups of equal matrix products, and the sizes of routed experts, with their bytes and FLOPs."""

from dataclasses import dataclass

from espalier.kernels.layers.experts_plan import ExpertsShape
from espalier.kernels.layers.linear_plans import DENSE
from espalier.kernels.ops.activation import SILU, Activation
from espalier.models.quantisers import GROUP_SIZE, MXFP4_BLOCK_SIZE, NVFP4_GROUP_SIZE

Shape = tuple[int, int]


@dataclass(frozen=True)
class ProductGroup:
    """A run of equal products: `num_weights` weights [out, in], each multiplied with `num_rows` rows.

    num_heads: if above 1, a weight is [heads, out, in], and a batched product multiplies each head with its own rows.
    weight_format: the weights' format, "dense" or a name of espalier/models/quantisers.py:QUANTISERS.  experts: for a
    router, the experts behind it; None for other layers.  first_weight: index of the run's first weight among all
    weights of this name and shape."""

    name: str
    shape: Shape
    num_weights: int
    num_rows: int
    num_heads: int = 1
    weight_format: str = DENSE
    experts: "RoutedExperts | None" = None
    first_weight: int = 0

    @property
    def weight_bytes(self) -> float:
        """The bytes of all weights of the run.  Dense weights have two bytes a number."""
        return value_bytes(self.weight_format) * self.num_weights * self.num_heads * self.shape[0] * self.shape[1]

    @property
    def flops(self) -> int:
        return 2 * self.num_rows * self.num_weights * self.num_heads * self.shape[0] * self.shape[1]

    @property
    def expert_bytes(self) -> float:
        """The bytes of all experts that get rows from the routers of this run."""
        experts = self.experts
        return 0 if experts is None else self.num_weights * experts.active_experts(self.num_rows) * experts.expert_bytes


def value_bytes(weight_format: str) -> float:
    """Returns the bytes of a matrix's number, with its share of a group's scale, without row and block scales."""
    scales = {"int4": 2 / GROUP_SIZE, "nvfp4": 1 / NVFP4_GROUP_SIZE, "mxfp4": 1 / MXFP4_BLOCK_SIZE}
    return 0.5 + scales[weight_format] if weight_format in scales else 2 if weight_format == DENSE else 1


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a model's mixture-of-experts layers.

    num_layers: the number of these layers.  shape: the experts' sizes in one layer.  shared_size: the shared expert's
    intermediate size, 0 for no shared expert.  shared_gate: whether the shared expert has a gate.  fuses_shared:
    whether passes of few rows compute an unquantised shared expert in the launches of the routed experts
    (espalier/models/layers/mlp.py). has_biases, activation: of the routed experts.
    """

    num_layers: int
    shape: ExpertsShape
    shared_size: int = 0
    shared_gate: bool = False
    fuses_shared: bool = False
    has_biases: bool = False
    activation: Activation = SILU


@dataclass(frozen=True)
class RoutedExperts:
    """The experts behind a router.

    weight_format: the experts' format, see ProductGroup.  mean_active: the mean number of a layer's experts that get
    rows; None for the number with uniform routing."""

    sizes: ExpertSizes
    weight_format: str = DENSE
    mean_active: float | None = None

    @property
    def expert_bytes(self) -> float:
        """The bytes of one stored expert."""
        return self.sizes.shape.expert_bytes * value_bytes(self.weight_format) / value_bytes(DENSE)

    def active_experts(self, num_rows: int) -> float:
        return self.sizes.shape.active_experts(num_rows) if self.mean_active is None else self.mean_active
