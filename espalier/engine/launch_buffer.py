"""Packs a launch input into one int64 vector, so that one copy brings it to the device, and splits the vector there.

A part is a named range of the vector.  The order and lengths of the parts that a CUDA graph reads depend on the form of
the launch alone.  So the graph finds each part at the same offset in every launch.  A round's graph reads all parts.  A
prefill pass's graph reads only the first parts.  The other parts update the slot table, and their lengths depend on the
prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from espalier.cache.states import SnapshotTargets
from espalier.engine.launch_input import LaunchInput
from espalier.errors import EspalierError
from espalier.layout import LaunchForm, RoundLayout
from espalier.slots import NODE_KINDS, ScatterUpdate, SlotTable, float_bits, guess_numbers_per_slot
from espalier.speculate.pieces import Pieces

PartSizes = tuple[tuple[str, int], ...]
# Each part begins at a multiple of this many int64 numbers (16 bytes).  For an address that is not aligned to 16 bytes,
# Triton compiles another kernel.  Without padding, the number of requests would decide which parts are aligned.
PART_ALIGNMENT = 2


@dataclass(frozen=True)
class LaunchBuffer:
    """A packed launch: either on the host, as `pack_launch` makes it, or a copy on the device.

    vector: [n] int64, a NumPy array on the host and a tensor on the device.  Each part is padded with zeros to a
    multiple of PART_ALIGNMENT.  part_sizes: (name, length) of each part, in order, without this padding."""

    vector: Any
    part_sizes: PartSizes

    def with_vector(self, vector: Tensor) -> "LaunchBuffer":
        """Returns the same launch with another vector.  vector: a copy of this launch's vector, on the device."""
        return LaunchBuffer(vector, self.part_sizes)

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        """The parts by name.

        ring_entry: [1], the entry of the results ring to write.  slots: [B], padded with slot 0.
        lengths: [B], the number of each request's tokens that a prefill pass computes; empty for a round.
        piece_request_row, piece_token_offset: [P], for each piece its request's row of the batch, and the number of
        this request's tokens in earlier pieces.  piece_last_piece: [B], the index of each request's last piece.  All
        three are empty in a form without pieces.
        snapshot_num_tokens, snapshot_row: [B], after how many tokens a request's recurrent state is copied, and the
        table row that gets the copy; empty without snapshots.
        cleared: slots that get a new request.
        FIELD.at, FIELD.values: for each updated field of the slot table, the indices and the new values."""
        parts = self.vector.split([_aligned_size(size) for _, size in self.part_sizes])
        return {name: part[:size] for (name, size), part in zip(self.part_sizes, parts, strict=True)}

    @property
    def ring_entry(self) -> Tensor:
        return self.parts["ring_entry"]

    @property
    def slots(self) -> Tensor:
        return self.parts["slots"]

    @property
    def lengths(self) -> Tensor:
        return self.parts["lengths"]

    @property
    def pieces(self) -> Pieces | None:
        """The pieces of a prefill pass; None in a form without pieces."""
        pieces = Pieces(*(self.parts[f"piece_{name}"] for name in Pieces._fields))
        return pieces if pieces.request_row.shape[0] else None

    @property
    def snapshots(self) -> SnapshotTargets | None:
        """The snapshots of recurrent states that the launch takes; None in a launch without snapshots."""
        targets = SnapshotTargets(self.parts["snapshot_num_tokens"], self.parts["snapshot_row"])
        return targets if targets.num_tokens.shape[0] else None

    @property
    def appended_pages(self) -> ScatterUpdate | None:
        """The new page-table entries that a round writes when it gathers its slots.  None for a prefill pass."""
        if self.lengths.shape[0]:
            return None
        return ScatterUpdate(self.parts["page_table.at"], self.parts["page_table.values"])

    def update_slot_table(self, table: SlotTable) -> None:
        """Updates the slot table, except for `appended_pages`.  Every launch begins with this call."""
        cleared = self.parts["cleared"]
        if cleared.shape[0]:
            table.clear(cleared)
        field_names = [name.removesuffix(".at") for name in self.parts if name.endswith(".at")]
        if self.appended_pages is not None:
            field_names.remove("page_table")
        table.write(
            {name: ScatterUpdate(self.parts[f"{name}.at"], self.parts[f"{name}.values"]) for name in field_names}
        )


