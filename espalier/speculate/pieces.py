"""Pieces of a prefill pass: runs of one request's tokens, all of one width, several a request.

A piece attends to the pieces before it through the pages, so each layer commits its rows before it attends.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.kernels.state.batch_state import gather
from espalier.slots import BatchState


class Pieces(NamedTuple):
    """request: [P], the row of the batch that a piece belongs to; offset: [P], tokens of that request in earlier pieces
    of the pass; last: [B], the last piece of each request.  Pieces of a request follow one another, in order."""

    request: Tensor
    offset: Tensor
    last: Tensor


class LastTokens(NamedTuple):
    """Where a prefill pass holds the last token of each request.

    row: [B], of all P·W rows of the pass; piece: [B], the piece; None where each request has one.
    """

    row: Tensor
    piece: Tensor | None


@dataclass(frozen=True)
class PieceRows:
    """The rows of a prefill pass, one batch row for each piece.

    slots: [P], prefix_len and num_tokens as they are when the earlier pieces are entered; length: [P], tokens;
    last: [B], the last piece of each request; None where each request has one.
    """

    slots: BatchState
    length: Tensor
    last: Tensor | None

    @classmethod
    def of(cls, slots: BatchState, length: Tensor, width: int, pieces: Pieces | None) -> "PieceRows":
        """slots: the batch; length: [B], tokens that each request enters; width: rows of a piece."""
        if pieces is None:
            return cls(slots, length, None)
        made = gather(slots.table, slots.index[pieces.request])
        moved = replace(made, prefix_len=made.prefix_len + pieces.offset, num_tokens=made.num_tokens + pieces.offset)
        return cls(moved, (length[pieces.request] - pieces.offset).clamp(max=width), pieces.last)

    def last_tokens(self, width: int) -> LastTokens:
        rows = (self.length - 1).clamp(min=0)
        if self.last is None:
            return LastTokens(torch.arange(len(rows), device=rows.device) * width + rows, None)
        return LastTokens(self.last * width + rows[self.last], self.last)
