"""`espalier bench kernels`: attention over committed rows on a GPU, beside what its memory can deliver.

A cell runs as a model's layers do: one plan, then layer after layer, each with pages of its own, so that no layer finds
its rows in the L2.  What is timed are replays of a CUDA graph, by events on the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from espalier.attention import Attention, Nodes, Prefix
from espalier.attention.triton import TritonAttention, TritonBackend
from espalier.bench.timing import Stopwatch
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.kernels.attention.ancestor_bits import pack
from espalier.kernels.attention.contiguous_blocks import count_contiguous_blocks
from espalier.kernels.attention.kv_splits import kv_splits_triton
from espalier.layout import RoundLayout

KEEPS = KVHeads(kv_heads=8, k_size=128, v_size=128)
SPEC = LayerSpec(32, KEEPS)
ABOUT = f"{SPEC.heads} query and {KEEPS.kv_heads} KV heads of {KEEPS.k_size}, bfloat16"
DTYPE = torch.bfloat16
STEPS = 5
TOPK = 8
TURNS = 20


@dataclass(frozen=True)
class Shape:
    """A pass: `queries` of each of `batch` requests over `context` committed rows; a tree, or a chunk's chain."""

    batch: int
    queries: int
    context: int
    chain: bool = False

    def __str__(self) -> str:
        return f"{self.batch} x {self.queries} {'chunk' if self.chain else 'nodes'} x {self.context}"

    @property
    def kv_bytes(self) -> int:
        """Committed bytes of one layer, each read once."""
        return self.batch * self.context * SPEC.values_per_token * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Of one layer: both products over the committed rows and, of a chain, its triangle."""
        pairs = self.queries * self.context + (self.queries * (self.queries + 1) // 2 if self.chain else 0)
        return 2 * self.batch * SPEC.heads * pairs * (KEEPS.k_size + KEEPS.v_size)


SHAPES = (
    Shape(64, 8, 4096),
    Shape(1, 8, 65536),
    Shape(1, 64, 32768),
    Shape(1, 2048, 0, chain=True),
    Shape(1, 2048, 16384, chain=True),
)


@dataclass(frozen=True)
class Cell:
    """Medians, in microseconds: attention of one layer, and the plan that all layers share.

    terabytes_per_second: committed bytes over the time, and as a share of what memory can deliver, where every byte is
    read once; tflops: operations over the time.
    """

    shape: str
    page_size: int
    attention_us: float
    plan_us: float
    terabytes_per_second: float | None
    bandwidth_share: float | None
    tflops: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    shape: Shape,
    page_size: int,
    bytes_per_second: float,
    device: torch.device,
    watch: Stopwatch,
    in_order: bool = False,
) -> Cell:
    """in_order: over pages that follow one another, as a pool hands them out that was never full; else in no order."""
    layers = layers_beyond_cache(shape, device)
    attention, run = prepared(shape, page_size, layers, device, in_order)
    [all_ms] = watch.ms([run], TURNS)
    [plan_ms] = watch.ms([_plan(attention, shape)], TURNS)
    attention_us, plan_us = 1e3 * all_ms / layers, 1e3 * plan_ms
    tflops = shape.flops / attention_us / 1e6
    if shape.chain:
        return Cell(str(shape), page_size, attention_us, plan_us, None, None, tflops)
    rate = shape.kv_bytes / (attention_us * 1e-6)
    return Cell(str(shape), page_size, attention_us, plan_us, rate / 1e12, rate / bytes_per_second, tflops)


def _plan(attention: Attention, shape: Shape) -> Callable[[], object]:
    """What an attention that has run had planned, anew."""
    prefix, pages = attention.prefix, attention.pages
    policy = cast(TritonAttention, attention).splits(SPEC).policy
    counts_blocks = (policy, count_contiguous_blocks) in prefix.planned

    def plan() -> None:
        splits = kv_splits_triton(prefix.length, prefix.first, policy)
        if counts_blocks:
            count_contiguous_blocks(splits, prefix.page_table, pages.page_size, prefix.first)

    return plan


def layers_beyond_cache(shape: Shape, device: torch.device) -> int:
    """So many layers that the first has left the L2 when it is read again."""
    cache: int = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    return min(16, max(2, -(-4 * cache // max(shape.kv_bytes, 1))))


def prepared(
    shape: Shape, page_size: int, layers: int, device: torch.device, in_order: bool = False
) -> tuple[Attention, Callable[[], Sequence[torch.Tensor]]]:
    """A planned pass over full pages, and a function that runs all of its layers.  in_order: see `measure`."""
    tree = (0, 1, 1) if shape.chain else (STEPS, TOPK, shape.queries)
    context = shape.context + shape.queries + 1
    layout = RoundLayout(shape.batch, *tree, page_size, context, 0, max(shape.batch * shape.queries, 16))
    width = layout.pages_for(shape.context)
    specs = [SPEC] * layers
    pages = PagedKV(layout, 1 + shape.batch * width, specs, layers, DTYPE, device)
    for stack in pages.target:
        for plane in stack.planes:
            plane.normal_()
    table = torch.zeros(shape.batch, layout.table_width, dtype=torch.int32, device=device)
    order = torch.arange if in_order else torch.randperm
    table[:, :width] = 1 + order(shape.batch * width, device=device).view(shape.batch, width)
    length = torch.full((shape.batch,), shape.context, dtype=torch.int64, device=device)
    attention = TritonBackend().plan(pages, specs, Prefix(table, length), _nodes(shape, length))
    q, k, v = (
        torch.randn(shape.batch, shape.queries, heads, size, dtype=DTYPE, device=device)
        for heads, size in (
            (SPEC.heads, KEEPS.k_size),
            (KEEPS.kv_heads, KEEPS.k_size),
            (KEEPS.kv_heads, KEEPS.v_size),
        )
    )
    return attention, lambda: [attention.attend(layer, q, k, v) for layer in range(layers)]


def _nodes(shape: Shape, length: torch.Tensor) -> Nodes:
    """A chain, or a tree whose nodes see every other one before them."""
    order = torch.arange(shape.queries, device=length.device)
    if shape.chain:
        return Nodes.chain(length[:, None] + order)
    mask = (order <= order[:, None]) & ((order - order[:, None]) % 2 == 0)
    positions = length[:, None] + mask.sum(1) - 1
    return Nodes(positions, positions, pack(mask.expand(shape.batch, -1, -1)))
