"""What the laboratory counts of a model's passes besides their weights: prefill, and the rows that attention reads."""

from collections.abc import Sequence
from dataclasses import replace

from espalier.bench.linears import ModelShape, Run

# The ends of the names of a layer's products up to attention.
UP_TO_ATTENTION = ("fc", "project", "context", "qkv", "q and kv", "q up", "k up")


def prefill_pass(shape: ModelShape, rows: int, requests: int, drafts: bool = True) -> tuple[Run, ...]:
    """A prefill pass: the target over `rows` rows, its lm_head over a row of each request, and the draft's extend.

    A last layer whose output is read at the last tokens alone computes it there alone (speculate/round.py).
    """
    extend = shape.extend_passes(rows) if drafts else ()
    if shape.modules == 1:
        extend = _read_at(requests, extend)
    whole = shape.target_pass(rows, requests)
    if drafts and shape.mtp is not None:
        # MTP modules read the target's output at every row.
        return (*whole, *extend)
    experts = shape.experts
    rest = replace(shape, layers=shape.layers - 1, experts=experts and replace(experts, layers=experts.layers - 1))
    last = replace(shape, layers=1, experts=experts and replace(experts, layers=1))
    of_last = _read_at(requests, last.target_pass(rows)[:-1])
    return (*rest.target_pass(rows)[:-1], *of_last, whole[-1], *extend)


def _read_at(rows: int, layer: Sequence[Run]) -> tuple[Run, ...]:
    """The runs of a layer whose output is read at `rows` rows: those behind attention compute no others."""
    return tuple(run if run.name.endswith(UP_TO_ATTENTION) else replace(run, rows=rows) for run in layer)


def attended(shape: ModelShape, context: float) -> float:
    """The rows that a query attends to, summed over the layers."""
    index = None if shape.latent is None else shape.latent.index
    if index is not None:
        return shape.layers * min(index.topk, context)
    return sum(min(window, context) for window in shape.windows) + (shape.layers - len(shape.windows)) * context


def attention_flops(shape: ModelShape) -> int:
    """FLOPs of one pair of query and row, in one layer."""
    latent = shape.latent
    return 2 * shape.heads * (2 * shape.head_size if latent is None else latent.row_size + latent.kv_rank)


def index_cost(shape: ModelShape, context: float) -> tuple[float, int]:
    """(bytes of the index keys, in bfloat16, that a request's queries score, FLOPs of one query), in all layers."""
    index = None if shape.latent is None else shape.latent.index
    if index is None or context <= index.topk:
        return 0, 0
    scored = shape.layers * context
    return 2 * index.size * scored, int(2 * index.heads * index.size * scored)


def prompt_attention_flops(shape: ModelShape, length: int) -> int:
    """FLOPs of the attention of all layers over a prompt: each token reads itself and those before it."""
    windows = [*shape.windows, *[length] * (shape.layers - len(shape.windows))]
    return attention_flops(shape) * sum(min(at + 1, window) for window in windows for at in range(length))
