"""The formulas of a layout, spelled out at known sizes, and its refusals."""

from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE, RoundLayout, TreeShape, max_draft_tokens, padded_batch

SIZES = {
    "max_batch": 4,
    "steps": 5,
    "topk": 8,
    "num_draft_tokens": 64,
    "page_size": 256,
    "max_context": 4096,
    "num_recomputed_tokens": 1,
    "chunk_size": 512,
}


def layout(**change) -> RoundLayout:
    return RoundLayout(**{**SIZES, **change})


def test_tokens_ahead_at_steps_5_are_13_with_overlap_and_7_in_lock_step():
    assert (layout().max_tokens_ahead(2), layout().max_tokens_ahead(1)) == (13, 7)
    assert layout(steps=0, num_draft_tokens=1).max_tokens_ahead(2) == 3


@pytest.mark.parametrize(
    ("steps", "topk", "bound"),
    [(0, 1, 1), (0, 8, 1), (1, 1, 2), (1, 8, 9), (3, 1, 4), (3, 2, 11), (5, 4, 69), (8, 8, 457)],
)
def test_a_tree_is_bounded_by_what_its_levels_can_propose(steps, topk, bound):
    assert max_draft_tokens(steps, topk) == bound
    assert layout(steps=steps, topk=topk, num_draft_tokens=bound).num_draft_tokens == bound
    with pytest.raises(
        EspalierError, match=f"num_draft_tokens={bound + 1} is not supported; use 1 to {bound} at steps={steps}"
    ):
        layout(steps=steps, topk=topk, num_draft_tokens=bound + 1)


