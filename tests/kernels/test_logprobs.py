"""Log-probabilities in the kernels equal the reference's, for those rows alone that ask."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.sampling import write_logprobs
from espalier.kernels.sampling import logprobs as kernel
from espalier.logprobs import CHOSEN, RANK, TOKEN, TOP, row_words
from tests.pairwise import in_turn_params

# Of log-probabilities up to some 20: a sum over the vocabulary in another order, and Triton's exp and log.
TOLERANCE = {torch.float32: 2.0**-16, torch.float64: 2.0**-40}
MOST = 5
# Undefined places hold what was there.
UNTOUCHED = -7
# Columns of a ring before those of log-probabilities.
OTHERS = 3


@pytest.fixture(autouse=True)
def small_splits(monkeypatch, request):
    """Several splits, however small the vocabulary, but on the device."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(kernel, "MIN_SPLIT_SIZE", 16)
        monkeypatch.setattr(kernel, "MAX_SPLIT_SIZE", 32)


def launched(batch, width, nodes, vocab, dtype, seed, device):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(batch, nodes, vocab, generator=generator)
    # bfloat16 has many ties of its own; these are ties in every type.
    logits[:, :, ::7] = logits[:, :, :1].clone()
    rows = torch.randint(0, nodes, (batch, width), generator=generator)
    tokens = torch.randint(0, vocab, (batch, width), generator=generator)
    length = torch.randint(0, width + 1, (batch,), generator=generator)
    asked = torch.randint(-1, MOST + 1, (batch,), generator=generator)
    parts = (logits.to(dtype), rows, tokens, length, asked)
    return tuple(part.to(device) for part in parts)


def ring_of(batch, width, device):
    """The last columns of a ring."""
    columns = (width + 1) * row_words(MOST)
    whole = torch.full((3, batch + 1, OTHERS + columns), UNTOUCHED, device=device)
    return whole[..., OTHERS:].unflatten(-1, (width + 1, -1))


def agree(parts, dtype, device):
    logits, _, tokens, length, asked = parts
    batch, width = tokens.shape
    entry = torch.tensor([1], device=device)
    ours, reference = (ring_of(batch, width, device) for _ in range(2))
    write_logprobs.triton(ours, entry, *parts)
    write_logprobs.reference(reference, entry, *parts)
    untouched = torch.ones(3, batch + 1, width + 1, dtype=torch.bool, device=device)
    for b in range(batch):
        count = min(int(asked[b]), logits.shape[2])
        for w in range(int(length[b]) if count >= 0 else 0):
            untouched[1, b, w] = False
            found, wanted = (ring[1, b, w, : row_words(count)] for ring in (ours, reference))
            whole = [TOKEN, RANK, *range(TOP, row_words(count), 2)]
            assert torch.equal(found[whole], wanted[whole])
            floats = [CHOSEN, *range(TOP + 1, row_words(count), 2)]
            near = {"rtol": 0, "atol": TOLERANCE[torch.promote_types(dtype, torch.float32)]}
            torch.testing.assert_close(found.view(torch.float64)[floats], wanted.view(torch.float64)[floats], **near)
            assert found[TOKEN] == tokens[b, w]
            assert (ours[1, b, w, row_words(count) :] == UNTOUCHED).all()
    for ring in (ours, reference):
        assert (ring[untouched] == UNTOUCHED).all()
        assert (ring._base[..., :OTHERS] == UNTOUCHED).all(), "columns of something else"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    in_turn_params([torch.float32, torch.bfloat16, torch.float64], [(1, 1, 1, 5), (3, 4, 8, 100), (2, 3, 3, 16)]),
)
def test_the_reference(shape, dtype, kernel_device):
    """(requests, drafted tokens, nodes, vocabulary)"""
    for seed in range(4):
        agree(launched(*shape, dtype, seed, kernel_device), dtype, kernel_device)


def test_minus_infinity_and_fewer_tokens_than_wanted(kernel_device):
    parts = launched(2, 2, 2, 40, torch.float32, 9, kernel_device)
    parts[0][:, :, 3:] = -torch.inf
    parts[2].fill_(1)
    parts[3].fill_(2)
    parts[4].fill_(MOST)
    agree(parts, torch.float32, kernel_device)


def test_an_empty_batch(kernel_device):
    ring = ring_of(1, 1, kernel_device)
    none = torch.zeros(0, 2, dtype=torch.int64, device=kernel_device)
    logits = torch.zeros(0, 3, 8, device=kernel_device)
    for write in (write_logprobs.triton, write_logprobs.reference):
        write(ring, none.new_zeros(1), logits, none, none, none[:, 0], none[:, 0])
    assert (ring == UNTOUCHED).all()


def test_what_does_not_fit_is_refused(kernel_device):
    logits, rows, tokens, length, asked = launched(2, 2, 2, 8, torch.float32, 1, kernel_device)
    entry = torch.tensor([0], device=kernel_device)
    with pytest.raises(EspalierError, match="logprobs: ring"):
        write_logprobs.triton(ring_of(0, 2, kernel_device), entry, logits, rows, tokens, length, asked)
    with pytest.raises(EspalierError, match="strides"):
        ring = ring_of(2, 2, kernel_device).transpose(2, 3).contiguous().transpose(2, 3)
        write_logprobs.triton(ring, entry, logits, rows, tokens, length, asked)
    with pytest.raises(EspalierError, match="logprobs: rows"):
        write_logprobs.triton(ring_of(2, 2, kernel_device), entry, logits, rows[:1], tokens, length, asked)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_large_vocabulary(dtype):
    device = torch.device("cuda")
    agree(launched(9, 6, 16, 128256, dtype, 3, device), dtype, device)
