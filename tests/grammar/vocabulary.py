"""A small vocabulary that spells any text: all bytes, and pieces of JSON that several tokens can spell."""

import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xgrammar

from espalier.grammar import Grammar
from espalier.masking.compile import compile_with_xgrammar
from espalier.masking.masker import GrammarMasker, allowed_tokens
from espalier.sampling.mask import mask_words
from espalier.text import TokenBytes

PIECES = ['{"', '": ', '", "', '"}', "true", "re", "red", "na", "name", "12", "00", "ab", ", ", "é"]
VOCABULARY = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES] + [b""]
END = len(VOCABULARY) - 1


class TooLong(AssertionError):
    """A random text has not ended."""


def bytes_of(token: int) -> TokenBytes:
    return TokenBytes(VOCABULARY[token], True)


def compiler_of(vocabulary: list[bytes]) -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[len(vocabulary) - 1])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


@lru_cache
def compiled(grammar: Grammar) -> xgrammar.CompiledGrammar:
    return compile_with_xgrammar(compiler_of(VOCABULARY), grammar)


def random_text(
    form: xgrammar.CompiledGrammar,
    rng: random.Random,
    vocabulary: Sequence[bytes] = VOCABULARY,
    most: int = 4000,
    often: Sequence[int] = (),
) -> bytes:
    """A text of tokens drawn from the masks alone, `most` at most.  The vocabulary's last token ends it.

    often: tokens that come more often than others.  Raises TooLong.
    """
    end = len(vocabulary) - 1
    masker = GrammarMasker(form, len(vocabulary), (end,), None, lambda token: TokenBytes(vocabulary[token], True))
    text, often = b"", frozenset(often)
    for _ in range(most):
        allowed = allowed_tokens(masker.root_mask())
        if not allowed.size:  # it ended with a token that has text
            return text
        if rng.random() < 0.6 and (liked := [token for token in allowed if token in often]):
            allowed = liked
        token = end if end in allowed and rng.random() < 0.3 else int(rng.choice(allowed))
        if token == end:
            return text
        text += vocabulary[token]
        masker.push(token)
    raise TooLong


def accepts(form: xgrammar.CompiledGrammar, text: str | bytes) -> bool:
    """Whether the grammar allows exactly this text."""
    matcher = xgrammar.GrammarMatcher(form, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


def language(form: xgrammar.CompiledGrammar) -> set[bytes]:
    """All texts of a finite grammar, spelled by single bytes."""
    matcher = xgrammar.GrammarMatcher(form)
    mask = np.zeros((1, mask_words(len(VOCABULARY))), dtype=np.int32)
    found, open_ends = set(), [b""]
    while open_ends:
        text = open_ends.pop()
        matcher.reset()
        assert matcher.accept_string(text)
        if matcher.is_completed():
            found.add(text)
        matcher.fill_next_token_bitmask(mask)
        open_ends += [text + bytes([token]) for token in allowed_tokens(mask[0]) if token < 256]
    return found
