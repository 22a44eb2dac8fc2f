"""Reference counts of pages, and the list of free pages.

A holder of a page is a running request or the prefix tree.  A page is free when it has no holder.  This module has only
page numbers and counts: cache/kv.py has the tensors, and the scheduler and the prefix tree know which pages they hold.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

DUMMY_PAGE = 0


class OutOfPages(Exception):
    """More pages were requested than are free.  The scheduler avoids this: it evicts, preempts or waits first."""


class PageDefect(AssertionError):
    """A bug in the counts of pages: a free page is shared or released, or counts and holders do not agree."""


class PagePool:
    """Reference counts of pages 1 .. num_pages - 1.  Page 0 is a dummy for padding: it is never allocated and never
    free.

    `allocate` takes the pages that were released last, in the order in which their holder had them.  If all released
    pages are in use again, `allocate` takes the lowest page numbers that were never used.  So allocations are
    deterministic and cost O(1) per page, and pages that are not needed are never written.  Pages with consecutive
    numbers stay together, so that attention can copy their rows as one block (kernels/attention/kv_splits.py).

    on_sharing_changed: a function that is called with (page, True) when a page gets its second holder, and with
    (page, False) when only one holder is left."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.num_release_calls = 0
        self.on_sharing_changed: Callable[[int, bool], None] | None = None
        self._reference_counts = [0] * num_pages
        self._free_pages = list(range(num_pages - 1, DUMMY_PAGE, -1))

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free_pages)

    def allocate(self, num_pages: int) -> list[int]:
        """Take free pages, with one reference each.  Raises OutOfPages, and takes none, if too few are free."""
        if num_pages > self.num_free:
            raise OutOfPages(f"{num_pages} pages requested, {self.num_free} of {self.num_pages - 1} are free")
        pages = [self._free_pages.pop() for _ in range(num_pages)]
        for page in pages:
            self._reference_counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page.  Raises PageDefect for a free page."""
        for page in pages:
            self._require_held(page, "shared")
            self._reference_counts[page] += 1
            if self._reference_counts[page] == 2 and self.on_sharing_changed is not None:
                self.on_sharing_changed(page, True)

    def release(self, pages: Iterable[int]) -> None:
        """Remove one reference from each page; a page without references is free.  Raises PageDefect for a free page.

        num_release_calls counts these calls.  A request that needs more pages waits until this number changes."""
        self.num_release_calls += 1
        for page in reversed([*pages]):
            self._require_held(page, "released")
            self._reference_counts[page] -= 1
            if not self._reference_counts[page]:
                self._free_pages.append(page)
            elif self._reference_counts[page] == 1 and self.on_sharing_changed is not None:
                self.on_sharing_changed(page, False)

    def reference_count(self, page: int) -> int:
        """Returns the number of holders of a page; 0 for a free page and for the dummy page."""
        return self._reference_counts[page]

    def is_free(self, page: int) -> bool:
        return not self._reference_counts[page]

    def _require_held(self, page: int, verb: str) -> None:
        """Raises if the page has no owner.  verb: what cannot be done with it, for the error text, such as "shared"."""
        if not DUMMY_PAGE < page < self.num_pages:
            raise PageDefect(f"page {page} cannot be {verb}: only pages 1 to {self.num_pages - 1} can")
        if not self._reference_counts[page]:
            raise PageDefect(f"page {page} cannot be {verb}: it is free")


class SnapshotRows:
    """Tracks which rows of the state tables hold snapshots.  A snapshot is the recurrent state at the end of a page.

    rows: the table rows that may hold snapshots."""

    def __init__(self, rows: Iterable[int]):
        self._rows = tuple(rows)
        self._free_rows = list(self._rows)[::-1]
        # The table row of each page's snapshot.  The least recently used snapshot is first.
        self._row_of_page: OrderedDict[int, int] = OrderedDict()

    def allocate(self) -> int | None:
        """Take a free row.  If none is free, take the row of the least recently used snapshot of a page.  Returns None
        if requests hold all rows."""
        if self._free_rows:
            return self._free_rows.pop()
        return self._row_of_page.popitem(last=False)[1] if self._row_of_page else None

    def release(self, row: int) -> None:
        """Free a row that a request held."""
        self._free_rows.append(row)

    def attach(self, page: int, row: int) -> None:
        """Make a request's row the snapshot of a page in the prefix tree.  If the page already has a snapshot, the row
        is freed instead."""
        if page in self._row_of_page:
            self.release(row)
        else:
            self._row_of_page[page] = row

    def last_with_snapshot(self, pages: Sequence[int]) -> int | None:
        """Returns the index in `pages` of the last page with a snapshot; None if no page has a snapshot."""
        return next((i for i in reversed(range(len(pages))) if pages[i] in self._row_of_page), None)

    def mark_used(self, page: int) -> int:
        """Return the row of a page's snapshot.  The snapshot becomes the most recently used."""
        self._row_of_page.move_to_end(page)
        return self._row_of_page[page]

    def detach(self, page: int) -> None:
        """Free the row of a page's snapshot, if it has one, because the page leaves the prefix tree."""
        row = self._row_of_page.pop(page, None)
        if row is not None:
            self.release(row)

    def __len__(self) -> int:
        """Returns the number of snapshots that are attached to pages."""
        return len(self._row_of_page)
