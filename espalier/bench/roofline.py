"""The roofline of a round: the least time that its linear layers, experts and attention can take on this GPU.

    roofline = fastest linear layers found for those rows, as one CUDA graph
               + max(bytes of the touched experts / measured bandwidth, their FLOPs / measured bf16 peak)
               + max(K/V bytes / measured bandwidth, attention FLOPs / measured bf16 peak)

Touched experts are those that have rows.  Their number is measured for the target, or it follows from uniform
routing; it does for the layers of an MTP draft.  `draft_passes` lists what a draft of modules runs; a block draft
runs one pass.  Everything else is measured on the device in the same run.  For comparison, weight bytes / bandwidth
is given too; no kernel reaches it.  `espalier bench floor` prints the parts of the linear layers and of the experts.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.text import Text
from torch import Tensor

from espalier.bench.chains import Matrix, Weights, plain
from espalier.bench.linears import ModelShape, Run, shape_named, value_bytes
from espalier.bench.timing import SECONDS, TURNS, Ceilings, Stopwatch
from espalier.config import FP8_KV, is_open
from espalier.kernels.layers.linear import linear
from espalier.kernels.layers.linear_quantised import linear_quantised
from espalier.kernels.layers.linear_tuning import DENSE, plans_for
from espalier.terminal.console import print_header, print_table, require_writable, stdout, write_json
from espalier.terminal.flags import positive_numbers
from espalier.terminal.machine import require_gpu


@dataclass(frozen=True)
class LinearTimes:
    """ms of a chain of linear layers: by the library, and by the fastest found (our kernels where the plans say so)."""

    rows: int
    cublas_ms: float
    fastest_ms: float
    weight_bytes: float


@dataclass(frozen=True)
class RoundRoofline:
    """ms: of a whole round; linear_ms, expert_ms: of its linear layers and of its experts alone.

    weight_bytes_ms: of reading the weights at the measured bandwidth, including only the touched experts.
    """

    ms: float
    linear_ms: float
    expert_ms: float
    weight_bytes_ms: float


@dataclass(frozen=True)
class Cost:
    """What an operation reads and computes."""

    num_bytes: float
    flops: float

    def ms(self, ceilings: Ceilings) -> float:
        return 1e3 * max(self.num_bytes / ceilings.bandwidth, self.flops / ceilings.peak)


@dataclass(frozen=True)
class DraftPass:
    """A pass of a draft's module (from 1) in a round.  queries, head_rows: rows of one request, and of its head."""

    module: int
    queries: int
    head_rows: int
    is_extend: bool = False


def draft_passes(modules: int, steps: int, topk: int) -> tuple[DraftPass, ...]:
    """The passes of a round (speculate/drafters/autoregressive.py), the same for both forms of an MTP draft.

    Level l runs module l over the beams of all levels before, and from the last module on over those of one level.
    Level 1 is the first module's head at the root alone, counted with the extend.  The extend runs every module over
    steps + 1 rows; it runs at steps=0 too.
    """
    levels = [
        DraftPass(min(level, modules), (level - 1 if level <= modules else 1) * topk, topk)
        for level in range(2, steps + 1)
    ]
    roots = 1 if steps else 0
    extends = [DraftPass(m, steps + 1, roots if m == 1 else 0, is_extend=True) for m in range(1, modules + 1)]
    return (*levels, *extends)


