"""The watch of tests/properties over an engine on the GPU: each launch is waited for, and looked at on the CPU."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch

from espalier.engine.cuda import CudaExecutor
from espalier.engine.executor import Handle
from espalier.engine.ticket import Row, Ticket
from espalier.slots import SlotTable
from tests.gpu.engines import DeviceSetup
from tests.gpu.twin import Done
from tests.properties.watch import CONSERVED, INCREMENTAL, PROPERTIES, READY, RESERVE, Watch

# Of K/V and hidden states, and of scores.  float64 on a GPU sums in another order than on the CPU, as the watch allows
# for.  Rounding of float32 comes to 1e-5 behind three layers, of bfloat16 to 0.15; a row of another token is off by 1.
TOLERANCES = {torch.float64: (1e-9, 1e-5), torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.4, 0.0)}
# In bfloat16 another token or node may be as good, but whatever was decided must be in the pages.
COMMITTED = (INCREMENTAL, READY, RESERVE, CONSERVED)


class Looked:
    """An executor whose launches end before they return, with a copy on the CPU of what its device then holds.

    A CPU executor runs tickets through `run`, and so does this one: it is where a watch hooks itself.
    """

    def __init__(self, inner: CudaExecutor):
        self.inner = inner
        self.round: Any = SimpleNamespace()
        self.look()

    def launch(self, ticket: Ticket) -> Handle:
        return Done(self.run(ticket))

    def run(self, ticket: Ticket) -> list[Row]:
        rows = self.inner.launch(ticket).result()
        self.look()
        return rows

    def look(self) -> None:
        torch.cuda.synchronize()
        self.round.table = on_cpu(self.inner.round.table)
        layers = self.inner.round.pages.layers.items()
        self.round.pages = SimpleNamespace(
            layers={layer: tuple(plane.cpu() for plane in planes) for layer, planes in layers}
        )

    def close(self) -> None:
        self.inner.close()


def on_cpu(table: SlotTable) -> SimpleNamespace:
    read = {name: getattr(table, name).cpu() for name in ("prefix_len", "root", "history", "page_table")}
    return SimpleNamespace(**read, carried={name: value.cpu() for name, value in table.carried.items()})


class DeviceWatch(Watch):
    def __init__(self, setup: DeviceSetup, properties: Collection[str] | None = None):
        """properties: by default those that a dtype can hold."""
        if properties is None:
            properties = COMMITTED if setup.dtype == torch.bfloat16 else PROPERTIES
        engine = setup.engine()
        assert isinstance(engine.executor, CudaExecutor)
        self.on_device = engine.executor.round.pages
        engine.executor = Looked(engine.executor)
        super().__init__(engine, setup.algorithm, setup.reference, properties)
        self.exact, self.score = TOLERANCES[setup.dtype]

    def spoil(self, pages: list[int]) -> None:
        size = self.engine.layout.page_size
        for buffers in self.on_device.layers.values():
            for buffer in buffers:
                buffer.view(-1, size, *buffer.shape[1:])[pages] = torch.nan
        torch.cuda.synchronize()
