"""Two executors that run the same launches, one by its graphs and one eagerly, held to the same bits after each."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.engine.executor import LaunchHandle
from espalier.engine.launch_input import LaunchInput, RequestResult

# Rows of the dummy request, which several rows of a padded batch write at once, and nobody reads.
NOBODYS = ("history", "carried.")


@dataclass(frozen=True)
class Done:
    rows: list[RequestResult]

    def result(self) -> list[RequestResult]:
        return self.rows


class Twin:
    """An executor that is two.  replayed: rounds that ran as a graph, by batch; num_passes: prefill passes that did;
    num_eager: other launches."""

    def __init__(self, graphs: CudaExecutor, eager: CudaExecutor):
        self.graphs, self.eager = graphs, eager
        eager.graphs.clear()
        self.runner = graphs.runner
        self.replayed: Counter[int] = Counter()
        self.num_passes = self.num_eager = 0

    def launch(self, launch_input: LaunchInput) -> LaunchHandle:
        launch_input = replace(launch_input, reports_trees=True)
        if self.graphs.graph_of(launch_input) is None:
            self.num_eager += 1
        elif launch_input.is_prefill:
            self.num_passes += 1
        else:
            self.replayed[len(launch_input.slots)] += 1
        rows, others = (executor.launch(launch_input).result() for executor in (self.graphs, self.eager))
        torch.cuda.synchronize()
        assert rows == others, f"rows of {launch_input}"
        for (name, one), (_, other) in zip(state(self.graphs), state(self.eager), strict=True):
            assert same_bits(one, other), f"{name} differs after {launch_input}"
        return Done(rows)

    def close(self) -> None:
        self.graphs.close()
        self.eager.close()


def twins(one: Engine, other: Engine) -> Twin:
    """From now on `one` launches on both."""
    assert isinstance(one.executor, CudaExecutor) and isinstance(other.executor, CudaExecutor)
    one.executor = Twin(one.executor, other.executor)
    return one.executor


def state(executor: CudaExecutor) -> Iterator[tuple[str, Tensor]]:
    """All that passes from launch to launch, and what came of the last ones."""
    table, pages = executor.runner.table, executor.runner.pages
    fields = {name: value for name, value in vars(table).items() if isinstance(value, Tensor)}
    fields |= {f"carried.{name}": value for name, value in table.carried.items()}
    for name, value in fields.items():
        yield f"the slot table's {name}", value[1:] if name.startswith(NOBODYS) else value
    for layer, pair in pages.layers.items():
        for what, buffer in zip("kv", pair, strict=True):
            yield f"committed {what} of layer {layer}", buffer
    states = executor.runner.cache.states
    for index, stack in enumerate(states.stacks if states is not None else ()):
        for what, values in (("tails", stack.conv_tail), ("states", stack.recurrent_state)):
            if values is not None:
                # The first row is of dummies, the last one takes what nobody keeps.
                yield f"{what} of stack {index}", values[:, 1:-1]
    yield "the results' ring", executor.results.ring


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN equals itself here, and 0.0 is not -0.0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
