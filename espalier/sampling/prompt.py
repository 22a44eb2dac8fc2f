"""Log-probabilities of a prompt's tokens, computed in its prefill passes.

The output head runs over a part of the reported rows at a time, so that only the logits of one part are in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.sampling.pick import Logprobs, logprobs


@dataclass(frozen=True)
class PromptRows:
    """The rows of a prefill pass after which the log-probability of the next prompt token is reported.

    Both tuples are on the host and have one entry for each request of the batch.  row_spans: rows begin .. end-1 of the
    flattened pass, in which the pieces of a request's prompt are adjacent.  num_top_logprobs: how many of the
    likeliest tokens the request wants beside each token."""

    row_spans: tuple[tuple[int, int], ...]
    num_top_logprobs: tuple[int, ...]

    @property
    def max_top_logprobs(self) -> int:
        return max(self.num_top_logprobs)

    @property
    def num_rows_by_request(self) -> list[int]:
        return [end - begin for begin, end in self.row_spans]

    def select(self, rows: Tensor) -> Tensor:
        """Take the reported rows of [P, W, ...], request after request: [N, ...]."""
        flat = rows.flatten(0, 1)
        return torch.cat([flat[begin:end] for begin, end in self.row_spans])


def prompt_logprobs(
    output_head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, max_rows: int, num_top: int
) -> Logprobs:
    """Compute log-probabilities of the tokens [N] that follow rows `hidden` [N, H], N > 0.

    max_rows: the most rows whose logits are in memory at once; num_top: see logprobs.
    """
    pieces = zip(hidden.split(max_rows), tokens.split(max_rows), strict=True)
    reported = [logprobs(output_head(rows), following, num_top) for rows, following in pieces]
    return Logprobs(*map(torch.cat, zip(*reported, strict=True)))