def round_runs(
    shape: ModelShape, batch: int, steps: int, topk: int, num_draft_tokens: int, drafts: bool = True
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """(the target's pass over the trees, the draft's passes) of a round.

    steps=0 is plain decoding: the draft still extends, unless drafts=False.
    """
    draft: list[Run] = []
    if drafts and shape.block is not None:
        draft += shape.block_pass(batch, steps, topk) if steps else ()
        return shape.target_pass(batch * num_draft_tokens), (*draft, *shape.extend_passes(batch * (steps + 1)))
    for each in draft_passes(shape.modules, steps, topk) if drafts else ():
        rows = batch * each.queries
        draft += shape.draft_pass(rows, batch * each.head_rows, rows if each.is_extend else 0, each.module)
    return shape.target_pass(batch * num_draft_tokens), tuple(draft)


def kv_value_bytes(kv_dtype: str, draft_kv_dtype: str) -> tuple[int, int]:
    """Bytes that a number of K or V takes, of the target and of the draft.  A draft's "auto" is the target's."""
    draft_kv_dtype = kv_dtype if is_open(draft_kv_dtype) else draft_kv_dtype
    return (1 if kv_dtype == FP8_KV else 2), (1 if draft_kv_dtype == FP8_KV else 2)


def round_attention(
    shape: ModelShape,
    batch: int,
    context: float,
    steps: int,
    topk: int,
    num_draft_tokens: int,
    drafts: bool = True,
    value_bytes: tuple[int, int] = (2, 2),
) -> Cost:
    """The attention of the passes of `round_runs`.  value_bytes: see kv_value_bytes.

    Each pass reads a request's prefix of `context` tokens once; a layer with a window reads only the window.  The nodes
    are left out: they are few compared with the prefix.
    """
    of_target, of_draft = value_bytes
    # (model, queries a request, bytes of a value) of each pass
    passes = [(shape, num_draft_tokens, of_target)]
    if drafts and shape.block is not None:
        passes += [(shape.draft_sizes, shape.block.rows, of_draft)] if steps else []
    elif drafts:
        passes += [(shape.draft_sizes, each.queries, of_draft) for each in draft_passes(shape.modules, steps, topk)]
    reads = [(model, queries, size, batch * model.attended(context)) for model, queries, size in passes]
    num_bytes = sum(size * model.kept_values * rows for model, _, size, rows in reads)
    return Cost(num_bytes, sum(queries * model.attention_flops * rows for model, queries, _, rows in reads))


def round_experts(
    shape: ModelShape,
    batch: int,
    steps: int,
    topk: int,
    num_draft_tokens: int,
    drafts: bool = True,
    touched: float | None = None,
) -> tuple[Cost, ...]:
    """The routed experts of each pass of `round_runs`.  touched: by the target's pass, as for expert_cost."""
    # The layers of a block draft have none.
    passes = draft_passes(shape.modules, steps, topk) if drafts and shape.block is None else ()
    draft = [expert_cost(shape.draft_sizes, batch * each.queries) for each in passes]
    return expert_cost(shape, batch * num_draft_tokens, touched), *draft


def expert_cost(shape: ModelShape, rows: int, touched: float | None = None) -> Cost:
    """The routed experts of a pass, of a target or of a module's layer.

    touched: experts with rows, the mean over layers; None: the number that uniform routing touches.
    """
    if shape.experts is None:
        return Cost(0, 0)
    layers, experts = shape.experts.layers, shape.experts.shape
    touched = experts.touched(rows) if touched is None else touched
    expert_bytes = experts.expert_bytes * value_bytes(shape.weights) / value_bytes(DENSE)
    return Cost(layers * touched * expert_bytes, layers * experts.flops(rows))


class Roofline:
    """Holds one set of weights of a shape, the target's and the draft's, and measures passes over them."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype = torch.bfloat16, value_bytes: tuple[int, int] = (2, 2)
    ) -> None:
        """value_bytes: of K and V, see kv_value_bytes."""
        self.shape, self.value_bytes = shape, value_bytes
        self.device = require_gpu("bench floor")
        self.weights = Weights(dtype, self.device)
        self.stopwatch = Stopwatch()
        # By (batch, tree): context and page size do not change the linear layers.
        self._linear_times: dict[tuple[int, tuple[int, int, int, bool]], LinearTimes] = {}

    def ceilings(self) -> Ceilings:
        return self.stopwatch.ceilings(self.device)

    def target(self, rows: int) -> LinearTimes:
        return self.linears(self.shape.target_pass(rows), rows)

    def linears(self, runs: Sequence[Run], rows: int) -> LinearTimes:
        """Time the runs as one CUDA graph, by F.linear and as the engine multiplies."""
        chains = [self.weights.chain(runs, multiply) for multiply in (plain, as_engine)]
        cublas, ours = self.stopwatch.ms(chains, TURNS, SECONDS)
        return LinearTimes(rows, cublas, min(cublas, ours), sum(run.weight_bytes for run in runs))

    def round_linears(
        self, batch: int, steps: int, topk: int, num_draft_tokens: int, drafts: bool = True
    ) -> LinearTimes:
        """The linear layers of a round, timed at the first call for this batch and layout.

        That call needs memory for the weights.  An engine takes all that is free, so call it before one is made.
        """
        layout = (steps, topk, num_draft_tokens, drafts)
        if (batch, layout) not in self._linear_times:
            target, draft = round_runs(self.shape, batch, *layout)
            self._linear_times[batch, layout] = self.linears((*draft, *target), batch * num_draft_tokens)
        return self._linear_times[batch, layout]

    def round(
        self,
        batch: int,
        context: float,
        steps: int,
        topk: int,
        num_draft_tokens: int,
        ceilings: Ceilings,
        drafts: bool = True,
        touched: float | None = None,
    ) -> RoundRoofline:
        """The roofline of a round of this layout.

        context: mean tokens of a request; ceilings: measured in the same run; drafts: False if there is no draft;
        touched: as for expert_cost.
        """
        layout = (steps, topk, num_draft_tokens, drafts)
        times = self.round_linears(batch, *layout)
        experts = round_experts(self.shape, batch, *layout, touched)
        expert_ms = sum(each.ms(ceilings) for each in experts)
        attention_ms = round_attention(self.shape, batch, context, *layout, self.value_bytes).ms(ceilings)
        bytes_ms = 1e3 * (times.weight_bytes + sum(each.num_bytes for each in experts)) / ceilings.bandwidth
        return RoundRoofline(times.fastest_ms + expert_ms + attention_ms, times.fastest_ms, expert_ms, bytes_ms)


def as_engine(x: Tensor, weight: Matrix) -> Tensor:
    """Multiply as the engine does on this GPU."""
    if not isinstance(weight, Tensor):
        return linear_quantised(x, weight, None)
    plans = plans_for((weight.shape[0], weight.shape[1]), DENSE, weight.dtype, weight)
    return plain(x, weight) if plans is None else linear(x, weight, None, plans.at(len(x)))


def run(args: Namespace) -> int:
    """`espalier bench floor`."""
    rows = positive_numbers("--rows", args.rows, "1,16,64")
    require_writable("--json", args.json)
    roofline = Roofline(shape_named(args.shape))
    print_header()
    ceilings = roofline.ceilings()
    times = [roofline.target(count) for count in rows]
    experts = [expert_times(roofline.shape, each.rows, ceilings) for each in times]
    passes = [
        {**asdict(each), "experts": of_pass and asdict(of_pass)} for each, of_pass in zip(times, experts, strict=True)
    ]
    write_json(args.json, {"shape": args.shape, "ceilings": asdict(ceilings), "passes": passes})
    stdout().print(Text(f"read {ceilings.bandwidth / 1e12:.2f} TB/s; bf16 product {ceilings.peak / 1e12:.0f} TFLOP/s"))
    print_table(table(times, ceilings, experts))
    return 0


@dataclass(frozen=True)
class ExpertTimes:
    """The routed experts of a pass.

    touched: experts with rows in a layer, for uniform routing.  ms: the least time, all layers together.
    """

    touched: float
    ms: float


def expert_times(shape: ModelShape, rows: int, ceilings: Ceilings) -> ExpertTimes | None:
    """The experts of a pass of `rows` rows; None for a dense model."""
    if shape.experts is None:
        return None
    return ExpertTimes(shape.experts.shape.touched(rows), expert_cost(shape, rows).ms(ceilings))


def table(
    times: Sequence[LinearTimes], ceilings: Ceilings, experts: Sequence[ExpertTimes | None] = ()
) -> list[list[str]]:
    """experts: one for each of `times`, or empty."""
    rows = [["rows", "F.linear, ms", "fastest, ms", "weight bytes / bandwidth, ms"]]
    for each in times:
        bytes_ms = 1e3 * each.weight_bytes / ceilings.bandwidth
        rows.append([f"{each.rows}", f"{each.cublas_ms:.2f}", f"{each.fastest_ms:.2f}", f"{bytes_ms:.2f}"])
    if any(experts):
        rows[0] += ["experts touched", "experts, ms"]
        for row, of_pass in zip(rows[1:], experts, strict=True):
            row += [f"{of_pass.touched:.1f}", f"{of_pass.ms:.2f}"] if of_pass else ["", ""]
    return rows
