"""Rows of the prefill passes that streams wait for, from a bound in milliseconds."""

import logging
from dataclasses import replace

import pytest

from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.layout import MIN_CHUNK_WIDTH
from espalier.startup.tree_policy import DEFAULT_PAUSE_MS, busy_chunk_size
from tests.startup.test_tree_policy import BIG

HUGE = replace(BIG, weights=replace(BIG.weights, dense=10 * BIG.weights.dense))


def rows(machine=BIG, chunk_size=2048, **fields):
    return busy_chunk_size(EngineConfig(model="m", **fields), chunk_size, 640, machine)


def pass_ms(machine, count):
    seconds = (machine.weights.target_seconds, machine.weights.draft_seconds)
    return 1000 * sum(of_model(count, machine.chip) for of_model in seconds)


@pytest.mark.parametrize("bound", [6.0, 7.5, 13, 20.0, 40.0])
def test_a_pass_has_the_most_rows_within_the_bound(bound):
    found = rows(max_pause_ms=bound)
    assert pass_ms(BIG, found) <= bound < pass_ms(BIG, found + MIN_CHUNK_WIDTH)


def test_the_log_says_how_long_a_pass_of_an_8b_takes(caplog):
    with caplog.at_level(logging.INFO, "espalier"):
        found = rows()
    # A pass of 4,096 rows takes 97 ms on an H100 (docs/log.md), so one of 800 rows takes 19 ms.
    assert 750 <= found <= 850
    assert f"at most {found} rows, predicted to take {pass_ms(BIG, found):.1f} ms" in caplog.text
    assert f"max_pause_ms={DEFAULT_PAUSE_MS:.4g}, by default" in caplog.text


def test_a_model_whose_weights_take_longer_than_the_default_still_enters_prompts_at_half_the_rate():
    assert pass_ms(HUGE, MIN_CHUNK_WIDTH) > DEFAULT_PAUSE_MS
    found = rows(HUGE)
    assert pass_ms(HUGE, found) <= 2 * pass_ms(HUGE, MIN_CHUNK_WIDTH) < pass_ms(HUGE, found + MIN_CHUNK_WIDTH)


def test_a_pass_never_exceeds_chunk_size():
    assert rows(chunk_size=256, max_pause_ms=1000) == 256
    assert rows(None, chunk_size=256) == 256
    assert rows(None) == rows(busy_chunk_size=640) == 640


@pytest.mark.parametrize(
    "machine, fields, message",
    [
        (BIG, {"max_pause_ms": 5}, r"max_pause_ms=5 is below the 5\.9 ms that the smallest prefill pass, of 16 rows"),
        (BIG, {"max_pause_ms": 20, "busy_chunk_size": 64}, "both bound the passes .* remove one of them"),
        (None, {"max_pause_ms": 20}, "set busy_chunk_size, the rows of a pass, instead"),
    ],
)
def test_a_bound_that_cannot_hold_is_refused(machine, fields, message):
    with pytest.raises(EspalierError, match=message):
        rows(machine, **fields)


@pytest.mark.parametrize("value", [0, -1, True, "20", float("inf"), float("nan")])
def test_a_bound_is_a_positive_number(value):
    with pytest.raises(EspalierError, match="max_pause_ms"):
        EngineConfig(model="m", max_pause_ms=value)
