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
from lab.bench.cases import KernelCase, TimedCase, describe_ceilings, time_cases, timing_table
from lab.bench.ceilings import measure_ceilings
from lab.bench.experts import expert_case
from lab.bench.states import STATE_COLUMNS, state_cases

GQA_SPEC = LayerSpec(32, KVHeads(kv_heads=8, k_size=128, v_size=128))
# The attention of DeepSeek-V2-Lite and of DeepSeek-V3.
MLA_ROWS = LatentKV(576, 512)
MLA_SPEC_16_HEADS, MLA_SPEC_128_HEADS = (LayerSpec(heads, MLA_ROWS, scale=192**-0.5) for heads in (16, 128))
DTYPE = torch.bfloat16
TREE_STEPS = 5
TREE_TOPK = 8

MEASURED_PARTS = ("attention", "experts", "states")
ATTENTION_COLUMNS = ("what", "requests x queries x committed", "heads", "page size")
EXPERT_COLUMNS = ("experts, a row's", "hidden x inner", "rows")


@dataclass(frozen=True)
class PassShape:
    """A pass of `queries` rows for each of `batch` requests over `context` committed rows.

    chain: whether the rows are a prefill chunk, else a tree.  spec: of the pass's layers."""

    batch: int
    queries: int
    context: int
    chain: bool = False
    spec: LayerSpec = GQA_SPEC

    def __str__(self) -> str:
        return f"{self.batch} x {self.queries} {'chunk' if self.chain else 'nodes'} x {self.context}"

    @property
    def heads(self) -> str:
        cache = self.spec.cache_spec
        kept = f"a row of {cache.size}" if isinstance(cache, LatentKV) else f"{cache.kv_heads} of {cache.k_size}"
        return f"{self.spec.heads} on {kept}{', FP8' if cache.dtype == FP8 else ''}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of the committed K and V of one layer."""
        return self.batch * self.context * self.spec.bytes_per_token(DTYPE)

    @property
    def flops(self) -> int:
        """FLOPs of one layer: both products over the committed rows and, in a chain, over the earlier new rows too."""
        pairs = self.queries * self.context + (self.queries * (self.queries + 1) // 2 if self.chain else 0)
        cache = self.spec.cache_spec
        return 2 * self.batch * self.spec.heads * pairs * (cache.k_size + cache.v_size)


PASS_SHAPES = (
    PassShape(64, 8, 4096),
    PassShape(1, 8, 65536),
    PassShape(1, 64, 32768),
    PassShape(1, 2048, 0, chain=True),
    PassShape(1, 2048, 16384, chain=True),
    *(
        PassShape(*sizes, spec=spec)
        for spec in (MLA_SPEC_16_HEADS, MLA_SPEC_128_HEADS)
        for sizes in ((1, 1, 65536), (1, 64, 32768), (32, 16, 4096))
    ),
    *(
        PassShape(*sizes, spec=spec)
        for spec in with_row_dtype((GQA_SPEC, MLA_SPEC_128_HEADS), FP8)
        for sizes in ((1, 1, 65536), (1, 64, 32768), (64, 8, 4096))
    ),
)
# DeepSeek-V2-Lite, Qwen3-30B-A3B and gpt-oss-20b.
EXPERT_SHAPES = (ExpertsShape(64, 6, 2048, 1408), ExpertsShape(128, 8, 2048, 768), ExpertsShape(32, 4, 2880, 2880))
EXPERT_ROWS = (1, 4, 16, 64, 256, 2048)


def run(args: Namespace) -> int:
    require_page_sizes(args.page_size)
    require_writable("--json", args.json)
    device = require_gpu("kernels")
    print_header()
    timer = GraphTimer()
    ceilings = measure_ceilings(timer, device)
    sources: dict[str, tuple[Sequence[str], Iterator[KernelCase]]] = {
        "attention": (ATTENTION_COLUMNS, attention_cases(args.page_size, device, args.in_order)),
        "experts": (EXPERT_COLUMNS, expert_cases(device)),
        "states": (STATE_COLUMNS, state_cases(device)),
    }
    names = [name for name in MEASURED_PARTS if name in (args.only or MEASURED_PARTS)]
    measured: dict[str, list[TimedCase]] = {}
    with progress("measuring", len(names)) as advance:
        for name in names:
            measured[name] = list(time_cases(sources[name][1], timer, ceilings.bandwidth))
            advance()
    order = "in order" if args.in_order else "in no order"
    cells = {name: [one.as_dict(sources[name][0]) for one in rows] for name, rows in measured.items()}
    write_json(args.json, {"ceilings": asdict(ceilings), "in_order": args.in_order, **cells})
    stdout().print(Text(f"bfloat16, pages {order}; {describe_ceilings(ceilings)}", DIM_STYLE))
    for name, rows in measured.items():
        print_table(timing_table(sources[name][0], rows))
        stdout().print()
    return 0


def require_page_sizes(sizes: Sequence[int]) -> None:
    """Raises EspalierError."""
    if not all(1 <= size <= MAX_PAGE_SIZE for size in sizes):
        raise EspalierError(f"--page-size={flag_text(list(sizes))} is not supported; use 1 to {MAX_PAGE_SIZE}")


def attention_cases(
    page_sizes: Sequence[int], device: torch.device, pages_in_order: bool = False
) -> Iterator[KernelCase]:
    """Yields two cases for each shape: the attention of one layer, and the plan that all layers share.

    pages_in_order: pages are consecutive, as in a pool that was never full; otherwise in random order."""
    for shape, page_size in product(PASS_SHAPES, page_sizes):
        num_layers = layers_beyond_cache(shape, device)
        attention, run_layers = prepare_pass(shape, page_size, num_layers, device, pages_in_order)
        names = str(shape), shape.heads, str(page_size)
        # A chain reads more than its committed rows.  MEASUREMENT_SECONDS: the previous shape may have lowered clocks.
        num_bytes = 0 if shape.chain else shape.kv_bytes
        yield KernelCase(("attention", *names), num_bytes, shape.flops, run_layers, num_layers, MEASUREMENT_SECONDS)
        yield KernelCase(("plan", *names), 0, 0, _planner(attention, shape))


def expert_cases(device: torch.device) -> Iterator[KernelCase]:
    for shape in EXPERT_SHAPES:
        experts = random_experts(shape, DTYPE, device)
        sizes = f"{shape.num_experts}, {shape.top_k}", f"{shape.hidden_size} x {shape.inner_size}"
        for rows in EXPERT_ROWS:
            yield expert_case((*sizes, f"{rows}"), shape, *experts, DTYPE, rows)


def _planner(attention: AttentionPlan, shape: PassShape) -> Callable[[], object]:
    """Returns a function that repeats the planning of `attention`, which must have run once."""
    prefix, pages = attention.prefix, attention.pages
    policy = cast(TritonAttention, attention).splits(shape.spec).policy
    rows = kv_block_rows(shape.spec.cache_spec.k_size)
    counts_blocks = (policy, count_contiguous_blocks, rows) in prefix.plan_cache

    def plan() -> None:
        splits = kv_splits.triton(prefix.length, prefix.first_position, policy)
        if counts_blocks:
            count_contiguous_blocks(splits, prefix.page_table, pages.page_size, prefix.first_position, rows)

    return plan


def layers_beyond_cache(shape: PassShape, device: torch.device) -> int:
    """Returns the number of layers after which the first layer's rows have left the L2 cache."""
    cache: int = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    return min(16, max(2, -(-4 * cache // max(shape.kv_bytes, 1))))


def prepare_pass(
    shape: PassShape, page_size: int, num_layers: int, device: torch.device, pages_in_order: bool = False
) -> tuple[AttentionPlan, Callable[[], Sequence[torch.Tensor]]]:
    """Returns (a planned pass over full pages, a function that runs all its layers).  See attention_cases."""
    made = make_pass_inputs(shape, page_size, num_layers, device, pages_in_order)
    attention = TritonBackend().plan(*made.plan_arguments)
    return attention, lambda: [attention.attend(layer, made.q, made.k, made.v) for layer in range(num_layers)]


@dataclass(frozen=True)
class PassInputs:
    """The inputs of a pass.  plan_arguments: for AttentionBackend.plan.  q, k, v: the same tensors for every layer."""

    plan_arguments: tuple[PagedKV, Sequence[LayerSpec], Prefix, Nodes]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_pass_inputs(
    shape: PassShape, page_size: int, num_layers: int, device: torch.device, pages_in_order: bool = False
) -> PassInputs:
    """Returns the inputs of a pass over full pages.  pages_in_order: see attention_cases."""
    tree = (0, 1, 1) if shape.chain else (TREE_STEPS, TREE_TOPK, shape.queries)
    context = shape.context + shape.queries + 1
    layout = RoundLayout(shape.batch, *tree, page_size, context, 0, max(shape.batch * shape.queries, 16))
    width = layout.pages_for(shape.context)
    specs = [shape.spec] * num_layers
    pages = PagedKV(layout, 1 + shape.batch * width, specs, num_layers, DTYPE, device)
    for stack in pages.target_stacks:
        for stacked in stack.planes:
            for plane in stacked:
                plane.copy_(torch.randn(plane.shape, dtype=DTYPE, device=device))
    table = torch.zeros(shape.batch, layout.table_width, dtype=torch.int32, device=device)
    order = torch.arange if pages_in_order else torch.randperm
    table[:, :width] = 1 + order(shape.batch * width, device=device).view(shape.batch, width)
    length = torch.full((shape.batch,), shape.context, dtype=torch.int64, device=device)
    row_spec = shape.spec.row_spec
    q = torch.randn(shape.batch, shape.queries, shape.spec.heads, row_spec.k_size, dtype=DTYPE, device=device)
    rows = [
        torch.randn(shape.batch, shape.queries, *size, dtype=DTYPE, device=device).to(row_spec.dtype or DTYPE)
        for size in row_spec.planes.values()
    ]
    k, v = row_spec.read(rows)
    return PassInputs((pages, specs, Prefix(table, length), _pass_nodes(shape, length)), q, k, v)


def _pass_nodes(shape: PassShape, length: torch.Tensor) -> Nodes:
    """A chain, or a tree in which each node sees every second node before it."""
    order = torch.arange(shape.queries, device=length.device)
    if shape.chain:
        return Nodes.chain(length[:, None] + order)
    mask = (order <= order[:, None]) & ((order - order[:, None]) % 2 == 0)
    positions = length[:, None] + mask.sum(1) - 1
    return Nodes(positions, positions, pack_bits(mask.expand(shape.batch, -1, -1)))
