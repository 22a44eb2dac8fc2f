"""Log-probabilities read like a list, however they are kept."""

import copy
import pickle

import numpy as np
import pytest

from espalier.logprobs import TokenLogprob, TokenLogprobs, row_words
from espalier.request import OutputChunk
from espalier.server import protocol
from espalier.server.protocol import OutputPart, StepOutput

ENTRIES = [TokenLogprob(7 + i, -1.5 - i, [(i, -0.5 * i), (i + 1, -0.25)], 1 + i) for i in range(5)]
CUT = [TokenLogprob(e.token_id, e.logprob, e.top[:1], e.rank) for e in ENTRIES]


def rows_of(entries):
    rows = np.zeros((len(entries), row_words(2)), np.int64)
    floats = rows.view(np.float64)
    for row, numbers, entry in zip(rows, floats, entries, strict=True):
        row[[0, 1]], numbers[2] = (entry.token_id, entry.rank), entry.logprob
        row[3::2], numbers[4::2] = zip(*entry.top, strict=True)
    return rows


def kept(count=2, of_prompt=False):
    made = TokenLogprobs(of_prompt=of_prompt)
    for at in (slice(0, 2), slice(2, 2), slice(2, 5)):
        assert made.add(rows_of(ENTRIES[at])[:, : row_words(count)]) == (CUT if count == 1 else ENTRIES)[at]
    return made


@pytest.mark.parametrize("count, expected", [(2, ENTRIES), (1, CUT)])
@pytest.mark.parametrize("of_prompt", [False, True])
def test_it_reads_like_a_list(count, expected, of_prompt):
    found, expected = kept(count, of_prompt), [None] * of_prompt + expected
    assert len(found) == len(expected) and found
    assert list(found) == expected == found == copy.deepcopy(found) == pickle.loads(pickle.dumps(found))
    assert (found[1], found[-1], found[1:3]) == (expected[1], expected[-1], expected[1:3])
    more = [None]
    assert (found + more, more + found, found + found) == (expected + more, more + expected, expected * 2)
    assert repr(found) == repr(expected) and ENTRIES[0] not in found[3:] and expected[2] in found
    assert type(found[1].token_id) is type(found[1].rank) is type(found[1].top[0][0]) is int
    assert found != expected[1:] and found != tuple(expected) and not TokenLogprobs()


def test_more_entries_after_a_reading():
    found = kept()
    assert found == ENTRIES
    found.add(rows_of(ENTRIES[:1]))
    assert found == [*ENTRIES, ENTRIES[0]]


def test_nan_is_found():
    rows = rows_of(ENTRIES)
    assert not kept().has_nan
    rows.view(np.float64)[3, 2] = np.nan
    assert TokenLogprobs((rows,)).has_nan and not TokenLogprobs((rows[:3],)).has_nan


@pytest.mark.parametrize("of_prompt", [False, True])
def test_they_reach_the_front_as_they_were(of_prompt):
    piece = OutputChunk("r", logprobs=kept(), prompt_logprobs=TokenLogprobs(of_prompt=True) if of_prompt else None)
    decoded = protocol.decode_from_engine(protocol.encode(StepOutput([OutputPart("r", piece)])))
    assert decoded.parts[0].output == piece and decoded.parts[0].output.logprobs == ENTRIES
