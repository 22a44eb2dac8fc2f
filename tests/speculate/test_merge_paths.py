"""Paths merged into a draft's trees, against dictionaries of token sequences; guesses of the host on the device."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.engine.launch_buffer import pack_launch
from espalier.engine.launch_input import LaunchInput
from espalier.kernels.ops.state import gather_slots
from espalier.kernels.ops.tree import VOID, Tree, select_tree
from espalier.layout import LaunchForm
from espalier.sampling.logit_processors import SamplingFeatures
from espalier.slots import PATH_KINDS, UNDRAFTED_OFFSET, Guess
from espalier.speculate.sources.base import Paths
from espalier.speculate.sources.calibrate import root_only_trees
from espalier.speculate.sources.merge_paths import merge_paths
from espalier.speculate.sources.paths_alone import trees_of_guesses
from espalier.speculate.sources.sent import paths_of_guesses
from tests.harness import Setup
from tests.kernels.treeing import random, random_pool

Sequences = dict[tuple[int, ...], float]
VOCAB = 3


def survival(steps: int, seed: int) -> torch.Tensor:
    """Few values, so that most are tied."""
    values = torch.tensor([0.0, -0.25, -0.5, -1.0, -7.0])
    return values[torch.randint(0, len(values), (PATH_KINDS, steps), generator=random(seed))]


def sequences_of(tree: Tree, row: int) -> Sequences:
    """By its tokens from the root down, the score of each node that is not void, in the nodes' order."""
    found: Sequences = {}
    tokens, parents, scores = (part[row].tolist() for part in (tree.tokens, tree.parents, tree.scores))
    lineage: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert node == 0 or parent < node
        lineage.append((*lineage[parent], token) if node else ())
        if node == 0 or token != VOID:
            assert lineage[-1] not in found, "one node for the same tokens"
            found[lineage[-1]] = scores[node]
    return found


def expected(tree: Tree, paths: Paths, table: torch.Tensor, row: int) -> Sequences:
    every = sequences_of(tree, row)
    drafted = {*every}
    for path, kind in zip(paths.tokens[row].tolist(), paths.kinds[row].tolist(), strict=True):
        score = torch.zeros(())
        for depth, token in enumerate(path):
            if token == VOID or not kind:
                break
            at = tuple(path[: depth + 1])
            score = score + table[kind if at in drafted else kind + UNDRAFTED_OFFSET, depth]
            every[at] = max(every.get(at, -math.inf), float(score))
    order = {at: place for place, at in enumerate(every)}
    kept = sorted(every, key=lambda at: (bool(at), -every[at], order[at]))[: tree.tokens.shape[1]]
    return {at: every[at] for at in kept if every[at] > -math.inf}


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 14),
    st.integers(0, 10_000),
)
def test_the_best_of_both_with_each_sequence_once(batch, topk, steps, count, nodes, seed):
    tokens, scores, beams = random_pool(batch, topk, steps, seed, VOCAB)
    tree = select_tree(torch.full((batch,), 9), [tokens], [scores], [beams], topk, min(nodes, tokens.shape[1] + 1))
    drawn = torch.randint(-1, VOCAB, (batch, count, steps), generator=random(seed + 1))
    paths = Paths(drawn, torch.randint(0, 1 + UNDRAFTED_OFFSET, (batch, count), generator=random(seed + 2)))
    table = survival(steps, seed + 3)
    of_draft = torch.where(tree.tokens == VOID, 0, PATH_KINDS + 1)
    made, kinds = merge_paths(tree, of_draft, paths, table, steps)
    for row in range(batch):
        got = sequences_of(made, row)
        drafted = sequences_of(tree, row)
        for at, kind in zip(got, kinds[row].tolist(), strict=False):
            of_paths = [
                int(paths.kinds[row, i])
                for i in range(count)
                if at == tuple(drawn[row, i, : len(at)].tolist()) and paths.kinds[row, i]
            ]
            assert kind == (PATH_KINDS + 1 if at in drafted else of_paths[0] + UNDRAFTED_OFFSET)
        assert list(got.items()) == list(expected(tree, paths, table, row).items())
        lineage = made.ancestor_mask()[row]
        for node, (at, parent) in enumerate(zip(lineage.tolist(), made.parents[row].tolist(), strict=True)):
            is_void = node > 0 and int(made.tokens[row, node]) == VOID
            above = torch.zeros(len(at), dtype=torch.bool) if is_void or not node else lineage[parent].clone()
            above[node] = True
            assert at == above.tolist()
            assert int(made.depths[row, node]) == (1 if is_void else sum(at) - 1)
    assert [part.dtype for part in made] == [part.dtype for part in tree]


