"""What the device knows of each request.

One row a slot; slot 0 is the dummy request that pads a batch and is never advanced.  Only what a slot holds passes from
launch to launch; the host needs no length to launch.  What the fields mean to sampling or drafting is for those rooms.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.request import MAX_BIAS, MAX_STOP_IDS


@dataclass(frozen=True)
class Admission:
    """A request entering a slot: plain values, so that a ticket can be sent to another process.

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


class SlotTable:
    """Device-resident request table, [num_slots, ...] a field.

    carried: what the drafter hands from round to round, by name, shaped per slot.
    """

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

        self.prefix_len = zeros()
        self.root = zeros()
        self.known_len = zeros()
        self.commit_from = zeros()
        self.end = zeros()
        self.depth_limit = zeros()
        self.page_table = zeros(layout.table_width)
        self.history = zeros(layout.history_width)
        self.carried = {name: zeros(*shape, dtype=dtype) for name, shape in carried.items()}
        self.temperature = zeros(dtype=torch.float32)
        self.top_k = zeros()
        self.top_p = zeros(dtype=torch.float32)
        self.min_p = zeros(dtype=torch.float32)
        self.repetition = zeros(dtype=torch.float32)
        self.presence = zeros(dtype=torch.float32)
        self.frequency = zeros(dtype=torch.float32)
        self.seed = zeros()
        self.min_position = zeros()
        self.bias_ids = zeros(MAX_BIAS)
        self.bias_values = zeros(MAX_BIAS, dtype=torch.float32)
        self.stop_ids = zeros(MAX_STOP_IDS)
        self.counts = zeros(vocab_size, dtype=torch.int32)
        self.seen = zeros(vocab_size, dtype=torch.bool)

    def admit(self, request: Admission) -> None:
        """Fill a slot.  Every field is written, so nothing of the slot's last owner stays."""
        slot = request.slot
        self._write(self.history[slot], request.tokens)
        self._write(self.page_table[slot], request.pages)
        self.prefix_len[slot] = request.start
        self.root[slot] = request.tokens[request.start]
        self.known_len[slot] = len(request.tokens)
        self.commit_from[slot] = request.commit_from
        self.end[slot] = request.end
        self.depth_limit[slot] = request.depth_limit
        for value in self.carried.values():
            value[slot] = 0
        for name, scalar in request.sampling.items():
            getattr(self, name)[slot] = scalar
        self._write(self.bias_ids[slot], request.bias.keys())
        self._write(self.bias_values[slot], request.bias.values())
        self._write(self.stop_ids[slot], request.stop_ids, rest=-1)
        self.seen[slot] = False
        self.counts[slot] = 0
        if request.counts_tokens:
            self._count(slot, request.tokens, request.prompt_len)

    def append_pages(self, appended: tuple[tuple[int, int, int], ...]) -> None:
        """Enter (slot, column, page), what grew since the last launch.  Raises EspalierError for a column past it."""
        for slot, column, _ in appended:
            if not (slot < self.layout.num_slots and column < self.layout.table_width):
                raise EspalierError(
                    f"page table holds {self.layout.num_slots} slots of {self.layout.table_width} pages, and slot "
                    f"{slot} asks for page {column}; both follow from {self.layout}: reserve pages by layout.reserve"
                )
        if appended:
            slots, columns, pages = torch.tensor(appended, device=self.page_table.device).unbind(1)
            self.page_table[slots, columns] = pages

    @staticmethod
    def _write(row: Tensor, values: Collection[float], rest: int = 0) -> None:
        row.fill_(rest)
        if values:
            row[: len(values)] = torch.tensor(list(values), dtype=row.dtype, device=row.device)

    def _count(self, slot: int, tokens: tuple[int, ...], prompt_len: int) -> None:
        known = torch.tensor(tokens, device=self.counts.device)
        self.seen[slot][known[:prompt_len]] = True
        output = known[prompt_len:]
        self.counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))


@dataclass
class Slots:
    """The rows of a batch, gathered once a launch.  prefix_len is that of before the launch throughout.

    index: [B] slots; prefix_len, root, commit_from: [B]; page_table: [B, table_width].
    """

    table: SlotTable
    index: Tensor
    prefix_len: Tensor
    root: Tensor
    commit_from: Tensor
    page_table: Tensor

    @classmethod
    def gather(cls, table: SlotTable, index: Tensor) -> "Slots":
        return cls(
            table, index, table.prefix_len[index], table.root[index], table.commit_from[index], table.page_table[index]
        )

    @property
    def batch(self) -> int:
        return self.index.shape[0]

    @property
    def real(self) -> Tensor:
        """[B] bool: rows that are requests, not padding."""
        return self.index > 0

    def history_at(self, positions: Tensor) -> Tensor:
        """Tokens at positions [B, W]; positions past the table read its last column, which callers mask."""
        columns = positions.clamp(max=self.table.layout.history_width - 1)
        return self.table.history[self.index[:, None], columns]

    def room(self) -> Tensor:
        """[B]: the deepest node that may be accepted, by the request's own limit and by the tokens it has left."""
        left = self.table.layout.room(self.table.end[self.index], self.prefix_len)
        return torch.minimum(self.table.depth_limit[self.index], left).clamp(min=0)

    def advance(self, tokens: Tensor, length: Tensor, count_tokens: bool) -> None:
        """Decide `length` [B] more tokens, tokens [B, W], the last of them the new root.

        What stands past `length` is written too: nothing reads a history past its root.
        """
        table, width = self.table, tokens.shape[1]
        offsets = torch.arange(width, device=tokens.device)
        table.history[self.index[:, None], self.prefix_len[:, None] + 1 + offsets] = tokens
        table.prefix_len[self.index] = self.prefix_len + length
        last = tokens.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0]
        table.root[self.index] = torch.where(length > 0, last, self.root)
        if count_tokens:
            emitted = (offsets < length[:, None]).to(table.counts.dtype)
            table.counts.index_put_((self.index[:, None].expand_as(tokens), tokens), emitted, accumulate=True)

    def enter(self, length: Tensor, picked: Tensor, count_tokens: bool) -> Tensor:
        """Commit `length` [B] known tokens; the next root is the token known to stand there, or else `picked` [B].

        Returns [B] bool: rows whose root was picked.
        """
        table = self.table
        prefix_len = self.prefix_len + length
        open_end = prefix_len >= table.known_len[self.index]
        root = torch.where(open_end, picked, self.history_at(prefix_len[:, None])[:, 0])
        table.history[self.index, prefix_len] = root
        table.prefix_len[self.index] = prefix_len
        table.root[self.index] = root
        if count_tokens:
            table.counts.index_put_((self.index, root), open_end.to(table.counts.dtype), accumulate=True)
        return open_end & self.real

    def carry(self, name: str, value: Tensor) -> None:
        """Hand `value` [B, ...] to the next launch."""
        self.table.carried[name][self.index] = value

    def carried(self, name: str) -> Tensor:
        return self.table.carried[name][self.index]
