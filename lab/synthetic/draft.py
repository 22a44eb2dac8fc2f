"""The base of all planted drafts' tensors: random backgrounds, heads that attend to their own row, solved rows."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from espalier.models.config import ModelConfig
from lab.synthetic.rope import LagCode, make_lag_code
from lab.synthetic.target import CHUNK_ROWS, TargetTensors, solve_rows

# Standard deviation of the random part of queries and keys that attend to their own row; in other weights it is 1.
BACKGROUND_STD = 0.05


class DraftTensors:
    """The weights of a draft, by name in its checkpoint: `shapes` lists them, `tensor` makes one.

    config: of its layers.
    """

    def __init__(self, config: ModelConfig, target: TargetTensors) -> None:
        self.config = config
        self.target = target
        self.dtype, self.device = target.dtype, target.device

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        """Make a tensor, in the checkpoint's dtype."""
        raise NotImplementedError

    @cached_property
    def lag_code(self) -> LagCode:
        return make_lag_code(self.config.rope, self.config.max_position)

    def random(self, name: str, std: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """A random matrix.  std: of the output, for inputs of standard deviation 1."""
        rows, columns = self.shapes[name]
        return self.target.draw.normal(f"draft/{name}", rows, columns, std * columns**-0.5, dtype)

    def random_without_planted(self, name: str, std: float) -> Tensor:
        """A random matrix [H, ...] that writes nothing in the planted directions."""
        drawn, basis = self.random(name, std), self.target.planted.basis
        return drawn.sub_(basis @ (basis.T @ drawn))

    def attending_to_itself(self, name: str) -> Tensor:
        """Queries or keys [heads · head_size, H or more], made from the embedding's mark in the first H columns, so
        that they agree only at distance 0."""
        planted, weight = self.target.planted, self.random(name, BACKGROUND_STD)
        key = (
            (self.lag_code.amplitude * self.lag_code.key()).to(self.device).repeat(len(weight) // self.config.head_size)
        )
        weight[:, : self.config.hidden_size] += torch.outer(key, planted.direction("mark") / planted.length["mark"])
        return weight

    def rows_of_places(self, inputs: Tensor, peak: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (places, rows [places, n]): a place's row times the input of the place before is exactly peak + the
        draft's log-probability of this step, or 0 if the draft has none.  inputs: [N, n], by place."""
        chain = self.target.chain
        logits = torch.where(chain.draft_logp.isfinite(), peak + chain.draft_logp, 0.0)
        for places in torch.arange(chain.size).split(CHUNK_ROWS):
            before = (places[:, None] - chain.shifts) % chain.size
            wanted = logits[before, torch.arange(len(chain.shifts))].to(self.device)
            every = torch.ones_like(wanted, dtype=torch.bool)
            yield places, solve_rows(inputs[before.to(self.device)], wanted, every)
