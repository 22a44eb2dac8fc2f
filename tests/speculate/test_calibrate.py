"""Scores become survival probabilities: of a draft that overstates itself, and of requests whose drafts differ."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from espalier.kernels.ops.tree import VOID, Tree, select_tree
from espalier.speculate.sources.calibrate import calibrate_scores, draft_node_kinds, pack_nodes
from espalier.speculate.sources.survival import SurvivalCounts
from tests.kernels.treeing import random_pool

STEPS, TOPK, NODES, ROWS = 3, 2, 8, 4


class Rounds:
    """Rounds of a batch whose target takes each request's first children with its own chance.

    verified: nodes beside the root of each request in the last round; said, found: what scores said of a round's nodes,
    and how many were on the target's path.
    """

    def __init__(self, batch: int, is_sampled: bool = False) -> None:
        self.survival, self.random = SurvivalCounts(STEPS), np.random.default_rng(0)
        self.batch, self.is_sampled = batch, torch.full((batch,), is_sampled)
        self.verified, self.said, self.found, self.rounds = [0] * batch, 0.0, 0, 0

    def run(self, chances: Sequence[float], rounds: int) -> list[int]:
        for _ in range(rounds):
            self.verified = self.round(chances)
        return self.verified

    def round(self, chances: Sequence[float]) -> list[int]:
        self.rounds += 1
        names = [str(row) for row in range(self.batch)]
        # The same scores of all.
        tokens, scores, beams = (part.expand(self.batch, -1) for part in random_pool(1, TOPK, STEPS, self.rounds))
        pool = [[part.contiguous()] for part in (tokens, scores, beams)]
        tree = select_tree(torch.zeros(self.batch, dtype=torch.int64), *pool, TOPK, NODES)
        kinds, skill = draft_node_kinds(tree, self.is_sampled), [[self.survival.draft_skill(name)] for name in names]
        table = torch.tensor(np.log(self.survival.probabilities), dtype=torch.float32)
        scored = calibrate_scores(tree, kinds, table, torch.tensor(skill))
        paths = [self.path(tree, row, chance) for row, chance in enumerate(chances)]
        self.survival.count_draft_nodes(names, pack_nodes(scored, kinds).numpy(), [emitted for emitted, _ in paths])
        chance_of_node = scored.scores.exp()
        chance_of_node[:, 0] = 0
        self.said += float(chance_of_node.sum())
        self.found += sum(len(nodes) for _, nodes in paths)
        only = scored.keep_nodes(scored.best_nodes(ROWS * self.batch))
        return (only.tokens[:, 1:] != VOID).sum(1).tolist()

    def path(self, tree: Tree, row: int, chance: float) -> tuple[list[int], list[int]]:
        """The tokens that the target emits, and the nodes that say them."""
        parents, at, nodes = tree.parents[row].tolist(), 0, []
        while self.random.random() < chance:
            children = [node for node in range(at + 1, NODES) if parents[node] == at and tree.tokens[row, node] != VOID]
            if not children:
                break
            at = children[0]
            nodes.append(at)
        # A token that no draft says.
        return [*(int(tree.tokens[row, node]) for node in nodes), 10**6], nodes


@pytest.mark.parametrize("is_sampled", [False, True])
def test_rows_go_where_the_draft_is_right_and_follow_when_that_changes(is_sampled: bool) -> None:
    rounds = Rounds(4, is_sampled)
    assert len(set(rounds.run([0.9, 0.9, 0.05, 0.05], 1))) <= 2, "nothing is known at first"
    sure, also_sure, noise, also_noise = rounds.run([0.9, 0.9, 0.05, 0.05], 30)
    assert min(sure, also_sure) >= 2 * max(noise, also_noise, 1), rounds.verified
    noise, also_noise, sure, also_sure = rounds.run([0.05, 0.05, 0.9, 0.9], 30)
    assert min(sure, also_sure) >= 2 * max(noise, also_noise, 1), rounds.verified


@pytest.mark.parametrize("chance", [0.2, 0.9])
def test_scores_say_how_many_nodes_come_true(chance: float) -> None:
    rounds = Rounds(12)
    rounds.run([chance] * 12, 30)
    rounds.said = rounds.found = 0
    rounds.run([chance] * 12, 60)
    assert rounds.said == pytest.approx(rounds.found, rel=0.15)
