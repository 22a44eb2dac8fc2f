"""The floor of a round: the least time that its products and its attention can take on this GPU.

    floor = fastest linear layers and products with experts found for those rows, as one CUDA graph
            + max(K/V and state bytes / measured bandwidth, attention FLOPs / measured bf16 peak)

Linear layers are multiplied by the library and as the engine does, experts as the engine does alone: no library has
that product.  A call touches as many experts (those that have rows) as were measured for the target, or as uniform
routing does; uniform routing for the layers of an MTP draft.  `draft_passes` lists what a draft of modules runs; a
block draft runs one pass.  Everything is measured on the device in the same run.  For comparison, the bytes of weights
and of touched experts / bandwidth are given too; no kernel reaches that.  `python -m lab floor` prints the parts.
"""

import gc
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from math import prod

import torch
from rich.text import Text

from espalier.bench.linears import ModelShape, ProductGroup, shape_named
from espalier.bench.timing import (
    DEFAULT_REPEATS,
    MEASUREMENT_SECONDS,
    GraphTimer,
    multiply_by_library,
    multiply_like_engine,
)
from espalier.cache.layer_spec import INDEX_PLANE, RecurrentState
from espalier.config import FP8_KV, is_unresolved
from espalier.layout import TreeShape
from espalier.terminal.console import print_header, print_table, require_gpu, require_writable, stdout, write_json
from lab.bench.ceilings import GpuCeilings, measure_ceilings
from lab.bench.checks import positive_numbers
from lab.bench.experts import ExpertWeights
from lab.bench.passes import attended_rows, attention_flops, index_cost, state_bytes


@dataclass(frozen=True)
class LinearTimes:
    """ms of a chain of linear layers: by the library, and by the faster of library and engine."""

    rows: int
    cublas_ms: float
    fastest_ms: float
    weight_bytes: float


@dataclass(frozen=True)
class ExpertTimes:
    """The routed experts of a chain.

    touched: experts with rows in a layer, the mean over layers.  num_bytes: bytes of all touched experts.
    ms: the time that experts add to the linear layers in the same CUDA graph.
    """

    touched: float
    num_bytes: float
    ms: float


@dataclass(frozen=True)
class RoundFloor:
    """The shortest times of a round and of its parts.

    ms: the whole round; linear_ms: its linear layers alone; expert_ms: the time that experts add to them;
    weight_bytes_ms: the time to read the weights at the measured bandwidth, of experts only the touched ones.
    """

    ms: float
    linear_ms: float
    expert_ms: float
    weight_bytes_ms: float


@dataclass(frozen=True)
class PassCost:
    """The bytes that an operation reads and the FLOPs that it computes."""

    num_bytes: float
    flops: float

    def ms(self, ceilings: GpuCeilings) -> float:
        return 1e3 * max(self.num_bytes / ceilings.bandwidth, self.flops / ceilings.peak)


@dataclass(frozen=True)
class DraftPass:
    """A pass of a draft's module in a round.  module: from 1.  queries: rows of one request.  head_rows: rows of one
    request that the head runs over."""

    module: int
    queries: int
    head_rows: int
    is_extend: bool = False


def draft_passes(num_modules: int, steps: int, topk: int) -> tuple[DraftPass, ...]:
    """The passes of a round (speculate/drafters/autoregressive.py), the same for both forms of an MTP draft.

    Level l runs module l over the beams of all levels before l.  If there is no module l, the last module runs over the
    beams of one level.  Level 1 runs only the first module's head at the root, which counts with the extend.  The
    extend runs every module over steps + 1 rows, also for steps=0."""
    levels = [
        DraftPass(min(level, num_modules), (level - 1 if level <= num_modules else 1) * topk, topk)
        for level in range(2, steps + 1)
    ]
    roots = 1 if steps else 0
    extends = [DraftPass(m, steps + 1, roots if m == 1 else 0, is_extend=True) for m in range(1, num_modules + 1)]
    return (*levels, *extends)


@dataclass(frozen=True)
class RoundSize:
    """The sizes that determine the time of a round.

    tree: for each request; in plain decoding a draft still runs its extend.  context: mean committed tokens of a
    request.  has_draft: whether a draft runs.
    num_touched_experts: how many experts the target's pass touches (RoutedExperts.mean_active_experts).
    """

    batch: int
    tree: TreeShape
    context: float = 0.0
    has_draft: bool = True
    num_touched_experts: float | None = None


