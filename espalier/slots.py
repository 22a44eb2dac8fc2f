"""What the device knows of each request.

One row a slot; slot 0 is the dummy request that pads a batch and is never advanced.  Only what a slot holds passes from
launch to launch; the host needs no length to launch.  What the fields mean to sampling or drafting is for those rooms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.limits import MAX_BIAS, MAX_STOP_IDS

INTS = (
    "prefix_len",
    "root",
    "known_len",
    "commit_from",
    "end",
    "depth_limit",
    "top_k",
    "seed",
    "min_position",
    "num_logprobs",
)
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


@dataclass(frozen=True)
class SlotInit:
    """A request entering a slot: plain values, so that a launch input can be sent to another process.

    tokens: all that is known of it, prompt first; start: the first row to compute; commit_from: rows below stand in
    shared pages and are never written; end: tokens after which it is finished; sampling: scalar fields by name.
    """

    slot: int
    tokens: tuple[int, ...]
    prompt_len: int
    pages: tuple[int, ...]
    start: int
    commit_from: int
    end: int
    depth_limit: int
    sampling: Mapping[str, float | int]
    bias: Mapping[int, float] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    counts_tokens: bool = False


class ScatterUpdate(NamedTuple):
    """Values for cells of one field of the slot table, cells counted row by row: two [n] int64, of numpy or torch.

    float32 values travel as their bits.
    """

    at: Any
    values: Any


class SlotTable:
    """Device-resident request table, [num_slots, ...] a field.

    Fields of one number a slot are columns of `ints` (int64) and `floats` (float32).  Page tables are int32; rows of
    pages are computed in int64.  carried: what the drafter hands
    from round to round, by name, shaped per slot.
    """

    prefix_len: Tensor
    root: Tensor
    known_len: Tensor
    commit_from: Tensor
    end: Tensor
    depth_limit: Tensor
    top_k: Tensor
    seed: Tensor
    min_position: Tensor
    num_logprobs: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def __init__(
        self,
        layout: RoundLayout,
        vocab_size: int,
        carried: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layout = layout
        n = layout.num_slots

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(n, *shape, dtype=dtype, device=device)

        self.ints = zeros(len(INTS))
        self.floats = zeros(len(FLOATS), dtype=torch.float32)
        for names, columns in ((INTS, self.ints), (FLOATS, self.floats)):
            for column, name in enumerate(names):
                setattr(self, name, columns[:, column])
        self.page_table = zeros(layout.table_width, dtype=torch.int32)
        self.history = zeros(layout.history_width)
        self.carried = {name: zeros(*shape, dtype=dtype) for name, shape in carried.items()}
        self.bias_ids = zeros(MAX_BIAS)
        self.bias_values = zeros(MAX_BIAS, dtype=torch.float32)
        self.stop_ids = zeros(MAX_STOP_IDS)
        self.counts = zeros(vocab_size, dtype=torch.int32)
        self.seen = zeros(vocab_size, dtype=torch.bool)

    def admission_updates(self, slot_inits: Sequence[SlotInit]) -> dict[str, ScatterUpdate]:
        """What fills the admitted slots, by field; all else in them is cleared."""
        fields: dict[str, list[ScatterUpdate]] = {}
        for request in slot_inits:
            for name, values in _row(request).items():
                columns = values.at if isinstance(values, ScatterUpdate) else np.arange(len(values))
                found = values.values if isinstance(values, ScatterUpdate) else np.asarray(values, dtype=np.int64)
                fields.setdefault(name, []).append(
                    ScatterUpdate(request.slot * getattr(self, name).shape[1] + columns, found)
                )
        return {name: ScatterUpdate(*map(np.concatenate, zip(*rows, strict=True))) for name, rows in fields.items()}

    def page_table_updates(self, appended_pages: Sequence[tuple[int, int, int]]) -> ScatterUpdate:
        """(slot, column, page), what grew since the last launch.  Raises EspalierError for a column past the table."""
        for slot, column, _ in appended_pages:
            if not (slot < self.layout.num_slots and column < self.layout.table_width):
                raise EspalierError(
                    f"page table holds {self.layout.num_slots} slots of {self.layout.table_width} pages, and slot "
                    f"{slot} asks for page {column}; both follow from {self.layout}: reserve pages by layout.reserve"
                )
        slots, columns, pages = np.array(appended_pages, dtype=np.int64).reshape(-1, 3).T
        return ScatterUpdate(slots * self.layout.table_width + columns, pages)

    def clear(self, slots: Tensor) -> None:
        """Empty slots [A], so that nothing of their last owners stays."""
        own = (self.history, self.page_table, self.bias_ids, self.bias_values, self.counts, self.seen)
        for rows in (*own, *self.carried.values()):
            rows.index_fill_(0, slots, 0)
        self.stop_ids.index_fill_(0, slots, -1)

    def write(self, cells: Mapping[str, ScatterUpdate]) -> None:
        """Fill cells, by field."""
        for name, (at, values) in cells.items():
            rows: Tensor = getattr(self, name)
            # The low bytes of an integer are its value in a narrower type, and a float's bits: a view, not a launch.
            narrowed = values.view(rows.dtype)[:: values.itemsize // rows.itemsize]
            rows.view(-1).index_copy_(0, at, narrowed)


def _row(request: SlotInit) -> dict[str, Any]:
    """The beginning of each field's row, or ScatterUpdate of columns and values."""
    own = {
        "prefix_len": request.start,
        "root": request.tokens[request.start],
        "known_len": len(request.tokens),
        "commit_from": request.commit_from,
        "end": request.end,
        "depth_limit": request.depth_limit,
        **request.sampling,
    }
    row: dict[str, Any] = {
        "ints": [own[name] for name in INTS],
        "floats": _bits([own[name] for name in FLOATS]),
        "history": request.tokens,
        "page_table": request.pages,
        "bias_ids": list(request.bias),
        "bias_values": _bits(list(request.bias.values())),
        "stop_ids": request.stop_ids,
    }
    if request.counts_tokens:
        seen = np.unique(np.array(request.tokens[: request.prompt_len], dtype=np.int64))
        output, times = np.unique(np.array(request.tokens[request.prompt_len :], dtype=np.int64), return_counts=True)
        row |= {"seen": ScatterUpdate(seen, np.ones_like(seen)), "counts": ScatterUpdate(output, times)}
    return row


