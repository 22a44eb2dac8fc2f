"""The page pool: counts, order, and every defect named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.cache.pages import OutOfPages, PageDefect, PagePool
from tests.pages import check_pool


def test_the_dummy_is_never_handed_out():
    pool = PagePool(5)
    assert pool.num_free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.reference_count(0) == 0


def test_pages_freed_last_are_handed_out_first_and_in_order():
    pool = PagePool(6)
    pages = pool.allocate(4)
    pool.release(pages[1:3])
    assert pool.allocate(3) == [2, 3, 5]


@pytest.mark.parametrize("num_pages", [1, 4])
def test_too_many_pages_are_refused_whole(num_pages):
    pool = PagePool(num_pages)
    with pytest.raises(OutOfPages, match=f"{num_pages} pages requested, {num_pages - 1} of {num_pages - 1}"):
        pool.allocate(num_pages)
    assert pool.num_free == num_pages - 1
    assert pool.allocate(0) == []


def test_a_page_is_free_when_its_last_holder_leaves():
    pool = PagePool(3)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert (pool.reference_count(1), pool.num_free) == (1, 1)
    pool.release(pages)
    assert (pool.reference_count(1), pool.num_free) == (0, 2)


@pytest.mark.parametrize("verb", ["share", "release"])
@pytest.mark.parametrize("page", [0, 2, 3, -1])
def test_a_page_that_nobody_holds_is_named(verb, page):
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=rf"page {page} cannot be {verb}d"):
        getattr(pool, verb)([page])
    check_pool(pool, [[1]], [])


def test_releasing_a_page_twice_in_one_call_is_named():
    pool = PagePool(3)
    with pytest.raises(PageDefect, match="page 1 cannot be released: it is free"):
        pool.release(pool.allocate(1) * 2)


def spoil_references(pool):
    pool._reference_counts[1] += 1


def forget_free(pool):
    pool._free_pages.remove(3)


def free_twice(pool):
    pool._free_pages.append(3)


def free_while_held(pool):
    pool._free_pages.append(1)


def free_the_dummy(pool):
    pool._free_pages.append(0)


def free_the_unknown(pool):
    pool._free_pages.append(9)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_references, "page 1 has 3 references and 2 holders"),
        (forget_free, "page 3 has 0 holders and is 0 times"),
        (free_twice, "page 3 has 0 holders and is 2 times"),
        (free_while_held, "page 1 has 2 holders and is 1 times"),
        (free_the_dummy, "page 0 is the dummy"),
        (free_the_unknown, "page 9 does not exist"),
    ],
)
def test_check_names_the_page_whose_books_are_wrong(spoil, message):
    pool = PagePool(5)
    pool.share(pool.allocate(2)[:1])
    check_pool(pool, [[1, 2]], [1])
    spoil(pool)
    with pytest.raises(AssertionError, match=message):
        check_pool(pool, [[1, 2]], [1])


@pytest.mark.parametrize(
    ("owned", "cached", "message"),
    [
        ([], [], "page 1 has 1 references and 0 holders"),
        ([[1]], [1], "page 1 has 1 references and 2 holders"),
        ([[1, 1]], [], "page 1 is listed 2 times by one holder"),
        ([[1]], [2], "page 2 has 0 references and 1 holders"),
        ([[1, 0]], [], "page 0 has 0 references and 1 holders"),
        ([[1, 7]], [], "page 7 does not exist"),
    ],
)
def test_check_names_the_page_whose_holders_are_wrong(owned, cached, message):
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=message):
        check_pool(pool, owned, cached)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 9)), max_size=60))
def test_counts_equal_holders_after_any_calls(calls):
    pool = PagePool(8)
    owned: list[list[int]] = []
    for verb, number in calls:
        if verb == "allocate" and number <= pool.num_free:
            owned.append(pool.allocate(number))
        elif verb == "share" and owned:
            pool.share(owned[number % len(owned)])
            owned.append(list(owned[number % len(owned)]))
        elif verb == "release" and owned:
            pool.release(owned.pop(number % len(owned)))
        check_pool(pool, owned, [])
        held = {page for pages in owned for page in pages}
        assert pool.num_free == 7 - len(held)
        assert all(pool.reference_count(page) == sum(page in pages for pages in owned) for page in range(8))