@given(st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=9), st.data())
def test_a_guess_goes_on_behind_what_was_decided_since(text, data):
    layout = SENT.layout
    start = data.draw(st.integers(0, len(text) - 1))
    ahead = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=layout.steps + layout.extend_width))
    table = RUNNER.table
    launch = LaunchInput(
        slots=(2,), sampling_features=SamplingFeatures(), guesses=((2, (Guess(start, 5, tuple(ahead)),)),)
    )
    packed = pack_launch(table, launch, 0, LaunchForm(1))
    packed.with_vector(torch.from_numpy(packed.vector)).update_slot_table(table)
    table.history[2, : len(text)] = torch.tensor(text)
    table.prefix_len[2] = len(text) - 1
    paths = paths_of_guesses(gather_slots(table, torch.tensor([2])), layout.steps)
    decided = text[start + 1 :]
    agrees = ahead[: len(decided)] == decided
    left = ahead[len(decided) : len(decided) + layout.steps] if agrees else []
    assert paths.tokens[0, 0].tolist() == left + [VOID] * (layout.steps - len(left))
    assert paths.kinds[0].tolist() == [5 if agrees else 0, 0]


@given(st.data(), st.integers(0, 10_000))
def test_on_a_cpu_guesses_alone_make_the_trees_that_a_gpu_merges(data, seed):
    layout, table, rng = SENT.layout, RUNNER.table, random(seed)
    slots = torch.tensor([1, 2])
    table.history[slots] = torch.randint(0, 3, (2, table.history.shape[1]), generator=rng)
    table.prefix_len[slots] = torch.randint(3, 9, (2,), generator=rng)
    table.survival.copy_(
        torch.nn.functional.pad(survival(layout.steps, seed), (0, 0, 0, len(table.survival) - PATH_KINDS))
    )
    for slot in slots.tolist():
        for path in range(layout.num_sent_paths):
            start = int(table.prefix_len[slot]) - data.draw(st.integers(-1, 2))
            known = table.history[slot, start + 1 : int(table.prefix_len[slot]) + 1].tolist()
            said = known + data.draw(st.lists(st.integers(-1, 1), max_size=layout.steps + 1))
            row = [start, data.draw(st.integers(0, UNDRAFTED_OFFSET)), *said, *[-1] * table.guesses.shape[2]]
            table.guesses[slot, path] = torch.tensor(row[: table.guesses.shape[2]])
    batch = gather_slots(table, slots)
    nodes = data.draw(st.integers(2, layout.num_draft_tokens))
    roots = root_only_trees(batch.root, nodes, layout.ancestor_words)
    paths = paths_of_guesses(batch, layout.steps)
    wanted = merge_paths(roots, torch.zeros_like(roots.tokens), paths, table.survival, layout.steps, is_drafted=False)
    got = trees_of_guesses(batch, nodes, layout.steps, layout.ancestor_words)
    for one, other in zip((*got[0], got[1]), (*wanted[0], wanted[1]), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), (got, wanted)


SENT = Setup(num_sent_paths=2)
RUNNER = SENT.engine().executor.runner
