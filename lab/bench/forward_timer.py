"""Times the forward passes of an engine on a CPU."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from espalier.bench.drive import rebuilt_engine
from espalier.engine.engine import Engine
from espalier.speculate.drafters.autoregressive import AutoregressiveDrafter
from espalier.speculate.drafters.path_merging import PathMergingDrafter


class ForwardTimer:
    """A model that sums the time of its calls.  It forwards everything to `model`; calls: the methods that are
    timed, besides calls of the model itself."""

    def __init__(self, model: Any, calls: Sequence[str] = ()):
        self.model = model
        self.calls = frozenset(calls)
        self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        return self._timed(self.model, *args)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.model, name)
        return (lambda *args: self._timed(value, *args)) if name in self.calls else value

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        begun = perf_counter()
        result = call(*args)
        self.seconds += perf_counter() - begun
        return result


def engine_with_timers(engine: Engine) -> tuple[Engine, list[ForwardTimer]]:
    """A new engine for a CPU, on the models and buffers of this one, with a timer in front of target and draft."""
    runner = engine.executor.runner
    target: Any = ForwardTimer(runner.target, ("logits",))
    merging = runner.drafter if isinstance(runner.drafter, PathMergingDrafter) else None
    drafter = runner.drafter if merging is None else merging.drafter
    if not isinstance(drafter, AutoregressiveDrafter):
        return rebuilt_engine(engine, 0, target=target), [target]
    draft: Any = ForwardTimer(drafter.draft, ("fuse",))
    draft.modules = [ForwardTimer(module, ("logits", "output_from_hidden")) for module in drafter.draft.modules]
    timed: Any = type(drafter)(draft, drafter.layout, drafter.cache)
    timed = timed if merging is None else PathMergingDrafter(timed, merging.layout)
    return rebuilt_engine(engine, 0, target=target, drafter=timed), [target, draft, *draft.modules]