def _bits(values: Sequence[float]) -> np.ndarray:
    """float32 values as integers."""
    return np.array(values, dtype=np.float32).view(np.int32).astype(np.int64)


@dataclass
class BatchState:
    """The rows of a batch, gathered once a launch.  prefix_len is that of before the launch throughout.

    index: [B] slots; prefix_len, root, commit_from: [B]; num_tokens: [B], prefix_len and the root; max_accept_depth:
    [B], the deepest node that may be accepted, by the request's own limit and by the tokens it has left; num_logprobs:
    [B], alternatives that it wants beside each emitted token, -1 for no log-probabilities; real: [B] bool, rows that
    are requests, not padding; page_table: [B, table_width] int32.  kernels/state/batch_state.py makes them.
    """

    table: SlotTable
    index: Tensor
    prefix_len: Tensor
    root: Tensor
    commit_from: Tensor
    num_tokens: Tensor
    max_accept_depth: Tensor
    num_logprobs: Tensor
    real: Tensor
    page_table: Tensor

    @property
    def batch(self) -> int:
        return self.index.shape[0]

    def history_at(self, positions: Tensor) -> Tensor:
        """Tokens at positions [B, W]; positions past the table read its last column, which callers mask."""
        columns = positions.clamp(max=self.table.layout.history_width - 1)
        return self.table.history[self.index[:, None], columns]

    def carried(self, name: str) -> Tensor:
        return self.table.carried[name][self.index]
