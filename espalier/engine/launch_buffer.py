"""Packs a launch input into one int64 vector, so that one copy sends it, and splits the vector on the device.

For a round, the order and lengths of the parts depend on the batch size alone.  So a CUDA graph finds each part at the
same offset in every launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from espalier.engine.launch_input import LaunchInput
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.slots import ScatterUpdate, SlotTable

Form = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PackedLaunch:
    """vector: int64; form: (name, length) of each part, in order."""

    vector: np.ndarray
    form: Form


@dataclass(frozen=True)
class DeviceLaunch:
    """The tensors that a launch reads.

    entry: [1], the entry of the results ring to write; slots: [B], padded with slot 0; lengths: [B], tokens that a
    prefill pass enters, empty for a round; cleared: slots that get a new request; cells: values to write into the slot
    table, by field.
    """

    entry: Tensor
    slots: Tensor
    lengths: Tensor
    cleared: Tensor
    cells: Mapping[str, ScatterUpdate]

    @classmethod
    def of(cls, vector: Tensor, form: Form) -> "DeviceLaunch":
        parts = dict(zip((name for name, _ in form), vector.split([size for _, size in form]), strict=True))
        direct = {name: parts.pop(name) for name in ("entry", "slots", "lengths", "cleared")}
        fields = dict.fromkeys(name.removesuffix(".at").removesuffix(".values") for name in parts)
        return cls(
            **direct, cells={name: ScatterUpdate(parts[f"{name}.at"], parts[f"{name}.values"]) for name in fields}
        )

    def apply(self, table: SlotTable) -> None:
        """Update the slot table.  Every launch begins with this."""
        if self.cleared.shape[0]:
            table.clear(self.cleared)
        table.write(self.cells)


def pack_launch(table: SlotTable, launch_input: LaunchInput, entry: int, batch: int) -> PackedLaunch:
    """Pack a launch input.  entry: entry of the results ring; batch: size after padding with slot 0.

    Raises EspalierError where the slot table or the vector is too small.
    """
    cells = table.admission_updates(launch_input.slot_inits)
    appended_pages = table.page_table_updates(launch_input.appended_pages)
    if not launch_input.is_prefill:
        appended_pages = _padded_cells(appended_pages, table.layout, batch)
    initial = cells.get("page_table", ScatterUpdate(*np.zeros((2, 0), dtype=np.int64)))
    cells["page_table"] = ScatterUpdate(*(np.concatenate(pair) for pair in zip(initial, appended_pages, strict=True)))
    parts = {
        "entry": np.array([entry]),
        "slots": _padded(launch_input.slots, batch),
        "lengths": _padded(launch_input.lengths, batch if launch_input.is_prefill else 0),
        "cleared": np.array([slot_init.slot for slot_init in launch_input.slot_inits], dtype=np.int64),
    }
    for name, (at, values) in cells.items():
        parts |= {f"{name}.at": at, f"{name}.values": values}
    return PackedLaunch(np.concatenate(list(parts.values())), tuple((name, len(part)) for name, part in parts.items()))


def _padded(values: Sequence[int], count: int) -> np.ndarray:
    padded = np.zeros(count, dtype=np.int64)
    padded[: len(values)] = values
    return padded


def _padded_cells(cells: ScatterUpdate, layout: RoundLayout, batch: int) -> ScatterUpdate:
    """Pad to the fixed length of a round.  Padding writes 0 to cell 0: the dummy request's first page stays page 0."""
    capacity = layout.max_appended_pages(batch)
    if len(cells.at) > capacity:
        raise EspalierError(
            f"a round of {batch} requests appends {len(cells.at)} pages and its launch input holds {capacity}; both "
            f"follow from {layout}: reserve pages with layout.reserve"
        )
    return ScatterUpdate(_padded(cells.at, capacity), _padded(cells.values, capacity))
