"""A launch input as one vector of integers, so that one copy sends it, and as the tensors that a launch reads from it.

The vector of a round has a form that follows from its batch alone: a CUDA graph finds every part in the same place.
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
    """vector: int64; form: the names and lengths of its parts, in order."""

    vector: np.ndarray
    form: Form


@dataclass(frozen=True)
class DeviceLaunch:
    """What a launch reads.  entry: [1] of the results' ring; slots: [B], padded by slot 0; lengths: [B] that a prefill
    pass enters, empty for a round; cleared: slots that change hands; cells: what is written into the slot table."""

    entry: Tensor
    slots: Tensor
    lengths: Tensor
    cleared: Tensor
    cells: Mapping[str, ScatterUpdate]

    @classmethod
    def of(cls, vector: Tensor, form: Form) -> "DeviceLaunch":
        parts = dict(zip((name for name, _ in form), vector.split([size for _, size in form]), strict=True))
        own = {name: parts.pop(name) for name in ("entry", "slots", "lengths", "cleared")}
        fields = dict.fromkeys(name.removesuffix(".at").removesuffix(".values") for name in parts)
        return cls(**own, cells={name: ScatterUpdate(parts[f"{name}.at"], parts[f"{name}.values"]) for name in fields})

    def apply(self, table: SlotTable) -> None:
        """The first thing that a launch does."""
        if self.cleared.shape[0]:
            table.clear(self.cleared)
        table.write(self.cells)


def pack_launch(table: SlotTable, launch_input: LaunchInput, entry: int, batch: int) -> PackedLaunch:
    """entry: of the results' ring; batch: to which the slots are padded by the dummy.  Raises EspalierError."""
    cells = table.admission_updates(launch_input.slot_inits)
    appended_pages = table.page_table_updates(launch_input.appended_pages)
    if not launch_input.is_prefill:
        appended_pages = _padded_cells(appended_pages, table.layout, batch)
    known = cells.get("page_table", ScatterUpdate(*np.zeros((2, 0), dtype=np.int64)))
    cells["page_table"] = ScatterUpdate(*(np.concatenate(pair) for pair in zip(known, appended_pages, strict=True)))
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
    """As many as the form has; the rest say once more that the dummy request's first page is the dummy page."""
    most = layout.max_appended_pages(batch)
    if len(cells.at) > most:
        raise EspalierError(
            f"a round of {batch} appends {len(cells.at)} pages and its launch input holds {most}; both follow from "
            f"{layout}: reserve pages by layout.reserve"
        )
    return ScatterUpdate(_padded(cells.at, most), _padded(cells.values, most))
