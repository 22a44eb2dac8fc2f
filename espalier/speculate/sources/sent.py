"""Makes paths from the guesses that the host wrote to the slot table with a launch.

The host does not know the tokens that rounds in flight decide.  So a guess begins right after the last token that the
host knew.  The device compares the first tokens of the guess with the tokens decided since then.  If they are equal,
the rest of the guess becomes a path.  Otherwise the guess is ignored, so old guesses in the table do no harm."""

import torch

from espalier.slots import GUESS_HEADER_COLUMNS, NO_TOKEN, BatchState
from espalier.speculate.sources.base import Paths


def paths_of_guesses(slots: BatchState, steps: int) -> Paths:
    """Returns the paths of the guesses that the slot table holds for a batch.  steps: the greatest depth."""
    rows = slots.table.guesses.index_select(0, slots.index)
    start, kind, tokens = rows[..., 0], rows[..., 1], rows[..., GUESS_HEADER_COLUMNS:]
    width = tokens.shape[2]
    num_decided = slots.prefix_len[:, None, None] - start[..., None]
    place = torch.arange(width, device=tokens.device)
    decided_tokens = slots.history_at((start[..., None] + 1 + place).flatten(1)).view(tokens.shape)
    agrees = ((place >= num_decided) | (tokens == decided_tokens)).all(-1) & (num_decided[..., 0] >= 0)
    index = num_decided + place[:steps]
    continuation = tokens.gather(2, index.clamp(0, width - 1))
    is_path = (index < width) & agrees[..., None]
    return Paths(torch.where(is_path, continuation, NO_TOKEN), torch.where(agrees, kind, 0))
