"""A source on the device: finds a request's last tokens earlier in its text, and proposes the tokens that followed."""

import torch

from espalier.kernels.ops.drafts import find_matches
from espalier.slots import BatchState
from espalier.speculate.sources.base import Paths, path_kind


def paths_of_text(slots: BatchState, num_paths: int, steps: int) -> Paths:
    """Returns `num_paths` paths for each slot, with distinct first tokens.  Paths after longer matches come first;
    among equal lengths, later matches come first."""
    matches = find_matches(slots.table.history, slots.index, slots.prefix_len, num_paths)
    depths = torch.arange(steps, device=matches.end_positions.device)
    period = (slots.prefix_len[:, None] - matches.end_positions).clamp(min=1)
    # Where a path would go beyond the known text, it repeats the text between match and root.
    positions = matches.end_positions[..., None] + 1 + depths % period[..., None]
    tokens = slots.history_at(positions.flatten(1)).view(positions.shape)
    kinds = torch.where(matches.lengths > 0, matches.lengths + (path_kind("text", 1) - 1), 0)
    return Paths(tokens, kinds)
