"""`python -m lab kernels`: attention over committed rows, K and V heads or latent rows, and the product with experts,
on a GPU, compared with its memory bandwidth.

A cell of attention runs as a model's layers do: one plan, then layer after layer, each with its own pages, so that no
layer finds its rows in the L2 cache.  Replays of a CUDA graph are timed by events on the device.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import torch
from rich.text import Text

from espalier.attention import Attention, Nodes, Prefix
from espalier.attention.triton import TritonAttention, TritonBackend
from espalier.bench.expert_product import ExpertProduct, random_experts
from espalier.bench.timing import SECONDS, Ceilings, Stopwatch
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec, stored_as
from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import pack
from espalier.kernels.layers.experts_plan import ExpertsShape
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.ops.attention import count_contiguous_blocks
from espalier.kernels.ops.kv_splits import kv_splits
from espalier.layout import MAX_PAGE_SIZE, RoundLayout
from espalier.terminal.console import QUIET, print_header, print_table, progress, require_writable, stdout, write_json
from espalier.terminal.flags import written
from espalier.terminal.machine import require_gpu

SPEC = LayerSpec(32, KVHeads(kv_heads=8, k_size=128, v_size=128))
# The attention of DeepSeek-V2-Lite and of DeepSeek-V3.
LATENT = LatentKV(576, 512)
FEW_HEADS, MANY_HEADS = (LayerSpec(heads, LATENT, scale=192**-0.5) for heads in (16, 128))
DTYPE = torch.bfloat16
STEPS = 5
TOPK = 8
TURNS = 20


@dataclass(frozen=True)
class Shape:
    """A pass: `queries` rows of each of `batch` requests over `context` committed rows.  chain: a prefill chunk, else a
    tree.  spec: of its layers."""

    batch: int
    queries: int
    context: int
    chain: bool = False
    spec: LayerSpec = SPEC

    def __str__(self) -> str:
        return f"{self.batch} x {self.queries} {'chunk' if self.chain else 'nodes'} x {self.context}"

    @property
    def heads(self) -> str:
        keeps = self.spec.keeps
        kept = f"a row of {keeps.size}" if isinstance(keeps, LatentKV) else f"{keeps.kv_heads} of {keeps.k_size}"
        return f"{self.spec.heads} on {kept}{', FP8' if keeps.dtype == FP8 else ''}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of the committed K and V of one layer."""
        return self.batch * self.context * self.spec.bytes_per_token(DTYPE)

    @property
    def flops(self) -> int:
        """FLOPs of one layer: both products over the committed rows and, in a chain, over the rows before each row."""
        pairs = self.queries * self.context + (self.queries * (self.queries + 1) // 2 if self.chain else 0)
        keeps = self.spec.keeps
        return 2 * self.batch * self.spec.heads * pairs * (keeps.k_size + keeps.v_size)


SHAPES = (
    Shape(64, 8, 4096),
    Shape(1, 8, 65536),
    Shape(1, 64, 32768),
    Shape(1, 2048, 0, chain=True),
    Shape(1, 2048, 16384, chain=True),
    *(
        Shape(*sizes, spec=spec)
        for spec in (FEW_HEADS, MANY_HEADS)
        for sizes in ((1, 1, 65536), (1, 64, 32768), (32, 16, 4096))
    ),
    *(
        Shape(*sizes, spec=spec)
        for spec in stored_as((SPEC, MANY_HEADS), FP8)
        for sizes in ((1, 1, 65536), (1, 64, 32768), (64, 8, 4096))
    ),
)
# DeepSeek-V2-Lite, Qwen3-30B-A3B and gpt-oss-20b.
EXPERTS = (ExpertsShape(64, 6, 2048, 1408), ExpertsShape(128, 8, 2048, 768), ExpertsShape(32, 4, 2880, 2880))
EXPERT_ROWS = (1, 4, 16, 64, 256, 2048)


@dataclass(frozen=True)
class Cell:
    """Medians in µs: attention of one layer, and the plan that all layers share.

    terabytes_per_second: committed bytes over the time; bandwidth_share: the same over the measured bandwidth; both are
    None for a chain.  tflops: TFLOP/s.
    """

    shape: str
    heads: str
    page_size: int
    attention_us: float
    plan_us: float
    terabytes_per_second: float | None
    bandwidth_share: float | None
    tflops: float


@dataclass(frozen=True)
class ExpertCell:
    """The product of `rows` rows with their experts.

    us: median, of one layer; touched: experts that have rows; bandwidth_share: bytes of the touched experts over the
    time, over the measured bandwidth; tflops: TFLOP/s.
    """

    shape: ExpertsShape
    rows: int
    us: float
    touched: float
    bandwidth_share: float
    tflops: float


def run(args: Namespace) -> int:
    if not all(1 <= size <= MAX_PAGE_SIZE for size in args.page_size):
        raise EspalierError(f"--page-size={written(args.page_size)} is not supported; use 1 to {MAX_PAGE_SIZE}")
    require_writable("--json", args.json)
    device = require_gpu("kernels")
    print_header()
    cells: list[Cell] = []
    with progress("measuring", len(SHAPES) * len(args.page_size) + len(EXPERTS)) as advance:
        stopwatch = Stopwatch()
        ceilings = stopwatch.ceilings(device)
        bytes_per_second = ceilings.bandwidth
        for shape in SHAPES:
            for page_size in args.page_size:
                cells.append(measure(shape, page_size, bytes_per_second, device, stopwatch, args.in_order))
                advance()
        experts = []
        for of_experts in EXPERTS:
            experts += measure_experts(of_experts, ceilings, device, stopwatch)
            advance()
    order = "in order" if args.in_order else "in no order"
    figures = {"bytes_per_second": bytes_per_second, "flops_per_second": ceilings.peak, "in_order": args.in_order}
    cells_of = {"cells": [asdict(cell) for cell in cells], "experts": [asdict(cell) for cell in experts]}
    write_json(args.json, figures | cells_of)
    reads = f"memory reads {bytes_per_second / 1e12:.2f} TB/s, a product does {ceilings.peak / 1e12:.0f} TFLOP/s"
    stdout().print(Text(f"bfloat16, pages {order}; {reads}", QUIET))
    print_table(_table(cells))
    stdout().print()
    print_table(_expert_table(experts))
    return 0


def measure_experts(
    shape: ExpertsShape, ceilings: Ceilings, device: torch.device, stopwatch: Stopwatch
) -> list[ExpertCell]:
    experts = ExpertProduct(shape, *random_experts(shape, DTYPE, device), DTYPE, stopwatch)
    cells = []
    for rows in EXPERT_ROWS:
        us, touched = experts.us(rows, TURNS)
        share = touched * shape.expert_bytes / us * 1e6 / ceilings.bandwidth
        cells.append(ExpertCell(shape, rows, us, touched, share, shape.flops(rows) / us / 1e6))
    return cells


def _expert_table(cells: Sequence[ExpertCell]) -> list[list[str]]:
    rows = [["experts, a row's", "hidden x inner", "rows", "touched", "us", "of memory's", "TFLOP/s"]]
    for cell in cells:
        shape = cell.shape
        sizes = f"{shape.num_experts}, {shape.top_k}", f"{shape.hidden} x {shape.inner}"
        share = f"{cell.bandwidth_share:.1%}"
        rows.append([*sizes, f"{cell.rows}", f"{cell.touched:.1f}", f"{cell.us:.1f}", share, f"{cell.tflops:.0f}"])
    return rows


def _table(cells: Sequence[Cell]) -> list[list[str]]:
    rows = [
        [
            "requests x queries x committed",
            "heads",
            "page size",
            "attention, us",
            "plan, us",
            "TB/s",
            "of memory's",
            "TFLOP/s",
        ]
    ]
    for cell in cells:
        rate = "" if cell.terabytes_per_second is None else f"{cell.terabytes_per_second:.2f}"
        share = "" if cell.bandwidth_share is None else f"{cell.bandwidth_share:.1%}"
        times = f"{cell.attention_us:.1f}", f"{cell.plan_us:.1f}"
        rows.append([cell.shape, cell.heads, str(cell.page_size), *times, rate, share, f"{cell.tflops:.0f}"])
    return rows


def measure(
    shape: Shape,
    page_size: int,
    bytes_per_second: float,
    device: torch.device,
    stopwatch: Stopwatch,
    in_order: bool = False,
) -> Cell:
    """Time one shape.  in_order: consecutive pages, as from a pool that was never full; otherwise in random order."""
    layers = layers_beyond_cache(shape, device)
    attention, run_layers = prepared(shape, page_size, layers, device, in_order)
    # The shape before may have left the clocks low.
    [all_ms] = stopwatch.ms([run_layers], TURNS, SECONDS)
    [plan_ms] = stopwatch.ms([_plan(attention, shape)], TURNS)
    attention_us, plan_us = 1e3 * all_ms / layers, 1e3 * plan_ms
    tflops = shape.flops / attention_us / 1e6
    if shape.chain:
        return Cell(str(shape), shape.heads, page_size, attention_us, plan_us, None, None, tflops)
    rate = shape.kv_bytes / (attention_us * 1e-6)
    return Cell(str(shape), shape.heads, page_size, attention_us, plan_us, rate / 1e12, rate / bytes_per_second, tflops)


def _plan(attention: Attention, shape: Shape) -> Callable[[], object]:
    """A function that repeats the planning of an attention that has run."""
    prefix, pages = attention.prefix, attention.pages
    policy = cast(TritonAttention, attention).splits(shape.spec).policy
    counts_blocks = (policy, count_contiguous_blocks) in prefix.planned

    def plan() -> None:
        splits = kv_splits.triton(prefix.length, prefix.first, policy)
        if counts_blocks:
            count_contiguous_blocks(splits, prefix.page_table, pages.page_size, prefix.first)

    return plan


def layers_beyond_cache(shape: Shape, device: torch.device) -> int:
    """The number of layers after which the first one has left the L2 cache."""
    cache: int = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    return min(16, max(2, -(-4 * cache // max(shape.kv_bytes, 1))))


def prepared(
    shape: Shape, page_size: int, layers: int, device: torch.device, in_order: bool = False
) -> tuple[Attention, Callable[[], Sequence[torch.Tensor]]]:
    """(a planned pass over full pages, a function that runs all of its layers).  in_order: see `measure`."""
    made = inputs(shape, page_size, layers, device, in_order)
    attention = TritonBackend().plan(*made.of_plan)
    return attention, lambda: [attention.attend(layer, made.q, made.k, made.v) for layer in range(layers)]


@dataclass(frozen=True)
class Inputs:
    """Of a pass.  of_plan: the arguments of AttentionBackend.plan; q, k, v: of every layer."""

    of_plan: tuple[PagedKV, Sequence[LayerSpec], Prefix, Nodes]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def inputs(shape: Shape, page_size: int, layers: int, device: torch.device, in_order: bool = False) -> Inputs:
    """A pass over full pages.  in_order: see `measure`."""
    tree = (0, 1, 1) if shape.chain else (STEPS, TOPK, shape.queries)
    context = shape.context + shape.queries + 1
    layout = RoundLayout(shape.batch, *tree, page_size, context, 0, max(shape.batch * shape.queries, 16))
    width = layout.pages_for(shape.context)
    specs = [shape.spec] * layers
    pages = PagedKV(layout, 1 + shape.batch * width, specs, layers, DTYPE, device)
    for stack in pages.target:
        for stacked in stack.stacked:
            for plane in stacked:
                plane.copy_(torch.randn(plane.shape, dtype=DTYPE, device=device))
    table = torch.zeros(shape.batch, layout.table_width, dtype=torch.int32, device=device)
    order = torch.arange if in_order else torch.randperm
    table[:, :width] = 1 + order(shape.batch * width, device=device).view(shape.batch, width)
    length = torch.full((shape.batch,), shape.context, dtype=torch.int64, device=device)
    keeps = shape.spec.keeps
    q = torch.randn(shape.batch, shape.queries, shape.spec.heads, keeps.k_size, dtype=DTYPE, device=device)
    rows = [
        torch.randn(shape.batch, shape.queries, *size, dtype=DTYPE, device=device).to(keeps.dtype or DTYPE)
        for size in keeps.planes.values()
    ]
    k, v = keeps.read(rows)
    return Inputs((pages, specs, Prefix(table, length), _nodes(shape, length)), q, k, v)


def _nodes(shape: Shape, length: torch.Tensor) -> Nodes:
    """A chain, or a tree in which each node sees every second node before it."""
    order = torch.arange(shape.queries, device=length.device)
    if shape.chain:
        return Nodes.chain(length[:, None] + order)
    mask = (order <= order[:, None]) & ((order - order[:, None]) % 2 == 0)
    positions = length[:, None] + mask.sum(1) - 1
    return Nodes(positions, positions, pack(mask.expand(shape.batch, -1, -1)))
