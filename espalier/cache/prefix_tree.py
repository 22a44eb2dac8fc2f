"""Pages that were computed once and may serve again: a radix tree over whole pages.

A node is one page under a key, which says what its rows were computed from and which the tree only compares; what
precedes it is its path.  The tree holds a reference to each of its
pages, so that they outlive their requests until they are evicted, least recently used leaf first.  When to share and
to evict is for the scheduler.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from espalier.cache.pages import DUMMY_PAGE, PageDefect, PagePool

# What requests must have in common, beside tokens, to share pages.
Salt = str | bytes | None


@dataclass(eq=False, slots=True)
class Node:
    """One cached page.

    used: the clock's count at its last use, never before that of a node below it.
    num_keepers: what keeps the node from eviction: each child that is kept, and one if requests hold the page.
    """

    page: int
    key: Hashable = ()
    parent: "Node | None" = None
    used: int = 0
    num_keepers: int = 0
    children: dict[Hashable, "Node"] = field(default_factory=dict)


def page_keys(tokens: Sequence[int], count: int, page_size: int, salt: Salt = None) -> Iterator[Hashable]:
    """Keys of the first `count` pages of these tokens.  Requests of different salts have no key in common."""
    for start in range(0, count * page_size, page_size):
        page = tuple(tokens[start : start + page_size])
        yield page if salt is None else (salt, page)


class PrefixTree:
    """Longest-prefix lookup and LRU eviction; O(log n) a page evicted, and no recursion."""

    def __init__(self, pool: PagePool, page_size: int):
        self.pool = pool
        self.page_size = page_size
        self._root = Node(DUMMY_PAGE)
        # In order of arrival, so that a node stands after its ancestors.
        self._nodes: dict[int, Node] = {}
        # (used, page) of every leaf once, and of some that are leaves no more.  `used` may lag behind the node's: a
        # lower bound, put right when the entry comes up, so that a match costs the heap nothing.
        self._leaves: list[tuple[int, int]] = []
        self._queued: set[int] = set()
        self._clock = 0
        self._num_kept = 0
        pool.on_shared = self._page_shared

    def match(self, tokens: Sequence[int], salt: Salt = None) -> list[int]:
        """The longest run of cached pages that prefixes `tokens` under this salt, in order; counts as a use of them.

        No reference is taken: share the pages before anything else may evict.
        """
        self._clock += 1
        node = self._root
        pages: list[int] = []
        for key in page_keys(tokens, len(tokens) // self.page_size, self.page_size, salt):
            child = node.children.get(key)
            if child is None:
                return pages
            node = child
            node.used = self._clock
            pages.append(node.page)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: Salt = None) -> None:
        """File `pages`, which hold tokens[: len(pages) * page_size]; counts as a use of them.

        The tree takes its own reference to each page that it did not hold.  Where equal tokens are cached already the
        caller's page is not taken; the caller releases its own references as always.
        """
        if len(tokens) < len(pages) * self.page_size:
            raise ValueError(f"{len(pages)} pages of {self.page_size} hold more than the {len(tokens)} tokens given")
        self._clock += 1
        node = self._root
        for key, page in zip(page_keys(tokens, len(pages), self.page_size, salt), pages, strict=True):
            node = node.children.get(key) or self._add(node, key, page)
            node.used = self._clock
        if pages and not node.children:
            self._queue(node)

    def evict(self, count: int) -> int:
        """Free up to `count` pages that nobody but the tree holds, least recently used leaf first; returns how many.

        A leaf that a request holds is passed over, and keeps its ancestors.  There is at most one such leaf a request.
        """
        evicted = 0
        passed_over = []
        while evicted < count and (leaf := self._least_recent_leaf()) is not None:
            if self.pool.references(leaf.page) > 1:
                passed_over.append(leaf)
                continue
            self._remove(leaf)
            evicted += 1
        for leaf in passed_over:
            self._queue(leaf)
        return evicted

    @property
    def evictable(self) -> int:
        """How many pages `evict` could free now.

        A held page keeps its ancestors, also those that no request holds: a request whose own copy of a prefix was
        not taken files its next page below the copy that was.
        """
        return len(self._nodes) - self._num_kept

    def pages(self) -> Iterator[int]:
        """Every cached page once, ancestors first."""
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def clear(self) -> None:
        """Let go of every page; those that requests hold stay theirs."""
        pages = list(self._nodes)
        self._root.children.clear()
        self._nodes.clear()
        self._leaves.clear()
        self._queued.clear()
        self._num_kept = 0
        self.pool.release(pages)

    def _add(self, parent: Node, key: Hashable, page: int) -> Node:
        if page in self._nodes:
            raise PageDefect(f"page {page} is cached already, under other tokens")
        self.pool.share([page])
        node = self._nodes[page] = parent.children[key] = Node(page, key, parent)
        if self.pool.references(page) > 1:
            self._page_shared(page, True)
        return node

    def _page_shared(self, page: int, shared: bool) -> None:
        """The first request begins to hold a page besides the tree, or the last one lets it go.

        Goes up as long as a node begins, or ceases, to be kept: O(1) for each page of a prefix, on average.
        """
        node = self._nodes.get(page)
        change, turning_point = (1, 1) if shared else (-1, 0)
        while node is not None and node is not self._root:
            node.num_keepers += change
            if node.num_keepers != turning_point:
                return
            self._num_kept += change
            node = node.parent

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        del self._nodes[leaf.page]
        self.pool.release([leaf.page])
        if parent is not self._root and not parent.children:
            self._queue(parent)

    def _queue(self, leaf: Node) -> None:
        if leaf.page not in self._queued:
            self._queued.add(leaf.page)
            heappush(self._leaves, (leaf.used, leaf.page))

    def _least_recent_leaf(self) -> Node | None:
        """Take the least recently used leaf from the heap; the caller evicts it or queues it again."""
        while self._leaves:
            used, page = heappop(self._leaves)
            self._queued.remove(page)
            node = self._nodes[page]
            if node.children:
                continue
            if node.used == used:
                return node
            self._queue(node)
        return None
