"""The state of an unfinished run: weights, optimizers and the number of steps done, in one file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def save_state(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
    # An interruption while writing must not destroy the previous state.
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load_state(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restore in place and return the number of steps done; 0 if there is no state."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=next(model.parameters()).device, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    print(f"resumed at step {state['step']}")
    return int(state["step"])
