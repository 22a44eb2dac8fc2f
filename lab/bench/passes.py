"""What the laboratory counts of a model's passes besides their weights: prefill, and the rows that attention reads."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from espalier.bench.linears import ModelShape, ProductRun
from espalier.cache.layer_spec import INDEX_PLANE, LayerSpec, RecurrentState
from espalier.kernels.ops.recurrence import CHUNK_ROWS

# The ends of the names of a layer's products up to attention.
UP_TO_ATTENTION = (
    *("fc", "project", "context", "qkv", "q and kv", "q up", "k up", "inputs", "gates"),
    *("index up", "index key", "index weights"),
)


def prefill_pass(shape: ModelShape, rows: int, requests: int, drafts: bool = True) -> tuple[ProductRun, ...]:
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
    rest, last = shape.part(0, shape.layers - 1), shape.part(shape.layers - 1)
    of_last = _read_at(requests, last.target_pass(rows)[:-1])
    return (*rest.target_pass(rows)[:-1], *of_last, whole[-1], *extend)


def _read_at(rows: int, layer: Sequence[ProductRun]) -> tuple[ProductRun, ...]:
    """The runs of a layer whose output is read at `rows` rows: those behind attention compute no others."""
    return tuple(run if run.name.endswith(UP_TO_ATTENTION) else replace(run, rows=rows) for run in layer)


def rows_read(spec: LayerSpec, context: float) -> float:
    """The rows of a prefix that a query of a layer attends to."""
    return min(*(most for most in (spec.window, spec.topk) if most is not None), context, context)


def attention_flops(spec: LayerSpec) -> int:
    """FLOPs of one pair of query and row, in one layer."""
    keeps = spec.rows
    return 2 * spec.heads * (keeps.k_size + keeps.v_size)


def index_cost(shape: ModelShape, spec: LayerSpec, context: float) -> tuple[float, float]:
    """(bytes of the index keys, in bfloat16, that a request's queries score, FLOPs of one query), in one layer."""
    index = None if shape.latent is None else shape.latent.indexer
    if index is None or INDEX_PLANE not in spec.cache_spec.planes or context <= index.topk:
        return 0, 0
    return 2 * index.size * context, 2 * index.heads * index.size * context


def state_bytes(keeps: RecurrentState) -> int:
    """Bytes of a request's state in one layer, in float32.  The tail of its convolution is small."""
    return 4 * keeps.heads * keeps.k_size * keeps.v_size


def state_flops(keeps: RecurrentState, length: int) -> int:
    """FLOPs of a prompt through a state: of the chunk form, with half of its triangles."""
    products = (3 if keeps.delta else 2) * keeps.k_size * keeps.v_size
    products += CHUNK_ROWS * (keeps.k_size + keeps.v_size) * (2 if keeps.delta else 1) // 2
    return 2 * length * keeps.heads * products


def prompt_attention_flops(shape: ModelShape, length: int) -> int:
    """FLOPs of the attention of all layers over a prompt: each token reads itself and those before it.  Those of states
    are added."""
    return sum(count * flops_of_prompt(spec, length) for spec, count in Counter(shape.specs).items())


def flops_of_prompt(spec: LayerSpec, length: int) -> int:
    if isinstance(spec.cache_spec, RecurrentState):
        return state_flops(spec.cache_spec, length)
    return attention_flops(spec) * sum(min(at + 1, spec.window or length) for at in range(length))
