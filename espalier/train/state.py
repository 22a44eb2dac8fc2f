"""The saved state of an unfinished run: weights, optimizers and the number of finished steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.errors import EspalierError, one_line
from espalier.train.work import replace_file, require_same_origin

SAME_FLAGS_REMEDY = "give the same flags to go on, or another --out to begin anew"


@dataclass(frozen=True)
class SavedState:
    """The state file of a run.  made_from: digests of target and data, and the run's settings, by flag.  Only a run
    with equal values can continue from the file."""

    path: Path
    made_from: Mapping[str, str | None]

    def save(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], num_steps_done: int) -> None:
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        remedy = "free some space there, or give another --work"
        # The file is opened by Python, because PyTorch's own errors do not name the cause.
        with replace_file(self.path, remedy) as unfinished, unfinished.open("wb") as file:
            torch.save({**state, "step": num_steps_done, "made_from": dict(self.made_from)}, file)

    def load(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
        """Restores the state in place.  Returns the number of finished steps; 0 if there is no state."""
        state = self._read_state(next(model.parameters()).device, mmap=False)
        if state is None:
            return 0
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        print(f"resumed at step {state['step']}")
        return int(state["step"])

    def require_same_origin(self) -> None:
        """Raises EspalierError, before the target is loaded, if the state belongs to another run."""
        self._read_state(torch.device("cpu"), mmap=True)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _read_state(self, device: torch.device, mmap: bool) -> dict[str, Any] | None:
        """Returns the state; None without a file.  mmap: map the file, instead of reading all of it."""
        if not self.path.exists():
            return None
        try:
            state = torch.load(self.path, map_location=device, weights_only=True, mmap=mmap)
        except Exception as error:  # a damaged file raises many types
            raise EspalierError(f"{self.path} cannot be read ({one_line(error)}); delete it to begin anew") from None
        require_same_origin(self.path, state.get("made_from"), self.made_from, SAME_FLAGS_REMEDY)
        return state
