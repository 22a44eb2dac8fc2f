"""Log-probabilities of a prompt's tokens, computed in its prefill passes.

The output head runs over a part of the rows at a time, so that only the logits of one part are in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.sampling.pick import Logprobs, logprobs


@dataclass(frozen=True)
class PromptRows:
    """The rows of a prefill pass for which the log-probability of the next prompt token is reported.

    Both tuples are on the host and have one entry for each request of the batch.  row_spans: (begin, end): the
    request's rows are begin .. end-1 of all rows of the pass; the pieces of a prompt are adjacent there.
    num_top_logprobs: how many of the likeliest tokens the request wants beside each prompt token."""

    row_spans: tuple[tuple[int, int], ...]
    num_top_logprobs: tuple[int, ...]

    @property
    def max_top_logprobs(self) -> int:
        return max(self.num_top_logprobs)

    @property
    def num_rows_by_request(self) -> list[int]:
        return [end - begin for begin, end in self.row_spans]

    def select(self, rows: Tensor) -> Tensor:
        """Returns the reported rows [N, ...] of all requests, one request after another.  rows: [P, W, ...], all
        rows."""
        flat = rows.flatten(0, 1)
        return torch.cat([flat[begin:end] for begin, end in self.row_spans])


def prompt_logprobs(
    output_head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, max_rows: int, num_top: int
) -> Logprobs:
    """Computes the log-probability of each token of `tokens` [N] after its row of `hidden` [N, H], N > 0.

    max_rows: the most rows whose logits are in memory at once.  num_top: how many of the likeliest tokens to report
    too."""
    pieces = zip(hidden.split(max_rows), tokens.split(max_rows), strict=True)
    reported = [logprobs(output_head(rows), following, num_top) for rows, following in pieces]
    return Logprobs(*map(torch.cat, zip(*reported, strict=True)))
