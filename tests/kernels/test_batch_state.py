"""What passes between the slot table and a launch, against loops over slots, and the kernels against their
references: exactly."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.state import gather_slots, load_carried_field, read_chain, store_carried_field
from espalier.layout import RoundLayout
from espalier.slots import BatchState, ScatterUpdate, SlotTable
from tests.kernels.treeing import poisoned, random, same

LAYOUT = RoundLayout(6, 2, 2, 4, 3, 40, 1, 32)
FIELDS = ("prefix_len", "root", "commit_from", "num_tokens", "max_accept_depth", "is_real", "page_table")
HIDDEN = 5


def filled(seed, layout=LAYOUT, size=HIDDEN):
    """A table of random requests; the dummy's row as a new table has it."""
    table, generator = SlotTable(layout, 9, {"hidden": (size,)}, torch.float32, torch.device("cpu")), random(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    n = layout.num_slots - 1
    table.prefix_len[1:] = integers(0, layout.max_context - 4, n)
    table.root[1:] = integers(0, 9, n)
    table.commit_from[1:] = integers(0, layout.max_context, n)
    table.end[1:] = table.prefix_len[1:] + integers(-1, 6, n)
    table.depth_limit[1:] = integers(0, 4, n)
    table.page_table[1:] = integers(1, 2**31, n, layout.table_width)
    table.history[1:] = integers(0, 9, n, layout.history_width)
    table.carried["hidden"][1:] = torch.randn(n, size, generator=generator)
    return table


def moved(table, device):
    other = SlotTable(table.layout, 9, {"hidden": table.carried["hidden"].shape[1:]}, torch.float32, device)
    for name in ("ints", "page_table", "history"):
        getattr(other, name).copy_(getattr(table, name))
    other.carried["hidden"].copy_(table.carried["hidden"])
    return other


def same_slots(got: BatchState, expected: BatchState) -> None:
    for name in FIELDS:
        value, wanted = getattr(got, name).cpu(), getattr(expected, name)
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name


def drawn(seed, batch, width, layout=LAYOUT, size=HIDDEN):
    """A table, a batch padded by the dummy, lengths of 0 for padding, and hidden rows."""
    generator = random(seed)
    index = torch.randperm(layout.num_slots - 1, generator=generator)[:batch] + 1
    index = torch.where(torch.rand(batch, generator=generator) < 0.3, 0, index)
    length = torch.randint(1, width + 1, (batch,), generator=generator)
    table = filled(seed, layout, size)
    length = torch.minimum(length, layout.history_width - 1 - table.prefix_len[index])
    values = torch.randn(batch, width, size, generator=generator)
    return table, index, torch.where(index > 0, length, 0), values


def test_the_references_are_what_loops_find():
    for seed in range(5):
        table, index, length, values = drawn(seed, 4, 5)
        slots = gather_slots.reference(table, index)
        for first in (0, 1):
            made, padded = (read_chain.reference(slots, first, length, 5, padding) for padding in (None, 8))
            assert torch.equal(made.positions, padded.positions) and torch.equal(made.rows, padded.rows)
            for b, slot in enumerate(index.tolist()):
                n = int(table.prefix_len[slot])
                max_accept_depth = min(int(table.depth_limit[slot]), int(table.end[slot]) - 2 - n)
                assert (int(slots.max_accept_depth[b]), bool(slots.is_real[b])) == (max(max_accept_depth, 0), slot > 0)
                assert int(slots.num_tokens[b]) == n + 1
                for i, at in enumerate(range(n + first, n + first + 5)):
                    known = i < length[b]
                    page, offset = divmod(at, LAYOUT.page_size)
                    kept = known and at >= table.commit_from[slot]
                    row = int(table.page_table[slot, page]) * LAYOUT.page_size + offset if kept else 0
                    token = int(table.history[slot, at] if known else table.root[slot])
                    assert tuple(int(part[b, i]) for part in made) == (at, token, row)
                    assert padded.tokens[b, i] == (token if known else 8)
        before = table.carried["hidden"].clone()
        assert torch.equal(load_carried_field(slots, "hidden"), before[index][:, None])
        store_carried_field.reference(slots, "hidden", values, length)
        for slot in range(1, LAYOUT.num_slots):
            at = index.tolist().index(slot) if slot in index else None
            expected = before[slot] if at is None else values[at, length[at] - 1]
            assert torch.equal(table.carried["hidden"][slot], expected)


def check(device, batch, width, layout=LAYOUT, size=HIDDEN):
    for seed in range(3):
        table, index, length, values = drawn(seed, batch, width, layout, size)
        theirs = moved(table, device)
        expected = gather_slots.reference(table, index)
        with poisoned():
            slots = gather_slots.triton(theirs, index.to(device))
            same_slots(slots, expected)
            for first, padding in ((0, None), (1, None), (0, 8)):
                made = read_chain.triton(slots, first, length.to(device), width, padding)
                same(made, read_chain.reference(expected, first, length, width, padding))
        store_carried_field.triton(slots, "hidden", values.to(device), length.to(device))
        store_carried_field.reference(expected, "hidden", values, length)
        # The dummy is written by every row of padding, in no order.
        assert torch.equal(theirs.carried["hidden"][1:].cpu(), table.carried["hidden"][1:])


@pytest.mark.parametrize("batch,width", [(0, 3), (1, 1), (3, 5), (5, 20)])
def test_kernels_are_the_references(kernel_device, batch, width):
    check(kernel_device, batch, width)


@pytest.mark.parametrize("batch,count", [(3, 0), (1, 1), (3, 5), (4, 300)])
def test_appended_pages_are_written_before_they_are_read(kernel_device, batch, count):
    """Also those of slots that are not in the batch, and the padding, which writes 0 to cell 0."""
    layout = RoundLayout(6, 2, 2, 4, 1, 1500, 1, 32)
    for seed in range(3):
        table, index, _, _ = drawn(seed, batch, 5, layout)
        theirs, generator = moved(table, kernel_device), random(seed)
        cells = torch.randperm((layout.num_slots - 1) * layout.table_width, generator=generator)[:count]
        pages = torch.randint(1, 2**31, (count,), generator=generator)
        nothing = torch.zeros(7, dtype=torch.int64)
        appended = ScatterUpdate(torch.cat((cells + layout.table_width, nothing)), torch.cat((pages, nothing)))
        on_device = ScatterUpdate(*(part.to(kernel_device) for part in appended))
        with poisoned():
            slots = gather_slots.triton(theirs, index.to(kernel_device), on_device)
        same_slots(slots, gather_slots.reference(table, index, appended))
        assert torch.equal(theirs.page_table.cpu(), table.page_table)
        assert torch.equal(table.page_table.view(-1)[appended.indices].long(), appended.values)


def test_tables_are_wider_than_a_block(kernel_device):
    check(kernel_device, 2, 1030, RoundLayout(3, 2, 2, 4, 1, 1500, 1, 2048), 1100)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,width", [(64, 6), (257, 9), (3, 2048)])
def test_kernels_are_the_references_at_size(kernel_device, batch, width):
    check(kernel_device, batch, width, RoundLayout(300, 5, 8, 64, 16, 4096, 1, 2048), 4096)


def test_sizes_that_disagree_are_refused(kernel_device):
    table, index, length, values = drawn(0, 3, 4)
    table, index, length, values = moved(table, kernel_device), *(v.to(kernel_device) for v in (index, length, values))
    slots = gather_slots.triton(table, index)
    with pytest.raises(EspalierError, match="gather: index"):
        gather_slots.triton(table, index.int())
    with pytest.raises(EspalierError, match="gather: values"):
        gather_slots.triton(table, index, ScatterUpdate(index, index[1:]))
    with pytest.raises(EspalierError, match="chain: length"):
        read_chain.triton(slots, 0, length[1:], 4)
    with pytest.raises(EspalierError, match="carry: values"):
        store_carried_field.triton(slots, "hidden", values[..., 1:], length)


def test_a_cpu_needs_no_kernel():
    table, index, length, values = drawn(1, 3, 4)
    slots = gather_slots(table, index)
    same_slots(slots, gather_slots.reference(table, index))
    same(read_chain(slots, 1, length, 4), read_chain.reference(slots, 1, length, 4))
    store_carried_field(slots, "hidden", values, length)
    same_slots(gather_slots(table, index), slots)
