"""Ancestor words: which staged rows of a pass a query sees.

A node's ancestors, itself included, are bits of int64 words: bit i % 64 of word i // 64 is node i.  That form is 8
bytes for 64 nodes, is what verification and the kernels read, and has no limit on the number of nodes.
"""

import torch
from torch import Tensor

from espalier.layout import ANCESTOR_BITS


def ancestor_mask(parents: Tensor, void: Tensor, levels: int) -> Tensor:
    """[B, D, D] bool: node j is an ancestor of node i, or i itself.

    parents: [B, D], the root its own parent; void: [B, D], nodes that only see themselves; levels: the tree's depth.
    """
    itself = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
    mask = itself.expand(parents.shape[0], -1, -1)
    towards_root = parents[:, :, None].expand(-1, -1, parents.shape[1])
    for _ in range(levels):
        mask = mask.gather(1, towards_root) | itself
    return torch.where(void[:, :, None], itself, mask)


def pack(mask: Tensor) -> Tensor:
    """Bits [..., D] bool to words [..., ceil(D / 64)] int64."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % ANCESTOR_BITS))
    bits = torch.arange(ANCESTOR_BITS, device=mask.device)
    return (padded.unflatten(-1, (-1, ANCESTOR_BITS)).long() << bits).sum(-1)


def unpack(ancestor_bits: Tensor, nodes: int) -> Tensor:
    """Words [..., W] int64 to bits [..., nodes] bool."""
    bits = torch.arange(ANCESTOR_BITS, device=ancestor_bits.device)
    return (ancestor_bits[..., None] >> bits & 1).flatten(-2)[..., :nodes].bool()


def every_ancestor(ancestor_bits: Tensor, holds: Tensor) -> Tensor:
    """[B, D] bool: `holds` [B, D] is true at the node and at all of its ancestors, ancestor_bits [B, D, W]."""
    return ((ancestor_bits & pack(~holds)[:, None]) == 0).all(-1)


def own_bits(first: int, count: int, ancestor_bits: int, device: torch.device) -> Tensor:
    """[count, words] int64: for row first + i of a pass, the word bit that is its own."""
    rows = torch.arange(first, first + count, device=device)
    bits = torch.ones_like(rows) << rows % ANCESTOR_BITS
    return bits[:, None] * (torch.arange(ancestor_bits, device=device) == (rows // ANCESTOR_BITS)[:, None])


def seen_rows(ancestor_bits: Tensor | None, positions: Tensor, row_positions: Tensor, window: int | None) -> Tensor:
    """[B, Q, R] bool: the staged rows that a query sees: its words' bits, or, for a chain, its own and those before it;
    of these what lies inside the window."""
    rows = row_positions.shape[1]
    if ancestor_bits is None:
        order = torch.arange(rows, device=positions.device)
        seen = (order <= order[:, None]).expand(positions.shape[0], -1, -1)
    else:
        seen = unpack(ancestor_bits, rows)
    return seen if window is None else seen & (positions[:, :, None] - row_positions[:, None, :] < window)
