"""`python -m lab kernels`: attention over committed rows, K and V heads or latent rows, the product with experts, and
layers that keep a state, on a GPU, compared with its memory bandwidth.

A cell of attention runs as a model's layers do: one plan, then layer after layer, each with its own pages, so that no
layer finds its rows in the L2 cache.  Replays of a CUDA graph are timed by events on the device.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import cast

import torch
from rich.text import Text

from espalier.attention import AttentionPlan, Nodes, Prefix
from espalier.attention.triton import TritonAttention, TritonBackend
from espalier.bench.timing import MEASUREMENT_SECONDS, GraphTimer
from espalier.bench.tune_experts import random_experts
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec, with_row_dtype
from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.hopper.config import kv_block_rows
from espalier.kernels.layers.experts_plan import ExpertsShape
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.ops.attention import count_contiguous_blocks
from espalier.kernels.ops.selection import kv_splits
from espalier.layout import MAX_PAGE_SIZE, RoundLayout
from espalier.terminal.console import (
    DIM_STYLE,
    print_header,
    print_table,
    progress,
    require_gpu,
    require_writable,
    stdout,
    write_json,
)
from espalier.terminal.flags import flag_text
from lab.bench.cases import Case, Timed, about, table, timed
from lab.bench.ceilings import measured_ceilings
from lab.bench.experts import expert_case
from lab.bench.states import STATE_HEADS, state_cases

SPEC = LayerSpec(32, KVHeads(kv_heads=8, k_size=128, v_size=128))
# The attention of DeepSeek-V2-Lite and of DeepSeek-V3.
LATENT = LatentKV(576, 512)
FEW_HEADS, MANY_HEADS = (LayerSpec(heads, LATENT, scale=192**-0.5) for heads in (16, 128))
DTYPE = torch.bfloat16
STEPS = 5
TOPK = 8

PARTS = ("attention", "experts", "states")
HEADS = ("what", "requests x queries x committed", "heads", "page size")
EXPERT_HEADS = ("experts, a row's", "hidden x inner", "rows")


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
        keeps = self.spec.cache_spec
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
        keeps = self.spec.cache_spec
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
        for spec in with_row_dtype((SPEC, MANY_HEADS), FP8)
        for sizes in ((1, 1, 65536), (1, 64, 32768), (64, 8, 4096))
    ),
)
# DeepSeek-V2-Lite, Qwen3-30B-A3B and gpt-oss-20b.
EXPERTS = (ExpertsShape(64, 6, 2048, 1408), ExpertsShape(128, 8, 2048, 768), ExpertsShape(32, 4, 2880, 2880))
EXPERT_ROWS = (1, 4, 16, 64, 256, 2048)


def run(args: Namespace) -> int:
    require_page_sizes(args.page_size)
    require_writable("--json", args.json)
    device = require_gpu("kernels")
    print_header()
    timer = GraphTimer()
    ceilings = measured_ceilings(timer, device)
    sources: dict[str, tuple[Sequence[str], Iterator[Case]]] = {
        "attention": (HEADS, attention_cases(args.page_size, device, args.in_order)),
        "experts": (EXPERT_HEADS, expert_cases(device)),
        "states": (STATE_HEADS, state_cases(device)),
    }
    names = [name for name in PARTS if name in (args.only or PARTS)]
    measured: dict[str, list[Timed]] = {}
    with progress("measuring", len(names)) as advance:
        for name in names:
            measured[name] = list(timed(sources[name][1], timer, ceilings.bandwidth))
            advance()
    order = "in order" if args.in_order else "in no order"
    cells = {name: [one.as_dict(sources[name][0]) for one in rows] for name, rows in measured.items()}
    write_json(args.json, {"ceilings": asdict(ceilings), "in_order": args.in_order, **cells})
    stdout().print(Text(f"bfloat16, pages {order}; {about(ceilings)}", DIM_STYLE))
    for name, rows in measured.items():
        print_table(table(sources[name][0], rows))
        stdout().print()
    return 0


def require_page_sizes(sizes: Sequence[int]) -> None:
    """Raises EspalierError."""
    if not all(1 <= size <= MAX_PAGE_SIZE for size in sizes):
        raise EspalierError(f"--page-size={flag_text(list(sizes))} is not supported; use 1 to {MAX_PAGE_SIZE}")


def attention_cases(page_sizes: Sequence[int], device: torch.device, in_order: bool = False) -> Iterator[Case]:
    """Of each shape the attention of one layer, and the plan that all layers share.

    in_order: consecutive pages, as from a pool that was never full; otherwise in random order.
    """
    for shape, page_size in product(SHAPES, page_sizes):
        layers = layers_beyond_cache(shape, device)
        attention, run_layers = prepared(shape, page_size, layers, device, in_order)
        names = str(shape), shape.heads, str(page_size)
        # A chain's committed rows are not all that it reads.  The shape before may have left the clocks low.
        num_bytes = 0 if shape.chain else shape.kv_bytes
        yield Case(("attention", *names), num_bytes, shape.flops, run_layers, layers, MEASUREMENT_SECONDS)
        yield Case(("plan", *names), 0, 0, _plan(attention, shape))


def expert_cases(device: torch.device) -> Iterator[Case]:
    for shape in EXPERTS:
        experts = random_experts(shape, DTYPE, device)
        sizes = f"{shape.num_experts}, {shape.top_k}", f"{shape.hidden_size} x {shape.inner_size}"
        for rows in EXPERT_ROWS:
            yield expert_case((*sizes, f"{rows}"), shape, *experts, DTYPE, rows)


def _plan(attention: AttentionPlan, shape: Shape) -> Callable[[], object]:
    """A function that repeats the planning of an attention that has run."""
    prefix, pages = attention.prefix, attention.pages
    policy = cast(TritonAttention, attention).splits(shape.spec).policy
    rows = kv_block_rows(shape.spec.cache_spec.k_size)
    counts_blocks = (policy, count_contiguous_blocks, rows) in prefix.plan_cache

    def plan() -> None:
        splits = kv_splits.triton(prefix.length, prefix.first_position, policy)
        if counts_blocks:
            count_contiguous_blocks(splits, prefix.page_table, pages.page_size, prefix.first_position, rows)

    return plan


def layers_beyond_cache(shape: Shape, device: torch.device) -> int:
    """The number of layers after which the first one has left the L2 cache."""
    cache: int = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    return min(16, max(2, -(-4 * cache // max(shape.kv_bytes, 1))))


def prepared(
    shape: Shape, page_size: int, layers: int, device: torch.device, in_order: bool = False
) -> tuple[AttentionPlan, Callable[[], Sequence[torch.Tensor]]]:
    """(a planned pass over full pages, a function that runs all of its layers).  in_order: see `attention_cases`."""
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
    """A pass over full pages.  in_order: see `attention_cases`."""
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
    keeps = shape.spec.rows
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
    return Nodes(positions, positions, pack_bits(mask.expand(shape.batch, -1, -1)))
