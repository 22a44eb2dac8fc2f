"""Checks that every page, and every row of a state snapshot, has exactly the owners that its counts say.

Each function raises PageDefect, which names the page or the rows.
"""

from collections import Counter
from collections.abc import Iterable

from espalier.cache.pages import DUMMY_PAGE, PageDefect, PagePool, SnapshotRows
from espalier.engine.engine import Engine
from espalier.engine.state_keeper import StateKeeper


def check_pages(engine: Engine) -> None:
    """Requires that every page is the dummy page, free, or held as often as its reference count says."""
    cached = [*engine.prefix_tree.pages()] if engine.prefix_tree is not None else []
    check_pool(engine.pool, [r.pages for r in engine.scheduler.running], cached)
    keeper = engine.scheduler.state_keeper
    if isinstance(keeper, StateKeeper):
        held = [row for each in keeper._by_request.values() for _, row in each.all_snapshots]
        check_snapshots(keeper.snapshot_rows, held, cached)


def check_pool(pool: PagePool, request_pages: Iterable[Iterable[int]], cached: Iterable[int]) -> None:
    """request_pages: the pages of each running request; cached: the pages of the prefix tree."""
    holders: Counter[int] = Counter()
    for held in (*request_pages, cached):
        counts = Counter(held)
        for page in (page for page, times in counts.items() if times > 1):
            raise PageDefect(f"page {page} is listed {counts[page]} times by one holder")
        holders.update(counts)
    free = Counter(pool._free_pages)
    for page in range(pool.num_pages):
        _check_page(pool, page, holders.pop(page, 0), free.pop(page, 0))
    for page in (*holders, *free):
        raise PageDefect(f"page {page} does not exist: pages are 0 to {pool.num_pages - 1}")


def _check_page(pool: PagePool, page: int, num_holders: int, free_count: int) -> None:
    if pool.reference_count(page) != num_holders:
        raise PageDefect(f"page {page} has {pool.reference_count(page)} references and {num_holders} holders")
    if page == DUMMY_PAGE and (num_holders or free_count):
        raise PageDefect(f"page {page} is the dummy: {num_holders} holders, {free_count} times in the free list")
    if page != DUMMY_PAGE and (num_holders > 0) + free_count != 1:
        raise PageDefect(f"page {page} has {num_holders} holders and is {free_count} times in the free list")


def check_snapshots(snapshots: SnapshotRows, held_rows: Iterable[int], cached_pages: Iterable[int]) -> None:
    """Requires that every row is exactly one of free, held or a page's snapshot, and that these pages are cached.

    held_rows: rows of running requests; cached_pages: pages of the tree.
    """
    found = sorted((*held_rows, *snapshots._free_rows, *snapshots._row_of_page.values()))
    if found != sorted(snapshots._rows):
        raise PageDefect(f"rows of snapshots are {list(snapshots._rows)}; free, held and filed are {found}")
    if lost := set(snapshots._row_of_page) - set(cached_pages):
        raise PageDefect(f"pages {sorted(lost)} have snapshots and are not in the prefix tree")
