"""The table that holds each request's data on the device.

A running request has a slot: one row of every field.  Slot 0 is the dummy request that pads a batch; it never advances.
A launch (a prefill pass or a round of decoding) passes data to the next launch only through slots.  So the host can
start a launch before it knows how many tokens a request has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.layout import MAX_ROUNDS_IN_FLIGHT, RoundLayout
from espalier.limits import MAX_BIASES, MAX_STOP_IDS
from espalier.request import SLOT_PARAMS

# The int64 numbers of a slot, in the order of their columns.  prefix_len: rows of K/V that are in pages; also the index
# of the root.  root: the id of the last decided token, from which the next tree grows.  known_len: how many tokens the
# request had when it entered the slot.  min_position: stop tokens are banned below it.  The rest: see SlotInit.
INT_COLUMNS = (
    "prefix_len",
    "root",
    "known_len",
    "commit_from",
    "end",
    "depth_limit",
    "seed",
    "min_position",
    "num_logprobs",
    "has_filters",
    "has_penalties",
    *(f.name for f in SLOT_PARAMS if f.type is int),
)
# The float32 numbers of a slot.
FLOAT_COLUMNS = tuple(f.name for f in SLOT_PARAMS if f.type is float)

# The sources that propose token sequences, called paths, beside a draft model.  Each tree node has a kind.  For each
# kind the engine counts how often the target picks its nodes (SlotTable.survival).  The kind of a path is a number for
# its source and its strength.  The strength, 1 to MATCH_STRENGTHS, says how well the path matches the request's text.
# Kind 0 means no path.  A node of a path has the path's kind if the draft proposes the same node.  Otherwise the target
# picks the node less often, so UNDRAFTED_OFFSET is added to the path's kind.
SOURCES = ("text", "prediction", "index")
ALL_SOURCES = (*SOURCES, "draft")
MATCH_STRENGTHS = 4
UNDRAFTED_OFFSET = len(SOURCES) * MATCH_STRENGTHS
PATH_KINDS = 1 + 2 * UNDRAFTED_OFFSET
# The numbers from PATH_KINDS on are the kinds of nodes that only the draft proposes.  A kind says whether tokens are
# sampled, the node's rank among its siblings, and its confidence level.  The last rank stands for all later ranks.  The
# confidence level is the number of the range that contains the draft's probability of the node.
NUM_RANKS, NUM_CONFIDENCE_LEVELS = 3, 8
NODE_KINDS = PATH_KINDS + 2 * NUM_RANKS * NUM_CONFIDENCE_LEVELS
# How many columns of SlotTable.guesses come before a guess's tokens: its start and its kind (class Guess).
GUESS_HEADER_COLUMNS = 2
# Fills the columns of a guess or path after its last token.
NO_TOKEN = -1


class Columns:
    """Maps each number's name to its column, such as `columns.top_k`.  Kernels take this object as a tl.constexpr.

    num_ints, num_floats: how many columns are int64, and how many float32.  Triton caches kernels by repr()."""

    num_ints: int
    num_floats: int

    def __init__(self, ints: Sequence[str], floats: Sequence[str]):
        """ints, floats: the names of the columns of each type, in the order of the columns."""
        for names in (ints, floats):
            vars(self).update({name: column for column, name in enumerate(names)})
        self.num_ints, self.num_floats = len(ints), len(floats)

    def __repr__(self) -> str:
        return "Columns(" + ", ".join(f"{name}={column}" for name, column in vars(self).items()) + ")"


COLUMNS = Columns(INT_COLUMNS, FLOAT_COLUMNS)


@dataclass(frozen=True)
class SlotInit:
    """The values of a request that enters a slot.  All values can be sent to another process.

    tokens: all known tokens, prompt first.  start: the index of the first row to compute.
    commit_from: rows below this index are in shared pages and are never written.
    end: the number of tokens at which the request finishes.  depth_limit: the most draft tokens accepted per round.
    sampling: by column name, the values of the columns that are not fields of this class.
    counts_tokens: whether the slot counts its tokens, which penalties need."""

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

    @property
    def numbers(self) -> dict[str, float | int]:
        """The value of every column of SlotTable.ints and SlotTable.floats, by column name."""
        return {
            "prefix_len": self.start,
            "root": self.tokens[self.start],
            "known_len": len(self.tokens),
            "commit_from": self.commit_from,
            "end": self.end,
            "depth_limit": self.depth_limit,
            **self.sampling,
        }


@dataclass(frozen=True)
class Guess:
    """Tokens that may follow a request's token at index `start`, the last token that the host knows.

    kind: the kind of this path (see SOURCES)."""

    start: int
    kind: int
    tokens: tuple[int, ...]


def max_guess_length(layout: RoundLayout) -> int:
    """Returns the most tokens of a guess: as many as the round in flight may decide, and `steps` tokens after them."""
    return (MAX_ROUNDS_IN_FLIGHT - 1) * layout.extend_width + layout.steps


def guess_numbers_per_slot(layout: RoundLayout) -> int:
    """Returns how many int64 numbers the guesses of one slot take."""
    return layout.num_sent_paths * (GUESS_HEADER_COLUMNS + max_guess_length(layout))


class ScatterUpdate(NamedTuple):
    """New values for n cells of one field of the slot table.  Arrays [n] int64 of numpy or torch.

    indices: the cells' indices in the flattened field.  values: a float32 is given by its bits (float_bits)."""

    indices: Any
    values: Any


