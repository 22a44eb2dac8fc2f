"""The waiting queue against a list that is sorted anew, and the turns of several clients."""

from itertools import combinations

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
            added.priority, added.arrival_index = value % 2, value
            queue.add(added)
            expected = sorted([*expected, added], key=lambda r: r.queue_key)  # stable
        elif verb == "remove" and expected:
            queue.remove(expected.pop(value % len(expected)))
        elif verb == "take" and expected:
            assert queue.pop(gets_slot=True).request is expected.pop(0)
        elif verb == "pass over" and expected:
            passed_over = [
                queue.pop(gets_slot=False) for _ in range(min(value, len(expected))) if queue.peek() is not None
            ]
            assert [entry.request for entry in passed_over] == expected[: len(passed_over)]
            for entry in passed_over:
                queue.put_back(entry)
        assert list(queue) == expected and len(queue) == len(expected)
        assert queue.peek() is (expected[0] if expected else None)


def test_removed_entries_do_not_stay_behind_a_request_that_waits():
    """Of a client that disconnects and comes again, while requests of a better priority keep the queue full."""
    queue, first = WaitingQueue(), request(0, [1])
    queue.add(first)
    for number in range(1, 500):
        added = request(number, [1])
        added.arrival_index = number
        queue.add(added)
        queue.remove(added)
    [of_priority] = queue._by_priority.values()
    [of_client] = of_priority._queues.values()
    assert len(of_client.heap) < 10 and queue.peek() is first


# (verb, client, priority, whether it had a slot before)
CALLS = st.tuples(
    st.sampled_from(["add"] * 6 + ["take"] * 5 + ["remove"]),
    st.sampled_from((0, 0, 0, 1, 1, 2)),
    st.sampled_from((1, 1, 1, 1, 1, 0)),
    st.integers(0, 9).map(lambda drawn: drawn == 9),
)


@given(st.lists(CALLS, min_size=20, max_size=150))
def test_clients_that_wait_are_served_in_turns(calls):
    """While two of them wait, neither is served twice more often; each client's requests go by arrival; a better
    priority goes first; one that had a slot before goes before all of its priority."""
    queue, waiting, served = WaitingQueue(), [], dict.fromkeys(combinations(range(3), 2), 0)
    for number, (verb, client, priority, is_back) in enumerate(calls):
        if verb == "add":
            added = request(number, [1])
            added.client, added.priority, added.arrival_index = str(client), priority, number
            added.generation = int(is_back)
            queue.add(added)
            waiting.append(added)
        elif verb == "remove" and waiting:
            queue.remove(waiting.pop(number % len(waiting)))
        elif verb == "take" and waiting:
            first = queue.peek()
            assert queue.pop(gets_slot=True).request is first
            assert first.priority == min(each.priority for each in waiting)
            alike = [each for each in waiting if each.priority == first.priority]
            assert bool(first.generation) == any(each.generation for each in alike)
            own = [each for each in alike if (each.client, each.generation) == (first.client, first.generation)]
            assert first is own[0] or first.generation
            waiting.remove(first)
            for pair in served if first.priority == 1 and not first.generation else ():
                if int(first.client) in pair:
                    served[pair] += 1 if int(first.client) == pair[0] else -1
        there = {int(each.client) for each in waiting if each.priority == 1 and not each.generation}
        for pair in served:
            if not there.issuperset(pair):
                served[pair] = 0
            assert abs(served[pair]) <= 2
        assert len(queue) == len(waiting) and set(queue) == set(waiting)


def test_a_client_that_comes_back_one_at_a_time_takes_no_more_than_its_turn():
    queue, order = WaitingQueue(), ""
    for number in range(40):
        added = request(number, [1])
        added.client, added.arrival_index = "many", number
        queue.add(added)
    for number in range(40, 60):
        added = request(number, [1])
        added.client, added.arrival_index = "one", number
        queue.add(added)
        while queue.peek() is not None and "one" not in (taken := queue.pop(gets_slot=True).request.client):
            order += taken[0]
        order += "o"
    assert "oo" not in order and "mmm" not in order
