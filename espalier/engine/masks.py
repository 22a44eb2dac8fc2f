"""Makes the masks of grammars, for prompts and for the nodes of trees, and the guide for the draft.

All grammars of a round share one time limit.  If a grammar takes too long (mask_threads.py), it allows no more tokens,
so its request ends.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from torch import Tensor

from espalier.engine.mask_threads import TOO_SLOW, MaskThreadPool
from espalier.grammar.spec import NO_TOKEN_LEFT_ERROR, TOOK_TOO_LONG_ERROR
from espalier.grammar.token_masker import ForcedTokens, TokenMasker
from espalier.layout import ANCESTOR_BITS
from espalier.request import Request
from espalier.sampling.mask import ALL_ALLOWED, mask_words, only_token

# For each row of a batch the (tokens, parents) of its tree.
HostTrees = list[tuple[list[int], list[int]]]
# One masker for each row of a batch; None for a row without a grammar.
Maskers = Sequence[TokenMasker | None]
NO_FORCED_TOKENS = ForcedTokens([], None)


class NodeMasks(NamedTuple):
    """Masks of some requests of a batch; the other requests allow all tokens.

    rows: the places of these requests in the batch.  masks: [len(rows), D, words] int32 (sampling/mask.py)."""

    rows: tuple[int, ...]
    masks: np.ndarray

    def for_full_batch(self, batch: int) -> np.ndarray:
        """Returns the masks of the whole batch, [batch, D, words]."""
        return _fill_full_batch(self.rows, self.masks, batch, ALL_ALLOWED)


class DraftGuideRows(NamedTuple):
    """The values of a sampling.mask.DraftGuide for some requests of a batch.

    rows: the places of these requests in the batch.  forced: [len(rows), S] int64.  masks: [len(rows), words] int32.
    levels: [len(rows)] int64, the tree level that each mask holds for; 0 for no level."""

    rows: tuple[int, ...]
    forced: np.ndarray
    masks: np.ndarray
    levels: np.ndarray

    def for_full_batch(self, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns forced [batch, S], masks [batch, words] and levels [batch].  For a request without a grammar, they
        allow every token."""
        fields = (self.forced, -1), (self.masks, ALL_ALLOWED), (self.levels, 0)
        forced, masks, levels = (_fill_full_batch(self.rows, values, batch, fill) for values, fill in fields)
        return forced, masks, levels


