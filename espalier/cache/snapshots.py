"""Which rows of the state table hold snapshots, and which page of the prefix tree each belongs to.

A row is free, held by a running request, or filed under a page: the state before the page's last tokens.  If no row is
free, the least recently used of the filed ones is taken.  The tensors are in cache/states.py.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from espalier.cache.pages import PageDefect


class Snapshots:
    """rows: of the state table."""

    def __init__(self, rows: Iterable[int]):
        self._rows = tuple(rows)
        self._free = list(self._rows)[::-1]
        # By page, the least recently used first.
        self._filed: OrderedDict[int, int] = OrderedDict()

    def allocate(self) -> int | None:
        """A row, which the caller holds from now on.  None if running requests hold all."""
        if self._free:
            return self._free.pop()
        return self._filed.popitem(last=False)[1] if self._filed else None

    def release(self, row: int) -> None:
        """Give a held row back."""
        self._free.append(row)

    def file(self, page: int, row: int) -> None:
        """Give a held row to a page of the tree.  A page that has a snapshot keeps that one."""
        if page in self._filed:
            self.release(row)
        else:
            self._filed[page] = row

    def last_of(self, pages: Sequence[int]) -> int | None:
        """The index of the last of these pages that has a snapshot."""
        return next((i for i in reversed(range(len(pages))) if pages[i] in self._filed), None)

    def use(self, page: int) -> int:
        """The row of a page's snapshot, which is used now."""
        self._filed.move_to_end(page)
        return self._filed[page]

    def drop(self, page: int) -> None:
        """Free the snapshot of a page that leaves the tree, if it has one."""
        row = self._filed.pop(page, None)
        if row is not None:
            self.release(row)

    def __len__(self) -> int:
        """Snapshots that are filed."""
        return len(self._filed)

    def check(self, held: Iterable[int], cached: Iterable[int]) -> None:
        """Check that every row is exactly one of free, held and filed, and that snapshots belong to cached pages.

        held: rows of running requests; cached: pages of the tree.  Raises PageDefect.
        """
        found = sorted((*held, *self._free, *self._filed.values()))
        if found != sorted(self._rows):
            raise PageDefect(f"rows of snapshots are {list(self._rows)}; free, held and filed are {found}")
        if lost := set(self._filed) - set(cached):
            raise PageDefect(f"pages {sorted(lost)} have snapshots and are not in the prefix tree")
