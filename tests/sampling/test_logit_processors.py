"""Bias, bans and penalties: by hand, and along a tree's paths as for the sequence written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.request import Request
from espalier.sampling.logit_processors import DraftedAncestors, SamplingFeatures, process_logits
from tests.sampling.batch import request, rows_of

VOCAB = 8
PENALISED = SamplingFeatures(penalised=True)
BIASED = SamplingFeatures(biased=True)
ALL = SamplingFeatures(penalised=True, biased=True)


def shaped(logits: list[float], one: Request, needs: SamplingFeatures) -> list[float]:
    positions = torch.tensor([[one.num_tokens]])
    values = torch.tensor([[logits]], dtype=torch.float64)
    return process_logits(values, rows_of([one], len(logits)), needs, positions)[0, 0].tolist()


def test_repetition_is_over_prompt_and_output_the_others_over_output():
    one = request([0, 1, 1], [1, 2, 2], repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    # Token 0 stood in the prompt, 1 in both, 2 twice in the output, 3 nowhere.
    assert shaped([4.0, -4.0, 4.0, 4.0], one, PENALISED) == [2.0, -8.75, 0.75, 4.0]


def test_a_bias_of_no_entries_changes_nothing():
    logits = [0.0, -0.5, 3.0, 1e-30]
    assert shaped(logits, request(), BIASED) == logits
    assert shaped(logits, request(logit_bias={2: -1.0, 0: 2.5}), BIASED) == [2.5, -0.5, 2.0, 1e-30]


@pytest.mark.parametrize("output", [0, 1, 2, 3])
def test_stop_ids_are_banned_until_min_tokens_whatever_their_bias(output):
    one = request([0, 0], [1] * output, stop_ids=[0, 3], min_tokens=2, logit_bias={3: 100.0})
    banned = output < 2
    expected = [-torch.inf if banned else 1.0, 1.0, 1.0, -torch.inf if banned else 101.0]
    assert shaped([1.0] * 4, one, BIASED) == expected


def test_bans_follow_each_rows_position():
    one = request([0], stop_ids=[1], min_tokens=2)
    values = process_logits(torch.zeros(1, 4, 3), rows_of([one], 3), BIASED, torch.tensor([[1, 2, 3, 4]]))
    assert (values[0, :, 1] == -torch.inf).tolist() == [True, True, False, False]
    assert (values[0, :, [0, 2]] == 0).all()


@st.composite
def trees(draw):
    """(tokens, parents) of a tree; node 0 is the root, some nodes are void."""
    size = draw(st.integers(1, 9))
    parents = [0] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    tokens = [draw(st.integers(0, VOCAB - 1))]
    for parent in parents[1:]:
        # A void node is no one's parent that counts: its own children are void too.
        void = tokens[parent] == -1 or draw(st.integers(0, 4)) == 0
        tokens.append(-1 if void else draw(st.integers(0, VOCAB - 1)))
    return tokens, parents


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from below the root down to `node`."""
    return [] if node == 0 else [*path_to(parents[node], parents), node]


@given(trees(), st.lists(st.integers(0, VOCAB - 1), max_size=4), st.integers(0, 2**32))
def test_penalties_along_a_path_are_those_of_the_sequence_written_out(tree, decided, seed):
    tokens, parents = tree
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {1: 0.5}}
    output = [*decided, tokens[0]]
    one, mate = request([5, 6], output, **params), request([1])
    size = len(tokens)
    on_path = torch.zeros(2, size, size, dtype=torch.bool)
    for node in range(size):
        on_path[:, node, path_to(node, parents)] = True
    logits = torch.randn(2, size, VOCAB, generator=torch.Generator().manual_seed(seed))
    positions = torch.zeros(2, size, dtype=torch.int64)
    together = process_logits(
        logits,
        rows_of([one, mate], VOCAB),
        ALL,
        positions,
        DraftedAncestors(torch.tensor([tokens] * 2), pack_bits(on_path)),
    )
    for node in range(size):
        path = [tokens[n] for n in path_to(node, parents) if tokens[n] >= 0]
        written_out = rows_of([request([5, 6], [*output, *path], **params)], VOCAB)
        assert torch.equal(
            together[0, node], process_logits(logits[:1, node : node + 1], written_out, ALL, positions[:1, :1])[0, 0]
        )
    # A neighbour without penalties keeps its logits, whatever its nodes.
    assert torch.equal(together[1], logits[1])


def test_extras_that_are_all_void_count_nowhere():
    one = request([0, 3], [3, 2], repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5)
    rows, logits, positions = rows_of([one], VOCAB), torch.ones(1, 4, VOCAB), torch.zeros(1, 4, dtype=torch.int64)
    void = process_logits(
        logits,
        rows,
        PENALISED,
        positions,
        DraftedAncestors(torch.full((1, 3), -1), pack_bits(torch.ones(1, 4, 3, dtype=torch.bool))),
    )
    assert torch.equal(void, process_logits(logits, rows, PENALISED, positions))


def test_shaping_leaves_its_inputs_alone():
    one = request([0], [1, 1], repetition_penalty=1.5, logit_bias={1: 3.0}, stop_ids=[2], min_tokens=9)
    rows, logits = rows_of([one], VOCAB), torch.ones(1, 2, VOCAB)
    before = {name: value.clone() for name, value in vars(rows).items()}
    process_logits(
        logits,
        rows,
        ALL,
        torch.ones(1, 2),
        DraftedAncestors(torch.tensor([[4, 5]]), pack_bits(torch.ones(1, 2, 2, dtype=torch.bool))),
    )
    assert (logits == 1).all()
    assert all(torch.equal(value, before[name]) for name, value in vars(rows).items())


@pytest.mark.parametrize(
    ("given_dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_narrow_logits_are_shaped_in_float32(given_dtype, computed):
    one = request([0], [1], repetition_penalty=1.5, logit_bias={1: 3.0})
    for needs in (SamplingFeatures(), ALL):
        ones = torch.ones(1, 1, VOCAB, dtype=given_dtype)
        values = process_logits(ones, rows_of([one], VOCAB), needs, torch.ones(1, 1))
        assert values.dtype == computed
