"""The prefix tree against a naive model: a list of cached paths, searched and scanned in full."""

import time
from dataclasses import dataclass, field
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from espalier.cache.pages import PageDefect, PagePool
from espalier.cache.prefix_tree import PrefixTree, page_keys
from tests.pages import check_pool


@dataclass
class Entry:
    page: int
    used: int
    drafted: bool


@dataclass
class NaiveCache:
    """Every cached page under the whole run of tokens up to its end."""

    page_size: int
    entries: dict[tuple[int, ...], Entry] = field(default_factory=dict)
    clock: int = 0

    def prefixes(self, tokens):
        return [tuple(tokens[:end]) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def match(self, tokens, drafted):
        self.clock += 1
        entries = self.entries

        def serves(run):
            return run in entries and (entries[run].drafted or not drafted)

        hit = list(takewhile(serves, self.prefixes(tokens)))
        for run in hit:
            self.entries[run].used = self.clock
        return [self.entries[run].page for run in hit]

    def insert(self, tokens, pages, drafted):
        self.clock += 1
        for run, page in zip(self.prefixes(tokens)[: len(pages)], pages, strict=True):
            if run not in self.entries or drafted > self.entries[run].drafted:
                self.entries[run] = Entry(page, 0, drafted)
            self.entries[run].used = self.clock

    def below(self, run):
        return [other for other in self.entries if len(other) > len(run) and other[: len(run)] == run]

    def evict(self, count, held):
        """Pages in the order in which they go."""
        gone = []
        while len(gone) < count:
            leaves = [r for r, e in self.entries.items() if e.page not in held and not self.below(r)]
            if not leaves:
                break
            oldest = min(leaves, key=lambda run: self.entries[run].used)
            gone.append(self.entries.pop(oldest).page)
        return gone

    def num_evictable(self, held):
        kept = [run for run, entry in self.entries.items() if entry.page in held]
        return sum(not any(other[: len(run)] == run for other in kept) for run in self.entries)

    def pages(self):
        return sorted(entry.page for entry in self.entries.values())


class WatchedPool(PagePool):
    """Remembers the pages that became free, in order."""

    def __init__(self, num_pages):
        super().__init__(num_pages)
        self.freed: list[int] = []

    def release(self, pages):
        for page in list(pages):
            super().release([page])
            if not self.reference_count(page):
                self.freed.append(page)


@dataclass
class Running:
    tokens: list[int]
    pages: list[int]
    drafted: bool


@st.composite
def prompts(draw):
    """Few enough that requests often share, repeat and part from one another; few end where a page does."""
    conversation = draw(st.sampled_from([[0] * 12, [0, 1] * 6, [0, 0, 0, 1, 1, 1] * 2]))
    return conversation[: draw(st.integers(0, 12))] + draw(st.lists(st.integers(0, 1), max_size=2))


class CacheMachine(RuleBasedStateMachine):
    """Requests come, grow, file their pages and leave as the scheduler has them do; nothing is too small to collide."""

    @initialize(page_size=st.integers(1, 3), num_pages=st.integers(1, 40))
    def start(self, page_size, num_pages):
        self.page_size = page_size
        self.pool = WatchedPool(num_pages)
        self.tree = PrefixTree(self.pool, page_size)
        self.naive = NaiveCache(page_size)
        self.running: list[Running] = []
        self.waiting: list[tuple[list[int], bool]] = []

    def held(self):
        return {page for request in self.running for page in request.pages}

    def evict_both(self, count):
        self.pool.freed.clear()
        evictable = self.tree.num_evictable
        gone = self.naive.evict(count, self.held())
        assert self.tree.evict(count) == len(gone) == min(count, evictable)
        assert self.pool.freed == gone

    def enter(self, tokens, drafted):
        shared = self.tree.match(tokens, drafted)
        assert shared == self.naive.match(tokens, drafted)
        self.pool.share(shared)
        self.running.append(Running(list(tokens), shared, drafted))
        if not self.grow(self.running[-1]):
            self.pool.release(self.running.pop().pages)
            return False
        return True

    def grow(self, request):
        missing = -(-len(request.tokens) // self.page_size) - len(request.pages)
        self.evict_both(max(0, missing - self.pool.num_free))
        if missing > self.pool.num_free:
            return False
        request.pages += self.pool.allocate(missing)
        return True

    def file(self, request):
        whole = len(request.tokens) // self.page_size
        self.tree.insert(request.tokens[: whole * self.page_size], request.pages[:whole], request.drafted)
        self.naive.insert(request.tokens, request.pages[:whole], request.drafted)

    def leave(self, request, filed):
        if filed:
            self.file(request)
        self.running.remove(request)
        self.pool.release(request.pages)

    @rule(tokens=prompts(), drafted=st.lists(st.booleans(), min_size=1, max_size=3), filed=st.booleans())
    def admit(self, tokens, drafted, filed):
        """One prompt, of one request or of several before the first has filed it."""
        entered = [self.running[-1] for each in drafted if self.enter(tokens, each)]
        for request in entered if filed else []:
            self.file(request)

    @rule(tokens=prompts(), drafted=st.booleans())
    def come_and_go(self, tokens, drafted):
        if self.enter(tokens, drafted):
            self.leave(self.running[-1], filed=True)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def extend(self, data, more):
        request = data.draw(st.sampled_from(self.running))
        request.tokens += more
        if not self.grow(request):
            del request.tokens[-len(more) :]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def insert(self, data):
        self.file(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), filed=st.booleans())
    def release(self, data, filed):
        self.leave(data.draw(st.sampled_from(self.running)), filed)

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self):
        self.waiting.append((self.running[-1].tokens, self.running[-1].drafted))
        self.leave(self.running[-1], filed=True)

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self):
        if self.enter(*self.waiting[0]):
            del self.waiting[0]

    @rule(tokens=prompts(), drafted=st.booleans())
    def look(self, tokens, drafted):
        assert self.tree.match(tokens, drafted) == self.naive.match(tokens, drafted)

    @rule(count=st.integers(0, 5))
    def evict(self, count):
        self.evict_both(count)

    @precondition(lambda self: len(self.tree) > 8)
    @rule()
    def clear(self):
        self.tree.clear()
        self.naive.entries.clear()

    @invariant()
    def every_page_is_exactly_one_of_free_cached_owned(self):
        check_pool(self.pool, [request.pages for request in self.running], self.tree.pages())
        kept = self.held() | set(self.tree.pages())
        assert self.pool.num_free + len(kept) + 1 == self.pool.num_pages

    @invariant()
    def the_tree_holds_what_the_naive_cache_holds(self):
        assert sorted(self.tree.pages()) == self.naive.pages()
        assert len(self.tree) == len(self.naive.entries)
        assert self.tree.num_evictable == self.naive.num_evictable(self.held())


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40)


