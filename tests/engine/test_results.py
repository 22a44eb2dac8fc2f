"""What a launch gives back survives the ring: every field, floats to the bit, entries apart."""

from dataclasses import replace

import pytest
import torch

from espalier.engine.launch_input import DraftTree, LaunchInput, RequestResult, TreeSize
from espalier.engine.results import ResultsRing, read_results
from espalier.kernels.ops.sampling import pack_logprob_rows
from espalier.kernels.ops.tree import AcceptedPath
from espalier.logprobs import TokenLogprob, TokenLogprobs, row_words
from espalier.sampling.logit_processors import SamplingFeatures
from espalier.sampling.prompt import PromptRows
from espalier.speculate.round import RoundOutput
from espalier.speculate.tree import Tree
from tests.harness import Setup

LAYOUT = Setup(steps=2, topk=2, num_draft_tokens=4, max_batch=3).layout
TREE = Tree(
    tokens=torch.tensor([[5, 6, 7, 9], [1, 2, -1, -1]]),
    parents=torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]]),
    depths=torch.tensor([[0, 1, 1, 2], [0, 1, 1, 1]]),
    scores=torch.tensor([[0.0, -0.1, -2.5, -0.1000001], [0.0, -1e-30, -torch.inf, -torch.inf]]),
    ancestors=torch.ones(2, 4, 1, dtype=torch.int64),
)
PATH = AcceptedPath(
    rows=torch.tensor([[0, 1, 3], [0, 0, 0]]),
    length=torch.tensor([3, 1]),
    tokens=torch.tensor([[6, 9, 4], [8, 0, 0]]),
    num_finite=torch.tensor([2, 1]),
)
LOGITS = torch.arange(2 * 4 * 10.0).view(2, 4, 10).sin()
NOBODY = torch.tensor([-1, -1])
ROUND = RoundOutput(PATH, LOGITS, NOBODY, PATH.rows, TREE)
ONES = torch.tensor([1, 0])
FIRST = torch.zeros(2, 1).long()
PASS = RoundOutput(AcceptedPath(FIRST, ONES, torch.tensor([[4], [3]]), ONES), LOGITS[:, :1], NOBODY, FIRST)


def written(outcome: RoundOutput, entry: int) -> ResultsRing:
    results = ResultsRing(LAYOUT, LOGITS.shape[2], 3, torch.device("cpu"))
    results.write(torch.tensor([entry]), outcome)
    return results


def rows_of(
    results: ResultsRing,
    entry: int,
    batch: int,
    prompt: torch.Tensor | None = None,
    reports_trees: bool = True,
    spans: tuple[tuple[int, int], ...] | None = None,
    wanted: tuple[int | None, ...] = (),
):
    rows = None if spans is None else PromptRows(spans, (2,) * batch)
    launch_input = LaunchInput((1,) * batch, SamplingFeatures(), wanted, reports_trees=reports_trees, prompt_rows=rows)
    return read_results(results.columns, results.ring[entry, :batch].numpy(), prompt, launch_input)


def test_a_round():
    results = written(ROUND, entry=1)
    assert not results.ring[[0, 2]].any() and not results.ring[1, 2].any()
    scores = TREE.scores.tolist()
    assert rows_of(results, 1, 2) == [
        RequestResult(
            [6, 9], False, TreeSize((2, 1)), DraftTree([5, 6, 7, 9], [0, 0, 0, 1], [0, 1, 1, 2], scores[0], [0, 1, 3])
        ),
        RequestResult([8], True, TreeSize((1,)), DraftTree([1, 2, -1, -1], [0, 0, 0, 0], [0, 1, 1, 1], scores[1], [0])),
    ]


def test_other_trees_have_other_sums():
    """Other tokens, the same ones in another order, other parents; and the ring's entry does not matter."""
    changed = [TREE.tokens + 1, TREE.tokens[:, [0, 2, 1, 3]], TREE.tokens.roll(1, 1)]
    trees = [
        TREE,
        *(TREE._replace(tokens=tokens) for tokens in changed),
        TREE._replace(parents=TREE.parents.roll(1, 1)),
    ]
    sums = [rows_of(written(replace(ROUND, tree=tree), 0), 0, 2)[0].tree_checksum for tree in trees]
    assert len(set(sums)) == len(trees)
    assert sums[0] == rows_of(written(ROUND, 1), 1, 2, reports_trees=False)[0].tree_checksum


