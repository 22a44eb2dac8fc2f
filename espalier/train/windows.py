"""Cuts token ids into rows of equal length: windows of a stream, or rows that begin at the beginning of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from espalier.errors import EspalierError


def num_windows(num_tokens: int, row_length: int) -> int:
    """Returns how many windows fit into a stream, wherever the first window begins: at any token before `row_length`.
    A window has `row_length + 1` tokens, and begins `row_length` tokens after the window before."""
    return max(0, (num_tokens - 1) // row_length - 1)


def require_windows(text: str, num_tokens: int, row_length: int, num_rows: int, remedy: str) -> None:
    """Raises EspalierError if a text is too short for a batch of `num_rows` windows.  text: how the message
    names the text."""
    if (num_found := num_windows(num_tokens, row_length)) < num_rows:
        text_and_rows = f"{text}: {num_found} rows of {row_length} tokens"
        raise EspalierError(f"{text_and_rows}, and a batch takes {num_rows} of them; {remedy}")


class StreamWindows:
    """Windows of `row_length + 1` tokens of a stream on the device.  Each epoch has its own offset and order."""

    def __init__(self, stream: np.ndarray, row_length: int, device: torch.device, seed: int) -> None:
        self.stream = torch.from_numpy(stream.astype(np.int32)).to(device)
        self.length = row_length
        self.seed = seed
        self.num_windows = num_windows(len(stream), row_length)

    def epoch_order(self, epoch: int) -> tuple[Tensor, int]:
        """Returns (order of the windows, offset of the first window) of an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(self.num_windows, generator=generator)
        return order, int(torch.randint(self.length, (1,), generator=generator))

    def batches(self, batch_size: int, first_batch: int = 0) -> Iterator[Tensor]:
        """Yields batches [size, length + 1] int64 without end, from the batch with the number first_batch on."""
        require_windows(
            f"the text has {len(self.stream)} tokens", len(self.stream), self.length, batch_size, "give more text"
        )
        per_epoch = self.num_windows // batch_size
        reach = torch.arange(self.length + 1, device=self.stream.device)
        number = first_batch // per_epoch
        skip = first_batch % per_epoch
        while True:
            order, offset = self.epoch_order(number)
            for step in range(skip, per_epoch):
                starts = order[step * batch_size : (step + 1) * batch_size] * self.length + offset
                yield self.stream[starts.to(reach.device)[:, None] + reach].long()
            number, skip = number + 1, 0


@dataclass(frozen=True)
class TextList:
    """Texts, each a prompt with its continuation.  tokens: [N], of all texts in order.  lengths: of each text.
    firsts: the length of each text's prompt, which is the index in the text where its continuation begins."""

    tokens: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[np.ndarray], output_starts: Sequence[int]) -> TextList:
        """Joins texts of token ids.  output_starts: the index in each text where its continuation begins."""
        # The dtype is int32, because the data's dtype may be too small for generated token ids.
        tokens = np.concatenate([np.zeros(0, np.int32), *texts]).astype(np.int32)
        return cls(tokens, np.array([len(text) for text in texts], np.int64), np.array(output_starts, np.int64))

    def split(self) -> list[np.ndarray]:
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []

    @property
    def is_answer(self) -> np.ndarray:
        """For each token, whether the token belongs to a continuation."""
        place = np.arange(len(self.tokens)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        return place >= np.repeat(self.firsts, self.lengths)


class TextRows:
    """Rows of `row_length + 1` tokens, each with one text or several.  A row begins at the beginning of a text, as in
    decoding, because the target's hidden states would differ otherwise.  Only a text whose rest fills the whole next
    row goes on there.  A shorter rest is left out in this epoch.  Each epoch has its own order of texts."""

    def __init__(self, texts: TextList, row_length: int, device: torch.device, seed: int) -> None:
        self.texts, self.length, self.device, self.seed = texts, row_length, device, seed
        self.text_starts = np.cumsum(texts.lengths) - texts.lengths

    def epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (indices, row_starts).  indices: into texts.tokens, with the texts in the epoch's order.  row_starts:
        the positions in `indices` at which the rows begin."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.text_starts))
        lengths, size = self.texts.lengths[order], self.length + 1
        ends = np.cumsum(lengths)
        places = np.arange(len(self.texts.tokens)) + np.repeat(self.text_starts[order] - (ends - lengths), lengths)
        rows, at = [], 0
        while at + size <= len(places):
            rows.append(at)
            end = int(ends[np.searchsorted(ends, at + size)]) if at + size < len(places) else len(places)
            at = at + size if end - at - size >= size else end
        return places, np.array(rows, np.int64)

    def batches(self, batch_size: int, first_batch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields batches without end: (token ids, whether each token belongs to a continuation), [size, length + 1].
        first_batch: how many batches a resumed run skips.  Raises EspalierError if the first epoch has fewer rows than
        `batch_size`."""
        number, reach, answers = 0, np.arange(self.length + 1), self.texts.is_answer
        while True:
            places, rows = self.epoch_order(number)
            # In another order, texts may fill fewer rows.  Such an epoch has no batch.
            if number == 0 and len(rows) < batch_size:
                raise EspalierError(
                    f"the target's own text fills {len(rows)} rows of {self.length} tokens, and a batch takes "
                    f"{batch_size} of them; use more --continuations, or a smaller --batch or --length"
                )
            steps = len(rows) // batch_size
            for step in range(min(first_batch, steps), steps):
                at = places[rows[step * batch_size : (step + 1) * batch_size, None] + reach]
                batch = torch.from_numpy(self.texts.tokens[at]).long(), torch.from_numpy(answers[at])
                yield batch[0].to(self.device), batch[1].to(self.device)
            number, first_batch = number + 1, max(0, first_batch - steps)
