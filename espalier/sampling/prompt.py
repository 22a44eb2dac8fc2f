"""Log-probabilities of a prompt's own tokens, read from the prefill passes that enter it.

The head runs over all rows that are asked for, in pieces: of a piece's logits only what is reported stays.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.sampling.pick import Logprobs, logprobs


@dataclass(frozen=True)
class PromptRows:
    """What a prefill pass reports, known on the host.

    spans: (begin, end) for each request of the batch, rows of the pass whose next token is a prompt token that is asked
    for; count: of the likeliest tokens to name beside each.
    """

    spans: tuple[tuple[int, int], ...]
    count: int

    @property
    def sizes(self) -> list[int]:
        return [end - begin for begin, end in self.spans]

    def of(self, rows: Tensor) -> Tensor:
        """The rows asked for of [B, W, ...], one request after the other: [N, ...]."""
        return torch.cat([rows[b, begin:end] for b, (begin, end) in enumerate(self.spans)])


def prompt_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, most: int, count: int
) -> Logprobs:
    """Log-probabilities of the tokens [N] that follow rows `hidden` [N, H], N > 0.

    most: rows whose logits are made at once; count: of the likeliest tokens to name beside each.
    """
    pieces = zip(hidden.split(most), tokens.split(most), strict=True)
    reported = [logprobs(head(rows), following, count) for rows, following in pieces]
    return Logprobs(*map(torch.cat, zip(*reported, strict=True)))
