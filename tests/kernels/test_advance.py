"""Advancing against loops over requests and tokens, and the kernel against its reference: exactly."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.advance import After, Before, advance, advance_reference, advance_triton
from tests.kernels.treeing import poisoned, random, same

PAGE, NODES, VOCAB = 4, 9, 5


def drawn(batch, width, seed, counted=True):
    """A batch of distinct slots, padding by slot 0 among it; few tokens, so that a path holds one twice."""
    generator = random(seed)
    slots, context = batch + 3, 40
    integers = torch.randint(0, VOCAB, (slots, 5), generator=generator)
    index = torch.randperm(slots - 1, generator=generator)[:batch] + 1
    length = torch.randint(1, width + 1, (batch,), generator=generator)
    padding = torch.rand(batch, generator=generator) < 0.3
    index, length = torch.where(padding, 0, index), torch.where(padding, 0, length)
    prefix_len = torch.randint(0, context - width - 1, (batch,), generator=generator)
    prefix_len = torch.where(padding, 0, prefix_len)
    integers[index, 1] = prefix_len
    before = Before(index, prefix_len, torch.randint(1, 10**12, (batch, context // PAGE), generator=generator))
    counts = torch.randint(0, 3, (slots, VOCAB), generator=generator, dtype=torch.int32) if counted else None
    history = torch.randint(0, VOCAB, (slots, context), generator=generator)
    after = After(history, integers[:, 1], integers[:, 3], counts)
    rows = torch.randint(0, NODES, (batch, width), generator=generator)
    tokens = torch.randint(0, VOCAB, (batch, width), generator=generator)
    return before, after, rows, length, tokens


def copied(after, device="cpu"):
    """On the device, prefix_len and root still columns of one table."""
    columns = torch.stack((after.prefix_len, after.root, after.root), 1).to(device)
    counts = None if after.counts is None else after.counts.to(device, copy=True)
    return After(after.history.to(device, copy=True), columns[:, 0], columns[:, 1], counts)


def advanced_in_loops(before, after, rows, length, tokens):
    """What `after` and the copies hold, one token at a time."""
    after = copied(after)
    source, destination = [], []
    for b, slot in enumerate(before.slots.tolist()):
        n = int(before.prefix_len[b])
        for i in range(tokens.shape[1]):
            source.append(b * NODES + int(rows[b, i]))
            row = 0
            if i < length[b]:
                row = int(before.page_table[b, (n + i) // PAGE]) * PAGE + (n + i) % PAGE
                after.history[slot, n + 1 + i] = after.root[slot] = tokens[b, i]
                after.prefix_len[slot] = n + i + 1
                if after.counts is not None:
                    after.counts[slot, tokens[b, i]] += 1
            destination.append(row)
    return after, source, destination


@pytest.mark.parametrize("batch,width,counted", [(1, 1, True), (3, 1, False), (4, 4, True), (6, 5, True)])
def test_the_reference_is_what_loops_find(batch, width, counted):
    for seed in range(5):
        given = drawn(batch, width, seed, counted)
        expected, source, destination = advanced_in_loops(*given)
        after = copied(given[1])
        copies = advance_reference(given[0], after, *given[2:], NODES, PAGE)
        same_state(after, expected)
        assert copies.source.flatten().tolist() == source and copies.destination.flatten().tolist() == destination


def same_state(after, expected):
    for name, value in expected._asdict().items():
        assert value is None or torch.equal(getattr(after, name).cpu(), value), name


def check(device, batch, width, counted):
    for seed in range(3):
        given = drawn(batch, width, seed, counted)
        after, expected = copied(given[1], device), copied(given[1])
        before = Before(*(value.to(device) for value in given[0]))
        with poisoned():
            copies = advance_triton(before, after, *(value.to(device) for value in given[2:]), NODES, PAGE)
        same(copies, advance_reference(given[0], expected, *given[2:], NODES, PAGE))
        same_state(after, expected)


SMALL = [(0, 3, True), (1, 1, True), (3, 2, False), (4, 5, True)]


@pytest.mark.parametrize("batch,width,counted", SMALL)
def test_kernel_is_the_reference(kernel_device, batch, width, counted):
    check(kernel_device, batch, width, counted)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,width,counted", [(64, 6, True), (257, 9, True), (64, 17, False)])
def test_kernel_is_the_reference_at_size(kernel_device, batch, width, counted):
    check(kernel_device, batch, width, counted)


def test_sizes_that_disagree_are_refused(kernel_device):
    before, after, rows, length, tokens = drawn(2, 3, 0)
    before, after = Before(*(value.to(kernel_device) for value in before)), copied(after, kernel_device)
    moved = (value.to(kernel_device) for value in (rows[:, 1:], length, tokens))
    with pytest.raises(EspalierError, match="advance: rows"):
        advance_triton(before, after, *moved, NODES, PAGE)


def test_a_cpu_needs_no_kernel():
    before, after, *given = drawn(3, 3, 1)
    expected = copied(after)
    same(advance(before, after, *given, NODES, PAGE), advance_reference(before, expected, *given, NODES, PAGE))
    same_state(after, expected)
