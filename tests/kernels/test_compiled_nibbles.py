"""Properties of the compiled kernels of 4-bit weights that no comparison of results shows."""

import json

import pytest

from tests import warm

pytest.importorskip("triton", reason="needs Triton")

# Memory delivers about 25 weights a cycle to a multiprocessor at 70% of its bandwidth, which issues 128 lanes a cycle.
MOST_A_WEIGHT = 5.0
# In the kernels for few rows, of linear layers and of experts.
MOST_A_WEIGHT_OF_FEW_ROWS = 3.0


@pytest.fixture(scope="module", params=["each", pytest.param("full", marks=pytest.mark.full)])
def cases(request):
    return json.loads(warm.compiler().run("tests.kernels.compiled_nibbles", request.param))


def test_a_weight_takes_no_more_instructions_than_memory_leaves_time_for(cases):
    assert all(case["a_weight"] <= MOST_A_WEIGHT for case in cases["plain"]), cases
    assert all(case["a_weight"] <= MOST_A_WEIGHT_OF_FEW_ROWS for case in cases["hopper"]), cases


def test_weights_and_inputs_go_to_the_tensor_cores_without_another_pass_through_shared_memory(cases):
    """Nor do registers spill.  The compiler must find layouts in which no value moves between threads."""
    every = cases["plain"] + cases["hopper"]
    assert all(case["stores"] == 0 and case["products"] > 0 for case in every), cases


def test_codes_and_inputs_are_copied_in_whole_words_of_16_bytes(cases):
    """Scales of a row in 4 bytes, or 8 of NVFP4; sums of 32 columns read 8 bytes of codes of each row at once."""
    for case in cases["plain"] + cases["hopper"]:
        code, group, *_ = case["case"]
        codes = "LDGSTS.E.64" if (code, group) == ("int4", 32) else "LDGSTS.E.BYPASS.128"
        exponents = {"mxfp4": {"LDGSTS.E"}, "nvfp4": {"LDGSTS.E.64"}}.get(code, set())
        assert set(case["copies"]) - {"LDGSTS.E.BYPASS.128"} == {codes, *exponents} - {"LDGSTS.E.BYPASS.128"}, case
