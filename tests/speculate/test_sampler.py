"""Sampler by the kernels and in plain torch are one: the same tokens at a tree's nodes, the same children."""

import pytest
import torch

from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack_bits
from espalier.sampling.logit_processors import DraftedAncestors
from espalier.speculate import sampler as draws_module
from espalier.speculate.sampler import DraftRows, KernelSampler, make_kernel_sampler, make_sampler
from espalier.speculate.tree import Tree
from tests.kernels.sampled import ALL_SAMPLING_FEATURES, ASKED, random_above, random_logits, slots_of, table_of

# The interpreter computes what a `where` leaves out as well.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

VOCAB, NODES, WIDTH = 16, 7, 4


def draws_of(device, asked=ASKED):
    """(by the kernels, in plain torch) for the same slots."""
    first = torch.arange(97, 97 + len(asked))
    there, here = (slots_of(table_of(asked, VOCAB, at), range(1, len(asked) + 1)) for at in (device, first.device))
    plain = make_sampler(here, ALL_SAMPLING_FEATURES, first, WIDTH, VOCAB, torch.float64)
    return make_kernel_sampler(there, ALL_SAMPLING_FEATURES, first.to(device)), plain


def tree_of(batch: int, seed: int = 0) -> Tree:
    """Random trees of three levels, their last node void."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([[0, 0, 0, 1, 1, 3, 0]] * batch)
    depths = torch.tensor([[0, 1, 1, 2, 2, 3, 1]] * batch)
    tokens = torch.randint(0, VOCAB, (batch, NODES), generator=generator)
    tokens[:, -1] = -1
    void = tokens < 0
    scores = torch.zeros(batch, NODES).masked_fill(void, -torch.inf)
    return Tree(tokens, parents, depths, scores, pack_bits(ancestor_mask(parents, void, 3)))


def moved(tree: Tree, device: torch.device) -> Tree:
    return Tree(*(value.to(device) for value in tree))


def test_the_nodes_of_a_tree(kernel_device):
    by_kernels, plain = draws_of(kernel_device)
    tree, logits = tree_of(len(ASKED)), random_logits(1, len(ASKED), NODES, VOCAB, dtype=torch.float64)
    expected = plain.sample_at_nodes(logits, tree)
    picked = by_kernels.sample_at_nodes(logits.to(kernel_device), moved(tree, kernel_device))
    assert picked.tokens.tolist() == expected.tokens.tolist() and picked.finite.all()


def test_the_token_after_a_chunk(kernel_device):
    by_kernels, plain = draws_of(kernel_device)
    logits = random_logits(2, len(ASKED), 1, VOCAB, dtype=torch.float64)
    expected = plain.sample_last(logits)
    assert by_kernels.sample_last(logits.to(kernel_device)).tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("draft_vocab", [None, 9])
@pytest.mark.parametrize("level", [1, 3])
def test_children_and_their_scores(kernel_device, draft_vocab, level):
    by_kernels, plain = draws_of(kernel_device)
    queries, batch = (1 if level == 1 else 2), len(ASKED)
    d2t = None if draft_vocab is None else torch.arange(draft_vocab) + 3
    logits = random_logits(3, batch, queries, draft_vocab or VOCAB, dtype=torch.float64)
    scores = -torch.rand(batch, queries, generator=torch.Generator().manual_seed(4))
    above = None if level == 1 else random_above(batch, queries, 4, VOCAB, torch.device("cpu"))
    expected_ids, expected = plain.best_children(DraftRows(logits, d2t, level - 1, scores, above), 3)
    rows = DraftRows(
        logits.to(kernel_device),
        None if d2t is None else d2t.to(kernel_device),
        level - 1,
        scores.to(kernel_device),
        None
        if above is None
        else DraftedAncestors(above.tokens.to(kernel_device), above.ancestor_bits.to(kernel_device)),
    )
    ids, best = by_kernels.best_children(rows, 3)
    possible = expected > -torch.inf
    assert torch.equal(ids.cpu()[possible], expected_ids[possible])
    # The scores are float32; a shape whose penalties reach thousands has ulps to match.
    assert torch.allclose(best.cpu(), expected, rtol=2**-22, atol=2**-22)


def test_rows_at_consecutive_positions(kernel_device):
    """With stride 1, row q has the children that it would have alone, q positions further on."""
    batch, queries = len(ASKED), 3
    logits = random_logits(5, batch, queries, VOCAB, dtype=torch.float64).to(kernel_device)
    scores = torch.zeros(batch, queries, device=kernel_device)
    for sampler in draws_of(kernel_device):
        at = kernel_device if isinstance(sampler, KernelSampler) else "cpu"
        ids, best = sampler.best_children(DraftRows(logits.to(at), None, 0, scores.to(at), position_stride=1), 3)
        for q in range(queries):
            row = slice(q, q + 1)
            alone = sampler.best_children(DraftRows(logits[:, row].to(at), None, q, scores[:, row].to(at)), 3)
            assert torch.equal(ids[:, row], alone[0]) and torch.equal(best[:, row], alone[1])


def test_a_planted_offset_reaches_the_kernels(kernel_device, monkeypatch):
    """The fault parent-noise breaks the path that runs, on either device."""
    asked = ASKED[:3]
    by_kernels, plain = draws_of(kernel_device, asked)
    tree, logits = tree_of(len(asked)), random_logits(1, len(asked), NODES, VOCAB, dtype=torch.float64)
    right = plain.sample_at_nodes(logits, tree).tokens
    monkeypatch.setattr(draws_module, "noise_offsets", lambda tree: tree.depths.gather(1, tree.parents))
    wrong = by_kernels.sample_at_nodes(logits.to(kernel_device), moved(tree, kernel_device)).tokens.cpu()
    assert (wrong != right).any() and torch.equal(wrong, plain.sample_at_nodes(logits, tree).tokens)


@pytest.mark.gpu
def test_a_captured_launch_reads_what_the_table_holds_at_replay(kernel_device):
    """And nothing of it syncs: capture refuses that."""
    slots = slots_of(table_of(ASKED, VOCAB, kernel_device), range(1, len(ASKED) + 1))
    first = torch.full((len(ASKED),), 97, device=kernel_device)
    tree = moved(tree_of(len(ASKED)), kernel_device)
    logits = random_logits(1, len(ASKED), NODES, VOCAB).to(kernel_device)
    scores = torch.zeros(len(ASKED), NODES, device=kernel_device)
    above = DraftedAncestors(tree.tokens, tree.ancestors)

    def launch():
        sampler = make_sampler(slots, ALL_SAMPLING_FEATURES, first, WIDTH, VOCAB, torch.float32)
        assert isinstance(sampler, KernelSampler)
        return sampler.sample_at_nodes(logits, tree).tokens, *sampler.best_children(
            DraftRows(logits, None, 2, scores, above), 3
        )

    before = [value.clone() for value in launch()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch()
    slots.table.seed += 1
    slots.table.temperature += 0.5
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, launch(), strict=True))
    assert not torch.equal(captured[0], before[0])