def round_products(shape: ModelShape, size: RoundSize) -> tuple[tuple[ProductGroup, ...], tuple[ProductGroup, ...]]:
    """Returns (products of the target's pass over the trees, products of the draft's passes) of a round."""
    batch, steps, topk = size.batch, size.tree.steps, size.tree.topk
    target = tuple(
        run
        if run.experts is None
        else replace(run, experts=replace(run.experts, mean_active_experts=size.num_touched_experts))
        for run in shape.target_pass(batch * size.tree.num_draft_tokens)
    )
    draft: list[ProductGroup] = []
    if size.has_draft and shape.block is not None:
        draft += shape.block_pass(batch, steps, topk) if steps else ()
        return target, (*draft, *shape.extend_passes(batch * (steps + 1)))
    for each in draft_passes(shape.num_draft_modules, steps, topk) if size.has_draft else ():
        rows = batch * each.queries
        draft += shape.draft_pass(rows, batch * each.head_rows, rows if each.is_extend else 0, each.module)
    return target, tuple(draft)


def kv_value_bytes(kv_dtype: str, draft_kv_dtype: str) -> tuple[int, int]:
    """Returns the bytes of a K or V value of (target, draft).  A draft's "auto" means the target's dtype."""
    draft_kv_dtype = kv_dtype if is_unresolved(draft_kv_dtype) else draft_kv_dtype
    return (1 if kv_dtype == FP8_KV else 2), (1 if draft_kv_dtype == FP8_KV else 2)


def round_attention_cost(shape: ModelShape, size: RoundSize, value_bytes: tuple[int, int] = (2, 2)) -> PassCost:
    """The attention of the passes of `round_products`.  value_bytes: see kv_value_bytes.

    Each pass reads a request's committed tokens once.  A layer with a window reads only the window; one with
    an index reads the index keys and, once for all nodes, as many rows as are chosen.  The nodes are left out: they are
    few compared with the prefix.  A state is read once and written once in a round.
    """
    (of_target, of_draft), batch, tree = value_bytes, size.batch, size.tree
    # (model, queries a request, bytes of a value) of each pass
    passes = [(shape, tree.num_draft_tokens, of_target)]
    if size.has_draft and shape.block is not None:
        passes += [(shape.draft_sizes, shape.block.block_rows, of_draft)] if tree.steps else []
    elif size.has_draft:
        of_modules = draft_passes(shape.num_draft_modules, tree.steps, tree.topk)
        passes += [(shape.draft_sizes, each.queries, of_draft) for each in of_modules]
    num_bytes = flops = 0.0
    for model, queries, of_value in passes:
        for spec in model.layer_specs:
            if isinstance(spec.cache_spec, RecurrentState):
                num_bytes += 2 * batch * state_bytes(spec.cache_spec)
                continue
            rows = batch * attended_rows(spec, size.context)
            of_keys, of_query = index_cost(model, spec, size.context)
            index_values = prod(spec.cache_spec.planes.get(INDEX_PLANE, (0,)))
            # A layer that reads the rows of an earlier one reads them again.
            num_bytes += of_value * (spec.cache_spec.values_per_token - index_values) * rows + batch * of_keys
            flops += queries * (attention_flops(spec) * rows + batch * of_query)
    return PassCost(num_bytes, flops)


