"""A small vocabulary that spells any text: all bytes, and pieces of JSON that several tokens can spell."""

from functools import lru_cache

import xgrammar

from espalier.grammar import Grammar
from espalier.masking.compile import form_of
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
    return form_of(compiler_of(VOCABULARY), grammar)