NO_UPDATE = ScatterUpdate(*np.zeros((2, 0), dtype=np.int64))


class SlotTable:
    """The table of all requests on the device.  Every field except `survival` is [num_slots, ...].

    Single numbers of a request are columns of `ints` (int64, INT_COLUMNS) and `floats` (float32, FLOAT_COLUMNS).  Each
    column is also an attribute, a view [num_slots], such as `table.root`.
    page_table: [num_slots, table_width] int32.  carried: the tensors that the drafter passes on to its next round.
    guesses: [num_slots, num_sent_paths, GUESS_HEADER_COLUMNS + max_guess_length], the host's guesses.
    history: [num_slots, history_width], the request's tokens.
    survival: [NODE_KINDS, steps], by kind and depth of a node, the log-probability that the target picks the node if it
    picked the node's parent; the same for all requests.
    draft_skill: [num_slots, 1], added to this log-probability for a request's draft nodes.
    own_text_paths: [num_slots, num_text_paths, 1 + steps], kind and tokens of the paths that the last round found in
    the request's prompt and output.
    candidates: [num_slots, num_draft_tokens], the nodes of the request's last tree, packed into numbers
    (speculate/sources/calibrate.py:pack_nodes).  They include nodes that were not verified,
    because nodes of other requests had better scores (TreeShape.shared_rows)."""

    if TYPE_CHECKING:

        def __getattr__(self, column: str) -> Tensor: ...

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
            """Returns a field of the table, [num_slots, *shape]."""
            return torch.zeros(n, *shape, dtype=dtype, device=device)

        self.ints = zeros(len(INT_COLUMNS))
        self.floats = zeros(len(FLOAT_COLUMNS), dtype=torch.float32)
        for names, columns in ((INT_COLUMNS, self.ints), (FLOAT_COLUMNS, self.floats)):
            vars(self).update(zip(names, columns.unbind(1), strict=True))
        self.page_table = zeros(layout.table_width, dtype=torch.int32)
        self.history = zeros(layout.history_width)
        self.carried = {name: zeros(*shape, dtype=dtype) for name, shape in carried.items()}
        self.bias_ids = zeros(MAX_BIASES)
        self.bias_values = zeros(MAX_BIASES, dtype=torch.float32)
        self.stop_ids = zeros(MAX_STOP_IDS)
        self.guesses = zeros(layout.num_sent_paths, GUESS_HEADER_COLUMNS + max_guess_length(layout))
        self.own_text_paths = zeros(layout.num_text_paths, 1 + layout.steps)
        self.candidates = zeros(layout.num_draft_tokens if layout.calibrates_scores else 0)
        self.draft_skill = zeros(1, dtype=torch.float32)
        self.survival = torch.zeros(NODE_KINDS, layout.steps, dtype=torch.float32, device=device)
        self.counts = zeros(vocab_size, dtype=torch.int32)
        self.seen = zeros(vocab_size, dtype=torch.bool)

    def init_updates(self, slot_inits: Sequence[SlotInit]) -> dict[str, ScatterUpdate]:
        """Returns the updates that fill these slots, by field.  Call `clear` for the slots first."""
        updates_by_field: dict[str, list[ScatterUpdate]] = {}
        for init in slot_inits:
            for name, values in _slot_rows(init).items():
                if not isinstance(values, ScatterUpdate):
                    values = ScatterUpdate(np.arange(len(values)), np.asarray(values, dtype=np.int64))
                first = init.slot * getattr(self, name).shape[1]
                updates_by_field.setdefault(name, []).append(ScatterUpdate(first + values.indices, values.values))
        return {
            name: ScatterUpdate(*map(np.concatenate, zip(*rows, strict=True)))
            for name, rows in updates_by_field.items()
        }

    def page_table_updates(self, appended_pages: Sequence[tuple[int, int, int]]) -> ScatterUpdate:
        """Returns the update that adds pages to page tables.

        appended_pages: (slot, column, page), since the last launch.  Raises EspalierError for a cell outside the table.
        """
        if not appended_pages:
            return NO_UPDATE
        for slot, column, _ in appended_pages:
            if not (slot < self.layout.num_slots and column < self.layout.table_width):
                raise EspalierError(
                    f"page table holds {self.layout.num_slots} slots of {self.layout.table_width} pages, and slot "
                    f"{slot} asks for page {column}; both follow from {self.layout}: use layout.pages_needed"
                )
        slots, columns, pages = np.array(appended_pages, dtype=np.int64).T
        return ScatterUpdate(slots * self.layout.table_width + columns, pages)

    def guess_updates(self, guesses: Sequence[tuple[int, Sequence[Guess]]]) -> ScatterUpdate:
        """Returns the update that writes the guesses of some slots.

        guesses: (slot, guesses for the slot, the best first).  The whole row of the slot is written.  It holds as many
        guesses as fit, from the first on."""
        width = guess_numbers_per_slot(self.layout)
        values = np.full((len(guesses), *self.guesses.shape[1:]), NO_TOKEN, dtype=np.int64)
        values[..., :GUESS_HEADER_COLUMNS] = 0
        for row, (_, slot_guesses) in zip(values, guesses, strict=True):
            for cells, guess in zip(row, slot_guesses, strict=False):
                cells[:GUESS_HEADER_COLUMNS] = guess.start, guess.kind
                cells[GUESS_HEADER_COLUMNS : GUESS_HEADER_COLUMNS + len(guess.tokens)] = guess.tokens
        slots = np.array([slot for slot, _ in guesses], dtype=np.int64)
        return ScatterUpdate((slots[:, None] * width + np.arange(width)).reshape(-1), values.reshape(-1))

    def clear(self, slots: Tensor) -> None:
        """Removes earlier requests' data from slots [n].  init_updates fills all of `ints` and `floats`."""
        cleared = (self.history, self.page_table, self.guesses, self.bias_ids, self.bias_values, self.counts, self.seen)
        for rows in (*cleared, *self.carried.values()):
            rows.index_fill_(0, slots, 0)
        self.stop_ids.index_fill_(0, slots, -1)

    def write(self, updates: Mapping[str, ScatterUpdate]) -> None:
        """Writes the cells of `updates` (by field name) into the table."""
        for name, (indices, values) in updates.items():
            rows: Tensor = getattr(self, name)
            # The low bytes of an int64 are the narrower integer, or the float's bits.  A view needs no kernel.
            narrowed = values.view(rows.dtype)[:: values.itemsize // rows.itemsize]
            rows.view(-1).index_copy_(0, indices, narrowed)


def _slot_rows(init: SlotInit) -> dict[str, Any]:
    """Returns {field of SlotTable: the first values of the slot's row, or a ScatterUpdate with columns as indices}."""
    numbers = init.numbers
    row: dict[str, Any] = {
        "ints": [numbers[name] for name in INT_COLUMNS],
        "floats": float_bits([numbers[name] for name in FLOAT_COLUMNS]),
        "history": init.tokens,
        "page_table": init.pages,
        "bias_ids": list(init.bias),
        "bias_values": float_bits(list(init.bias.values())),
        "stop_ids": init.stop_ids,
    }
    if init.counts_tokens:
        seen = np.unique(np.array(init.tokens[: init.prompt_len], dtype=np.int64))
        output, num_times = np.unique(np.array(init.tokens[init.prompt_len :], dtype=np.int64), return_counts=True)
        row |= {"seen": ScatterUpdate(seen, np.ones_like(seen)), "counts": ScatterUpdate(output, num_times)}
    return row


def float_bits(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns the bits of float32 values, as int64."""
    return np.array(values, dtype=np.float32).view(np.int32).astype(np.int64)


@dataclass
class BatchState:
    """The data of a batch's slots, gathered once per launch by kernels/state/batch_state.py.

    index: [B], the slots' numbers.  prefix_len, root, commit_from: [B], the table's columns before the launch.
    num_tokens: [B], prefix_len + 1, because the root counts too.  page_table: [B, table_width] int32.
    max_accept_depth: [B], depth of the deepest node that may be accepted, limited by the request's depth_limit and by
    the tokens that the request has left.  num_logprobs: [B], likeliest tokens to report beside each emitted token, -1
    if the request wants no log-probabilities.  is_real: [B] bool, False for padding."""

    table: SlotTable
    index: Tensor
    prefix_len: Tensor
    root: Tensor
    commit_from: Tensor
    num_tokens: Tensor
    max_accept_depth: Tensor
    num_logprobs: Tensor
    is_real: Tensor
    page_table: Tensor

    @property
    def batch(self) -> int:
        return self.index.shape[0]

    def history_at(self, positions: Tensor) -> Tensor:
        """Returns the tokens at positions [B, W].  Positions past the table read its last column; callers mask them."""
        columns = positions.clamp(max=self.table.layout.history_width - 1)
        return self.table.history[self.index[:, None], columns]
