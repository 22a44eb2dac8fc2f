"""What the host's sources guess, against searching lists; and the survival that is counted of paths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.request import Request, SamplingParams
from espalier.slots import NODE_KINDS
from espalier.speculate.sources import own_text
from espalier.speculate.sources.index import BYTES_PER_TOKEN, NGRAM_LENGTHS, IndexSource, _ngram_hash, client_salt
from espalier.speculate.sources.prediction import REJOIN_TOKENS, PredictionSource
from espalier.speculate.sources.survival import INITIAL_SURVIVAL, SurvivalCounts
from tests.harness import request

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=5)
WIDTH = 5


@given(texts, st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(8, 60), st.data())
def test_the_index_says_what_followed_in_a_text_of_the_same_client(served, last, size, data):
    index = IndexSource(size * BYTES_PER_TOKEN)
    clients = [data.draw(st.sampled_from(["", "a"])) for _ in served]
    for text, client in zip(served, clients, strict=True):
        index.add_text(text, client_salt(client))
    # What the ring still holds: the newest tokens.
    left, kept = size, []
    for text, client in reversed([*zip(served, clients, strict=True)]):
        kept.append((text[max(0, len(text) - left) :], client))
        left = max(0, left - len(text))
    for client in ("", "a"):
        for matching, ahead in index.find_continuations(last, client_salt(client), WIDTH):
            assert any(
                whose == client
                and text[end - matching : end] == last[-matching:]
                and text[end : end + WIDTH] == [*ahead]
                for text, whose in kept
                for end in range(matching, len(text))
            )
    # The first run of the newest text is found, unless a later run has taken its cell of the table.
    newest, client, run = served[-1], clients[-1], NGRAM_LENGTHS[-1]
    cells = [_ngram_hash(newest[i : i + run], client_salt(client)) % size for i in range(len(newest) - run + 1)]
    if len(newest) > run and size > 4 * len(newest) and cells.count(cells[0]) == 1:
        found = index.find_continuations(newest[:run], client_salt(client), WIDTH)
        assert found, "the newest text is in the index"


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=6), st.integers(1, 7))
def test_the_host_finds_in_a_text_what_followed_its_last_tokens(pieces, width):
    """The latest place of each run, against searching the list; behind its end the text is repeated."""
    text = own_text.IndexedText(pieces[0])
    for piece in pieces[1:]:
        text.add_tokens(piece)
    tokens = [token for piece in pieces for token in piece]
    expected: dict[int, tuple[int, tuple[int, ...]]] = {}
    for run in own_text.NGRAM_LENGTHS:
        ends = [end for end in range(run, len(tokens)) if tokens[end - run : end] == tokens[-run:]]
        if ends:
            end = ends[-1]
            matching = max(
                n
                for n in range(min(end, own_text.MAX_MATCHING) + 1)
                if tokens[end - n : end] == tokens[len(tokens) - n :]
            )
            ahead = (tokens[end:] * width)[:width]
            expected.setdefault(end, (matching, tuple(ahead)))
    assert text.find_continuations(width) == [*expected.values()]


def test_an_index_is_bounded_and_apart_for_each_client():
    index = IndexSource(64 * BYTES_PER_TOKEN)
    held = index.tokens.nbytes + index.text_ids.nbytes + sum(table.nbytes for table in index.ring_index_tables.values())
    assert held == 64 * BYTES_PER_TOKEN
    asked = asking([1, 2, 3], client="one")
    asked.output = [4, 5, 6, 7]
    index.remove_request(asked)
    same, other = asking([2, 3, 4], client="one"), asking([2, 3, 4], client="two")
    assert [guess.tokens for guess in index.guesses(same, 2)] == [(5, 6)]
    assert index.guesses(other, 2) == []


def asking(prompt: list[int], prediction: tuple[int, ...] = (), client: str = "") -> Request:
    made = request(0, prompt, SamplingParams(prediction=prediction or None))
    made.client = client
    return made


def push(source: PredictionSource, asked: Request, tokens: list[int]) -> None:
    for token in tokens:
        asked.output.append(token)
        source.add_tokens(asked, [token])


def test_a_prediction_is_followed_left_and_found_again():
    predicted = tuple(range(20, 40))
    source, asked = PredictionSource(), asking([1, 2], predicted)
    source.add_request(asked)
    [guess] = source.guesses(asked, WIDTH)
    assert (guess.start, guess.tokens) == (1, predicted[:WIDTH])
    push(source, asked, [20, 21])
    assert source.guesses(asked, WIDTH)[0].tokens == predicted[2 : 2 + WIDTH]
    push(source, asked, [7, 8])
    assert source.guesses(asked, WIDTH) == [], "the output is elsewhere"
    push(source, asked, [*predicted[8 : 8 + REJOIN_TOKENS]])
    assert source.guesses(asked, WIDTH)[0].tokens == predicted[8 + REJOIN_TOKENS :][:WIDTH]
    push(source, asked, [*predicted[8 + REJOIN_TOKENS :]])
    assert source.guesses(asked, WIDTH) == [], "all was said"
    usage = asked.usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (14, 6)
    source.remove_request(asked)
    assert source.progress == {}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.lists(st.integers(0, 2), max_size=25))
def test_no_prediction_is_accepted_more_than_it_is_long(predicted, output):
    source, asked = PredictionSource(), asking([1], tuple(predicted))
    source.add_request(asked)
    push(source, asked, output)
    usage = asked.usage
    assert 0 <= usage.accepted_prediction_tokens <= len(predicted)
    assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens == len(predicted)
    assert set(np.array(predicted)[[*map(bool, source.progress["r0"].has_appeared)]]) <= {*output}
    for guess in source.guesses(asked, WIDTH):
        assert len(guess.tokens) <= WIDTH


def test_survival_finds_the_rates_of_a_stream_and_follows_a_change():
    """Kind 3 follows with 0.9 a token, then with 0.2; others keep what was assumed."""
    survival, rng = SurvivalCounts(steps=4), np.random.default_rng(0)
    first = survival.table_to_send()
    assert first is not None and first.shape == (NODE_KINDS, 4) and (first <= 0).all() and (first[0] == 0).all()
    for rate in (0.9, 0.2):
        for _ in range(2000):
            path = [1, 1, 1, 1]
            length = next((at for at in range(4) if rng.random() >= rate), 4)
            survival.count_path(3, path, [*path[:length], 0])
        assert np.abs(survival.probabilities[3] - rate).max() < 0.08, survival.probabilities[3]
        assert survival.table_to_send() is not None and survival.table_to_send() is None
    assert np.allclose(survival.probabilities[1], INITIAL_SURVIVAL["text"][0])


def test_how_far_a_path_reaches_does_not_depend_on_what_a_draft_proposed_beside_it():
    alone, beside = SurvivalCounts(steps=4), SurvivalCounts(steps=4)
    for emitted in ([1, 1, 0], [1, 1, 1, 1, 0], [0]):
        alone.count_path(3, [1] * 4, emitted)
        beside.count_path(3, [1] * 4, emitted, num_drafted=1)
    prior = 4 * INITIAL_SURVIVAL["text"][2]
    first = (2 + prior) / (3 + 4)
    assert alone.path_probabilities(3) == beside.path_probabilities(3) and 0.7 < first < 0.8
    assert alone.path_probabilities(3)[0] == pytest.approx(first, abs=0.01)
    assert alone.path_probabilities(3)[1] == pytest.approx(first * (2 + 4 * first) / (2 + 4), abs=0.01)


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), min_size=1, max_size=6))
def test_a_path_counts_down_to_where_it_parts(path, emitted):
    survival = SurvivalCounts(steps=4)
    survival.count_path(2, path, emitted)
    agreed = next((at for at, (a, b) in enumerate(zip(path, emitted, strict=False)) if a != b), None)
    tried = min(len(path), len(emitted), 4) if agreed is None else min(agreed + 1, 4)
    followed = tried if agreed is None else min(agreed, 4)
    assert survival.num_tried[2].tolist() == [1.0] * tried + [0.0] * (4 - tried)
    assert survival.num_right[2].tolist() == [1.0] * followed + [0.0] * (4 - followed)
