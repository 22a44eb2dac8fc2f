"""Log-probabilities of a prompt's tokens, computed in its prefill passes.

The output head runs over the reported rows in pieces, so that only one piece's logits are in memory at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.sampling.pick import Logprobs, logprobs


@dataclass(frozen=True)
class PromptRows:
    """The rows of a prefill pass whose next token's log-probability is reported, known on the host.

    For each request of the batch, spans: rows [begin, end) of the pass, its pieces one after another; counts: how many
    of the likeliest tokens it wants beside each.
    """

    spans: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        return max(self.counts)

    @property
    def sizes(self) -> list[int]:
        return [end - begin for begin, end in self.spans]

    def of(self, rows: Tensor) -> Tensor:
        """The reported rows of [P, W, ...], one request after the other: [N, ...]."""
        flat = rows.flatten(0, 1)
        return torch.cat([flat[begin:end] for begin, end in self.spans])


def prompt_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, max_rows: int, count: int
) -> Logprobs:
    """Log-probabilities of the tokens [N] that follow rows `hidden` [N, H], N > 0.

    max_rows: rows whose logits are in memory at once; count: how many of the likeliest tokens to report beside each.
    """
    pieces = zip(hidden.split(max_rows), tokens.split(max_rows), strict=True)
    reported = [logprobs(head(rows), following, count) for rows, following in pieces]
    return Logprobs(*map(torch.cat, zip(*reported, strict=True)))
