"""The watch of tests/properties over an engine on the GPU: each launch is waited for, and looked at on the CPU."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from espalier.engine.cuda import CudaExecutor
from espalier.engine.executor import LaunchHandle
from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.kernels.ops.attention import latent_attention, tree_attention
from espalier.kernels.runtime.op import Op
from espalier.slots import SlotTable
from tests.gpu.engines import DeviceSetup
from tests.gpu.twin import Done
from tests.properties.watch import CONSERVED, INCREMENTAL, PROPERTIES, READY, RESERVE, ROUTED, Watch

# Of rows of K/V and hidden states (row_error), and of scores.  float64 on a GPU sums in another order than on the CPU,
# as the watch allows for.
# bfloat16: a row is behind some 45 roundings, eleven a layer, of three layers and the draft's.  Each is 2^-8 at most,
# up or down by chance: sqrt(45) * 2^-8 / sqrt(3) = 0.015 of the row.  Where two rows of a window score nearly alike,
# softmax makes that a few times more.  Of 2.5 million rows of random texts, on a CPU, half were off by less than 0.006,
# one in a hundred by 0.018 or more, the furthest by 0.064 (in float32 by 7e-6).  The row of another token is off by
# 1.3, half the time.  The bound stands between: 64 times 2^-8.
TOLERANCES = {torch.float64: (1e-9, 1e-5), torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.25, 0.0)}
# In bfloat16 another token or node may be as good, but whatever was decided must be in the pages.
# A graph runs no Python that could count routed rows.
ON_DEVICE = tuple(name for name in PROPERTIES if name != ROUTED)
COMMITTED = (INCREMENTAL, READY, RESERVE, CONSERVED)


@contextmanager
def attention_kernels() -> Iterator[set[str]]:
    """The names of the attention kernels that the GPU's backend launches or captures meanwhile."""
    launched: set[str] = set()

    def noted(attention: Op[..., Any]) -> Callable[..., Any]:
        launch = attention.triton

        def noting(*args: Any, **how: Any) -> Any:
            launched.add(attention.__name__)
            return launch(*args, **how)

        return noting

    with ExitStack() as patches:
        for attention in (tree_attention, latent_attention):
            patches.enter_context(patch.object(attention, "triton", noted(attention)))
        yield launched


class Looked:
    """An executor whose launches end before they return, with a copy on the CPU of what its device then holds.

    A CPU executor runs tickets through `run`, and so does this one: it is where a watch hooks itself.
    """

    def __init__(self, inner: CudaExecutor):
        self.inner = inner
        self.runner: Any = SimpleNamespace(cache=inner.runner.cache)
        self.look()

    def launch(self, launch_input: LaunchInput) -> LaunchHandle:
        return Done(self.run(launch_input))

    def run(self, launch_input: LaunchInput) -> list[RequestResult]:
        rows = self.inner.launch(launch_input).result()
        self.look()
        return rows

    def look(self) -> None:
        torch.cuda.synchronize()
        self.runner.table = on_cpu(self.inner.runner.table)
        layers = self.inner.runner.pages.layers.items()
        self.runner.pages = SimpleNamespace(
            layers={layer: tuple(plane.cpu() for plane in planes) for layer, planes in layers}
        )

    def close(self) -> None:
        self.inner.close()


def on_cpu(table: SlotTable) -> SimpleNamespace:
    read = {name: getattr(table, name).cpu() for name in ("prefix_len", "root", "commit_from", "history", "page_table")}
    return SimpleNamespace(**read, carried={name: value.cpu() for name, value in table.carried.items()})


class DeviceWatch(Watch):
    def __init__(self, setup: DeviceSetup, properties: Collection[str] | None = None):
        """properties: by default those that a dtype can hold."""
        if properties is None:
            properties = COMMITTED if setup.dtype == torch.bfloat16 else ON_DEVICE
        engine = setup.engine()
        assert isinstance(engine.executor, CudaExecutor)
        self.on_device = engine.executor.runner.pages
        engine.executor = Looked(engine.executor)
        super().__init__(engine, setup.algorithm, setup.reference, properties)
        self.exact, self.score = TOLERANCES[setup.dtype]

    def spoil(self, pages: list[int]) -> None:
        size = self.engine.layout.page_size
        for buffers in self.on_device.layers.values():
            for buffer in buffers:
                buffer.view(-1, size, *buffer.shape[1:])[pages] = torch.nan
        torch.cuda.synchronize()
