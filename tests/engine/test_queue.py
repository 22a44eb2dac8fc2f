"""The waiting queue against a list that is sorted anew."""

from hypothesis import given
from hypothesis import strategies as st

from espalier.engine.queue import WaitingQueue
from tests.harness import request


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "pass over", "remove"]), st.integers(0, 3)), max_size=60))
def test_requests_stand_by_priority_then_arrival_then_as_they_came(calls):
    queue, expected, passed_over = WaitingQueue(), [], []
    for number, (verb, value) in enumerate(calls):
        if verb == "add":
            added = request(number, [1])
            added.priority, added.arrival = value % 2, value
            queue.add(added)
            expected = sorted([*expected, added], key=lambda r: r.place)  # stable
        elif verb == "remove" and expected:
            queue.remove(expected.pop(value % len(expected)))
        elif verb == "take" and expected:
            assert queue.take().request is expected.pop(0)
        elif verb == "pass over" and expected:
            passed_over = [queue.take() for _ in range(min(value, len(expected))) if queue.first() is not None]
            assert [entry.request for entry in passed_over] == expected[: len(passed_over)]
            for entry in passed_over:
                queue.put_back(entry)
        assert list(queue) == expected and len(queue) == len(expected)
        assert queue.first() is (expected[0] if expected else None)


def test_removed_entries_do_not_stay_behind_a_request_that_waits():
    """Of a client that disconnects and comes again, while requests of a better priority keep the queue full."""
    queue, first = WaitingQueue(), request(0, [1])
    queue.add(first)
    for number in range(1, 500):
        added = request(number, [1])
        added.arrival = number
        queue.add(added)
        queue.remove(added)
    assert len(queue._heap) < 10 and queue.first() is first
