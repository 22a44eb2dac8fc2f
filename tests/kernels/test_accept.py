"""The accept kernel equals its reference exactly.  tests/speculate/test_accept.py tests the reference itself."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack_bits
from espalier.kernels.ops.tree import VOID, Tree, accept, select_tree
from espalier.speculate.tree import RootTrees
from tests.kernels.treeing import poisoned, random, random_pool, same

TOKENS = 3


def random_inputs(batch, topk, steps, nodes, seed, limited=True):
    """accept's arguments.  Tokens are few, so that random picks often match; a quarter of the requests is padding."""
    generator = random(seed)
    pool = ([values] for values in random_pool(batch, topk, steps, seed, vocab=topk))
    tree = select_tree.reference(torch.zeros(batch).long(), *pool, topk, nodes)
    picks = torch.randint(0, max(topk, 2), (batch, nodes), generator=generator)
    if seed % 2:
        # Each node's pick is the token of its first child, so that whole paths are accepted.
        last_child = torch.arange(nodes - 1, -1, -1).expand(batch, -1)
        real_nodes = torch.where(tree.tokens == VOID, 0, 1).flip(1).bool()
        child = (
            torch.zeros(batch, nodes).long().scatter_(1, tree.parents.flip(1), torch.where(real_nodes, last_child, 0))
        )
        picks = torch.where(child > 0, tree.tokens.gather(1, child), picks).clamp(min=0)
    limit = torch.randint(0, steps + 2, (batch,), generator=generator) if limited else torch.full((batch,), steps)
    real = torch.rand(batch, generator=generator) < 0.75
    finite = torch.rand(batch, nodes, generator=generator) < 0.8
    return tree, picks, finite, limit, real, steps


def on(device, inputs):
    """accept's tensors on a device."""
    tree, *rest = inputs
    return Tree(*(value.to(device) for value in tree)), *(value.to(device) for value in rest)


def check(device, batch, topk, steps, nodes):
    for seed in range(4):
        inputs = random_inputs(batch, topk, steps, nodes, seed, limited=seed > 1)
        with poisoned():
            path = accept.triton(*on(device, inputs[:-1]), steps)
        same(path, accept.reference(*inputs))


SMALL = [(0, 2, 2, 4), (3, 1, 4, 5), (3, 2, 3, 7), (3, 3, 3, 22), (2, 8, 2, 65), (1, 12, 2, 129)]
LARGE = [(64, 8, 5, 64), (64, 10, 8, 64), (64, 10, 8, 129), (3, 16, 8, 512), (64, 6, 20, 300)]


@pytest.mark.parametrize("batch,topk,steps,nodes", SMALL)
def test_kernel_is_the_reference(kernel_device, batch, topk, steps, nodes):
    check(kernel_device, batch, topk, steps, nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,topk,steps,nodes", LARGE)
def test_kernel_is_the_reference_at_size(kernel_device, batch, topk, steps, nodes):
    check(kernel_device, batch, topk, steps, nodes)


def chain(nodes):
    line = torch.arange(nodes)[None]
    parents = (line - 1).clamp(min=0)
    ancestor_bits = pack_bits(ancestor_mask(parents, torch.zeros(1, nodes).bool(), nodes))
    return Tree(line % TOKENS, parents, line, torch.zeros(1, nodes), ancestor_bits)


@pytest.mark.parametrize("depth", [0, 1, 62, 63, 64, 65, 128])
def test_paths_longer_than_64_nodes(kernel_device, depth):
    picks = (torch.arange(129)[None] + 1) % TOKENS
    picks[0, depth:] = 9
    inputs = (chain(129), picks, picks != 5, torch.tensor([128]), torch.tensor([True]))
    path = accept.triton(*on(kernel_device, inputs), 128)
    assert path.length.tolist() == [depth + 1] and path.tokens[0, depth].item() == 9
    same(path, accept.reference(*inputs, 128))


def test_plain_decoding_and_padding(kernel_device):
    tree = RootTrees(2, torch.device("cpu"))(torch.tensor([5, 6]))
    zero = torch.zeros(2, 1).long()
    inputs = (tree, torch.tensor([[1], [2]]), zero == 0, zero[:, 0], torch.tensor([True, False]))
    path = accept.triton(*on(kernel_device, inputs), 0)
    assert (path.tokens.tolist(), path.length.tolist(), path.rows.tolist()) == ([[1], [2]], [1, 0], [[0], [0]])


def test_wrong_shapes_and_dtypes_are_refused(kernel_device):
    *inputs, steps = random_inputs(2, 2, 3, 7, 1)
    tree, picks, *rest = on(kernel_device, inputs)
    with pytest.raises(EspalierError, match="accept: target_tokens"):
        accept.triton(tree, picks[:, 1:], *rest, steps)
    with pytest.raises(EspalierError, match="accept: is_real"):
        accept.triton(tree, picks, *rest[:2], rest[2].long(), steps)


def test_cpu_tensors_use_the_reference():
    inputs = random_inputs(2, 2, 3, 7, 1)
    same(accept(*inputs), accept.reference(*inputs))
