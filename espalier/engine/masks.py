"""What grammars bring to a launch: masks of prompts, of trees' nodes, and the guide for the draft."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from espalier.cores import available_cores
from espalier.grammar.token_masker import TokenMasker
from espalier.layout import ANCESTOR_BITS
from espalier.request import Request
from espalier.sampling.mask import ALL_ALLOWED, mask_words, only_token

Trees = list[tuple[list[int], list[int]]]
# Of each row of a batch; None for a row that is free.
Maskers = Sequence[TokenMasker | None]
# Threads that walk trees at once.  A walk releases the GIL.
MAX_THREADS = 8


@dataclass(frozen=True)
class RowMasks:
    """Masks of some rows of a batch; the others allow all tokens.

    rows: their places in the batch; masks: [len(rows), D, words] int32 (sampling/mask.py).
    """

    rows: tuple[int, ...]
    masks: np.ndarray

    def whole(self, batch: int) -> np.ndarray:
        """[batch, D, words]"""
        whole = np.full((batch, *self.masks.shape[1:]), ALL_ALLOWED, dtype=np.int32)
        whole[list(self.rows)] = self.masks
        return whole


@dataclass(frozen=True)
class GuideRows:
    """sampling.mask.DraftGuide for some rows of a batch.

    forced: [len(rows), S] int64; masks: [len(rows), words] int32; levels: [len(rows)] int64.
    """

    rows: tuple[int, ...]
    forced: np.ndarray
    masks: np.ndarray
    levels: np.ndarray

    def whole(self, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """forced [batch, S], masks [batch, words], levels [batch]; a row without a grammar is free."""
        forced = np.full((batch, self.forced.shape[1]), -1, dtype=np.int64)
        masks = np.full((batch, self.masks.shape[1]), ALL_ALLOWED, dtype=np.int32)
        levels = np.zeros(batch, dtype=np.int64)
        places = list(self.rows)
        forced[places], masks[places], levels[places] = self.forced, self.masks, self.levels
        return forced, masks, levels


@dataclass(frozen=True)
class BeamRows:
    """What may follow the beams of some rows of a batch; beams of other rows are free.

    forced: [len(rows), K] int64, the only token, -1 for several; masks: [len(rows), K, words] int32.
    """

    rows: tuple[int, ...]
    forced: np.ndarray
    masks: np.ndarray

    def whole(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """forced [batch, K], masks [batch, K, words]"""
        forced = np.full((batch, self.forced.shape[1]), -1, dtype=np.int64)
        forced[list(self.rows)] = self.forced
        return forced, RowMasks(self.rows, self.masks).whole(batch)


# (tokens, ancestor_bits) of draft rows, on the host: what may follow them.
AskRows = Callable[[Tensor, Tensor], BeamRows]


class MaskBuilder:
    """Asks the requests' maskers (TokenMasker), several at once.

    steps: levels of the largest tree.
    tells_forced, tells_mask: whether the draft is told which tokens are forced, and which are allowed; tells_deeper:
    whether it may ask the same at deeper levels (of_beams).  False exists to measure what each brings.
    """

    def __init__(self, vocab_size: int, steps: int):
        self.tells_forced = self.tells_mask = self.tells_deeper = True
        self.num_words = mask_words(vocab_size)
        self.steps = steps
        self._threads: ThreadPoolExecutor | None = None

    def of_nodes(self, maskers: Maskers, trees: Trees) -> RowMasks:
        """The tokens that may follow each node of each tree."""
        rows = _masked(maskers)
        masks = np.full((len(rows), len(trees[0][0]), self.num_words), ALL_ALLOWED, dtype=np.int32)

        def fill(place: int) -> None:
            masker = maskers[rows[place]]
            assert masker is not None
            masker.node_masks(*trees[rows[place]], masks[place])

        if len(rows) == 1:
            fill(0)
        elif rows:
            list(self._pool().map(fill, range(len(rows))))
        return RowMasks(rows, masks)

    def of_prompts(self, batch: Sequence[Request]) -> np.ndarray | None:
        """[B, 1, words] int32: the tokens that may follow each prompt; None if all may.

        Only where the whole prompt is launched is a token picked.
        """
        picking = (r.masker if r.num_prefilled >= r.prefill_len and not r.output else None for r in batch)
        masks = {row: masker.root_mask()[None] for row, masker in enumerate(picking) if masker is not None}
        return RowMasks(tuple(masks), np.stack([*masks.values()])).whole(len(batch)) if masks else None

    def guide(self, maskers: Maskers) -> GuideRows | None:
        """What is known before a tree is drafted; None without a tree or a grammar."""
        rows = _masked(maskers)
        if not rows or not self.steps:
            return None
        forced = np.full((len(rows), self.steps), -1, dtype=np.int64)
        masks = np.full((len(rows), self.num_words), ALL_ALLOWED, dtype=np.int32)
        levels = np.zeros(len(rows), dtype=np.int64)
        for place, row in enumerate(rows):
            masker = maskers[row]
            assert masker is not None
            known = masker.known_next(self.steps if self.tells_forced else 0)
            forced[place, : len(known.forced)] = known.forced
            if known.mask is not None and self.tells_mask:
                masks[place], levels[place] = known.mask, len(known.forced) + 1
        return GuideRows(rows, forced, masks, levels)

    def of_beams(self, maskers: Maskers, tokens: Tensor, ancestor_bits: Tensor) -> BeamRows:
        """What may follow the beams of a level.  tokens, ancestor_bits: as in sampling.mask.AskHost, on the host."""
        rows, beams = _masked(maskers), ancestor_bits.shape[1]
        found = BeamRows(
            rows,
            np.full((len(rows), beams), -1, dtype=np.int64),
            np.full((len(rows), beams, self.num_words), ALL_ALLOWED, dtype=np.int32),
        )
        if self.tells_deeper:
            for place, row in enumerate(rows):
                masker, drafted = maskers[row], tokens[row].tolist()
                assert masker is not None
                for beam, words in enumerate(ancestor_bits[row].tolist()):
                    path = [token for e, token in enumerate(drafted) if _has_bit(words, e)]
                    self._tell(found, place, beam, masker.mask_after(path))
        return found

    def _tell(self, found: BeamRows, place: int, beam: int, mask: np.ndarray | None) -> None:
        if mask is None:
            return
        if self.tells_mask:
            found.masks[place, beam] = mask
        only = only_token(mask) if self.tells_forced else None
        found.forced[place, beam] = -1 if only is None else only

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(available_cores(), MAX_THREADS), "espalier-masks")
        return self._threads

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _masked(maskers: Maskers) -> tuple[int, ...]:
    return tuple(row for row, masker in enumerate(maskers) if masker is not None)


def _has_bit(words: Sequence[int], place: int) -> bool:
    return bool(words[place // ANCESTOR_BITS] >> place % ANCESTOR_BITS & 1)