def test_a_smaller_tree_has_void_nodes_at_its_end():
    layout = Setup(steps=3, topk=2, num_draft_tokens=6, max_batch=3).layout
    results = ResultsRing(layout, LOGITS.shape[2], 1, torch.device("cpu"))
    results.write(torch.tensor([0]), ROUND)
    row = rows_of(results, 0, 2)[0]
    assert (row.tokens, row.tree_size) == ([6, 9], TreeSize((2, 1)))
    assert row.tree is not None
    assert (row.tree.tokens, row.tree.path_rows) == ([5, 6, 7, 9, -1, -1], [0, 1, 3])
    assert row.tree.scores == [*TREE.scores[0].tolist(), float("-inf"), float("-inf")]


def test_trees_come_to_the_host_only_where_somebody_looks():
    assert [row.tree for row in rows_of(written(ROUND, 0), 0, 2, reports_trees=False)] == [None, None]


def test_a_prefill_pass_has_no_tree():
    assert rows_of(written(PASS, 2), 2, 2) == [RequestResult([4], True), RequestResult([], True)]


def test_logprobs_stay_with_their_tokens():
    values = torch.arange(12.0).view(2, 3, 2)
    chosen, ranks = torch.tensor([[-0.5, -0.25, -1.0], [-2.0, 0.0, 0.0]]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    results = written(ROUND, 1)
    results.logprobs[1, :2, :, : row_words(2)] = pack_logprob_rows(PATH.tokens, chosen, ranks, values.long(), -values)
    read_rows = rows_of(results, 1, 2, wanted=(0, 2))
    results.ring.zero_()  # The next launch overwrites it.
    first, second = (TokenLogprobs([row.logprobs]) for row in read_rows)
    assert [(entry.token_id, entry.logprob, entry.rank) for entry in first] == [(6, -0.5, 1), (9, -0.25, 2)]
    assert second == [TokenLogprob(8, -2.0, [(6, -6.0), (7, -7.0)], 4)]
    assert [entry.top for entry in first] == [[], []]


def test_only_who_asked_gets_logprobs():
    asked = RoundOutput(PATH, LOGITS, torch.tensor([-1, 1]), PATH.rows, TREE)
    none, one = (row.logprobs for row in rows_of(written(asked, 0), 0, 2, wanted=(None, 1)))
    assert none is None and one is not None and one.shape == (1, row_words(1))
    assert TokenLogprobs([one])[0].logprob == pytest.approx(LOGITS[1, 0].log_softmax(-1)[8].item(), abs=1e-6)


def test_no_more_likeliest_tokens_than_the_vocabulary_has():
    asked = RoundOutput(PATH, LOGITS, torch.tensor([20, 20]), PATH.rows, TREE)
    for rows in rows_of(written(asked, 0), 0, 2, wanted=(20, 11)):
        assert all(
            sorted(token for token, _ in entry.top) == list(range(10)) for entry in TokenLogprobs([rows.logprobs])
        )


def test_a_prompts_logprobs_go_to_who_asked():
    values = torch.arange(6.0).view(3, 2)
    tokens, chosen, ranks = torch.tensor([7, 8, 9]), torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1, 2, 3])
    prompt = pack_logprob_rows(tokens, chosen, ranks, values.long(), -values)
    entries = [TokenLogprob(7 + i, -1.0 - i, [(2 * i, -2.0 * i), (2 * i + 1, -2.0 * i - 1)], 1 + i) for i in range(3)]
    for spans, cut in (((3, 5), (0, 1)), 2), (((0, 0), (4, 7)), 0), (((1, 4), (0, 0)), 3):
        rows = rows_of(written(PASS, 0), 0, 2, prompt.clone(), spans=spans)
        kept = [[] if row.prompt_logprobs is None else TokenLogprobs([row.prompt_logprobs]) for row in rows]
        assert kept == [entries[:cut], entries[cut:]]
        assert all(row.prompt_logprobs is None or row.prompt_logprobs.base is None for row in rows), "a whole pass"
        assert [row.logprobs for row in rows] == [None, None]


def test_an_entry_is_overwritten_whole():
    results = written(ROUND, 1)
    results.write(torch.tensor([1]), PASS)
    assert rows_of(results, 1, 2) == [RequestResult([4], True), RequestResult([], True)]
