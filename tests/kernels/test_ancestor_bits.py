"""Ancestor masks and bits against a walk up the tree, with fewer and more than 64 nodes."""

import pytest
import torch

from espalier.kernels.attention.ancestor_bits import (
    WORD_COUNT_MULTIPLE,
    ancestor_mask,
    causal_ancestor_bits,
    pack_bits,
    unpack_bits,
)
from espalier.layout import ANCESTOR_BITS

SIZES = [1, 2, 3, 63, 64, 65, 128, 129]


def random_tree(nodes: int, seed: int) -> tuple[list[int], list[bool], int]:
    """(parents, each before its node; which leaves are void; depth of the tree)."""
    generator = torch.Generator().manual_seed(seed)
    parents = [0] + [int(torch.randint(max(0, i - 6), i, (), generator=generator)) for i in range(1, nodes)]
    inner = set(parents) | {0}
    void = [i not in inner and bool(torch.rand((), generator=generator) < 0.3) for i in range(nodes)]
    depths = [0] * nodes
    for i in range(1, nodes):
        depths[i] = depths[parents[i]] + 1
    return parents, void, max(depths)


def walked(parents: list[int], void: list[bool]) -> list[list[bool]]:
    """The ancestor mask, by walking up from each node."""
    rows = []
    for node in range(len(parents)):
        line = {node}
        at = node
        while at and not void[node]:
            at = parents[at]
            line.add(at)
        rows.append([other in line for other in range(len(parents))])
    return rows


@pytest.mark.parametrize("nodes", SIZES)
def test_mask_equals_a_walk_to_the_root(nodes):
    trees = [random_tree(nodes, seed) for seed in range(3)]
    parents = torch.tensor([parents for parents, _, _ in trees])
    void = torch.tensor([void for _, void, _ in trees])
    mask = ancestor_mask(parents, void, max_depth=max(depth for _, _, depth in trees))
    assert mask.tolist() == [walked(parents, void) for parents, void, _ in trees]


@pytest.mark.parametrize("nodes", SIZES)
def test_words_hold_the_mask(nodes):
    mask = torch.rand(2, 5, nodes, generator=torch.Generator().manual_seed(nodes)) < 0.5
    ancestor_bits = pack_bits(mask)
    assert ancestor_bits.shape == (2, 5, -(-nodes // 64)) and ancestor_bits.dtype == torch.int64
    assert torch.equal(unpack_bits(ancestor_bits, nodes), mask)


def test_bit_i_mod_64_of_word_i_over_64_is_node_i():
    for node in (0, 1, 31, 62, 63, 64, 127, 128):
        ancestor_bits = pack_bits(torch.arange(129) == node)
        expected = [0, 0, 0]
        expected[node // 64] = 1 << node % 64 if node % 64 < 63 else -(1 << 63)
        assert ancestor_bits.tolist() == expected


def test_an_empty_batch_is_legal():
    assert pack_bits(torch.zeros(0, 7, 70, dtype=torch.bool)).shape == (0, 7, 2)
    assert ancestor_mask(torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, 5, dtype=torch.bool), 3).shape == (
        0,
        5,
        5,
    )


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1024, 1025])
def test_the_bits_up_to_a_row_are_those_of_a_chain(rows):
    row = torch.tensor(sorted({0, min(62, rows - 1), min(63, rows - 1), min(64, rows - 1), rows - 1}))
    bits = causal_ancestor_bits(row, rows)
    assert bits.shape[:2] == (len(row), 1) and bits.shape[2] % WORD_COUNT_MULTIPLE == 0
    assert torch.equal(unpack_bits(bits, bits.shape[2] * ANCESTOR_BITS)[:, 0].sum(1), row + 1)
    assert torch.equal(unpack_bits(bits, rows)[:, 0], torch.arange(rows) <= row[:, None])
