"""The plans of a tuning by shape, and the rows of its printed table."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from espalier.bench.linears import Shape
from espalier.kernels.layers.linear_plans import (
    LINEAR_TUNING,
    NO_PLANS,
    ROWS_BUCKETS,
    LibraryPlan,
    LinearPlan,
    LinearPlans,
)

if TYPE_CHECKING:
    from espalier.bench.tune import MeasuredPlans

PlanTable = dict[tuple[Shape, int], LinearPlan]


def plans_by_shape(table: PlanTable, stored_plans: Mapping[Shape, LinearPlans]) -> dict[Shape, LinearPlans]:
    """Returns the plans of each shape: from `table`, and for buckets that `table` lacks from `stored_plans`."""
    shapes = dict.fromkeys(shape for shape, _ in table)
    return {
        shape: tuple(
            table.get((shape, rows), LINEAR_TUNING.plan_for_count(stored_plans.get(shape, NO_PLANS), rows))
            for rows in ROWS_BUCKETS
        )
        for shape in shapes
    }


def table_rows(measured: "Iterable[MeasuredPlans]", table: PlanTable, baseline_name: str) -> list[list[str]]:
    """Returns the rows of the printed table.  baseline_name: the text in place of a plan if the baseline is fastest."""
    rows = [["weight", "rows", f"{baseline_name}, µs", "ours, µs", "taken among its neighbours"]]
    for bucket in sorted(measured, key=lambda each: (each.shape, each.num_rows)):
        shape = f"{bucket.shape[0]} x {bucket.shape[1]}"
        taken = _plan_name(table[bucket.shape, bucket.num_rows], baseline_name)
        rows.append([shape, f"{bucket.num_rows}", f"{bucket.baseline_us:.1f}", f"{bucket.fastest_us:.1f}", taken])
    return rows


def _plan_name(plan: LinearPlan, baseline_name: str) -> str:
    if plan is None:
        return baseline_name
    if isinstance(plan, LibraryPlan):
        return f"F.linear, {plan.pieces} pieces" if plan.splits == 1 else f"F.linear, {plan.splits} parts"
    return f"{plan.block_out}x{plan.block_in}, {plan.splits} parts, {plan.stages} stages, {plan.warps} warps"
