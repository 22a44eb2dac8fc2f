"""Pieces of a prefill pass.  A piece is some consecutive tokens of one request.  A request may have several pieces.

All pieces have one width.  A piece attends to the request's earlier pieces through the pages.  So each layer writes the
rows of a pass to the pages before it attends."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from espalier.kernels.ops.state import gather_slots
from espalier.slots import BatchState


class Pieces(NamedTuple):
    """The pieces of a pass.  Pieces of one request are adjacent and in order.

    request_row: [P], the row of the batch that a piece belongs to.  token_offset: [P], the number of that request's
    tokens in earlier pieces of the pass.  last_piece: [B], the index of each request's last piece."""

    request_row: Tensor
    token_offset: Tensor
    last_piece: Tensor


class LastTokens(NamedTuple):
    """Where the last token of each piece, and of each request, is in a prefill pass.

    row: [P], the index of a piece's last token among the rows of the piece.  slots: [B], the requests' slots.
    piece: [B], the index of each request's last piece; None if each request has one piece.  For a request without
    tokens, this may be the index of any piece."""

    row: Tensor
    piece: Tensor | None
    slots: Tensor

    def of_last_pieces(self, values: Tensor) -> Tensor:
        """Returns the values of each request's last piece.  values: [P, ...].  result: [B, ...]."""
        return values if self.piece is None else values[self.piece]


@dataclass(frozen=True)
class PieceRows:
    """A prefill pass as a batch of pieces: each piece is one row of the batch.

    slots: [P], the slot-table values of each piece's request.  The tokens of the request's earlier pieces are added to
    prefix_len and num_tokens.  length: [P], the number of tokens of each piece.  request_slots: [B], the slot numbers.
    last_piece: [B], the index of each request's last piece; None if each request has one piece."""

    slots: BatchState
    length: Tensor
    last_piece: Tensor | None
    request_slots: Tensor

    @classmethod
    def of_pass(cls, slots: BatchState, length: Tensor, width: int, pieces: Pieces | None) -> "PieceRows":
        """Makes the PieceRows of a pass.  slots: the batch.  length: [B], the number of each request's tokens in this
        pass.  width: rows of a piece.  pieces: None if each request has one piece."""
        if pieces is None:
            return cls(slots, length, None, slots.index)
        piece_slots = gather_slots(slots.table, slots.index[pieces.request_row])
        offset = pieces.token_offset
        advanced = replace(
            piece_slots, prefix_len=piece_slots.prefix_len + offset, num_tokens=piece_slots.num_tokens + offset
        )
        return cls(advanced, (length[pieces.request_row] - offset).clamp(max=width), pieces.last_piece, slots.index)

    @property
    def last_tokens(self) -> LastTokens:
        """Where the last tokens of pieces and requests are."""
        return LastTokens((self.length - 1).clamp(min=0), self.last_piece, self.request_slots)