def pack_launch(
    table: SlotTable, launch_input: LaunchInput, ring_entry: int, form: LaunchForm, has_snapshots: bool = False
) -> LaunchBuffer:
    """Packs a launch input.  ring_entry: entry of the results ring.  form: the launch's form, padding included.

    has_snapshots: whether the vector has snapshot parts even if the launch takes no snapshot.  The CUDA graphs of
    models with recurrent states always read these parts.
    Padding requests have slot 0 and no tokens.  Padding pieces have no tokens and belong to the last request.
    Raises EspalierError if the slot table or the vector is too small."""
    updates = table.init_updates(launch_input.slot_inits)
    appended_pages = table.page_table_updates(launch_input.appended_pages)
    if "page_table" in updates:
        appended_pages = ScatterUpdate(*map(np.concatenate, zip(updates["page_table"], appended_pages, strict=True)))
    updates["page_table"] = appended_pages
    if not launch_input.is_prefill:
        updates |= _source_updates(table, launch_input)
    parts: dict[str, Sequence[int] | np.ndarray] = {
        "ring_entry": (ring_entry,),
        "slots": launch_input.slots,
        "lengths": launch_input.lengths,
        **_piece_parts(launch_input, form),
        "snapshot_num_tokens": [at for at, _ in launch_input.snapshots],
        "snapshot_row": [row for _, row in launch_input.snapshots],
        "cleared": [slot_init.slot for slot_init in launch_input.slot_inits],
    }
    for name, (at, values) in updates.items():
        parts |= {f"{name}.at": at, f"{name}.values": values}
    part_sizes = {name: len(part) for name, part in parts.items()} | _padded_sizes(table.layout, launch_input, form)
    num_snapshots = form.batch if has_snapshots or launch_input.snapshots else 0
    part_sizes |= {"snapshot_num_tokens": num_snapshots, "snapshot_row": num_snapshots}
    # The vector is filled in place: a round has few numbers, and making another array would take as long as filling it.
    begins = list(accumulate(map(_aligned_size, part_sizes.values()), initial=0))
    vector = np.zeros(begins[-1], dtype=np.int64)
    for begin, (name, size) in zip(begins, part_sizes.items(), strict=False):
        part = parts[name]
        if len(part):
            vector[begin : begin + size][: len(part)] = part
    return LaunchBuffer(vector, tuple(part_sizes.items()))


def _padded_sizes(layout: RoundLayout, launch_input: LaunchInput, form: LaunchForm) -> dict[str, int]:
    """Returns the lengths to which parts are padded with zeros.

    A padding zero in an update of the page table writes 0 to cell 0, the first page of the dummy request.  That page is
    page 0 already."""
    if launch_input.is_prefill:
        return {"slots": form.batch, "lengths": form.batch, "piece_last_piece": form.batch if form.pieces else 0}
    capacity, count = layout.max_appended_pages(form.batch), len(launch_input.appended_pages)
    if count > capacity:
        raise EspalierError(
            f"a round of {form.batch} requests appends {count} pages and its launch input holds {capacity}; both "
            f"follow from {layout}: reserve pages with layout.pages_needed"
        )
    part_sizes = {"page_table": capacity}
    if layout.calibrates_scores:
        part_sizes |= {
            "guesses": form.batch * guess_numbers_per_slot(layout),
            "survival": NODE_KINDS * layout.steps,
            "draft_skill": form.batch,
        }
    return {"slots": form.batch} | {
        f"{name}.{part}": size for name, size in part_sizes.items() for part in ("at", "values")
    }


def _source_updates(table: SlotTable, launch_input: LaunchInput) -> dict[str, ScatterUpdate]:
    """Returns the updates of `table` (on the device) for a round's guesses, survival table and draft skills.

    An update may be padded with zeros.  In `survival`, these are written to kind 0, which no guess has.  In
    `draft_skill`, they are written to the dummy slot."""
    if not table.layout.calibrates_scores:
        return {}
    survival = np.zeros(0, dtype=np.float32) if launch_input.survival is None else launch_input.survival.reshape(-1)
    skill = np.array(launch_input.draft_skill, dtype=np.float32)
    return {
        "guesses": table.guess_updates(launch_input.guesses),
        "survival": ScatterUpdate(np.arange(len(survival)), float_bits(survival)),
        "draft_skill": ScatterUpdate(np.array(launch_input.slots[: len(skill)], dtype=np.int64), float_bits(skill)),
    }


def _piece_parts(launch_input: LaunchInput, form: LaunchForm) -> dict[str, np.ndarray]:
    """Returns the three parts that describe the pieces of a prefill pass, padded to the form's number of pieces."""
    request = offset = last = np.zeros(0, dtype=np.int64)
    if form.pieces:
        pieces = launch_input.pieces or tuple((row, 0) for row in range(len(launch_input.slots)))
        request, offset = np.array(pieces, dtype=np.int64).T
        last = np.flatnonzero(np.append(request[1:] != request[:-1], True))
        # A piece that begins where its request ends has no tokens.
        num_missing, row = form.pieces - len(pieces), form.batch - 1
        end = launch_input.lengths[row] if row < len(launch_input.slots) else 0
        request, offset = np.append(request, np.full(num_missing, row)), np.append(offset, np.full(num_missing, end))
    return {"piece_request_row": request, "piece_token_offset": offset, "piece_last_piece": last}


def _aligned_size(size: int) -> int:
    """Returns the size of a part, in int64 values, rounded up so that the next part is aligned."""
    return -(-size // PART_ALIGNMENT) * PART_ALIGNMENT
