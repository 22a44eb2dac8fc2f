"""Counts the experts that a target's passes touch.  Counting slows passes down, so they must not be timed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.engine.lead import LeadExecutor
from espalier.kernels.ops.experts import route
from espalier.models.layers.mlp import MixtureMLP, RoutedRows
from espalier.models.weight_formats.sharded import UnsummedOutput


class CountingExperts:
    """A MixtureMLP that also counts the experts that each call touches, without a sync.

    counts: each call appends (rows, number of experts).
    """

    def __init__(self, mlp: MixtureMLP, counts: list[tuple[int, Tensor]]) -> None:
        self.mlp, self.counts, self.norm_input = mlp, counts, mlp.norm_input

    def __call__(self, rows: RoutedRows, live: Tensor | None = None) -> Tensor | UnsummedOutput:
        mlp, x = self.mlp, rows.x
        ids, _ = route(rows.logits, mlp.router_bias, mlp.routing)
        if live is not None:
            ids = ids.masked_fill(~live[:, None], mlp.routing.num_experts)
        has_rows = torch.zeros(mlp.routing.num_experts + 1, dtype=torch.int64, device=x.device)
        has_rows.scatter_(0, ids.flatten(), 1)
        self.counts.append((len(x), has_rows[:-1].sum()))
        return mlp(rows, live)


def mixture_blocks(engine: Engine) -> list[MixtureMLP]:
    """The target's mixture-of-experts blocks, by layer; none if it is dense."""
    return [layer.mlp for layer in _mixture_layers(engine)]


def _mixture_layers(engine: Engine) -> list[Any]:
    layers = getattr(engine.executor.runner.target, "layers", [])
    return [layer for layer in layers if isinstance(layer.mlp, MixtureMLP)]


@contextmanager
def count_experts(engine: Engine) -> Iterator[list[tuple[int, Tensor]]]:
    """Inside this context launches run eagerly, and each mixture-of-experts block counts (CountingExperts.counts)."""
    counts: list[tuple[int, Tensor]] = []
    executor: Any = engine.executor
    layers = _mixture_layers(engine)
    graphs = executor.graphs if isinstance(executor, CudaExecutor) else None
    try:
        if graphs is not None:
            executor.graphs = {}
        for layer in layers:
            layer.mlp = CountingExperts(layer.mlp, counts)
        yield counts
    finally:
        for layer in layers:
            layer.mlp = layer.mlp.mlp
        if graphs is not None:
            executor.graphs = graphs


def experts_touched(engine: Engine, run_passes: Callable[[], object], rows: int | None = None) -> float | None:
    """Returns how many experts a target pass touches in a layer, the mean over the passes of `run_passes`.

    None for a dense target, and if several ranks run it.  rows: only passes of this size count; None: all passes."""
    # Other ranks would still replay their CUDA graphs while this rank runs eagerly.
    if not mixture_blocks(engine) or isinstance(engine.executor, LeadExecutor):
        return None
    with count_experts(engine) as counts:
        run_passes()
        counted = [count for pass_rows, count in counts if rows in (None, pass_rows)]
        if counted[0].is_cuda:
            torch.cuda.synchronize(counted[0].device)
        return float(torch.stack(counted).double().mean())
