"""Prefill passes: tokens go in oldest first, in whole pieces of one width, with little padding."""

from dataclasses import replace
from itertools import groupby

import pytest

from espalier.engine.launch_input import LaunchInput, dummy_launch
from espalier.engine.prefill_policy import PrefillPass, next_prefill_pass, pieces_of
from espalier.layout import LaunchForm, RoundLayout, captured_form
from espalier.sampling.prompt import PromptRows

LAYOUT = RoundLayout(64, 0, 1, 1, 16, 32768, 0, 2048)


def test_equal_prompts_have_a_piece_each():
    assert next_prefill_pass(LAYOUT, [1024] * 32, 2048) == PrefillPass((1024, 1024), 1024)
    assert next_prefill_pass(LAYOUT, [8192, 5], 2048) == PrefillPass((2048,), 2048)
    assert pieces_of(PrefillPass((1024, 1024), 1024)) == ()


def test_an_odd_length_is_cut_into_pieces_with_little_padding():
    made = next_prefill_pass(LAYOUT, [1100], 2048)
    assert made.lengths == (1100,) and made.rows <= 1.06 * 1100
    assert pieces_of(PrefillPass((100, 30), 48)) == ((0, 0), (0, 48), (0, 96), (1, 0))


def test_a_long_and_short_prompts_share_a_pass():
    assert next_prefill_pass(LAYOUT, [1000, 3, 300], 2048).lengths == (1000, 3, 300)


@pytest.mark.parametrize(
    ("left", "width", "form"),
    [
        ([1], 16, (1, 16, 1)),
        ([128], 64, (2, 64, 2)),
        ([100, 20], 64, (3, 64, 3)),
        ([250], 256, (1, 256, 1)),
        ([20] * 8, 16, (16, 16, 16)),
        ([128] * 8, 64, (16, 64, 16)),
        ([1024], 256, (4, 256, 4)),
        ([1500], 256, (6, 256, 6)),
        ([1024] * 2, 256, (8, 256, 8)),
    ],
)
def test_a_small_pass_is_padded_to_a_captured_form(left, width, form):
    made = next_prefill_pass(LAYOUT, left, 2048, LAYOUT.captured_passes)
    assert made == PrefillPass(tuple(left), width)
    slots = tuple(range(1, len(left) + 1))
    launch_input = LaunchInput(
        slots, dummy_launch(1).sampling_features, lengths=made.lengths, width=width, pieces=pieces_of(made)
    )
    assert launch_input.form(LAYOUT.captured_passes) == LaunchForm(*form)
    reports = replace(launch_input, prompt_rows=PromptRows(((0, 1), *((0, 0),) * (len(left) - 1)), (0,) * len(left)))
    assert reports.form(LAYOUT.captured_passes) == launch_input.form()


def test_a_large_pass_is_captured_if_it_enters_as_many_tokens():
    assert next_prefill_pass(LAYOUT, [8192, 5], 2048, LAYOUT.captured_passes) == PrefillPass((2048,), 256)
    assert next_prefill_pass(LAYOUT, [1024] * 32, 2048, LAYOUT.captured_passes) == PrefillPass((1024, 1024), 256)


def test_full_passes_can_be_captured():
    layout = replace(LAYOUT, chunk_size=4096)
    captured = layout.captured_passes + layout.captured_full_passes
    assert [form.pass_rows for form in captured] == sorted(form.pass_rows for form in captured)
    for left, width, pieces in (([8192], 256, 16), ([1024] * 8, 256, 16), ([700] * 8, 64, 64)):
        made = next_prefill_pass(layout, left, 4096, captured)
        assert made.width == width and made.rows == 4096 and len(pieces_of(made)) == pieces
        assert captured_form(captured, width, pieces) == LaunchForm(min(pieces, 64), width, pieces)
    assert not LAYOUT.captured_full_passes, "up to 2,048 rows, captured_passes has them"
    for chunk_size in range(2048, 4200, 4):
        forms = replace(LAYOUT, chunk_size=chunk_size)
        every = forms.captured_passes + forms.captured_full_passes
        assert len(every) == len({*every})


def test_a_large_pass_is_eager_where_captured_forms_have_more_padding():
    captured = LAYOUT.captured_passes
    for left in ([1025], [128] * 9, [300, 1700, 9]):
        assert next_prefill_pass(LAYOUT, left, 2048, captured) == next_prefill_pass(LAYOUT, left, 2048)


def test_what_no_captured_form_holds_enters_by_several_small_graphs_rather_than_one_small_eager_pass():
    captured = LAYOUT.captured_passes
    assert next_prefill_pass(LAYOUT, [1000], 640, captured) == PrefillPass((512,), 256)
    assert next_prefill_pass(LAYOUT, [16] * 17, 2048, captured) == PrefillPass((16,) * 16, 16)


def test_captured_forms_are_few_and_fit_the_layout():
    forms = LAYOUT.captured_passes
    assert len(forms) == 22 and [form.pass_rows for form in forms] == sorted(form.pass_rows for form in forms)
    small = replace(LAYOUT, max_batch=3, chunk_size=100)
    assert {form.batch for form in small.captured_passes} == {1, 2, 3}
    assert max(form.pass_rows for form in small.captured_passes) == 96


def test_a_pass_keeps_to_its_rows():
    assert next_prefill_pass(LAYOUT, [8192], 512) == PrefillPass((512,), 512)
    assert next_prefill_pass(LAYOUT, [1], 2048) == PrefillPass((1,), 16)


@pytest.mark.parametrize(("longest", "padding"), [(200, 0.12), (512, 0.08), (2048, 0.07)])
@pytest.mark.parametrize("max_rows", [512, 2048])
def test_prompts_of_all_lengths_enter_once_with_little_padding(longest, padding, max_rows):
    """Over 256 prompts whose lengths are spread evenly."""
    prompts = [1 + i * 97 % longest for i in range(256)]
    left, entered, rows = dict(enumerate(prompts)), [0] * len(prompts), 0
    while left:
        waiting = [*left][:64]
        made = next_prefill_pass(LAYOUT, [left[r] for r in waiting], max_rows)
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
