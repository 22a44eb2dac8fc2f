"""Where a prompt goes: to the pages that it shares, within the bound on load, and the books that are kept of it."""

import subprocess
import sys
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.serve_ray.places import MAX_PAGES, Places, page_keys

REPLICAS = ("a", "b", "c")
PROMPT = list(range(100, 180))
KEYS = page_keys(PROMPT, 16)


def test_a_key_stands_for_a_start_of_whole_pages():
    assert len(KEYS) == 5 and len(set(KEYS)) == 5
    assert page_keys(PROMPT[:47], 16) == KEYS[:2]
    other = [*PROMPT[:20], 0, *PROMPT[21:]]
    assert page_keys(other, 16)[0] == KEYS[0] and not set(page_keys(other, 16)[1:]) & set(KEYS)
    # The same page behind another start is another key.
    assert page_keys([*PROMPT[16:32], *PROMPT[16:32]], 16)[1] not in KEYS
    assert len(page_keys(range(16 * MAX_PAGES + 64), 16)) == MAX_PAGES


def test_keys_are_equal_in_every_process():
    code = "from espalier.serve_ray.places import page_keys; print(page_keys(list(range(100, 180)), 16))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {str(KEYS)}


def test_a_prompt_goes_where_the_longest_start_of_it_went():
    for longer, shorter in (("b", "c"), ("c", "b")):
        places = Places(imbalance=1)
        places.sent(KEYS[:4], 1, longer, "r1")
        places.sent(KEYS[:2], 1, shorter, "r2")
        places.ended(longer, "r1")
        places.ended(shorter, "r2")
        assert places.ranked(KEYS, REPLICAS)[:2] == [longer, shorter]
        # The replica with most of it is gone.
        places.keep({"a", shorter})
        assert places.ranked(KEYS, ("a", shorter)) == [shorter, "a"]


def test_load_comes_before_pages_beyond_the_bound():
    places = Places(imbalance=2)
    for number in range(2):
        places.sent(KEYS, 1, "a", f"r{number}")
    assert places.ranked(KEYS, REPLICAS)[0] == "a"
    places.sent(KEYS, 1, "a", "r2")
    assert places.ranked(KEYS, REPLICAS)[0] != "a"
    places.ended("a", "r0")
    assert places.ranked(KEYS, REPLICAS)[0] == "a"


def test_fronts_that_know_nothing_agree_and_spread():
    chosen = Counter()
    for start in range(64):
        keys = page_keys(range(start, start + 32), 16)
        [first] = {Places().ranked(keys, order)[0] for order in (REPLICAS, REPLICAS[::-1])}
        chosen[first] += 1
    assert set(chosen) == set(REPLICAS)


def test_only_the_pages_used_last_are_remembered():
    places = Places(max_keys=5)
    places.sent(KEYS, 1, "a", "r")
    places.sent(page_keys([0] * 16, 16), 1, "b", "s")
    assert places.ranked(KEYS, ("a", "b")) == places.ranked((), ("a", "b")), "its first page is forgotten"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("sent", "ended", "keep")), st.sampled_from(REPLICAS), st.integers(0, 3), st.integers(1, 4)
        )
    )
)
def test_the_books_balance(steps):
    """load is what was sent and has not ended, whatever ends twice or never began."""
    places, open_samples, there = Places(), {}, set(REPLICAS)
    for what, replica, request, samples in steps:
        key = replica, str(request)
        if what == "sent":
            places.sent(KEYS[:request], samples, *key)
            open_samples.setdefault(key, []).append(samples)
        elif what == "ended":
            places.ended(*key)
            if open_samples.get(key):
                open_samples[key].pop()
        else:
            there = {replica}
            places.keep(there)
            open_samples = {key: each for key, each in open_samples.items() if key[0] in there}
        wanted = {each: sum(sum(v) for k, v in open_samples.items() if k[0] == each) for each in REPLICAS}
        assert {each: places.load[each] for each in REPLICAS} == wanted
        ranked = places.ranked(KEYS, REPLICAS)
        assert sorted(ranked) == list(REPLICAS)
        assert wanted[ranked[0]] - min(wanted.values()) <= places.imbalance