class FloorMeter:
    """Holds one set of weights of a shape, the target's and the draft's, and measures passes over them."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype = torch.bfloat16,
        value_bytes: tuple[int, int] = (2, 2),
        ranks: int = 1,
        draft_ranks: int = 1,
    ) -> None:
        """value_bytes: from kv_value_bytes.  ranks, draft_ranks: GPUs that share the work of the target, and
        of the draft."""
        self.shape, self.value_bytes, self.ranks, self.draft_ranks = shape, value_bytes, ranks, draft_ranks
        self.device = require_gpu("floor")
        self.weights = ExpertWeights(dtype, self.device)
        self.timer = GraphTimer()
        # Context and page size change no product.
        self._products: dict[tuple[ProductGroup, ...], tuple[LinearTimes, ExpertTimes | None]] = {}

    def ceilings(self) -> GpuCeilings:
        return measure_ceilings(self.timer, self.device)

    def time_linears(self, runs: Sequence[ProductGroup], rows: int) -> LinearTimes:
        """Time the linear layers as one CUDA graph, with F.linear and with the engine's kernels."""
        return self._timed(runs, rows, with_experts=(False,))[0]

    def time_products(self, runs: tuple[ProductGroup, ...], rows: int) -> tuple[LinearTimes, ExpertTimes | None]:
        """Time the linear layers alone, and together with the routed experts; None without experts.

        The same runs are timed once.
        """
        if runs not in self._products:
            has_experts = any(run.experts is not None for run in runs)
            self._products[runs] = self._timed(runs, rows, (False, True) if has_experts else (False,))
        return self._products[runs]

    def _timed(
        self, runs: Sequence[ProductGroup], rows: int, with_experts: Sequence[bool]
    ) -> tuple[LinearTimes, ExpertTimes | None]:
        if self.device.type == "cuda":
            # The memory of a closed engine first: new weights among its pages would keep these in PyTorch's cache.
            gc.collect()
            torch.cuda.empty_cache()
        chains = [
            self.weights.make_pass(runs, multiply, each)
            for each in with_experts
            for multiply in (multiply_by_library, multiply_like_engine)
        ]
        cublas, ours, *whole = self.timer.median_ms(chains, DEFAULT_REPEATS, MEASUREMENT_SECONDS)
        linears = LinearTimes(rows, cublas, min(cublas, ours), sum(run.weight_bytes for run in runs))
        if not whole:
            return linears, None
        touched = [
            (run.num_weights, run.experts.active_experts(run.num_rows)) for run in runs if run.experts is not None
        ]
        mean = sum(count * each for count, each in touched) / sum(count for count, _ in touched)
        return linears, ExpertTimes(mean, sum(run.expert_bytes for run in runs), min(whole) - linears.fastest_ms)

    def round(self, size: RoundSize, ceilings: GpuCeilings) -> RoundFloor:
        """The floor of a round.  ceilings: measured in the same run.

        No engine may run during the call: an engine takes all free memory, and the call needs memory for weights.
        Ranks are assumed to share the work at one GPU's efficiency, and their sums to take no time."""
        whole = self._one_gpu_floor(size, ceilings)
        if self.ranks == 1:
            return whole
        target = self._one_gpu_floor(replace(size, has_draft=False), ceilings)
        pairs = zip(astuple(whole), astuple(target), strict=True)
        return RoundFloor(*(part / self.ranks + (both - part) / self.draft_ranks for both, part in pairs))

    def _one_gpu_floor(self, size: RoundSize, ceilings: GpuCeilings) -> RoundFloor:
        target, draft = round_products(self.shape, size)
        linears, experts = self.time_products((*draft, *target), size.batch * size.tree.num_draft_tokens)
        attention_ms = round_attention_cost(self.shape, size, self.value_bytes).ms(ceilings)
        expert_ms, expert_bytes = (experts.ms, experts.num_bytes) if experts else (0.0, 0.0)
        bytes_ms = 1e3 * (linears.weight_bytes + expert_bytes) / ceilings.bandwidth
        whole_ms = linears.fastest_ms + expert_ms + attention_ms
        return RoundFloor(whole_ms, linears.fastest_ms, expert_ms, bytes_ms)


def run(args: Namespace) -> int:
    """`python -m lab floor`."""
    rows = positive_numbers("--rows", args.rows, "1,16,64")
    require_writable("--json", args.json)
    floors = FloorMeter(shape_named(args.shape))
    print_header()
    ceilings = floors.ceilings()
    times = [floors.time_products(floors.shape.target_pass(count), count) for count in rows]
    passes = [{**asdict(linears), "experts": experts and asdict(experts)} for linears, experts in times]
    write_json(args.json, {"shape": args.shape, "ceilings": asdict(ceilings), "passes": passes})
    stdout().print(Text(f"read {ceilings.bandwidth / 1e12:.2f} TB/s; bf16 product {ceilings.peak / 1e12:.0f} TFLOP/s"))
    print_table(floor_table(times, ceilings))
    return 0


def floor_table(times: Sequence[tuple[LinearTimes, ExpertTimes | None]], ceilings: GpuCeilings) -> list[list[str]]:
    rows = [["rows", "F.linear, ms", "fastest, ms", "weight bytes / bandwidth, ms"]]
    if any(experts for _, experts in times):
        rows[0] += ["experts touched", "experts add, ms", "their bytes / bandwidth, ms"]
    for linears, experts in times:
        bytes_ms = 1e3 * linears.weight_bytes / ceilings.bandwidth
        row = [f"{linears.rows}", f"{linears.cublas_ms:.2f}", f"{linears.fastest_ms:.2f}", f"{bytes_ms:.2f}"]
        if experts:
            bytes_ms = 1e3 * experts.num_bytes / ceilings.bandwidth
            row += [f"{experts.touched:.1f}", f"{experts.ms:.2f}", f"{bytes_ms:.2f}"]
        rows.append(row)
    return rows
