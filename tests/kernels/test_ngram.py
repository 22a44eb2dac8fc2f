"""The n-gram lookup kernel equals its reference exactly.  tests/speculate/test_ngram.py tests the reference itself."""

import pytest
import torch

import espalier.kernels.tree.ngram as ngram
from espalier.errors import EspalierError
from espalier.kernels.ops.drafts import find_matches, max_history_length
from tests.kernels.treeing import poisoned, random


def random_inputs(batch, width, vocab, seed=0):
    """history, index, root: texts of many lengths, in shuffled rows.  After its text a row repeats the last token, so
    that a kernel that reads too far finds wrong matches."""
    generator = random(seed)
    history = torch.randint(0, vocab, (batch + 2, width), generator=generator)
    root = torch.randint(0, width, (batch, 2), generator=generator)
    root[:1], root[1:2] = width - 1, 0
    index = (torch.randperm(batch + 1, generator=generator) + 1)[:batch]
    for row, end in zip(index, root[:, 0], strict=True):
        history[row, end + 1 :] = history[row, end]
    return history, index, root[:, 0]


SMALL = [(0, 9, 3, 2), (1, 1, 2, 1), (3, 17, 2, 4), (4, 40, 3, 8), (3, 70, 40, 3), (5, 33, 2, 5)]
LARGE = [(64, 32768, 50, 8), (3, 131072, 2000, 4), (8, 5000, 3, 64)]


@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(c, marks=pytest.mark.gpu) for c in LARGE)], ids=str)
def test_kernel_is_the_reference(kernel_device, case, monkeypatch):
    batch, width, vocab, topk = case
    if case in SMALL:
        # Small blocks, so that texts have several blocks, and some texts end inside a block.
        monkeypatch.setattr(ngram, "BLOCK", 16)
    inputs = random_inputs(batch, width, vocab)
    with poisoned():
        matches = find_matches.triton(*(value.to(kernel_device) for value in inputs), topk)
    expected = find_matches.reference(*inputs, topk)
    assert all(torch.equal(got.cpu(), value) for got, value in zip(matches, expected, strict=True))


def test_the_width_of_history_does_not_matter():
    history, index, root = random_inputs(4, 40, 3)
    assert max_history_length(root) == int(root.max()) + 1
    wide = torch.cat((history, torch.full((len(history), 500), int(history.max()))), 1)
    for got, value in zip(find_matches(wide, index, root, 4), find_matches(history, index, root, 4), strict=True):
        assert torch.equal(got, value)


def test_wrong_shapes_and_dtypes_are_refused(kernel_device):
    history, index, root = (value.to(kernel_device) for value in random_inputs(3, 9, 2))
    with pytest.raises(EspalierError, match="find_matches: root"):
        find_matches.triton(history, index, root[1:], 2)
    with pytest.raises(EspalierError, match="find_matches: history"):
        find_matches.triton(history.int(), index, root, 2)
