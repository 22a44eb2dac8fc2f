"""Which path of a tree is kept: matching, the test of every ancestor, the deepest node, its path, what is emitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import every_ancestor, unpack
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if
from espalier.layout import ANCESTOR_BITS

if TYPE_CHECKING:
    import triton.language as tl


class Accepted(NamedTuple):
    """rows [B, S+1], length [B], tokens [B, S+1], num_finite [B]: the fields of speculate/accept.py:Path, in their
    order."""

    rows: Tensor
    length: Tensor
    tokens: Tensor
    num_finite: Tensor


def accept(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestor_bits: Tensor,
    picks: Tensor,
    finite: Tensor,
    depth_limit: Tensor,
    real: Tensor,
    steps: int,
) -> Accepted:
    """The longest path that the target would have produced itself.

    tokens, parents, depths, picks [B, D] int64, depths up to steps; words [B, D, W] int64; finite [B, D] bool,
    of the picks; depth_limit [B] int64, deeper nodes never match; real [B] bool, others get length 0.  Among equally
    deep nodes the lowest wins.  num_finite: of a path's picks how many, from the first, are finite.
    Raises EspalierError if sizes do not agree.  Exact.
    """
    run = accept_triton if tokens.is_cuda else accept_reference
    return run(tokens, parents, depths, ancestor_bits, picks, finite, depth_limit, real, steps)


def accept_triton(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestor_bits: Tensor,
    picks: Tensor,
    finite: Tensor,
    depth_limit: Tensor,
    real: Tensor,
    steps: int,
) -> Accepted:
    batch, nodes = tokens.shape
    num_words = -(-nodes // ANCESTOR_BITS)
    for name, value in (("tokens", tokens), ("parents", parents), ("depths", depths), ("picks", picks)):
        require(f"accept: {name}", value, (batch, nodes), torch.int64, tokens)
    require("accept: words", ancestor_bits, (batch, nodes, num_words), torch.int64, tokens)
    require("accept: finite", finite, (batch, nodes), torch.bool, tokens)
    require("accept: depth_limit", depth_limit, (batch,), torch.int64, tokens)
    require("accept: real", real, (batch,), torch.bool, tokens)
    sizes = ((batch, steps + 1), (batch,), (batch, steps + 1), (batch,))
    path = Accepted(*(tokens.new_empty(size) for size in sizes))
    if batch:
        given = (tokens, parents, depths, ancestor_bits, picks, finite, depth_limit, real)
        word_block = power_of_two(num_words)
        _accept_kernel[(batch,)](
            *(value.contiguous() for value in given),
            *path,
            NODES=nodes,
            WORDS=num_words,
            LEVELS=steps + 1,
            W=word_block,
            L=power_of_two(steps + 1),
            num_warps=4,
            **early(chip(tokens)),
        )
    return path


def accept_reference(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestor_bits: Tensor,
    picks: Tensor,
    finite: Tensor,
    depth_limit: Tensor,
    real: Tensor,
    steps: int,
) -> Accepted:
    match = (tokens == picks.gather(1, parents)) & (depths <= depth_limit[:, None]) | (depths == 0)
    last = deepest(every_ancestor(ancestor_bits, match), depths)
    rows = path_rows(ancestor_bits, depths, last, steps)
    depth = depths.gather(1, last[:, None])
    bonus = picks.gather(1, last[:, None])
    level = torch.arange(steps + 1, device=rows.device)
    drafted = torch.nn.functional.pad(tokens.gather(1, rows)[:, 1:], (0, 1))
    emitted = torch.where(level < depth, drafted, torch.where(level == depth, bonus, 0))
    length = torch.where(real, depth[:, 0] + 1, 0)
    num_finite = (finite.gather(1, rows) & (level < length[:, None])).cumprod(1).sum(1)
    return Accepted(rows, length, emitted, num_finite)


def deepest(kept: Tensor, depths: Tensor) -> Tensor:
    """[B]: the kept node of greatest depth, the lowest among equals."""
    nodes = depths.shape[1]
    rank = torch.arange(nodes - 1, -1, -1, device=depths.device)
    return torch.where(kept, depths * nodes + rank, -1).argmax(1)


def path_rows(ancestor_bits: Tensor, depths: Tensor, last: Tensor, steps: int) -> Tensor:
    """[B, S+1]: the nodes from the root to `last`, by depth; zeros below it."""
    batch, nodes = depths.shape
    path = ancestor_bits.gather(1, last[:, None, None].expand(-1, 1, ancestor_bits.shape[2]))[:, 0]
    past_the_end = steps + 1
    depth = torch.where(unpack(path, nodes), depths, past_the_end)
    rows = torch.zeros(batch, past_the_end + 1, dtype=torch.int64, device=last.device)
    return rows.scatter_(1, depth, torch.arange(nodes, device=last.device).expand_as(depth))[:, :past_the_end]


@kernel
def _accept_kernel(
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    words_ptr,
    picks_ptr,
    finite_ptr,
    limit_ptr,
    real_ptr,
    rows_ptr,
    length_ptr,
    emitted_ptr,
    sound_ptr,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    LEVELS: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program a request, its nodes in registers."""
    pdl_wait_if(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, W * 64)
    exists = node < NODES
    at = request * NODES + node
    token = tl.load(tokens_ptr + at, mask=exists, other=0)
    parent = tl.load(parents_ptr + at, mask=exists, other=0)
    depth = tl.load(depths_ptr + at, mask=exists, other=0).to(tl.int32)
    wanted = tl.load(picks_ptr + request * NODES + parent, mask=exists, other=0)
    limit = tl.load(limit_ptr + request)
    match = ((token == wanted) & (depth <= limit)) | (node == 0)

    # The nodes that do not match, as words; whoever stands on one of them is not kept.
    bit = (match == 0).to(tl.int64) << (node % 64).to(tl.int64)
    broken = tl.sum(tl.reshape(bit, [W, 64]), 1)
    word = tl.arange(0, W)
    ancestors = tl.load(
        words_ptr + at[:, None] * WORDS + word[None, :], mask=exists[:, None] & (word < WORDS)[None, :], other=0
    )
    hindered = tl.max(((ancestors & broken[None, :]) != 0).to(tl.int32), 1)
    kept = exists & (hindered == 0)
    best = tl.max(tl.where(kept, depth * NODES + (NODES - 1 - node), -1), 0)
    last = NODES - 1 - best % NODES
    length = best // NODES

    own = tl.load(words_ptr + (request * NODES + last) * WORDS + node // 64, mask=exists, other=0)
    on_path = exists & (((own >> (node % 64).to(tl.int64)) & 1) != 0)
    out = request * LEVELS
    tl.store(rows_ptr + out + depth, node.to(tl.int64), mask=on_path)
    tl.store(emitted_ptr + out + depth - 1, token, mask=on_path & (depth > 0))
    # The path fills the levels down to `length`, and the rest is filled here: no entry is written twice.
    level = tl.arange(0, L)
    zeros = tl.zeros([L], tl.int64)
    tl.store(rows_ptr + out + level, zeros, mask=(level > length) & (level < LEVELS))
    tl.store(emitted_ptr + out + level, zeros, mask=(level > length) & (level < LEVELS))
    tl.store(emitted_ptr + out + length, tl.load(picks_ptr + request * NODES + last))
    is_real = tl.load(real_ptr + request) != 0
    tl.store(length_ptr + request, tl.where(is_real, length + 1, 0).to(tl.int64))
    finite = tl.load(finite_ptr + at, mask=exists, other=1) != 0
    num_finite = tl.min(tl.where(on_path & (finite == 0), depth, length + 1), 0)
    tl.store(sound_ptr + request, tl.where(is_real, num_finite, 0).to(tl.int64))
