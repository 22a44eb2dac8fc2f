"""Pieces of a prefill pass: runs of one request's tokens, all of one width, several a request.

A piece attends to the pieces before it through the pages, so each layer commits its rows before it attends.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from espalier.kernels.state.batch_state import gather
from espalier.kernels.tree.gather_rows import gather_rows
from espalier.slots import BatchState


class Pieces(NamedTuple):
    """request: [P], the row of the batch that a piece belongs to; offset: [P], tokens of that request in earlier pieces
    of the pass; last: [B], the last piece of each request.  Pieces of a request follow one another, in order."""

    request: Tensor
    offset: Tensor
    last: Tensor


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

    def last_token(self, hidden: Tensor) -> Tensor:
        """Of hidden [P, W, H], the row of each request's last token: [B, 1, H]."""
        rows = (self.length - 1).clamp(min=0)
        if self.last is None:
            return gather_rows(hidden, rows[:, None])
        flat = self.last * hidden.shape[1] + rows[self.last]
        return gather_rows(hidden.flatten(0, 1)[None], flat[None]).transpose(0, 1)
