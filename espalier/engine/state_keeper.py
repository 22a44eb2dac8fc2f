"""For models with recurrent states: decides at which token a request begins to compute, and when the device copies the
state of a request (a snapshot).

The snapshot of a page is the state before the page's last `tokens_before_end` tokens.  The device takes the snapshot in
the launch in which the request reaches that number of tokens (LaunchInput.snapshots).  The host uses the snapshot only
after it has read the result of that launch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from espalier.cache.pages import SnapshotRows
from espalier.cache.prefix_tree import PrefixTree
from espalier.cache.states import ZERO_ROW
from espalier.layout import RoundLayout
from espalier.request import Request

# Tokens between two snapshots: of a long prompt, and of a text that is being decoded.
PROMPT_SNAPSHOT_INTERVAL, DECODE_SNAPSHOT_INTERVAL = 2048, 64
# Pairs of numbers as in LaunchInput: (number of tokens, row) of snapshots, (source, destination) of copies.
IntPairs = tuple[tuple[int, int], ...]
NO_SNAPSHOT = (0, ZERO_ROW)


class NoStateKeeper:
    """Serves the scheduler for a model without recurrent states.  It takes no snapshots."""

    def enter_slot(self, request: Request, first_row: int, num_cached_tokens: int) -> tuple[int, int]:
        """Returns (the first row to compute, the tokens that count as cached) of a request that got its slot and pages.

        first_row: the first row to compute in a model without states.  num_cached_tokens: tokens with rows in shared
        pages."""
        return first_row, num_cached_tokens

    def max_prefill_tokens(self, request: Request) -> int:
        """Returns the most tokens of the request that the next prefill pass may compute."""
        return request.prefill_len - request.num_prefilled

    def snapshots_of_pass(self, batch: Sequence[Request], lengths: Sequence[int]) -> IntPairs:
        """Returns LaunchInput.snapshots of a prefill pass.  lengths: for each request, the number of tokens that the
        pass computes."""
        return ()

    def snapshots_of_round(self, batch: Sequence[Request]) -> IntPairs:
        """Returns LaunchInput.snapshots of a round.  Must be called before the round is launched."""
        return ()

    def take_state_copies(self) -> IntPairs:
        """Returns LaunchInput.state_copies of the next launch."""
        return ()

    def on_decoded(self, request: Request) -> None:
        """Called when the host has read tokens of a running request."""

    def on_pages_cached(self, request: Request, num_rows: int) -> None:
        """Called when the full pages of the first `num_rows` rows of a running request are in the prefix tree."""

    def on_slot_released(self, request: Request) -> None:
        """Called when a request has left its slot."""


@dataclass
class RequestSnapshots:
    """The snapshots of a running request.  A snapshot belongs to a page.  It is stored as a pair: the number of tokens
    up to the end of the page, and the row of the state table.

    planned_ends: the page ends in the prompt that will get a snapshot, ascending, as numbers of tokens.
    taken_snapshots: the snapshots that prefill passes took, for pages that are not in the prefix tree yet.
    pending_snapshot: the snapshot that rounds will take next.  last_snapshot: the last snapshot that rounds took."""

    planned_ends: list[int]
    taken_snapshots: list[tuple[int, int]] = field(default_factory=list)
    pending_snapshot: tuple[int, int] | None = None
    last_snapshot: tuple[int, int] | None = None

    @property
    def all_snapshots(self) -> list[tuple[int, int]]:
        return [
            *self.taken_snapshots,
            *(each for each in (self.last_snapshot, self.pending_snapshot) if each is not None),
        ]


class StateKeeper(NoStateKeeper):
    """Serves the scheduler for a model with recurrent states.

    snapshot_rows: the rows for snapshots.  prefix_tree: None without a prefix cache; then no snapshots are taken.
    decode_interval, prompt_interval: tokens between two snapshots, rounded up to whole pages where they are used."""

    def __init__(self, layout: RoundLayout, prefix_tree: PrefixTree | None, snapshot_rows: SnapshotRows):
        self.layout = layout
        self.prefix_tree = prefix_tree
        self.snapshot_rows = snapshot_rows
        self.tokens_before_end = max(layout.num_recomputed_tokens, 1)
        self.decode_interval, self.prompt_interval = DECODE_SNAPSHOT_INTERVAL, PROMPT_SNAPSHOT_INTERVAL
        self._by_request: dict[Request, RequestSnapshots] = {}
        self._pending_copies: list[tuple[int, int]] = []
        if prefix_tree is not None:
            prefix_tree.on_removed = snapshot_rows.detach

    def enter_slot(self, request: Request, first_row: int, num_cached_tokens: int) -> tuple[int, int]:
        """See NoStateKeeper.enter_slot: returns the first row to compute, and the tokens that count as cached."""
        assert request.slot is not None
        # The number of cached pages whose snapshots, if they have one, are states at or before row `first_row`.
        reached = self.layout.num_full_pages(min(num_cached_tokens, first_row + self.tokens_before_end))
        hit_index = self.snapshot_rows.last_with_snapshot(request.pages[:reached])
        row, end = ZERO_ROW, 0
        if hit_index is not None:
            row, end = self.snapshot_rows.mark_used(request.pages[hit_index]), self.layout.tokens_in(hit_index + 1)
        self._pending_copies.append((row, request.slot))
        begin = max(0, end - self.tokens_before_end)
        self._by_request[request] = RequestSnapshots(
            self._planned_page_ends(request.prefill_len, begin, num_cached_tokens)
        )
        return begin, end

    def _planned_page_ends(self, prefill_len: int, first_row: int, num_cached_tokens: int) -> list[int]:
        """Returns the page ends of a prompt that get a snapshot: the end of the cached pages, every multiple of
        `prompt_interval`, and the last page end."""
        if self.prefix_tree is None:
            return []
        interval = self._rounded_to_pages(self.prompt_interval)
        last_page_end = self.layout.tokens_in(self.layout.num_full_pages(prefill_len))
        ends = {num_cached_tokens, last_page_end, *range(interval, last_page_end, interval)}
        return sorted(end for end in ends if first_row < end - self.tokens_before_end and end <= last_page_end)

    def max_prefill_tokens(self, request: Request) -> int:
        """Returns the most tokens of the request that the next pass may compute.  A pass takes one snapshot at most."""
        left, planned = super().max_prefill_tokens(request), self._by_request[request].planned_ends
        # A pass takes at most one snapshot of a request.  So if more are planned, the pass ends at the first of them.
        return left if len(planned) < 2 else min(left, planned[0] - self.tokens_before_end - request.num_prefilled)

    def snapshots_of_pass(self, batch: Sequence[Request], lengths: Sequence[int]) -> IntPairs:
        return self._launch_snapshots([*map(self._snapshot_of_pass, batch, lengths)])

    def _snapshot_of_pass(self, request: Request, length: int) -> tuple[int, int] | None:
        """Returns the snapshot (number of tokens, row) that a pass over `length` tokens takes; None: it takes none."""
        snapshots = self._by_request[request]
        ends, num_prefilled = snapshots.planned_ends, request.num_prefilled + length
        if not ends or ends[0] - self.tokens_before_end > num_prefilled:
            return None
        end, row = ends.pop(0), self.snapshot_rows.allocate()
        if row is None:
            return None
        snapshots.taken_snapshots.append((end, row))
        return end, row

    def snapshots_of_round(self, batch: Sequence[Request]) -> IntPairs:
        return self._launch_snapshots([*map(self._snapshot_of_round, batch)])

    def _snapshot_of_round(self, request: Request) -> tuple[int, int] | None:
        """Returns the snapshot (number of tokens, row) that the next rounds take; None: they take none."""
        snapshots = self._by_request[request]
        if snapshots.pending_snapshot is None and self.prefix_tree is not None:
            # The next snapshot is taken after so many tokens that no round in flight can have reached this number.
            max_committed = self.layout.max_committed_rows(request.num_known, request.rounds_in_flight)
            interval = self._rounded_to_pages(self.decode_interval)
            end = ((max_committed + self.tokens_before_end) // interval + 1) * interval
            if end - self.tokens_before_end <= max_committed + self.layout.extend_width:
                row = self.snapshot_rows.allocate()
                snapshots.pending_snapshot = None if row is None else (end, row)
        return snapshots.pending_snapshot

    def _launch_snapshots(self, snapshots: Sequence[tuple[int, int] | None]) -> IntPairs:
        """Returns LaunchInput.snapshots.  snapshots: for each request (page end in tokens, table row), or None."""
        if not any(snapshots):
            return ()
        return tuple(NO_SNAPSHOT if each is None else (each[0] - self.tokens_before_end, each[1]) for each in snapshots)

    def take_state_copies(self) -> IntPairs:
        copies, self._pending_copies = tuple(self._pending_copies), []
        return copies

    def on_decoded(self, request: Request) -> None:
        snapshots, num_tokens = self._by_request[request], min(request.num_known, request.num_tokens)
        if snapshots.pending_snapshot is not None and snapshots.pending_snapshot[0] <= num_tokens:
            if snapshots.last_snapshot is not None:
                self.snapshot_rows.release(snapshots.last_snapshot[1])
            snapshots.last_snapshot, snapshots.pending_snapshot = snapshots.pending_snapshot, None

    def on_pages_cached(self, request: Request, num_rows: int) -> None:
        """Gives snapshots to the pages of the first `num_rows` rows, which are in the prefix tree now."""
        snapshots = self._by_request[request]
        self.on_decoded(request)
        taken_snapshots, snapshots.taken_snapshots, snapshots.last_snapshot = (
            [*snapshots.taken_snapshots, *([snapshots.last_snapshot] if snapshots.last_snapshot else [])],
            [],
            None,
        )
        for end, row in taken_snapshots:
            pages = [] if self.prefix_tree is None or end > num_rows else self.prefix_tree.match(request.tokens[:end])
            if pages and self.layout.tokens_in(len(pages)) == end:
                self.snapshot_rows.attach(pages[-1], row)
            else:
                self.snapshot_rows.release(row)

    def on_slot_released(self, request: Request) -> None:
        for _, row in self._by_request.pop(request).all_snapshots:
            self.snapshot_rows.release(row)

    def _rounded_to_pages(self, num_tokens: int) -> int:
        """Returns the number of tokens, rounded up to whole pages."""
        return self.layout.tokens_in(self.layout.pages_for(num_tokens))


def make_state_keeper(
    layout: RoundLayout, prefix_tree: PrefixTree | None, snapshot_rows: Sequence[int] | None
) -> NoStateKeeper:
    """Returns the keeper for a model.  snapshot_rows: the state table's rows for snapshots; None without states."""
    return NoStateKeeper() if snapshot_rows is None else StateKeeper(layout, prefix_tree, SnapshotRows(snapshot_rows))
