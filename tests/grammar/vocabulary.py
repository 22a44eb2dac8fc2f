"""A small vocabulary that spells any text: all bytes, and pieces of JSON that several tokens can spell."""

import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xgrammar

from espalier.grammar import Grammar
from espalier.masking.compile import compile_form
from espalier.masking.masker import GrammarMasker, allowed_tokens
from espalier.text import TokenBytes

PIECES = ['{"', '": ', '", "', '"}', "true", "re", "red", "na", "name", "12", "00", "ab", ", ", "é"]
VOCABULARY = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES] + [b""]
END = len(VOCABULARY) - 1


def bytes_of(token: int) -> TokenBytes:
    return TokenBytes(VOCABULARY[token], True)


def compiler_of(vocabulary: list[bytes]) -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[len(vocabulary) - 1])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


@lru_cache
def compiled(grammar: Grammar) -> xgrammar.CompiledGrammar:
    return compile_form(compiler_of(VOCABULARY), grammar)


def random_text(
    form: xgrammar.CompiledGrammar, rng: random.Random, vocabulary: Sequence[bytes] = VOCABULARY, most: int = 4000
) -> bytes:
    """A text of tokens drawn from the masks alone, `most` at most.  The vocabulary's last token ends it."""
    end = len(vocabulary) - 1
    masker = GrammarMasker(form, len(vocabulary), (end,), None, lambda token: TokenBytes(vocabulary[token], True))
    text = b""
    for _ in range(most):
        allowed = allowed_tokens(masker.root_mask())
        token = end if end in allowed and rng.random() < 0.3 else int(rng.choice(allowed))
        if token == end:
            break
        text += vocabulary[token]
        masker.push(token)
    assert np.all(masker.root_mask() == 0) or end in allowed_tokens(masker.root_mask())
    return text
