"""Tries a grammar's masks over sample texts, before a request with it may run.

Where a text can be read in many ways, xgrammar's parser takes the square or the cube of its length for each token that
it tries.  Such a grammar is refused.  Ambiguity that shows only later in a text is left to the engine, which bounds its
time (engine/mask_threads.py).
"""

import random
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from espalier.errors import EspalierError
from espalier.sampling.mask import mask_words

if TYPE_CHECKING:
    import xgrammar

# The processor time of one mask, and of reading one byte.  A mask reads the first bytes of many tokens, so a byte that
# takes this long foretells a mask that takes a thousand times as long.
MASK_S = 0.02
BYTE_S = 0.001
# The sample texts.
NUM_SAMPLES = 4
NUM_TOKENS = 96
# Of these a sample takes no longer token before others: the masks behind it might take too long already.
MAX_TOKEN_BYTES = 8
# The processor time after which no sample begins.
TRIAL_S = 0.25
# A matcher needs an end token, and hides what that token spells.
END = 0


def try_bytes(compile_for: "Callable[[xgrammar.GrammarCompiler], xgrammar.CompiledGrammar]") -> None:
    """Compile a grammar for a vocabulary of single bytes, and try its masks.  Raises EspalierError."""
    try:
        form = compile_for(_byte_compiler())
    except Exception:  # to be raised again where it is compiled for all tokens
        return
    try_masks(form, np.ones(256, dtype=np.int64))


@cache
def _byte_compiler() -> "xgrammar.GrammarCompiler":
    import xgrammar

    vocabulary = [bytes([byte]) for byte in range(256)]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def try_masks(form: "xgrammar.CompiledGrammar", num_bytes: np.ndarray) -> None:
    """Generate texts from the masks alone.  Raises EspalierError if a mask, or to read a token, takes too long.

    num_bytes: [vocab_size] int, of each token.
    """
    import xgrammar

    num_bytes = np.where(np.arange(len(num_bytes)) == END, 0, num_bytes)
    begun = time.thread_time()
    for seed in range(NUM_SAMPLES):
        if time.thread_time() - begun < TRIAL_S:
            matcher = xgrammar.GrammarMatcher(form, override_stop_tokens=[END])
            _try_one(matcher, num_bytes, random.Random(seed), repeats=seed == 0, prefers_long=seed < 2)


def _try_one(matcher: Any, num_bytes: np.ndarray, rng: random.Random, repeats: bool, prefers_long: bool) -> None:
    """num_bytes: of each token, 0 for one that is not tried.

    repeats: a token comes again while it may, since a repeated text can often be read in the most ways.
    """
    mask = np.zeros((1, mask_words(len(num_bytes))), dtype=np.int32)
    sizes = np.minimum(num_bytes, MAX_TOKEN_BYTES).astype(np.uint8)
    length, token = 0, END
    for _ in range(NUM_TOKENS):
        took_s = _time_of(matcher.fill_next_token_bitmask, mask)
        # A slow mask is made once more, and a slow token is read once more: the first time may be the system's.
        _require(took_s <= MASK_S or _time_of(matcher.fill_next_token_bitmask, mask) <= MASK_S, length)
        allowed = np.unpackbits(mask[0].view(np.uint8), count=len(sizes), bitorder="little")
        if not (repeats and allowed[token] and sizes[token]):
            allowed *= sizes
            if not (longest := allowed.max()):
                return
            token = _first(allowed == longest if prefers_long else allowed > 0, rng.randrange(len(sizes)))
        limit_s = BYTE_S * num_bytes[token]
        took_s = _time_of(matcher.accept_token, token)
        if took_s > limit_s:
            matcher.rollback(1)
            took_s = _time_of(matcher.accept_token, token)
        length += int(num_bytes[token])
        _require(took_s <= limit_s, length)


def _first(is_liked: np.ndarray, start: int) -> int:
    """The first liked token from `start` on, then from 0 on: to list them all would take longer than their mask."""
    behind = start + int(is_liked[start:].argmax())
    return behind if is_liked[behind] else int(is_liked.argmax())


def _time_of(call: Callable[..., Any], *arguments: Any) -> float:
    """Processor time in seconds."""
    begun = time.thread_time()
    call(*arguments)
    return time.thread_time() - begun


def _require(is_fast: bool, length: int) -> None:
    if not is_fast:
        raise EspalierError(
            f"the grammar is too ambiguous: behind {length} bytes of a sample text it takes too long to find the next "
            "tokens; write it so that each text can be read in one way only, lower its counts, or make it smaller"
        )
