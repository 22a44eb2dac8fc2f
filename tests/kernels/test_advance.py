"""Advancing against loops over requests and tokens, and the kernel against its reference: exactly."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.state import AcceptedNodes, advance, gather_slots
from espalier.layout import RoundLayout
from espalier.slots import SlotTable
from tests.kernels.treeing import poisoned, random, same

PAGE, NODES, VOCAB = 4, 9, 5
FIELDS = ("ints", "history", "counts")


def drawn(batch, width, seed, device="cpu", picked_width=None):
    """A table, a batch of distinct slots, padding by slot 0 among it, lengths up to `width` and picked tokens; few
    tokens, so that a path holds one twice.  picked_width: of a prefill pass, by default the lengths' own."""
    generator = random(seed)
    layout = RoundLayout(batch + 2, 2, 2, 4, PAGE, 40, 1, 32)
    table = SlotTable(layout, VOCAB, {}, torch.float32, torch.device("cpu"))

    def integers(low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    n = layout.num_slots - 1
    table.ints[1:] = integers(0, VOCAB, n, table.ints.shape[1])
    table.prefix_len[1:] = integers(0, 40 - width - 1, n)
    table.known_len[1:] = table.prefix_len[1:] + integers(0, width + 3, n)
    table.commit_from[1:] = table.prefix_len[1:] + integers(-2, 3, n)
    table.page_table[1:] = integers(1, 2**31, n, layout.table_width)
    table.history[1:] = integers(0, VOCAB, n, layout.history_width)
    table.counts[1:] = integers(0, 3, n, VOCAB, dtype=torch.int32)
    index = torch.randperm(n, generator=generator)[:batch] + 1
    padding = torch.rand(batch, generator=generator) < 0.3
    index = torch.where(padding, 0, index)
    length = torch.where(padding, 0, integers(1, width + 1, batch))
    moved = SlotTable(layout, VOCAB, {}, torch.float32, torch.device(device))
    for name in (*FIELDS, "page_table"):
        getattr(moved, name).copy_(getattr(table, name))
    picked = integers(0, VOCAB, batch, picked_width or width)
    rows = integers(0, NODES, batch, width)
    return moved, *(value.to(device) for value in (index, length, picked, rows))


def advanced_in_loops(table, index, length, picked, rows, counted):
    """The table moves on one token at a time; how many were picked, source and destination of the path."""
    width, num_picked, source, destination = picked.shape[1], [], [], []
    for b, slot in enumerate(index.tolist()):
        n, count = int(table.prefix_len[slot]), int(length[b])
        num_picked.append(0)
        for i in range(count):
            at, choice = n + 1 + i, i - max(count - width, 0)
            if choice >= 0 and at >= int(table.known_len[slot]):
                table.history[slot, at] = picked[b, choice]
                table.counts[slot, picked[b, choice]] += int(counted)
                num_picked[-1] += 1
            table.root[slot] = table.history[slot, at]
            table.prefix_len[slot] = at
        for i in range(rows.shape[1]):
            source.append(b * NODES + int(rows[b, i]))
            kept = i < count and n + i >= int(table.commit_from[slot])
            page = int(table.page_table[slot, (n + i) // PAGE]) if kept else 0
            destination.append(page * PAGE + (n + i) % PAGE if kept else 0)
    return num_picked, source, destination


def same_tables(table, expected):
    for name in FIELDS:
        assert torch.equal(getattr(table, name).cpu(), getattr(expected, name)), name


SIZES = [(1, 1, True), (3, 1, False), (4, 4, True), (6, 5, True)]


@pytest.mark.parametrize("batch,width,counted", SIZES)
def test_the_reference_of_a_round_is_what_loops_find(batch, width, counted):
    for seed in range(5):
        table, index, length, picked, rows = drawn(batch, width, seed)
        by_hand = drawn(batch, width, seed)[0]
        num_picked, source, destination = advanced_in_loops(by_hand, index, length, picked, rows, counted)
        made = advance.reference(
            gather_slots.reference(table, index), length, picked, counted, AcceptedNodes(rows, NODES)
        )
        same_tables(table, by_hand)
        assert made.num_new_tokens.tolist() == num_picked
        assert made.copies.source.flatten().tolist() == source
        assert made.copies.destination.flatten().tolist() == destination


@pytest.mark.parametrize("batch,width,counted", SIZES)
def test_the_reference_of_a_prefill_pass_is_what_loops_find(batch, width, counted):
    """One token is picked, the last; it counts only where it is not known."""
    for seed in range(5):
        table, index, length, picked, rows = drawn(batch, width, seed, picked_width=1)
        by_hand = drawn(batch, width, seed, picked_width=1)[0]
        num_picked, _, _ = advanced_in_loops(by_hand, index, length, picked, rows, counted)
        made = advance.reference(gather_slots.reference(table, index), length, picked, counted)
        same_tables(table, by_hand)
        assert made.copies is None and made.num_new_tokens.tolist() == num_picked


def check(device, batch, width, counted):
    for seed in range(3):
        for picked_width in (width, 1):
            given, expected = (drawn(batch, width, seed, d, picked_width) for d in (device, "cpu"))
            (table, index, length, picked, rows), (wanted, *others) = given, expected
            has_path = picked_width == width
            with poisoned():
                path = AcceptedNodes(rows, NODES) if has_path else None
                made = advance.triton(gather_slots.triton(table, index), length, picked, counted, path)
            path = AcceptedNodes(others[3], NODES) if has_path else None
            right = advance.reference(gather_slots.reference(wanted, others[0]), *others[1:3], counted, path)
            assert torch.equal(made.num_new_tokens.cpu(), right.num_new_tokens)
            if has_path:
                same(made.copies, right.copies)
            same_tables(table, wanted)


@pytest.mark.parametrize("batch,width,counted", [(0, 3, True), (1, 1, True), (3, 2, False), (4, 5, True)])
def test_kernel_is_the_reference(kernel_device, batch, width, counted):
    check(kernel_device, batch, width, counted)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,width,counted", [(64, 6, True), (257, 9, True), (64, 17, False)])
def test_kernel_is_the_reference_at_size(kernel_device, batch, width, counted):
    check(kernel_device, batch, width, counted)


def test_sizes_that_disagree_are_refused(kernel_device):
    table, index, length, picked, rows = drawn(2, 3, 0, kernel_device)
    slots = gather_slots.triton(table, index)
    with pytest.raises(EspalierError, match="advance: nodes"):
        advance.triton(slots, length, picked, True, AcceptedNodes(rows[:, 1:], NODES))
    with pytest.raises(EspalierError, match="advance: length"):
        advance.triton(slots, length[1:], picked, True)


def test_a_cpu_needs_no_kernel():
    (table, index, *given, rows), (wanted, *_) = drawn(3, 3, 1), drawn(3, 3, 1)
    made = advance(gather_slots.reference(table, index), *given, True, AcceptedNodes(rows, NODES))
    right = advance.reference(gather_slots.reference(wanted, index), *given, True, AcceptedNodes(rows, NODES))
    same(made.copies, right.copies)
    same_tables(table, wanted)