class BeamMasks(NamedTuple):
    """The tokens that may follow the beams of some requests of a batch; any token may follow the other beams.

    rows: the places of these requests in the batch.  forced: [len(rows), K] int64, the token if only one may follow,
    else -1.  masks: [len(rows), K, words] int32."""

    rows: tuple[int, ...]
    forced: np.ndarray
    masks: np.ndarray

    def for_full_batch(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns forced [batch, K] and masks [batch, K, words]."""
        forced = _fill_full_batch(self.rows, self.forced, batch, -1)
        return forced, _fill_full_batch(self.rows, self.masks, batch, ALL_ALLOWED)


# A function that returns which tokens may follow the draft's beams.  Arguments, on the host: the drafted tokens [B, E],
# and ancestor bits [B, beams, W], whose bit e says whether drafted token e is on the path to the beam.
AskBeamMasks = Callable[[Tensor, Tensor], BeamMasks]


class MaskBuilder:
    """Calls the requests' maskers (TokenMasker) in threads, because a call may never return.

    steps: the levels of the largest tree.  slow_maskers: maskers that took too long.  They are never called again.
    guides_forced: whether the draft gets forced tokens.  guides_mask: whether the draft gets masks of allowed tokens.
    guides_all_levels: whether the draft gets an answer when it asks for masks at deeper tree levels (`beam_masks`).
    Only measurements set these three to False."""

    def __init__(self, vocab_size: int, steps: int):
        self.guides_forced = self.guides_mask = self.guides_all_levels = True
        self.num_mask_words = mask_words(vocab_size)
        self.steps = steps
        self.threads = MaskThreadPool()
        self.slow_maskers: WeakSet[TokenMasker] = WeakSet()
        # The processor seconds of each masker: those of this round, plus half of the value before this round.
        self._used_s: WeakKeyDictionary[TokenMasker, float] = WeakKeyDictionary()

    def node_masks(self, maskers: Maskers, trees: HostTrees) -> NodeMasks:
        """Returns the masks of the tokens that may follow each node.  maskers, trees: one for each row of the batch."""
        rows = _rows_with_masker(maskers)
        masks = np.full((len(rows), len(trees[0][0]), self.num_mask_words), ALL_ALLOWED, dtype=np.int32)

        def fill(place: int, masker: TokenMasker) -> None:
            """Writes the masks of request rows[place]."""
            masker.node_masks(*trees[rows[place]], masks[place])

        answers = self._call_maskers([maskers[row] for row in rows], fill, all_threads=True)
        slow = [place for place, answer in enumerate(answers) if answer is TOO_SLOW]
        if slow:
            # An abandoned thread may still write into the original array.
            masks = masks.copy()
            masks[slow] = 0
        return NodeMasks(rows, masks)

    def prompt_masks(self, batch: Sequence[Request]) -> np.ndarray | None:
        """Returns [B, 1, words] int32: the tokens that may follow each prompt; None if any token may.

        Only a prompt whose last token is in this pass gets a mask, because only such a prompt gets a next token."""
        picking = [r.masker if r.num_prefilled >= r.prefill_len and not r.output else None for r in batch]
        rows = _rows_with_masker(picking)
        if not rows:
            return None
        maskers = [picking[row] for row in rows]
        answers = self._call_maskers(maskers, lambda _, masker: masker.root_mask(), all_threads=True)
        masks = [np.zeros(self.num_mask_words, np.int32) if mask is TOO_SLOW else mask for mask in answers]
        return NodeMasks(rows, np.stack(masks)[:, None]).for_full_batch(len(batch))

    def guide_rows(self, maskers: Maskers) -> DraftGuideRows | None:
        """Returns the forced tokens and masks for the draft of a round; None without a tree or a grammar.

        Called once in each round.  So it also halves the times that the maskers have used in earlier rounds."""
        rows = _rows_with_masker(maskers)
        self._halve_used_time()
        if not rows or not self.steps:
            return None
        forced = np.full((len(rows), self.steps), -1, dtype=np.int64)
        masks = np.full((len(rows), self.num_mask_words), ALL_ALLOWED, dtype=np.int32)
        levels = np.zeros(len(rows), dtype=np.int64)
        max_forced = self.steps if self.guides_forced else 0
        answers = self._call_maskers([maskers[row] for row in rows], lambda _, masker: masker.forced_tokens(max_forced))
        for place, answer in enumerate(answers):
            forced_next = NO_FORCED_TOKENS if answer is TOO_SLOW else answer
            forced[place, : len(forced_next.tokens)] = forced_next.tokens
            if forced_next.mask is not None and self.guides_mask:
                masks[place], levels[place] = forced_next.mask, len(forced_next.tokens) + 1
        return DraftGuideRows(rows, forced, masks, levels)

    def beam_masks(self, maskers: Maskers, tokens: Tensor, ancestor_bits: Tensor) -> BeamMasks:
        """Returns the tokens that may follow the beams of a tree level.

        tokens: [B, E], all tokens drafted so far.  ancestor_bits: [B, beams, W], whose bit e says whether drafted token
        e is on the path to the beam.  Both are on the host."""
        rows, beams = _rows_with_masker(maskers), ancestor_bits.shape[1]
        out = BeamMasks(
            rows,
            np.full((len(rows), beams), -1, dtype=np.int64),
            np.full((len(rows), beams, self.num_mask_words), ALL_ALLOWED, dtype=np.int32),
        )

        def masks_of(place: int, masker: TokenMasker) -> list[np.ndarray | None]:
            """Returns a mask for each beam of request rows[place]; None as in TokenMasker.mask_after."""
            drafted, bits = tokens[rows[place]].tolist(), ancestor_bits[rows[place]].tolist()
            return [masker.mask_after([t for e, t in enumerate(drafted) if _has_bit(words, e)]) for words in bits]

        if self.guides_all_levels:
            for place, answer in enumerate(self._call_maskers([maskers[row] for row in rows], masks_of)):
                for beam, mask in enumerate(() if answer is TOO_SLOW else answer):
                    self._write_beam(out, place, beam, mask)
        return out

    def _write_beam(self, out: BeamMasks, row: int, beam: int, mask: np.ndarray | None) -> None:
        """Writes the mask of a beam of request out.rows[row].  mask: [words]; None allows all tokens."""
        if mask is None:
            return
        if self.guides_mask:
            out.masks[row, beam] = mask
        forced_token = only_token(mask) if self.guides_forced else None
        out.forced[row, beam] = -1 if forced_token is None else forced_token

    def why_no_token(self, masker: TokenMasker | None) -> str | None:
        """Returns the reason why the grammar allows no token; None if it allows some, or if there is no grammar."""
        if masker is None:
            return None
        [is_stuck] = self._call_maskers([masker], lambda _, masker: masker.is_stuck)
        if is_stuck is TOO_SLOW:
            return TOOK_TOO_LONG_ERROR
        return NO_TOKEN_LEFT_ERROR if is_stuck else None

    def _call_maskers(
        self, maskers: Maskers, call_masker: Callable[[int, TokenMasker], Any], *, all_threads: bool = False
    ) -> list[Any]:
        """Returns call_masker(place, masker) for each masker; TOO_SLOW for a masker that takes or took too long.

        all_threads: as in MaskThreadPool.run."""

        def ask(place: int) -> Any:
            """place: an index in `maskers`."""
            masker = maskers[place]
            assert masker is not None
            return TOO_SLOW if masker in self.slow_maskers else call_masker(place, masker)

        def overrun_s(time_share_s: float) -> float:
            """Returns the seconds that maskers not called now have used beyond `time_share_s` each."""
            others = (used for masker, used in self._used_s.items() if masker not in asked)
            return sum(max(0.0, used - time_share_s) for used in others)

        asked = [masker for masker in maskers if masker is not None]
        used_s = [self._used_s.get(masker, 0.0) for masker in asked]
        answers = self.threads.run(ask, len(asked), all_threads=all_threads, used_s=used_s, overrun_s=overrun_s)
        self._used_s.update(zip(asked, used_s, strict=True))
        self.slow_maskers.update(masker for masker, answer in zip(asked, answers, strict=True) if answer is TOO_SLOW)
        return answers

    def _halve_used_time(self) -> None:
        for masker, used_s in list(self._used_s.items()):
            self._used_s[masker] = used_s / 2

    def close(self) -> None:
        """Ends the threads."""
        self.threads.close()


def _fill_full_batch(rows: Sequence[int], values: np.ndarray, batch: int, fill: int) -> np.ndarray:
    """Returns [batch, ...]: `values` at these rows, and `fill` at all others."""
    full = np.full((batch, *values.shape[1:]), fill, dtype=values.dtype)
    full[list(rows)] = values
    return full


def _rows_with_masker(maskers: Maskers) -> tuple[int, ...]:
    return tuple(row for row, masker in enumerate(maskers) if masker is not None)


def _has_bit(words: Sequence[int], bit: int) -> bool:
    return bool(words[bit // ANCESTOR_BITS] >> bit % ANCESTOR_BITS & 1)
