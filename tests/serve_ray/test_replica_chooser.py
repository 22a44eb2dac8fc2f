"""Where a prompt goes: to the pages that it shares, within the bound on load, and the books that are kept of it."""

import os
import subprocess
import sys
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.serve_ray import replica_chooser
from espalier.serve_ray.replica_chooser import MAX_HASHED_PAGES, ReplicaChooser, prefix_hashes

REPLICAS = ("a", "b", "c")
PROMPT = list(range(100, 180))
KEYS = prefix_hashes(PROMPT, 16)


def test_a_key_stands_for_a_start_of_whole_pages():
    assert len(KEYS) == 5 and len(set(KEYS)) == 5
    assert prefix_hashes(PROMPT[:47], 16) == KEYS[:2]
    other = [*PROMPT[:20], 0, *PROMPT[21:]]
    assert prefix_hashes(other, 16)[0] == KEYS[0] and not set(prefix_hashes(other, 16)[1:]) & set(KEYS)
    # The same page behind another start is another key.
    assert prefix_hashes([*PROMPT[16:32], *PROMPT[16:32]], 16)[1] not in KEYS
    assert len(prefix_hashes(range(16 * MAX_HASHED_PAGES + 64), 16)) == MAX_HASHED_PAGES


def test_keys_are_equal_in_every_process():
    # By its file: the package imports all that replicas need, which takes seconds.
    code = f"import runpy; print(runpy.run_path({replica_chooser.__file__!r})['prefix_hashes'](range(100, 180), 16))"
    # Hashes of another seed than this process has.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(KEYS)


def test_a_prompt_goes_where_the_longest_start_of_it_went():
    for longer, shorter in (("b", "c"), ("c", "b")):
        chooser = ReplicaChooser(imbalance=1)
        chooser.record_sent(KEYS[:4], 1, longer, "r1")
        chooser.record_sent(KEYS[:2], 1, shorter, "r2")
        chooser.record_ended(longer, "r1")
        chooser.record_ended(shorter, "r2")
        assert chooser.rank_replicas(KEYS, REPLICAS)[:2] == [longer, shorter]
        # The replica with most of it is gone.
        chooser.forget_other_replicas({"a", shorter})
        assert chooser.rank_replicas(KEYS, ("a", shorter)) == [shorter, "a"]


def test_load_comes_before_pages_beyond_the_bound():
    chooser = ReplicaChooser(imbalance=2)
    for number in range(2):
        chooser.record_sent(KEYS, 1, "a", f"r{number}")
    assert chooser.rank_replicas(KEYS, REPLICAS)[0] == "a"
    chooser.record_sent(KEYS, 1, "a", "r2")
    assert chooser.rank_replicas(KEYS, REPLICAS)[0] != "a"
    chooser.record_ended("a", "r0")
    assert chooser.rank_replicas(KEYS, REPLICAS)[0] == "a"


def test_fronts_that_know_nothing_agree_and_spread():
    chosen = Counter()
    for start in range(64):
        keys = prefix_hashes(range(start, start + 32), 16)
        [first] = {ReplicaChooser().rank_replicas(keys, order)[0] for order in (REPLICAS, REPLICAS[::-1])}
        chosen[first] += 1
    assert set(chosen) == set(REPLICAS)


PROMPTS = [prefix_hashes([start] * 16 + PROMPT, 16) for start in range(4)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=12), st.integers(1, 12))
def test_what_is_remembered_are_the_pages_used_last_and_of_one_prompt_its_first(sent, max_prefixes):
    """A prompt's remembered keys are its shortest prefixes: a longer one without them is never found."""
    chooser = ReplicaChooser(max_prefixes=max_prefixes)
    newest = []
    for number, (prompt, pages) in enumerate(sent):
        keys = PROMPTS[prompt][:pages]
        chooser.record_sent(keys, 1, "a", str(number))
        newest = [*keys, *(key for key in newest if key not in keys)][:max_prefixes]
    for keys in PROMPTS:
        held = next((count for count, key in enumerate(keys) if key not in newest), len(keys))
        assert chooser._num_pages_held(keys, ("a",)).get("a", 0) == held == sum(key in newest for key in keys)


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
    chooser, open_samples, there = ReplicaChooser(), {}, set(REPLICAS)
    for what, replica, request, samples in steps:
        key = replica, str(request)
        if what == "sent":
            chooser.record_sent(KEYS[:request], samples, *key)
            open_samples.setdefault(key, []).append(samples)
        elif what == "ended":
            chooser.record_ended(*key)
            if open_samples.get(key):
                open_samples[key].pop()
        else:
            there = {replica}
            chooser.forget_other_replicas(there)
            open_samples = {key: each for key, each in open_samples.items() if key[0] in there}
        wanted = {each: sum(sum(v) for k, v in open_samples.items() if k[0] == each) for each in REPLICAS}
        assert {each: chooser.num_open_samples[each] for each in REPLICAS} == wanted
        ranked = chooser.rank_replicas(KEYS, REPLICAS)
        assert sorted(ranked) == list(REPLICAS)
        assert wanted[ranked[0]] - min(wanted.values()) <= chooser.imbalance
