"""`espalier doctor --tune`: measures the linear layers on this GPU, and writes the fastest kernel plans for the engine.

For each shape and bucket of rows, the candidate plans of our kernel are compared with a baseline: F.linear, or for
quantised matrices (--weights) the plan that kernels/layers/linear_quantised.py takes if nothing was measured.

First, each shape is measured alone: a CUDA graph of products with so many weights that none is still in the L2 cache.
Then a shape's best plans are measured in passes of a model, with all other kernels.  There, a kernel of ours can start
before the preceding kernel has ended (programmatic dependent launch), but a kernel after F.linear cannot (docs/log.md).
With --seconds, only the first candidates are measured, for few rows first."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter

import torch
from rich.text import Text
from torch import Tensor

from espalier.bench import tune_experts
from espalier.bench.flags import EXPERTS
from espalier.bench.linears import ModelShape, ProductGroup, Shape, model_sizes, shape_named, with_draft
from espalier.bench.timing import GraphTimer, Matrix, Multiply, Weights, multiply_like_engine
from espalier.bench.tune_experts import gpu_versions
from espalier.config import EngineConfig, is_unresolved
from espalier.errors import EspalierError
from espalier.kernels.layers import quantised_plans
from espalier.kernels.layers.experts_plan import EXPERTS_TUNING as EXPERT_TABLES
from espalier.kernels.layers.linear_plans import (
    DENSE,
    LINEAR_TUNING,
    NO_PLANS,
    ROWS_BUCKETS,
    LibraryPlan,
    LinearPlan,
    LinearPlans,
    TritonPlan,
    TuningTable,
    candidate_plans,
    user_tuning_file,
)
from espalier.kernels.layers.quantised import InputRows, QuantisedMatrix
from espalier.kernels.ops.linear import (
    linear,
    linear_gated,
    linear_partial_sums,
    linear_quantised,
    linear_quantised_gated,
    linear_quantised_partial_sums,
)
from espalier.kernels.ops.norm import add_rms_norm
from espalier.kernels.runtime.launch import chip
from espalier.kernels.runtime.precompile import precompile
from espalier.models.mtp import MTPConfig
from espalier.models.quantisers import QUANTISERS
from espalier.models.weight_formats import FormatLookup
from espalier.startup.load import Checkpoint, find_checkpoint
from espalier.startup.resolve import choose_device
from espalier.terminal.console import print_header, print_table, progress, require_gpu, require_writable, stdout
from espalier.terminal.flags import flag_of, given_flags

# The least bytes of weights that one measured graph reads, so that its time is long enough.
CHAIN_BYTES = 600 * 10**6
# The least bytes of a shape's different weights: more than fit in the L2 cache.
COPIES_BYTES = 300 * 10**6
# How many of a shape's fastest plans are measured again alone, and how many are then measured in passes of a model.
NUM_REMEASURED = 6
NUM_MEASURED_IN_PASSES = 3
# The layers of a measured pass, and how many times each shape's plan is chosen, with the other shapes' current plans.
MEASURED_LAYERS, NUM_SWEEPS = 8, 2
# Smaller relative gains are noise.
MIN_RELATIVE_GAIN = 0.002
# Limits with --seconds: the number of candidate plans for a shape and bucket, the share of the time for measuring
# shapes alone, and how many seconds before the end no further pass is measured.
MAX_CANDIDATES_IN_LIMIT, ALONE_TIME_SHARE, WEIGHT_SETUP_SECONDS = 24, 0.75, 5
# The first bucket holds 1 to 16 rows.  So it is measured with the fewest rows (this number) too.
MIN_ROWS = 1

# Layers whose output may be partial sums, which the next kernel adds up, and layers whose output goes through a gate.
SUMMED_LAYERS, GATED_LAYERS = ("qkv", "o", "down"), ("gate_up",)

# The name of the baseline: {True: for dense weights, False: for quantised weights}.
BASELINE_NAME = {True: "F.linear", False: "by rule"}
# Every weight format can store a matrix with this number of rows and columns.
MIN_MATRIX_SIDE = 256
# One matrix of an EAGLE head and of a block draft.  A draft with this matrix quantised counts as quantised.
DRAFT_MATRICES = ("midlayer.self_attn.o_proj", "layers.0.self_attn.o_proj")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# The engine flags that --tune --shapes uses, and the further flags that tuning a model uses.
SHAPE_FLAGS, MODEL_FLAGS = ("device", "dtype"), ("model", "draft", "model_overrides")

# (shape, bucket of rows)
PlanKey = tuple[Shape, int]
PlanTable = dict[PlanKey, LinearPlan]
Groups = Sequence[ProductGroup]


@dataclass(frozen=True)
class MeasuredPlans:
    """The times of one shape in one bucket of rows, measured alone.  baseline_us, fastest_us: a product's time with the
    baseline and with our fastest plan.  plans: our fastest plans, the fastest first; fastest: None for the baseline."""

    shape: Shape
    num_rows: int
    baseline_us: float
    fastest_us: float
    plans: tuple[TritonPlan | LibraryPlan, ...]

    @property
    def fastest(self) -> LinearPlan:
        return self.plans[0] if self.fastest_us < self.baseline_us else None


def run(args: Namespace, config: EngineConfig) -> int:
    """Measure the plans, write the table and print the results.  Raises EspalierError."""
    used_flags = SHAPE_FLAGS if args.shapes else (*SHAPE_FLAGS, *MODEL_FLAGS)
    if refused := [flag_of(name) for name in given_flags(args) if name not in used_flags]:
        raise EspalierError(f"{refused[0]} is not for --tune{' --shapes' if args.shapes else ''}; leave one out")
    path = args.choices or user_tuning_file()
    if path.parent.is_dir():  # else write_table makes it
        require_writable("--choices", path)
    if path.exists():
        # Both calls raise an error if write_table cannot extend the file.
        LINEAR_TUNING.read_tables(path)
        EXPERT_TABLES.read_tables(path)
    if args.seconds is not None and not args.seconds > 0:
        raise EspalierError(f"--seconds={args.seconds:g} is not supported; use a number above 0")
    require_gpu("--tune")
    device = choose_device(config)
    if device.type != "cuda":
        raise EspalierError(f"--tune measures on a GPU, and device is {device}; use --device cuda")
    with torch.cuda.device(device):
        return _run(args, config)


def _run(args: Namespace, config: EngineConfig) -> int:
    checkpoint = None if args.shapes else find_checkpoint(config)
    dtype = _engine_dtype(config, checkpoint)
    weight_format = _weight_format(args)
    if checkpoint is None:
        weight_formats = args.weights or DENSE, args.draft_weights or DENSE
        models = [shape_named(name, *weight_formats) for name in args.shapes.split(",")]
    else:
        models = [_sizes_of_checkpoint(args, checkpoint)]
    path = args.choices or user_tuning_file()
    if args.tune == EXPERTS:
        if args.seconds is not None:
            raise EspalierError("--seconds is not for --tune experts, which measures every plan; leave it out")
        if weight_format != DENSE:
            flag = "--weights" if args.weights else "--draft-weights"
            raise EspalierError(f"{flag} is not for --tune experts: their plans serve all formats; leave it out")
        tune_experts.run(models, DTYPES[dtype], path)
        return 0
    shapes = tuple(dict.fromkeys(shape for model in models for shape in _shapes_to_measure(model, weight_format)))
    tuner = LinearTuner(DTYPES[dtype], weight_format, inf if args.seconds is None else args.seconds)
    print_header()
    measured_alone: dict[PlanKey, MeasuredPlans] = {}
    chosen_plans: PlanTable = {}

    def write_plans(new_plans: PlanTable) -> None:
        plans = plans_by_shape(new_plans, stored_plans)
        LINEAR_TUNING.write_table(path, TuningTable(tuner.chip, dtype, plans, gpu_versions(), tuner.tuning_format))

    # The written table keeps the plans of buckets that are not measured now.
    stored_plans = dict(LINEAR_TUNING.measured_plans(tuner.chip, DTYPES[dtype], tuner.tuning_format))
    for stored_table in LINEAR_TUNING.read_tables(path) if path.exists() else ():
        stored_plans |= stored_table.plans if stored_table.key == (tuner.chip, dtype, tuner.tuning_format) else {}
    with progress("measuring", len(ROWS_BUCKETS) + len(models)) as advance:
        for rows in ROWS_BUCKETS:
            measured_alone |= tuner.measure_alone(shapes, rows)
            # Stored in case the tuning is interrupted.  The plans that are fastest in passes replace these plans.
            write_plans({cell: measured.fastest for cell, measured in measured_alone.items()})
            advance()
        for model in models:
            tuner.measure_in_passes(model, measured_alone, chosen_plans)
            advance()
    # Add the plans of shapes that no pass has, such as matrices that only experts use in this format.
    chosen_plans = {cell: measured.fastest for cell, measured in measured_alone.items()} | chosen_plans
    write_plans(chosen_plans)
    print_table(_table_rows(measured_alone.values(), chosen_plans, BASELINE_NAME[weight_format == DENSE]))
    if left_out := len(shapes) * len(ROWS_BUCKETS) - len(measured_alone):
        stdout().print(Text(f"the time was over: {left_out} shapes and numbers of rows are as they were"))
    stdout().print(Text(f"written to {path}"))
    return 0


def _weight_format(args: Namespace) -> str:
    """Returns the weight format of target and draft.  Raises EspalierError if the flags name two formats."""
    if args.weights and args.draft_weights not in (None, args.weights):
        raise EspalierError(
            f"--weights={args.weights} and --draft-weights={args.draft_weights} are two formats, and --tune measures "
            "one at a time; give them one after the other"
        )
    return args.weights or args.draft_weights or DENSE


def _shapes_to_measure(model: ModelShape, weight_format: str) -> tuple[Shape, ...]:
    """Returns the shapes to measure.  If the format is only for experts, these are the shapes of the linear layers that
    the format could store."""
    if weight_format == DENSE or not QUANTISERS[weight_format].quantises_only_experts:
        return model.matrix_shapes(weight_format)
    columns = QUANTISERS[weight_format].group_sizes[0]
    runs = (run for run in model.target_pass(1)[:-1] if run.num_heads == 1 and run.shape[1] % columns == 0)
    return tuple(dict.fromkeys(run.shape for run in runs))


def _engine_dtype(config: EngineConfig, checkpoint: Checkpoint | None) -> str:
    """Returns the engine's dtype: the configured dtype, else the checkpoint's.  Raises EspalierError."""
    config_fields = {} if checkpoint is None else checkpoint.target.raw
    checkpoint_dtype = config_fields.get("dtype") or config_fields.get("torch_dtype") or "bfloat16"
    dtype = checkpoint_dtype if is_unresolved(config.dtype) else config.dtype
    if dtype not in DTYPES:
        raise EspalierError(f"--tune measures bfloat16 and float16, not {dtype}; other dtypes take F.linear")
    return dtype


def _sizes_of_checkpoint(args: Namespace, checkpoint: Checkpoint) -> ModelShape:
    """Returns the sizes of a checkpoint and of its draft.  Raises EspalierError if target or draft is quantised."""
    for name in ("weights", "draft_weights"):
        if given := getattr(args, name):
            flag = flag_of(name)
            raise EspalierError(
                f"{flag} is for --tune --shapes, and a model is measured as it is stored; use --shapes llama-3.1-8b "
                f"{flag} {given}, or leave {flag} out"
            )
    target, draft = checkpoint.target, checkpoint.draft
    _refuse_quantised(checkpoint.target_path, "--weights", target.formats, ("model.layers.0.self_attn.o_proj",))
    if draft is None:
        return model_sizes(target)
    names = (f"{draft.prefix(0)}self_attn.o_proj",) if isinstance(draft, MTPConfig) else DRAFT_MATRICES
    _refuse_quantised(checkpoint.draft_path, "--draft-weights", draft.layer.formats, names)
    return with_draft(model_sizes(target), draft)


def _refuse_quantised(path: Path | None, flag: str, formats: FormatLookup, names: Sequence[str]) -> None:
    """Raises EspalierError if any matrix of `names` is quantised."""
    if found_formats := {formats(name).name for name in names} - {DENSE}:
        raise EspalierError(
            f"--tune measures the quantised matrices of named sizes, and {path} is {min(found_formats)}; use --shapes "
            f"llama-3.1-8b {flag} fp8, or an unquantised copy"
        )


class LinearTuner:
    """Measures plans on the GPU of this machine, in one dtype.  weight_format: see ProductGroup.
    seconds: after this time no further measurement starts."""

    def __init__(self, dtype: torch.dtype, weight_format: str = DENSE, seconds: float = inf) -> None:
        begun = perf_counter()
        self.weight_format = weight_format
        self.device = require_gpu("--tune")
        self.random_weights = Weights(dtype, self.device)
        self.timer = GraphTimer()
        self.chip = chip(torch.empty(0, device=self.device))
        self.is_limited = seconds < inf
        self.deadline, self.alone_deadline = begun + seconds, begun + ALONE_TIME_SHARE * seconds
        self._weight_copies: dict[Shape, list[Matrix]] = {}

    @property
    def tuning_format(self) -> str:
        """The name of this weight format in the file of plans."""
        if self.weight_format == DENSE:
            return DENSE
        any_matrix = self.random_weights.random_weight((MIN_MATRIX_SIDE, MIN_MATRIX_SIDE), self.weight_format)
        assert isinstance(any_matrix, QuantisedMatrix)
        return quantised_plans.tuning_format_name(any_matrix)

    def measure_alone(self, shapes: Sequence[Shape], rows: int) -> dict[PlanKey, MeasuredPlans]:
        """Measures each shape alone with `rows` rows, a bucket.  The result lacks shapes for which no time was left."""
        if perf_counter() > self.alone_deadline:
            return {}
        plans, dtype = {shape: self._candidates(shape, rows) for shape in shapes}, self.random_weights.dtype
        inputs = {shape: torch.randn(rows, shape[1], dtype=dtype, device=self.device) for shape in shapes}
        if self.device.type == "cuda":
            with precompile():
                for shape, x in inputs.items():
                    for plan in (None, *plans[shape]):
                        _repeated_products(x, self.weight_copies(shape), plan, 1)()
        measured_plans: dict[PlanKey, MeasuredPlans] = {}
        buckets = len(ROWS_BUCKETS) - ROWS_BUCKETS.index(rows)
        for i, (shape, x) in enumerate(inputs.items()):
            now = perf_counter()
            if now > self.alone_deadline:
                break
            # Each bucket gets half of the remaining time: small buckets matter more, and their kernels compile slowly.
            share = (self.alone_deadline - now) / (len(shapes) - i) / (1 if buckets == 1 else 2)
            measured_plans[shape, rows] = self._measure_bucket(shape, x, plans[shape], now + share)
        return measured_plans

    def weight_copies(self, shape: Shape) -> list[Matrix]:
        """Returns different weights of the same shape, together larger than the L2 cache."""
        if shape not in self._weight_copies:
            copies = [self.random_weights.random_weight(shape, self.weight_format)]
            while len(copies) < max(2, -(-COPIES_BYTES // copies[0].nbytes)):
                copies.append(self.random_weights.random_weight(shape, self.weight_format))
            self._weight_copies[shape] = copies
        return self._weight_copies[shape]

    def _candidates(self, shape: Shape, rows: int) -> Sequence[TritonPlan | LibraryPlan]:
        weight = self.weight_copies(shape)[0]
        if isinstance(weight, QuantisedMatrix):
            plans: Sequence[TritonPlan | LibraryPlan] = quantised_plans.candidate_plans(rows, weight, self.chip)
        else:
            plans = candidate_plans(rows, *shape, self.chip)
        return plans[:MAX_CANDIDATES_IN_LIMIT] if self.is_limited else plans

    def _measure_bucket(
        self, shape: Shape, x: Tensor, plans: Sequence[TritonPlan | LibraryPlan], deadline: float = inf
    ) -> MeasuredPlans:
        """Measures the plans one by one until `deadline`.  Then measures the fastest of them again.  x: [rows, in]."""
        weights, rows = self.weight_copies(shape), len(x)
        measured_inputs = (x[:MIN_ROWS], x) if rows == ROWS_BUCKETS[0] else (x,)
        first_us: dict[TritonPlan | LibraryPlan, float] = {}
        for plan in plans:
            first_us[plan] = self._plan_us(x, weights, [plan], 3)[0]
            if perf_counter() > deadline:
                break
        finalists = sorted(first_us, key=lambda plan: first_us[plan])[:NUM_REMEASURED]
        times = [self._plan_us(inputs, weights, [None, *finalists], 12) for inputs in measured_inputs]
        baseline_us, *plan_us = (sum(each) / len(measured_inputs) for each in zip(*times, strict=True))
        order = sorted(range(len(plan_us)), key=lambda i: plan_us[i])
        return MeasuredPlans(shape, rows, baseline_us, min(plan_us, default=inf), tuple(finalists[i] for i in order))

    def _plan_us(self, x: Tensor, weights: Sequence[Matrix], plans: Sequence[LinearPlan], repeats: int) -> list[float]:
        """Returns the µs of one product of x [rows, in] with each plan.  The plans take turns, `repeats` times."""
        calls = max(2, -(-CHAIN_BYTES // weights[0].nbytes))
        bodies = [_repeated_products(x, weights, plan, calls) for plan in plans]
        return [1e3 * ms / calls for ms in self.timer.median_ms(bodies, repeats)]

    def measure_in_passes(self, model: ModelShape, plans_alone: dict[PlanKey, MeasuredPlans], table: PlanTable) -> None:
        """Adds to `table`, for each shape of the model, the plan with which the model's passes are fastest.  Shapes
        that `table` already has keep their plans."""
        model = model.slice_layers(0, MEASURED_LAYERS)
        weights = Weights(self.random_weights.dtype, self.device)
        for rows in ROWS_BUCKETS:
            for runs in (model.target_pass(rows), model.draft_pass(rows, fused_rows=rows)):
                measured_groups = (r for r in runs if r.num_heads == 1 and r.weight_format == self.weight_format)
                keys = dict.fromkeys((r.shape, rows) for r in measured_groups)
                undecided = {key: plans_alone[key] for key in keys if key in plans_alone and key not in table}
                table |= {cell: measured.fastest for cell, measured in undecided.items()}
                if not undecided or perf_counter() > self.deadline - WEIGHT_SETUP_SECONDS:
                    continue
                if self.device.type == "cuda":
                    with precompile():
                        for measured in undecided.values():
                            for plan in (None, *measured.plans[:NUM_MEASURED_IN_PASSES]):
                                self._pass_with_plan(runs, weights, measured, plan, table)()
                for measured in NUM_SWEEPS * [*undecided.values()]:
                    if perf_counter() > self.deadline:
                        break
                    table[measured.shape, rows] = self._fastest_plan_in_pass(runs, weights, measured, table)

    def _pass_with_plan(
        self, groups: Groups, weights: Weights, measured: MeasuredPlans, plan: LinearPlan, table: PlanTable
    ) -> Callable[[], None]:
        """Returns a function that runs the pass `groups`, with `plan` for the measured shape, `table` for others."""
        plans = {**table, (measured.shape, measured.num_rows): plan}
        return weights.make_pass(groups, _multiply_by_table(groups, plans, measured.num_rows))

    def _fastest_plan_in_pass(
        self, groups: Groups, weights: Weights, measured: MeasuredPlans, table: PlanTable
    ) -> LinearPlan:
        """Returns the plan with which a pass is fastest.  measured: the plans.  table: for other shapes."""
        key = (measured.shape, measured.num_rows)
        contenders = list(dict.fromkeys([table[key], None, *measured.plans[:NUM_MEASURED_IN_PASSES]]))
        bodies = [self._pass_with_plan(groups, weights, measured, plan, table) for plan in contenders]
        times = self.timer.median_ms(bodies, 12)
        best = min(range(len(times)), key=lambda i: times[i])
        return contenders[best if times[best] < times[0] * (1 - MIN_RELATIVE_GAIN) else 0]


def _plan_product(
    x: InputRows, weight: Matrix, plan: LinearPlan, gated: bool = False, as_partial_sums: bool = False
) -> Tensor:
    """Returns x · weightᵀ.  plan: None for the baseline.  gated: apply the gate.  as_partial_sums: not added up."""
    if not isinstance(weight, QuantisedMatrix):
        assert isinstance(x, Tensor)
        return (linear_gated if gated else linear_partial_sums if as_partial_sums else linear)(x, weight, None, plan)
    quantised_plan = plan if isinstance(plan, TritonPlan) else quantised_plans.plan_by_rule_for(weight, x)
    if gated:
        activation = linear_quantised_gated(x, weight, None, quantised_plan)
        assert isinstance(activation, Tensor)
        return activation
    if as_partial_sums:
        return linear_quantised_partial_sums(x, weight, None, quantised_plan)
    return linear_quantised(x, weight, None, quantised_plan)


def _repeated_products(x: Tensor, weights: Sequence[Matrix], plan: LinearPlan, num_calls: int) -> Callable[[], None]:
    def run_products() -> None:
        for call in range(num_calls):
            _plan_product(x, weights[call % len(weights)], plan)

    return run_products


def _multiply_by_table(product_groups: Groups, table: PlanTable, rows: int) -> Multiply:
    """Returns a function that runs a product with its plan in `table`, and then the kernel that follows it in a layer.

    After SUMMED_LAYERS, an add-and-norm kernel adds up the partial sums (after qkv, in place of the engine's kernel for
    rotations).  A gate follows GATED_LAYERS.  Some plans fuse the gate with the product.  rows: of every input."""
    groups = SUMMED_LAYERS, GATED_LAYERS
    summed, gated = ({run.shape for run in product_groups if run.name.split()[-1] in names} for names in groups)
    norm_inputs: dict[Shape, tuple[Tensor, Tensor]] = {}

    def multiply(x: InputRows, weight: Matrix) -> Tensor:
        shape = (weight.shape[0], weight.shape[1])
        if (shape, rows) not in table:
            return multiply_like_engine(x, weight)
        if shape in gated:
            return _plan_product(x, weight, table[shape, rows], gated=True)
        if shape not in summed:
            return _plan_product(x, weight, table[shape, rows])
        if shape not in norm_inputs:
            norm = torch.ones(shape[0], dtype=x.dtype, device=weight.device)
            norm_inputs[shape] = norm.new_zeros(len(x), shape[0]), norm
        residual, norm = norm_inputs[shape]
        return add_rms_norm(_plan_product(x, weight, table[shape, rows], as_partial_sums=True), residual, norm, 1.0)[1]

    return multiply


def plans_by_shape(table: PlanTable, stored_plans: Mapping[Shape, LinearPlans]) -> dict[Shape, LinearPlans]:
    """Returns the plans of each shape in `table`, one for each bucket: for a bucket not in `table`, the stored plan."""
    earlier_plans = {shape: stored_plans.get(shape, NO_PLANS) for shape, _ in table}
    return {
        shape: tuple(table.get((shape, rows), LINEAR_TUNING.plan_for_count(plans, rows)) for rows in ROWS_BUCKETS)
        for shape, plans in earlier_plans.items()
    }


def _table_rows(measured: Iterable[MeasuredPlans], table: PlanTable, baseline_name: str) -> list[list[str]]:
    """Returns the rows of the printed table.  baseline_name: the text in place of a plan if the baseline is fastest."""
    rows = [["weight", "rows", f"{baseline_name}, µs", "ours, µs", "taken among its neighbours"]]
    for bucket in sorted(measured, key=lambda each: (each.shape, each.num_rows)):
        shape = f"{bucket.shape[0]} x {bucket.shape[1]}"
        chosen_plan = _plan_name(table[bucket.shape, bucket.num_rows], baseline_name)
        rows.append([shape, f"{bucket.num_rows}", f"{bucket.baseline_us:.1f}", f"{bucket.fastest_us:.1f}", chosen_plan])
    return rows


def _plan_name(plan: LinearPlan, baseline_name: str) -> str:
    if plan is None:
        return baseline_name
    if isinstance(plan, LibraryPlan):
        return f"F.linear, {plan.pieces} pieces" if plan.splits == 1 else f"F.linear, {plan.splits} parts"
    return f"{plan.block_out}x{plan.block_in}, {plan.splits} parts, {plan.stages} stages, {plan.warps} warps"
