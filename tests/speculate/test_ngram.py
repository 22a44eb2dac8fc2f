"""n-gram lookup against searching a list."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.kernels.ops.drafts import find_matches
from espalier.speculate.drafters.ngram import continuation_positions
from tests.oracles.reference_round import Reference, matched

VOCAB = 3
WIDTH = 24
histories = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=16)


def best_matches(table: torch.Tensor, root: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    return find_matches(table, torch.arange(len(table)), root, topk)


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Histories [B, WIDTH] with what must never be read behind them, and the index of each last token."""
    table = torch.full((len(rows), WIDTH), VOCAB - 1)
    for row, tokens in zip(table, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return table, torch.tensor([len(tokens) - 1 for tokens in rows])


@given(st.lists(histories, min_size=1, max_size=3), st.integers(1, 5))
def test_the_longest_and_latest_match_for_each_next_token(rows, topk):
    lengths, ends = best_matches(*padded(rows), topk)
    for tokens, got_lengths, got_ends in zip(rows, lengths.tolist(), ends.tolist(), strict=True):
        found: dict[int, tuple[int, int]] = {}
        for end in range(len(tokens) - 1):
            match = (matched(tokens, end), end)
            if match[0]:
                found[tokens[end + 1]] = max(found.get(tokens[end + 1], (0, 0)), match)
        expected = sorted(found.values(), reverse=True)[:topk]
        assert list(zip(got_lengths, got_ends, strict=True))[: len(expected)] == expected
        assert got_lengths[len(expected) :] == [0] * (topk - len(expected))


@given(histories.filter(lambda tokens: len(tokens) > 1), st.data())
def test_a_match_goes_on_around_its_period(tokens, data):
    end = data.draw(st.integers(0, len(tokens) - 2))
    table, root = padded([tokens])
    whole = list(tokens)
    for level in range(1, 9):
        # What stood `period` back is said again, drafted tokens included.
        whole.append(whole[len(whole) - (len(tokens) - 1 - end)])
        got = table.gather(1, continuation_positions(torch.tensor([[end]]), root, level))
        assert got.tolist() == [[whole[len(tokens) - 1 + level]]]


def test_no_history_before_the_root_finds_nothing():
    assert best_matches(*padded([[1]]), 4)[0].tolist() == [[0, 0, 0, 0]]
    assert Reference.ngram_candidates(None, [1], 3, 4) == []


def test_an_empty_batch_is_legal():
    table = torch.zeros(0, WIDTH, dtype=torch.int64)
    lengths, ends = best_matches(table, table[:, 0], 4)
    assert lengths.shape == ends.shape == (0, 4)
    assert continuation_positions(ends, table[:, 0], 2).shape == (0, 4)