def cached(pool, tree, tokens):
    """A request that came, filed its pages and left."""
    pages = pool.allocate(len(tokens) // tree.page_size)
    tree.insert(tokens, pages)
    pool.release(pages)
    return pages


def test_only_whole_pages_match():
    pool = PagePool(9)
    tree = PrefixTree(pool, 4)
    pages = cached(pool, tree, list(range(8)))
    assert [tree.match(list(range(n))) for n in (0, 3, 4, 7, 8, 9)] == [[], [], pages[:1], pages[:1], pages, pages]
    assert tree.match([1, 1, 2, 3, 4, 5, 6, 7]) == []
    assert tree.match([0, 1, 2, 3, 4, 5, 6, 0]) == pages[:1]


def test_a_duplicate_is_not_taken_and_its_successor_is_filed_below_the_first():
    pool = PagePool(9)
    tree = PrefixTree(pool, 1)
    first = cached(pool, tree, [5, 6])
    second = pool.allocate(3)
    tree.insert([5, 6, 7], second)
    assert tree.match([5, 6, 7]) == [*first, second[2]]
    # The second request holds none of the first two pages itself, and they are not to be evicted from above the third.
    assert (tree.num_evictable, tree.evict(9)) == (0, 0)
    pool.release(second)
    assert (tree.num_evictable, tree.evict(9)) == (3, 3)
    assert pool.num_free == 8


def test_least_recently_used_leaves_go_first_and_a_match_is_a_use():
    pool = PagePool(9)
    tree = PrefixTree(pool, 1)
    for tokens in ([1, 2], [1, 3], [4]):
        cached(pool, tree, tokens)
    tree.match([1, 2])
    assert tree.evict(1) == 1
    assert [len(tree.match(tokens)) for tokens in ([1, 3], [4], [1, 2])] == [1, 1, 2]
    assert tree.evict(1) == 1
    assert [len(tree.match(tokens)) for tokens in ([4], [1, 2])] == [0, 2]


def test_a_page_is_cached_under_one_key_only():
    pool = PagePool(9)
    tree = PrefixTree(pool, 1)
    pages = pool.allocate(1)
    tree.insert([1], pages)
    with pytest.raises(PageDefect, match="page 1 is cached already"):
        tree.insert([2], pages)


def test_more_pages_than_tokens_are_refused():
    pool = PagePool(9)
    with pytest.raises(ValueError, match="2 pages of 4 tokens need more than the 7"):
        PrefixTree(pool, 4).insert([0] * 7, pool.allocate(2))


def test_clear_leaves_a_request_its_pages():
    pool = PagePool(9)
    tree = PrefixTree(pool, 1)
    cached(pool, tree, [3, 4])
    pages = pool.allocate(2)
    tree.insert([1, 2], pages)
    tree.clear()
    assert (len(tree), list(tree.pages()), tree.match([1]), tree.evict(1)) == (0, [], [], 0)
    check_pool(pool, [pages], [])
    assert cached(pool, tree, [1]) == tree.match([1])


def test_a_hundred_thousand_pages_cost_no_scan_a_page():
    """One branch of 50,000 pages, deeper than any recursion, and 50,000 leaves; each evicted by a call of its own."""
    pool = PagePool(100_001)
    tree = PrefixTree(pool, 1)
    # About a second; a scan a page would take an hour.
    deadline = time.perf_counter() + 60
    cached(pool, tree, range(50_000))
    for token in range(50_000):
        cached(pool, tree, [-1 - token])
    assert pool.num_free == 0
    for _ in range(100_000):
        assert tree.evict(1) == 1
        assert time.perf_counter() < deadline
    assert pool.num_free == 100_000


def test_keys_of_pages_are_their_tokens():
    assert list(page_keys(range(7), 2, 3)) == [(0, 1, 2), (3, 4, 5)]