def test_rows_and_words_follow_from_the_tree():
    made = layout()
    assert (made.extend_width, made.beam_rows, made.verify_rows) == (6, 32, 256)
    assert (made.target_rows, made.draft_rows) == (512, 512)
    assert (layout(chunk_size=16).target_rows, layout(chunk_size=16).draft_rows) == (256, 128)
    narrow = layout(chunk_size=16, topk=1, num_draft_tokens=6)
    assert (narrow.target_rows, narrow.draft_rows) == (24, 24)
    words = [layout(num_draft_tokens=nodes).ancestor_words for nodes in (1, 64, 65, 128, 129)]
    assert words == [1, 1, 2, 2, 3]
    assert layout(steps=0, num_draft_tokens=1).beam_rows == layout(steps=1, num_draft_tokens=2).beam_rows == 0


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64, 256, 512])
def test_tables_hold_the_context_and_what_is_ahead(page_size):
    made = layout(page_size=page_size)
    assert made.history_width == 4096 + 13
    assert made.table_width == -(-(4096 + 13) // page_size)
    assert made.position_rows == 4096 + 13 + 512
    assert layout(chunk_size=16, steps=40, num_draft_tokens=2).position_rows == 4096 + 83 + 40


def test_a_reserve_is_what_is_ahead_in_pages_and_ends_with_the_request():
    made = layout(page_size=16)
    assert made.pages_needed(num_known=100, rounds=2, end=4096) == -(-113 // 16)
    assert made.pages_needed(num_known=100, rounds=1, end=4096) == -(-107 // 16)
    # A round launched past the end decides one token more, for nobody.
    assert layout(page_size=1).pages_needed(num_known=100, rounds=1, end=103) == 103
    assert layout(page_size=1).pages_needed(num_known=100, rounds=2, end=103) == 104


def test_prefill_widths_are_doublings_up_to_the_chunk_and_their_middles():
    assert layout(chunk_size=16).chunk_widths == (16,)
    assert layout(chunk_size=100).chunk_widths == (16, 32, 48, 64, 96, 100)
    assert layout(chunk_size=512).chunk_widths == (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    made = layout(chunk_size=100)
    assert [made.max_pieces(width) for width in (16, 32, 64, 100)] == [6, 3, 1, 1]


def test_passes_are_smaller_while_others_decode():
    made = layout(chunk_size=2048, busy_chunk_size=512)
    assert (made.max_pass_rows(is_streamed=False), made.max_pass_rows(is_streamed=True)) == (2048, 512)
    assert layout(chunk_size=2048).max_pass_rows(is_streamed=True) == 2048


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "steps=-1 is not supported; use 0"),
        ({"topk": 0}, "topk=0 is not supported; use 1"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 is not supported; use 1 to"),
        ({"page_size": 0}, "page_size=0 is not supported; use 1 to 512"),
        ({"page_size": 513}, "page_size=513 is not supported; use 1 to 512"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"max_context": 1}, "max_context=1"),
        ({"chunk_size": 15}, "chunk_size=15 is not supported; use 16"),
    ],
)
def test_a_size_that_cannot_be_is_refused(change, message):
    with pytest.raises(EspalierError, match=message):
        layout(**change)


def test_a_buffer_of_another_layout_is_refused_naming_all_there_is_to_know():
    made = layout()
    made.require_shape("tree.tokens", torch.zeros(4, 64), 4, 64)
    made.require_shape("tree.tokens", torch.zeros(4, 64), -1, 64)
    for wrong in (torch.zeros(4, 63), torch.zeros(4), torch.zeros(4, 64, 1)):
        with pytest.raises(EspalierError) as refused:
            made.require_shape("tree.tokens", wrong, 4, 64)
        for part in ("tree.tokens", "[4, 64]", str(list(wrong.shape)), "topk=8", "page_size=256", "same layout"):
            assert part in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(EspalierError, match=r"rounds of 4 requests and this launch has 5.*max_batch=4"):
        made.require_batch(5)
    with pytest.raises(EspalierError, match=r"prefill pass holds \d+ rows.*raise chunk_size"):
        made.require_chunk(2, made.chunk_size)


def test_each_batch_has_the_tree_of_the_greatest_number_up_to_its_own():
    small = TreeShape(3, 2, 8)
    made = layout(max_batch=64, trees=((8, small), (64, PLAIN_TREE)))
    assert [made.for_batch(batch).tree for batch in (1, 7, 8, 63, 64)] == [
        made.tree,
        made.tree,
        small,
        small,
        PLAIN_TREE,
    ]
    assert made.for_batch(7) is made and made.for_batch(8).trees == ()
    of_8 = made.for_batch(8)
    assert (of_8.extend_width, of_8.beam_rows, of_8.page_size) == (4, 4, made.page_size)


def test_staging_holds_the_fullest_batch_of_any_tree():
    trees = ((8, TreeShape(3, 2, 8)), (64, PLAIN_TREE))
    made = layout(max_batch=64, trees=trees)
    assert [(batch, each.tree) for batch, each in made.largest_rounds] == [
        (7, made.tree),
        (63, trees[0][1]),
        (64, PLAIN_TREE),
    ]
    assert (made.verify_rows, made.draft_rows) == (63 * 8, 512)
    assert replace(made, chunk_size=16).draft_rows == 63 * 4
    assert layout(max_batch=6, trees=trees).largest_rounds == ((6, layout(max_batch=6, trees=trees)),)
    assert layout(trees=((1, PLAIN_TREE),)).verify_rows == 4
    assert made.history_width == layout().history_width


def test_no_batch_has_a_tree_above_the_configured_one():
    for shape in (TreeShape(6, 1, 2), TreeShape(1, 9, 2), TreeShape(5, 8, 65)):
        with pytest.raises(EspalierError, match="above the configured"):
            layout(trees=((2, shape),))
        with pytest.raises(EspalierError, match="above the configured"):
            layout().with_tree(shape)
    for sizes in ((0,), (2, 2), (3, 2)):
        with pytest.raises(EspalierError, match="ascending"):
            layout(trees=tuple((size, PLAIN_TREE) for size in sizes))


@pytest.mark.parametrize(("batch", "bucket"), [(1, 1), (4, 4), (5, 6), (12, 12), (13, 13)])
def test_a_batch_is_padded_to_the_next_bucket_or_not_at_all(batch, bucket):
    assert padded_batch(batch, (1, 2, 3, 4, 6, 8, 12)) == bucket
