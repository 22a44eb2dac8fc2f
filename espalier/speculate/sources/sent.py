"""Guesses of the host, on the device: rows of the slot table that a launch writes.

The host does not know what rounds in flight decide.  So a guess begins behind the last token that the host knew, and
the device drops what has been decided since.  A guess that something else was decided against is no path.  A row that
no launch has written again is such a guess too, or still a good one.
"""

import torch

from espalier.slots import GUESS_HEAD, NO_TOKEN, BatchState
from espalier.speculate.sources.base import Paths


def paths_of_guesses(slots: BatchState, steps: int) -> Paths:
    """The paths of the slots' rows of guesses."""
    rows = slots.table.guesses.index_select(0, slots.index)
    start, kind, tokens = rows[..., 0], rows[..., 1], rows[..., GUESS_HEAD:]
    width = tokens.shape[2]
    decided = slots.prefix_len[:, None, None] - start[..., None]
    place = torch.arange(width, device=tokens.device)
    known = slots.history_at((start[..., None] + 1 + place).flatten(1)).view(tokens.shape)
    agrees = ((place >= decided) | (tokens == known)).all(-1) & (decided[..., 0] >= 0)
    at = decided + place[:steps]
    ahead = tokens.gather(2, at.clamp(0, width - 1))
    is_path = (at < width) & agrees[..., None]
    return Paths(torch.where(is_path, ahead, NO_TOKEN), torch.where(agrees, kind, 0))
