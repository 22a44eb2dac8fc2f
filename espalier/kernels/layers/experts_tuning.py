"""Which plan computes the experts of a size: the measured one (tuning_table.py), or a rule.

Plans are listed by the size of an expert (hidden, inner) and by the mean pairs (row, choice) per expert.  They are
measured by `espalier doctor --tune experts`, with dense weights.  A size that was not measured takes the plans of the
size nearest in bytes.  A chip without a table takes the rule of experts_plan.py.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from espalier.kernels.hopper.plans import FEW_ROWS, TILE, takes_format
from espalier.kernels.layers.experts_plan import (
    PAIRS_BUCKETS,
    ExpertsPlan,
    ExpertsShape,
    ProductPlan,
    quantised_rule,
    rule,
)
from espalier.kernels.layers.linear_plans import DTYPES, MIN_BLOCK_ROWS
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.layers.tuning_table import Key, Size, TunedKind
from espalier.kernels.runtime.launch import Chip, power_of_two

# Mean pairs of an expert up to which tiles have FEW_ROWS where a kernel has such tiles.
FEW_PAIRS = 4

# The plans of a size, in the order of PAIRS_BUCKETS.
Plans = tuple[ExpertsPlan, ...]
log = logging.getLogger(__name__)


def plan_for(
    shape: ExpertsShape,
    rows: int,
    dtype: torch.dtype,
    gpu: Chip,
    matrices: tuple[Tensor | QuantisedMatrix, Tensor | QuantisedMatrix] | None = None,
) -> ExpertsPlan:
    """The plan for a number of rows.  matrices: gate_up and down; None: both are dense."""
    plan = _measured_or_rule(shape, rows, dtype, gpu)
    # The experts of one row differ: there is nothing to sort.
    plan = replace(plan, rows=1) if rows == 1 else plan
    if matrices is None:
        return plan
    is_few = plan.rows == MIN_BLOCK_ROWS and power_of_two(rows) * shape.top_k <= FEW_PAIRS * shape.num_experts
    if is_few and all(isinstance(m, QuantisedMatrix) and takes_format(m, dtype, FEW_ROWS, gpu) for m in matrices):
        few = quantised_rule(shape, rows, replace(plan, rows=FEW_ROWS), *matrices, gpu)
        # What has no gate has no such kernel.
        has_gate = matrices[0].shape[1] > matrices[1].shape[2]
        if has_gate and few.gated.tile(2) == few.down.tile(1) == TILE:
            # Half of the products; an expert seldom has more pairs.
            return few
    return quantised_rule(shape, rows, plan, *matrices, gpu)


def _measured_or_rule(shape: ExpertsShape, rows: int, dtype: torch.dtype, gpu: Chip) -> ExpertsPlan:
    if dtype in DTYPES:
        plans = EXPERTS.measured(gpu, dtype)
        if plans:
            return _nearest(plans, shape.size)[shape.bucket(rows)]
    return rule(shape, rows, dtype, gpu)


def _nearest(plans: Mapping[Size, Plans], size: Size) -> Plans:
    """The plans of this size, else of the size nearest in bytes; of equally near sizes, the first."""
    own = plans.get(size)
    if own is not None:
        return own
    return plans[min(plans, key=lambda known: abs(math.log(known[0] * known[1] / (size[0] * size[1]))))]


def _log_plans(key: Key, plans: Mapping[Size, Plans], sources: Sequence[str]) -> None:
    sizes = ", ".join(f"{hidden}x{inner}" for hidden, inner in plans)
    log.info("experts, %s: %s", key[1], f"plans measured for {sizes}" if plans else "no plans measured on this chip")


def _plan(fields: dict[str, Any], size: Size) -> ExpertsPlan:
    return ExpertsPlan(fields["rows"], ProductPlan(*fields["gated"]), ProductPlan(*fields["down"]))


def _fields(plan: ExpertsPlan) -> dict[str, Any]:
    """The fields of a plan in the file: for each product block_out, block_in, warps and stages."""
    return {"rows": plan.rows, **{name: [*asdict(getattr(plan, name)).values()] for name in ("gated", "down")}}


EXPERTS = TunedKind("experts", "experts", "sizes", "pairs an expert", PAIRS_BUCKETS, _fields, _plan, _log_plans)
