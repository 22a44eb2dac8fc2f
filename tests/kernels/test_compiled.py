"""Properties of the compiled attention kernels that no comparison of results shows."""

import json

import pytest

from tests import warm

pytest.importorskip("triton", reason="needs Triton")

# Bytes that the compiler may add to exchange values between warps.
SCRATCH = 4096


@pytest.fixture(scope="module", params=["each", pytest.param("full", marks=pytest.mark.full)])
def compiled(request):
    return json.loads(warm.compiler().run("tests.kernels.compiled", request.param))


def test_kernels_that_plan_and_merge_compile(compiled):
    assert not compiled["errors_of_small_kernels"]


def test_loops_are_pipelined_and_fit_the_chip(compiled):
    """A loop that carries more than the load of a page computes the right result, but waits for all copies at once."""
    for case in compiled["plain"]:
        assert case["shared"] * case["config"]["programs_per_processor"] <= 227 * 1024, case
        assert len(case["in_flight"]) >= 2 and all(waits and min(waits) > 0 for waits in case["in_flight"]), case


def test_latent_rows_are_loaded_once_and_fit_the_chip(compiled):
    """If rows were loaded again as V, they would take nearly twice the shared memory."""
    for case in compiled["latent"]:
        assert case["shared"] <= case["expected_shared"] + SCRATCH, case
        assert case["shared"] * case["config"]["programs_per_processor"] <= 227 * 1024, case
        assert len(case["in_flight"]) == 3 and all(waits and min(waits) > 0 for waits in case["in_flight"]), case


def test_weights_are_computed_while_the_tensor_cores_work(compiled):
    """ptxas may reorder the instructions; apart from this test only the run time would show it."""
    for case in compiled["hopper"]:
        assert (
            case["shared"] <= case["expected_shared"]
            and case["expected_shared"] * case["config"]["programs_per_processor"] <= 227 * 1024
        ), case
        # Each warpgroup has a loop with masks and, without a window, a loop without masks.
        loops = (1 if case["window"] else 2) * case["config"]["warpgroups"]
        assert len(case["overlapping"]) == loops, case
        # A thread has half of a block's exponentials for its two queries.
        assert min(case["overlapping"]) >= case["exponentials"], case


def test_rows_that_threads_have_copied_are_fenced(compiled):
    """Without a fence, the tensor cores may read what shared memory held before.  What TMA has copied needs none, and
    the warps that convert FP8 rows have theirs, before all of them meet and one hands the rows over."""
    for case in compiled["hopper"]:
        # As above: without a window, the loop without masks comes first.
        without_masks, with_masks = case["fences"][::2], case["fences"][1::2]
        if case["window"]:
            assert min(case["fences"]) >= 1, case
        else:
            assert min(with_masks) >= 1, case
            assert max(without_masks) == 0 if case["fenced_by_writers"] else min(without_masks) >= 1, case
        assert all(fences == 1 and barriers >= 1 for fences, barriers in case["converted"]), case
        assert bool(case["converted"]) == (case["config"]["raw_stages"] > 0), case
    assert any(case["fenced_by_writers"] for case in compiled["hopper"])


def test_latent_rows_queries_and_weights_that_threads_have_written_are_fenced(compiled):
    """Both warpgroups read rows, so each has fences of its own.  A fence that no thread's writes need costs time in
    each block."""
    for case in compiled["hopper_latent"]:
        fences, by_writers = case["fences"], case["fenced_by_writers"]
        # As above: the loop without masks comes first.  Threads have copied staged rows, in the loop with masks.
        assert fences["rows"] == [0 if by_writers else 1, 1], case
        # The second warpgroup has one loop for both kinds of blocks.
        assert fences["values"] == [1, 1 if by_writers else 0], case
        assert fences["queries"] == [1] and fences["weights"] and set(fences["weights"]) == {1}, case
        assert all(fenced == 1 and barriers >= 1 for fenced, barriers in fences["converted"]), case
        assert bool(fences["converted"]) == (case["config"]["raw_stages"] > 0), case
    assert any(case["fenced_by_writers"] for case in compiled["hopper_latent"])


def test_latent_weights_are_computed_while_the_tensor_cores_work(compiled):
    for case in compiled["hopper_latent"]:
        assert case["shared"] <= case["expected_shared"] <= 227 * 1024, case
        # Two loops: without and with masks.  A thread has 8 of a block's 32 exponentials for each of its two queries.
        assert len(case["overlapping"]) == 2 and min(case["overlapping"]) >= 16, case


def test_few_latent_queries_are_columns_of_the_products(compiled):
    for case in compiled["hopper_latent_few"]:
        assert case["shared"] <= case["expected_shared"] <= 227 * 1024 and case["spills"] == 0, case
        # A block of 64 rows: 576 / 16 products for the scores, 4 · 512 / 64 for the values.
        assert case["products"] == 36 + 32, case
        # All four warps' weights are visible to the tensor cores before the first product reads them.
        fences, barriers = case["weights"]
        assert fences == 1 and barriers >= 1, case


def test_gated_products_follow_each_other(compiled):
    """Each warpgroup has four products of 16 columns a block, and starts the next block's while they run."""
    case = compiled["hopper_gated"]
    assert case["shared"] <= 227 * 1024 and case["spills"] == case["slow_conversions"] == 0, case
    assert case["products"] == 2 * 4 and case["in_flight"] == [1, 1], case


def test_loading_warps_stay_together_where_one_thread_arrives_for_all(compiled):
    """A warp that falls a whole turn of the stages behind would wait forever.  Barriers that the compiler inserts
    prevent it."""
    cases = compiled["hopper"] + compiled["hopper_latent"] + compiled["hopper_latent_few"]
    for case in [*cases, compiled["hopper_gated"]]:
        assert len(case["tma_loop_barriers"]) == case["contiguous"] and all(case["tma_loop_barriers"]), case
    assert any(case["contiguous"] for case in compiled["hopper"])
