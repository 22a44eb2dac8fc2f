"""Prefill passes: tokens go in oldest first, in whole pieces of one width, with little padding."""

from itertools import groupby

import pytest

from espalier.engine.prefill_policy import PrefillPass, next_pass, pieces_of
from espalier.layout import RoundLayout

LAYOUT = RoundLayout(64, 0, 1, 1, 16, 32768, 0, 2048)


def test_equal_prompts_have_a_piece_each():
    assert next_pass(LAYOUT, [1024] * 32, 2048) == PrefillPass((1024, 1024), 1024)
    assert next_pass(LAYOUT, [8192, 5], 2048) == PrefillPass((2048,), 2048)
    assert pieces_of(PrefillPass((1024, 1024), 1024)) == ()


def test_an_odd_length_is_cut_into_pieces_with_little_padding():
    made = next_pass(LAYOUT, [1100], 2048)
    assert made.lengths == (1100,) and made.rows <= 1.06 * 1100
    assert pieces_of(PrefillPass((100, 30), 48)) == ((0, 0), (0, 48), (0, 96), (1, 0))


def test_a_long_and_short_prompts_share_a_pass():
    assert next_pass(LAYOUT, [1000, 3, 300], 2048).lengths == (1000, 3, 300)


def test_a_pass_keeps_to_its_rows():
    assert next_pass(LAYOUT, [8192], 512) == PrefillPass((512,), 512)
    assert next_pass(LAYOUT, [1], 2048) == PrefillPass((1,), 16)


@pytest.mark.parametrize(("longest", "padding"), [(200, 0.12), (512, 0.08), (2048, 0.07)])
@pytest.mark.parametrize("max_rows", [512, 2048])
def test_prompts_of_all_lengths_enter_once_with_little_padding(longest, padding, max_rows):
    """Over 256 prompts whose lengths are spread evenly."""
    prompts = [1 + i * 97 % longest for i in range(256)]
    left, entered, rows = dict(enumerate(prompts)), [0] * len(prompts), 0
    while left:
        waiting = [*left][:64]
        made = next_pass(LAYOUT, [left[r] for r in waiting], max_rows)
        assert made.lengths and made.rows <= max_rows and made.width in LAYOUT.chunk_widths
        pieces = pieces_of(made) or tuple((r, 0) for r in range(len(made.lengths)))
        for r, group in groupby(pieces, key=lambda piece: piece[0]):
            assert [offset for _, offset in group] == [*range(0, made.lengths[r], made.width)]
        rows += made.rows
        for request, length in zip(waiting, made.lengths, strict=False):
            entered[request] += length
            left[request] -= length
            if not left[request]:
                del left[request]
    assert entered == prompts
    assert sum(prompts) <= rows <= (1 + padding) * sum(prompts)
