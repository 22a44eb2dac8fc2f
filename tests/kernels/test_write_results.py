"""Results put into a ring against a loop over columns, and the kernel against its reference: exactly."""

import struct

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.state import EMPTY_COLUMN, write_results
from tests.kernels.treeing import random

# After the columns that are written come OTHERS, of something else.
ENTRIES, ROWS, WIDTH, OTHERS = 3, 6, 22, 2


def drawn(batch, seed, all_of_them=True):
    """ResultColumns with columns between them that none covers; one of floats, infinite ones and a NaN among them."""
    generator = random(seed)

    def integers(columns):
        return torch.randint(-(2**62), 2**62, (batch, columns), generator=generator)

    scores = torch.randn(batch, 4, generator=generator)
    scores[:, 1:3] = torch.tensor([-torch.inf, torch.nan])
    fields = {0: integers(1), 3: integers(5)}
    if not all_of_them:
        return fields
    fields |= {8: scores, 13: integers(1), 14: integers(2), 16: scores[:, :2]}
    # As many as a launch has with every source.
    return fields | {column: integers(1) for column in range(18, WIDTH)}


def ring_of(seed, device="cpu"):
    return torch.randint(0, 100, (ENTRIES, ROWS, WIDTH + OTHERS), generator=random(seed)).to(device)


def put_in_loops(ring, entry, fields):
    ring = ring.clone()
    for b in range(fields[0].shape[0]):
        row = [EMPTY_COLUMN] * WIDTH
        for start, field in fields.items():
            for column, value in enumerate(field[b].tolist(), start):
                row[column] = value if field.dtype == torch.int64 else struct.unpack("i", struct.pack("f", value))[0]
        ring[entry, b, :WIDTH] = torch.tensor(row)
    return ring


@pytest.mark.parametrize("batch", [1, 4, ROWS])
def test_the_reference_is_what_loops_put(batch):
    for seed in range(4):
        fields, ring = drawn(batch, seed, seed % 2 == 0), ring_of(seed)
        expected = put_in_loops(ring, seed % ENTRIES, fields)
        write_results.reference(ring[..., :WIDTH], torch.tensor([seed % ENTRIES]), fields)
        assert torch.equal(ring, expected)


@pytest.mark.parametrize("batch", [0, 1, 4, ROWS])
def test_kernel_is_the_reference(kernel_device, batch):
    for seed in range(4):
        fields, expected = drawn(batch, seed, seed % 2 == 0), ring_of(seed)
        ring, entry = ring_of(seed, kernel_device), torch.tensor([seed % ENTRIES])
        write_results.reference(expected[..., :WIDTH], entry, fields)
        write_results.triton(
            ring[..., :WIDTH],
            entry.to(kernel_device),
            {start: field.to(kernel_device) for start, field in fields.items()},
        )
        assert torch.equal(ring.cpu(), expected)


def test_what_does_not_fit_is_refused(kernel_device):
    ring, entry = ring_of(0, kernel_device)[..., :WIDTH], torch.tensor([0]).to(kernel_device)
    fields = {start: field.to(kernel_device) for start, field in drawn(4, 0).items()}
    with pytest.raises(EspalierError, match="write_results: entry"):
        write_results.triton(ring, entry[:0], fields)
    with pytest.raises(EspalierError, match="field of column 3"):
        write_results.triton(ring, entry, fields | {3: fields[3][1:]})
    with pytest.raises(EspalierError, match="up to column 23"):
        write_results.triton(ring, entry, {0: fields[0], 18: fields[3]})
    with pytest.raises(EspalierError, match="stride 144, not 1"):
        write_results.triton(ring.permute(1, 2, 0), entry, {0: fields[0]})


def test_a_cpu_needs_no_kernel():
    ring, fields = ring_of(1), drawn(3, 1)
    expected = put_in_loops(ring, 2, fields)
    write_results(ring[..., :WIDTH], torch.tensor([2]), fields)
    assert torch.equal(ring, expected)
