"""FLOPs and bytes of a model's passes besides linear layers: attention, states, and the products of prefill."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from espalier.bench.linears import ModelShape, ProductGroup
from espalier.cache.layer_spec import INDEX_PLANE, LayerSpec, RecurrentState
from espalier.kernels.ops.recurrence import CHUNK_ROWS

# The ends of the names of a layer's products up to attention.
UP_TO_ATTENTION = (
    *("fc", "project", "context", "qkv", "q and kv", "q up", "k up", "inputs", "gates"),
    *("index up", "index key", "index weights"),
)


def prefill_pass(shape: ModelShape, rows: int, num_requests: int, has_draft: bool = True) -> tuple[ProductGroup, ...]:
    """Returns the products of a prefill pass.

    The target runs over `rows` rows, its lm_head over one row of each request, and then the draft's extend runs.
    If only the last tokens' output of the last layer is read, that layer computes only these rows (speculate/round.py).
    """
    extend = shape.extend_passes(rows) if has_draft else ()
    if shape.num_draft_modules == 1:
        extend = _with_output_rows(num_requests, extend)
    whole = shape.target_pass(rows, num_requests)
    if has_draft and shape.mtp is not None:
        # MTP modules read the target's output at every row.
        return (*whole, *extend)
    rest, last = shape.slice_layers(0, shape.num_layers - 1), shape.slice_layers(shape.num_layers - 1)
    of_last = _with_output_rows(num_requests, last.target_pass(rows)[:-1])
    return (*rest.target_pass(rows)[:-1], *of_last, whole[-1], *extend)


def _with_output_rows(rows: int, layer_runs: Sequence[ProductGroup]) -> tuple[ProductGroup, ...]:
    """Returns a layer's products if its output is read at `rows` rows: those after attention compute no other rows."""
    return tuple(run if run.name.endswith(UP_TO_ATTENTION) else replace(run, num_rows=rows) for run in layer_runs)


def attended_rows(spec: LayerSpec, context: float) -> float:
    """Returns how many of `context` prefix rows a query of a layer attends to."""
    return min(*(most for most in (spec.window, spec.topk) if most is not None), context, context)


def attention_flops(spec: LayerSpec) -> int:
    """Returns the attention FLOPs of one layer for one pair (query, row)."""
    row_spec = spec.row_spec
    return 2 * spec.heads * (row_spec.k_size + row_spec.v_size)


def index_cost(shape: ModelShape, spec: LayerSpec, context: float) -> tuple[float, float]:
    """Returns (bytes of index keys, in bfloat16, that a request's queries score, FLOPs per query), of one layer."""
    index = None if shape.latent is None else shape.latent.indexer
    if index is None or INDEX_PLANE not in spec.cache_spec.planes or context <= index.topk:
        return 0, 0
    return 2 * index.size * context, 2 * index.heads * index.size * context


def state_bytes(state: RecurrentState) -> int:
    """Bytes of a request's state in one layer, in float32.  The tail of its convolution is small."""
    return 4 * state.heads * state.k_size * state.v_size


def state_flops(state: RecurrentState, length: int) -> int:
    """FLOPs of a prompt in a layer with a state, computed in chunks.  Only half of each triangular product counts."""
    products = (3 if state.delta else 2) * state.k_size * state.v_size
    products += CHUNK_ROWS * (state.k_size + state.v_size) * (2 if state.delta else 1) // 2
    return 2 * length * state.heads * products


def prompt_attention_flops(shape: ModelShape, length: int) -> int:
    """Returns the FLOPs of causal attention over a prompt, of all layers, plus the FLOPs of recurrent states."""
    return sum(count * layer_prompt_flops(spec, length) for spec, count in Counter(shape.layer_specs).items())


def layer_prompt_flops(spec: LayerSpec, length: int) -> int:
    if isinstance(spec.cache_spec, RecurrentState):
        return state_flops(spec.cache_spec, length)
    return attention_flops(spec) * sum(min(at + 1, spec.window or length) for at in range(length))
