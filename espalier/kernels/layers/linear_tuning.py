"""Which plan computes which weight shape of a linear layer: the measured ones (tuning_table.py), or a rule.

On a chip with a table, a dense shape without an entry takes the rule of linear_plans.py up to 64 rows and F.linear
above.  On a chip without a table every dense shape takes F.linear.  The log says so.  A quantised shape without an
entry takes the rule of quantised_plans.py.  Formats are "dense", or names of quantised_plans.py:tuning_name.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from torch import Tensor

from espalier.kernels.layers.linear_plans import DTYPES, RULE_ROWS, LibraryPlan, LinearPlan, TritonPlan, rule
from espalier.kernels.layers.tuning_table import DENSE, Key, Size, TunedKind
from espalier.kernels.runtime.launch import Chip, chip

# Row-count buckets, by their upper bounds: one plan per bucket, F.linear above the largest.  Within a bucket a
# TritonPlan gives a row the same bits whatever the number of rows.  Up to 16 rows are padded to 16: one bucket.
ROWS_BUCKETS = (16, 32, 64, 128, 256)

# The kernel prefetches whole lines of 128 bytes: 64 numbers.
MIN_BLOCK_IN = 64

log = logging.getLogger(__name__)


# The plans of one weight shape, in the order of ROWS_BUCKETS.  None: F.linear, or the rule if weights are quantised.
LinearPlans = tuple[LinearPlan, ...]
NO_PLANS: LinearPlans = (None,) * len(ROWS_BUCKETS)


def plans_for(shape: Size, format: str, dtype: torch.dtype, stored: Tensor) -> LinearPlans | None:
    """The plans for a dense weight's shape [out, in]; None: nothing was measured on this chip.

    dtype: of the activations; stored: any tensor of the weight, to tell the chip.
    """
    if not stored.is_cuda or dtype not in DTYPES:
        return None
    return plans_on(chip(stored), shape, LINEARS.measured(chip(stored), dtype, format))


def plans_on(gpu: Chip, shape: Size, measured: Mapping[Size, LinearPlans]) -> LinearPlans | None:
    """The plans for a weight shape, given those measured on this chip; None if there are none."""
    if shape in measured or not measured:
        return measured.get(shape)
    _log_rule(shape)
    return tuple(rule(rows, *shape, gpu) for rows in ROWS_BUCKETS)


def _log_plans(key: Key, plans: Mapping[Size, LinearPlans], sources: Sequence[str]) -> None:
    gpu, dtype, format = key
    major, minor = gpu.capability
    where = f"capability {major}.{minor}, {gpu.processors} SMs, {gpu.shared_memory} bytes of shared memory"
    untuned = "F.linear" if format == DENSE else "plans by rule"
    source = (
        f"plans from {', '.join(sources)}" if sources else f"{untuned}; espalier doctor --tune measures faster ones"
    )
    log.info("linear layers, %s weights, %s, %s: %s", format, dtype, where, source)


@cache
def _log_rule(shape: Size) -> None:
    log.info(
        "linear layers: no plan measured for [%d, %d]: a plan by rule up to %d rows, F.linear above; espalier doctor "
        "--tune measures faster plans",
        *shape,
        RULE_ROWS,
    )


def _plan(fields: dict[str, Any] | None, shape: Size) -> LinearPlan:
    if fields is None:
        return None
    return _library_plan(fields, shape) if "pieces" in fields else _triton_plan(fields)


def _library_plan(fields: dict[str, Any], shape: Size) -> LibraryPlan:
    plan = LibraryPlan(**fields)
    if min(plan.pieces, plan.splits) != 1 or max(plan.pieces, plan.splits) < 2:
        raise ValueError(f"{plan} must have one of pieces and splits at 1 and the other above 1")
    if shape[1] % plan.splits:
        raise ValueError(f"the splits of {plan} do not divide the {shape[1]} columns of the weight")
    return plan


def _triton_plan(fields: dict[str, Any]) -> TritonPlan:
    """Refuses, when the table is read, a plan that could not be launched."""
    plan = TritonPlan(**fields)
    powers_of_two = plan.block_out, plan.block_in, plan.warps
    if min(*powers_of_two, plan.splits, plan.stages) < 1 or any(size & (size - 1) for size in powers_of_two):
        raise ValueError(f"{plan} must be positive, and its blocks and warps powers of two")
    if plan.block_in < MIN_BLOCK_IN:
        raise ValueError(f"{plan} must have a block_in of at least {MIN_BLOCK_IN}")
    return plan


def _fields(plan: LinearPlan) -> dict[str, Any] | None:
    return None if plan is None else asdict(plan)


LINEARS = TunedKind("linear layers", "tables", "shapes", "rows", ROWS_BUCKETS, _fields, _plan, _log_plans)
