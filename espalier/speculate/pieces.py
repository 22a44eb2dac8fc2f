"""Pieces of a prefill pass: runs of one request's tokens, all of one width, several a request.

A piece attends to the pieces before it through the pages, so each layer commits its rows before it attends.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from espalier.kernels.ops.state import gather
from espalier.slots import BatchState


class Pieces(NamedTuple):
    """request: [P], the row of the batch that a piece belongs to; offset: [P], tokens of that request in earlier pieces
    of the pass; last: [B], the last piece of each request.  Pieces of a request follow one another, in order."""

    request: Tensor
    offset: Tensor
    last: Tensor


class LastTokens(NamedTuple):
    """Where a prefill pass holds the last token of each piece, and of each request.

    row: [P], the row of a piece's last token among its rows; piece: [B], each request's last piece, None where each
    request has one piece; slots: [B], the requests' slots.  A request without tokens may name any piece.
    """

    row: Tensor
    piece: Tensor | None
    slots: Tensor

    def of_requests(self, values: Tensor) -> Tensor:
        """Of values [P, ...], those of the last pieces: [B, ...]."""
        return values if self.piece is None else values[self.piece]


@dataclass(frozen=True)
class PieceRows:
    """The rows of a prefill pass, one batch row for each piece.

    slots: [P], prefix_len and num_tokens as they are when the earlier pieces are entered; length: [P], tokens;
    last: [B], the last piece of each request, None where each request has one; requests: [B], their slots.
    """

    slots: BatchState
    length: Tensor
    last: Tensor | None
    requests: Tensor

    @classmethod
    def of(cls, slots: BatchState, length: Tensor, width: int, pieces: Pieces | None) -> "PieceRows":
        """slots: the batch; length: [B], tokens that each request enters; width: rows of a piece."""
        if pieces is None:
            return cls(slots, length, None, slots.index)
        made = gather(slots.table, slots.index[pieces.request])
        moved = replace(made, prefix_len=made.prefix_len + pieces.offset, num_tokens=made.num_tokens + pieces.offset)
        return cls(moved, (length[pieces.request] - pieces.offset).clamp(max=width), pieces.last, slots.index)

    @property
    def last_tokens(self) -> LastTokens:
        return LastTokens((self.length - 1).clamp(min=0), self.last, self.requests)
