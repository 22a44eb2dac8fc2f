"""The prefix cache: a radix tree over full pages, so that requests with equal prefixes share pages.

A node is one page.  The node's key is the tokens of the page, and the path from the root to the node holds the tokens
before the page.  The tree holds a reference to each of its pages, so a page stays cached when its request has finished.
The least recently used leaf is evicted first.  The scheduler decides when to share and when to evict.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from espalier.cache.pages import DUMMY_PAGE, PageDefect, PagePool


@dataclass(eq=False, slots=True)
class PageNode:
    """One cached page.

    last_used: the tree's clock when the page was last used; never smaller than last_used of the node's children.
    has_draft_rows: whether the draft ran over the page's tokens.  If so, it also ran over those of all ancestors.
    num_pins: the number of children that cannot be evicted, plus 1 if a request holds the page.  A node can be evicted
    only if num_pins is 0."""

    page: int
    key: Hashable = ()
    parent: "PageNode | None" = None
    last_used: int = 0
    has_draft_rows: bool = False
    num_pins: int = 0
    children: dict[Hashable, "PageNode"] = field(default_factory=dict)


def page_keys(tokens: Sequence[int], num_pages: int, page_size: int) -> Iterator[Hashable]:
    """Yields the keys of the first `num_pages` pages of these tokens."""
    for start in range(0, num_pages * page_size, page_size):
        yield tuple(tokens[start : start + page_size])


class PrefixTree:
    """Longest-prefix lookup and LRU eviction.  Eviction costs O(log n) for each page.

    on_removed: a function that is called with each page that leaves the tree."""

    def __init__(self, pool: PagePool, page_size: int):
        self.pool = pool
        self.page_size = page_size
        self.on_removed: Callable[[int], None] = lambda page: None
        self._root = PageNode(DUMMY_PAGE)
        self._nodes: dict[int, PageNode] = {}
        # A heap of (last_used, page): an entry for each leaf, and old entries of pages that are no longer leaves.
        # `match` does not change the heap, so last_used in an entry may be too old.  `_pop_oldest_leaf` corrects it.
        self._leaves: list[tuple[int, int]] = []
        self._queued_pages: set[int] = set()
        self._clock = 0
        self._num_pinned = 0
        pool.on_sharing_changed = self._on_page_shared

    def match(self, tokens: Sequence[int], needs_draft_rows: bool = False) -> list[int]:
        """Returns the cached pages of the longest cached prefix of `tokens`, in order.  Marks these pages as used now.

        needs_draft_rows: whether to match only pages that have draft rows.  This method takes no reference to the
        pages, so the caller must share them (PagePool.share) before the next eviction."""
        self._clock += 1
        node = self._root
        pages: list[int] = []
        for key in page_keys(tokens, len(tokens) // self.page_size, self.page_size):
            child = node.children.get(key)
            if child is None or (needs_draft_rows and not child.has_draft_rows):
                return pages
            node = child
            node.last_used = self._clock
            pages.append(node.page)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], has_draft_rows: bool = True) -> None:
        """Add `pages`, which hold tokens[: len(pages) * page_size].  Marks these pages as used now.

        has_draft_rows: whether the draft ran over all of these tokens.  A page with equal tokens after the same prefix
        may be cached already.  Then the tree keeps the cached page, unless only the new page has draft rows.  The tree
        takes a reference to each page that it adds.  The caller's references stay."""
        if len(tokens) < len(pages) * self.page_size:
            raise ValueError(f"{len(pages)} pages of {self.page_size} tokens need more than the {len(tokens)} given")
        self._clock += 1
        node = self._root
        for key, page in zip(page_keys(tokens, len(pages), self.page_size), pages, strict=True):
            node = node.children.get(key) or self._add_node(node, key, page)
            if has_draft_rows and not node.has_draft_rows:
                node.has_draft_rows = True
                if node.page != page:
                    self._replace_page(node, page)
            node.last_used = self._clock
        if pages and not node.children:
            self._queue_leaf(node)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that only the tree holds, least recently used first.  Returns how many it freed.

        A leaf that a request holds stays, with its ancestors.  Each request holds at most one leaf."""
        num_evicted = 0
        held_leaves = []
        while num_evicted < num_pages and (leaf := self._pop_oldest_leaf()) is not None:
            if self.pool.reference_count(leaf.page) > 1:
                held_leaves.append(leaf)
                continue
            self._remove_leaf(leaf)
            num_evicted += 1
        for leaf in held_leaves:
            self._queue_leaf(leaf)
        return num_evicted

    @property
    def num_evictable(self) -> int:
        """Number of pages that `evict` could free now.

        The ancestors of a page that a request holds cannot be freed, even if no request holds the ancestors.  Such
        ancestors occur if two requests computed the same prefix.  The later request holds its own copies of the cached
        pages, and its next page is inserted below the cached pages."""
        return len(self._nodes) - self._num_pinned

    def pages(self) -> Iterator[int]:
        """Returns an iterator over the cached pages."""
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def clear(self) -> None:
        """Release all pages.  Requests keep the pages that they hold."""
        pages = list(self._nodes)
        self._root.children.clear()
        self._nodes.clear()
        self._leaves.clear()
        self._queued_pages.clear()
        self._num_pinned = 0
        for page in pages:
            self.on_removed(page)
        self.pool.release(pages)

    def _add_node(self, parent: PageNode, key: Hashable, page: int) -> PageNode:
        """key: stands for the tokens of the page among the children of `parent`."""
        node = parent.children[key] = PageNode(page, key, parent)
        self._attach_page(node, page)
        return node

    def _attach_page(self, node: PageNode, page: int) -> None:
        """Makes `page` the page of the node, with a reference of the tree."""
        if page in self._nodes:
            raise PageDefect(f"page {page} is cached already with other tokens")
        self.pool.share([page])
        node.page, self._nodes[page] = page, node
        if self.pool.reference_count(page) > 1:
            self._on_page_shared(page, True)

    def _release_page(self, page: int) -> None:
        del self._nodes[page]
        self.on_removed(page)
        self.pool.release([page])

    def _replace_page(self, node: PageNode, page: int) -> None:
        """Makes `page` the page of the node, and releases the page that it had."""
        old_page = node.page
        if self.pool.reference_count(old_page) > 1:
            self._on_page_shared(old_page, False)
        self._attach_page(node, page)
        self._release_page(old_page)

    def _on_page_shared(self, page: int, is_shared: bool) -> None:
        """Updates `num_pins`.  is_shared: True if a request now holds the page, False if no request holds it any more.

        Goes up the tree as long as nodes become evictable, or become not evictable.  If all pages of a prefix are
        shared or released together, the average cost is O(1) per page."""
        node = self._nodes.get(page)
        change, count_after_change = (1, 1) if is_shared else (-1, 0)
        while node is not None and node is not self._root:
            node.num_pins += change
            if node.num_pins != count_after_change:
                return  # another pin was or is on this node
            self._num_pinned += change
            node = node.parent

    def _remove_leaf(self, leaf: PageNode) -> None:
        """Removes a node without children, and releases its page."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        self._release_page(leaf.page)
        if parent is not self._root and not parent.children:
            self._queue_leaf(parent)

    def _queue_leaf(self, leaf: PageNode) -> None:
        """Adds a node that has become a leaf to the heap of leaves to evict, if its page has no entry yet."""
        if leaf.page not in self._queued_pages:
            self._queued_pages.add(leaf.page)
            heappush(self._leaves, (leaf.last_used, leaf.page))

    def _pop_oldest_leaf(self) -> PageNode | None:
        """Pop the least recently used leaf from the heap.  The caller evicts it or queues it again."""
        while self._leaves:
            last_used, page = heappop(self._leaves)
            self._queued_pages.remove(page)
            node = self._nodes.get(page)
            if node is None or node.children:
                continue
            if node.last_used == last_used:
                return node
            self._queue_leaf(node)
        return None


@dataclass(frozen=True)
class PageBudget:
    """Frees cached pages when the pool has too few free pages.  prefix_tree: None without a prefix cache."""

    pool: PagePool
    prefix_tree: PrefixTree | None

    def evict_until_free(self, num_pages: int) -> bool:
        """Evict cached pages until the pool has `num_pages` free pages.  Returns False if it has fewer after
        eviction."""
        num_missing = num_pages - self.pool.num_free
        if num_missing > 0 and self.prefix_tree is not None:
            self.prefix_tree.evict(num_missing)
        return self.pool.num_free >= num_pages

    def could_free(self, num_pages: int) -> bool:
        """Whether `evict_until_free` would succeed.  Nothing is evicted."""
        num_missing = num_pages - self.pool.num_free
        return num_missing <= 0 or (self.prefix_tree is not None and num_missing <= self.prefix_tree.num_evictable)
