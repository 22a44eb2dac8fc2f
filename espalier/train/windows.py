"""Cut a stream of token ids into windows of one length."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from espalier.errors import EspalierError


def num_windows(num_tokens: int, length: int) -> int:
    """Windows of `length + 1` tokens at every offset below `length`."""
    return max(0, (num_tokens - 1) // length - 1)


def require_windows(what: str, num_tokens: int, length: int, size: int, remedy: str) -> None:
    """Refuse a text that does not fill a batch of `size` windows.  what: the text, with its length.

    Raises EspalierError.
    """
    if (found := num_windows(num_tokens, length)) < size:
        raise EspalierError(f"{what}: {found} rows of {length} tokens, and a batch takes {size} of them; {remedy}")


class Windows:
    """Windows of `length + 1` tokens of a stream on the device, with a new offset and order in every epoch."""

    def __init__(self, stream: np.ndarray, length: int, device: torch.device, seed: int) -> None:
        self.stream = torch.from_numpy(stream.astype(np.int32)).to(device)
        self.length = length
        self.seed = seed
        self.num_windows = num_windows(len(stream), length)

    def epoch(self, number: int) -> tuple[Tensor, int]:
        """(order of the windows, offset of the first)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(self.num_windows, generator=generator)
        return order, int(torch.randint(self.length, (1,), generator=generator))

    def batches(self, size: int, first: int = 0) -> Iterator[Tensor]:
        """Endless batches [size, length + 1] int64.  first: number of batches to skip, for a resumed run."""
        require_windows(
            f"the text has {len(self.stream)} tokens", len(self.stream), self.length, size, "give more text"
        )
        per_epoch = self.num_windows // size
        reach = torch.arange(self.length + 1, device=self.stream.device)
        number = first // per_epoch
        skip = first % per_epoch
        while True:
            order, offset = self.epoch(number)
            for step in range(skip, per_epoch):
                starts = order[step * size : (step + 1) * size] * self.length + offset
                yield self.stream[starts.to(reach.device)[:, None] + reach].long()
            number, skip = number + 1, 0
