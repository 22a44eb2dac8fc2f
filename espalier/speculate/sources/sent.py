"""Makes paths from the guesses that the host wrote to the slot table with a launch.

The host does not know the tokens that rounds in flight decide.  So a guess begins behind the last token that the host
knew.  The device compares the start of the guess with the tokens decided since.  If they are equal, the rest of the
guess is a path; otherwise the guess gives no path.  The same rule applies to guesses of an earlier launch.
"""

import torch

from espalier.slots import GUESS_HEADER_COLUMNS, NO_TOKEN, BatchState
from espalier.speculate.sources.base import Paths


def paths_of_guesses(slots: BatchState, steps: int) -> Paths:
    """Returns the paths of the guesses that the slot table holds for a batch.  steps: the greatest depth."""
    rows = slots.table.guesses.index_select(0, slots.index)
    start, kind, tokens = rows[..., 0], rows[..., 1], rows[..., GUESS_HEADER_COLUMNS:]
    width = tokens.shape[2]
    decided = slots.prefix_len[:, None, None] - start[..., None]
    place = torch.arange(width, device=tokens.device)
    known = slots.history_at((start[..., None] + 1 + place).flatten(1)).view(tokens.shape)
    agrees = ((place >= decided) | (tokens == known)).all(-1) & (decided[..., 0] >= 0)
    at = decided + place[:steps]
    ahead = tokens.gather(2, at.clamp(0, width - 1))
    is_path = (at < width) & agrees[..., None]
    return Paths(torch.where(is_path, ahead, NO_TOKEN), torch.where(agrees, kind, 0))
