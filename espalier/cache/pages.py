"""Which pages are free, and how many hold each of those that are not.

Ids and counts only: the tensors stand in cache/kv.py, and who holds what is for the scheduler and the prefix tree.  A
holder is a running request or the prefix tree; a page is free when nobody holds it.
"""

from collections import Counter
from collections.abc import Callable, Iterable

DUMMY_PAGE = 0


class OutOfPages(Exception):
    """More pages were asked for than are free.  Ask `free` first: it is for the scheduler to evict, preempt or wait."""


class PageDefect(AssertionError):
    """The books are wrong: a page held by nobody is shared or released, or counts do not add up.  Names the page."""


class PagePool:
    """Reference counts of pages 1 .. num_pages - 1.  Page 0, the dummy that padding writes to, is never handed out.

    Pages freed last are handed out first, in the order in which they were held; at the start the lowest ids.  That
    costs O(1) a page, depends on nothing but the calls made, leaves memory that was never needed untouched, and keeps
    pages that follow one another together: attention copies their rows in one go
    (kernels/attention/contiguous_blocks.py).

    on_shared: called with (page, True) when a page gets its second holder, and with (page, False) when it is left with
    one.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.num_released = 0
        self.on_shared: Callable[[int, bool], None] | None = None
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))

    @property
    def free(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages with one reference each.  Raises OutOfPages, and hands out none, if fewer are free."""
        if count > self.free:
            raise OutOfPages(f"{count} pages asked for, {self.free} of {self.num_pages - 1} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page.  Raises PageDefect for a page that nobody holds."""
        for page in pages:
            self._require_held(page, "shared")
            self._references[page] += 1
            if self._references[page] == 2 and self.on_shared is not None:
                self.on_shared(page, True)

    def release(self, pages: Iterable[int]) -> None:
        """Take a holder from each page; the last one frees it.  Raises PageDefect for a page that nobody holds.

        num_released counts the calls, for those who wait for pages.
        """
        self.num_released += 1
        for page in reversed([*pages]):
            self._require_held(page, "released")
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
            elif self._references[page] == 1 and self.on_shared is not None:
                self.on_shared(page, False)

    def references(self, page: int) -> int:
        """How many hold the page; 0 for a free page and for the dummy."""
        return self._references[page]

    def check(self, owned: Iterable[Iterable[int]], cached: Iterable[int]) -> None:
        """Raise PageDefect unless every page is exactly one of dummy, free, held, and counts equal holders.

        owned: the pages of each running request; cached: the pages of the prefix tree.  O(pages).
        """
        holders: Counter[int] = Counter()
        for held in (*owned, cached):
            counts = Counter(held)
            for page in (page for page, times in counts.items() if times > 1):
                raise PageDefect(f"page {page} stands {counts[page]} times with one holder")
            holders.update(counts)
        free = Counter(self._free)
        for page in range(self.num_pages):
            self._check_page(page, holders.pop(page, 0), free.pop(page, 0))
        for page in (*holders, *free):
            raise PageDefect(f"page {page} does not exist: pages 0 to {self.num_pages - 1} do")

    def _check_page(self, page: int, holders: int, times_free: int) -> None:
        if self._references[page] != holders:
            raise PageDefect(f"page {page} has {self._references[page]} references and {holders} holders")
        if page == DUMMY_PAGE and (holders or times_free):
            raise PageDefect(
                f"page {page} is the dummy, and has {holders} holders and stands {times_free} times in the free list"
            )
        if page != DUMMY_PAGE and (holders > 0) + times_free != 1:
            raise PageDefect(f"page {page} has {holders} holders and stands {times_free} times in the free list")

    def _require_held(self, page: int, verb: str) -> None:
        if not DUMMY_PAGE < page < self.num_pages:
            raise PageDefect(f"page {page} cannot be {verb}: pages 1 to {self.num_pages - 1} can")
        if not self._references[page]:
            raise PageDefect(f"page {page} cannot be {verb}: it is free")
