"""Ancestor bits: which staged rows of a pass a query sees.

Each query has W int64 words.  Bit i % 64 of word i // 64 is set if the query sees row i.  In a tree, node i is then an
ancestor of the query's node, or the node itself.  64 nodes take 8 bytes, and the number of nodes is not limited.
"""

import torch
from torch import Tensor

from espalier.kernels.runtime.launch import require
from espalier.layout import ANCESTOR_BITS

# The number of words is a multiple of this, because Triton compiles one kernel for all strides divisible by 16.
WORD_COUNT_MULTIPLE = 16


def ancestor_mask(parents: Tensor, is_void: Tensor, max_depth: int) -> Tensor:
    """Returns [B, D, D] bool: entry [b, i, j] says that node j is an ancestor of node i, or i itself.

    parents: [B, D], the root is its own parent; is_void: [B, D] bool, nodes that see only themselves;
    max_depth: the depth of the tree's deepest node, or more."""
    itself = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
    mask = itself.expand(parents.shape[0], -1, -1)
    parent_columns = parents[:, :, None].expand(-1, -1, parents.shape[1])
    for _ in range(max_depth):
        mask = mask.gather(1, parent_columns) | itself
    return torch.where(is_void[:, :, None], itself, mask)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack bits [..., D] bool into words [..., ceil(D / 64)] int64."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % ANCESTOR_BITS))
    bits = torch.arange(ANCESTOR_BITS, device=mask.device)
    return (padded.unflatten(-1, (-1, ANCESTOR_BITS)).long() << bits).sum(-1)


def unpack_bits(ancestor_bits: Tensor, num_nodes: int) -> Tensor:
    """Unpack words [..., W] int64 into bits [..., num_nodes] bool."""
    bits = torch.arange(ANCESTOR_BITS, device=ancestor_bits.device)
    return (ancestor_bits[..., None] >> bits & 1).flatten(-2)[..., :num_nodes].bool()


def true_for_all_ancestors(ancestor_bits: Tensor, is_true: Tensor) -> Tensor:
    """Returns [B, D] bool: whether is_true [B, D] holds for a node and its ancestors.  ancestor_bits: [B, D, W]."""
    return ((ancestor_bits & pack_bits(~is_true)[:, None]) == 0).all(-1)


def self_only_bits(first_row: int, num_rows: int, num_ancestor_words: int, device: torch.device) -> Tensor:
    """Returns [num_rows, num_ancestor_words] int64: bits of the rows from first_row on.  Each row sees only itself."""
    rows = torch.arange(first_row, first_row + num_rows, device=device)
    bits = torch.ones_like(rows) << rows % ANCESTOR_BITS
    return bits[:, None] * (torch.arange(num_ancestor_words, device=device) == (rows // ANCESTOR_BITS)[:, None])


def causal_ancestor_bits(row: Tensor, num_rows: int) -> Tensor:
    """Returns [B, 1, W] int64: bits of rows 0 to row [B], for num_rows rows.  W: a multiple of WORD_COUNT_MULTIPLE."""
    words = torch.arange(-(-num_rows // (ANCESTOR_BITS * WORD_COUNT_MULTIPLE)) * WORD_COUNT_MULTIPLE, device=row.device)
    num_seen = (row[:, None] + 1 - ANCESTOR_BITS * words).clamp(0, ANCESTOR_BITS)
    # A shift by 64 is not defined.
    low_bits = (torch.ones_like(num_seen) << num_seen.clamp(max=ANCESTOR_BITS - 1)) - 1
    return torch.where(num_seen == ANCESTOR_BITS, -1, low_bits)[:, None]


def require_ancestor_bits(name: str, ancestor_bits: Tensor, num_rows: int, q: Tensor) -> None:
    """Check the shape of the ancestor bits of queries q [B, Q, ...] over staged rows.  Raises EspalierError.

    The bits may have more words than num_rows rows need, because a tree has its final number of words while it grows.
    """
    num_words = max(-(-num_rows // ANCESTOR_BITS), ancestor_bits.shape[-1])
    require(name, ancestor_bits, (*q.shape[:2], num_words), torch.int64, q)


def visible_mask(ancestor_bits: Tensor | None, positions: Tensor, row_positions: Tensor, window: int | None) -> Tensor:
    """Returns [B, Q, R] bool: the staged rows that each query sees, inside the window.

    A query of a tree sees the rows of its ancestor bits.  Without ancestor bits (a chain), a query sees all rows up to
    its own.  positions: [B, Q]."""
    num_rows = row_positions.shape[1]
    if ancestor_bits is None:
        order = torch.arange(num_rows, device=positions.device)
        seen = (order <= order[:, None]).expand(positions.shape[0], -1, -1)
    else:
        seen = unpack_bits(ancestor_bits, num_rows)
    return seen if window is None else seen & (positions[:, :, None] - row_positions[:, None, :] < window)
