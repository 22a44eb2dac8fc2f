"""Tries a grammar's masks over sample texts, before a request with it may run.

If a text can be parsed in many ways, xgrammar's time for each token grows with the square or the cube of the length of
the text.  A grammar is refused if this happens in a sample text.  Longer texts may still be slow, so the engine also
limits the time of masks (engine/mask_threads.py).
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

# The most processor time in seconds, for making one mask and for reading one byte.  For a mask, the matcher reads the
# first bytes of many tokens, so a mask may take a thousand times as long as reading one byte.
MAX_MASK_S = 0.02
MAX_S_PER_BYTE = 0.001
# The number of sample texts, and the number of tokens of each text.
NUM_SAMPLES = 4
NUM_SAMPLE_TOKENS = 96
# Longer tokens are not preferred over tokens of this many bytes, because the masks after them may take too long.
MAX_TOKEN_BYTES = 8
# The processor time in seconds after which no further sample text is begun.
MAX_TRIAL_S = 0.25
# The end token of the trial's matchers, because a matcher needs an end token.  It never occurs in a sample text.
TRIAL_END_TOKEN = 0


def try_with_byte_tokens(compile_for: "Callable[[xgrammar.GrammarCompiler], xgrammar.CompiledGrammar]") -> None:
    """Compile a grammar for a vocabulary of single bytes, and try its masks.  Raises EspalierError."""
    try:
        xgrammar_form = compile_for(_byte_compiler())
    except Exception:  # the compilation for all tokens will raise it again
        return
    try_masks(xgrammar_form, np.ones(256, dtype=np.int64))


@cache
def _byte_compiler() -> "xgrammar.GrammarCompiler":
    import xgrammar

    vocabulary = [bytes([byte]) for byte in range(256)]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def try_masks(compiled: "xgrammar.CompiledGrammar", num_bytes: np.ndarray) -> None:
    """Generate texts of allowed tokens.  Raises EspalierError if a mask, or reading a token, takes too long.
    num_bytes: [vocab_size] int, the number of bytes of each token."""
    import xgrammar

    num_bytes = np.where(np.arange(len(num_bytes)) == TRIAL_END_TOKEN, 0, num_bytes)
    begun = time.thread_time()
    for seed in range(NUM_SAMPLES):
        if time.thread_time() - begun < MAX_TRIAL_S:
            matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[TRIAL_END_TOKEN])
            _try_one_text(
                matcher, num_bytes, random.Random(seed), repeats_tokens=seed == 0, prefers_long_tokens=seed < 2
            )


def _try_one_text(
    matcher: Any, num_bytes: np.ndarray, rng: random.Random, repeats_tokens: bool, prefers_long_tokens: bool
) -> None:
    """Generate one text.  Raises EspalierError if a mask or a token takes too long.

    num_bytes: the number of bytes of each token; 0 for a token that must not be in the text.
    repeats_tokens: whether to repeat a token while it is allowed, because repetitions can often be parsed in many ways.
    prefers_long_tokens: whether to choose among the longest allowed tokens (up to MAX_TOKEN_BYTES), or among all."""
    mask = np.zeros((1, mask_words(len(num_bytes))), dtype=np.int32)
    lengths = np.minimum(num_bytes, MAX_TOKEN_BYTES).astype(np.uint8)
    num_read, token = 0, TRIAL_END_TOKEN
    for _ in range(NUM_SAMPLE_TOKENS):
        took_s = _cpu_seconds_of(matcher.fill_next_token_bitmask, mask)
        # A slow mask or token is timed once more, because other processes may have caused the first delay.
        _require_fast(
            took_s <= MAX_MASK_S or _cpu_seconds_of(matcher.fill_next_token_bitmask, mask) <= MAX_MASK_S, num_read
        )
        allowed = np.unpackbits(mask[0].view(np.uint8), count=len(lengths), bitorder="little")
        if not (repeats_tokens and allowed[token] and lengths[token]):
            allowed *= lengths
            if not (longest := allowed.max()):
                return
            is_candidate = allowed == longest if prefers_long_tokens else allowed > 0
            token = _first_candidate(is_candidate, rng.randrange(len(lengths)))
        limit_s = MAX_S_PER_BYTE * num_bytes[token]
        took_s = _cpu_seconds_of(matcher.accept_token, token)
        if took_s > limit_s:
            matcher.rollback(1)
            took_s = _cpu_seconds_of(matcher.accept_token, token)
        num_read += int(num_bytes[token])
        _require_fast(took_s <= limit_s, num_read)


def _first_candidate(is_candidate: np.ndarray, start: int) -> int:
    """Returns the first candidate index from `start` on; if there is none, the first from 0 on.  Making a list of all
    candidates would take longer than the mask."""
    from_start = start + int(is_candidate[start:].argmax())
    return from_start if is_candidate[from_start] else int(is_candidate.argmax())


def _cpu_seconds_of(call: Callable[..., Any], *arguments: Any) -> float:
    begun = time.thread_time()
    call(*arguments)
    return time.thread_time() - begun


def _require_fast(is_fast: bool, num_read: int) -> None:
    """Raises if a masker was too slow.  num_read: the bytes of the sample text that it had read."""
    if not is_fast:
        raise EspalierError(
            f"the grammar is too ambiguous: after {num_read} bytes of a sample text it takes too long to find the next "
            "tokens; write it so that each text can be read in one way only, lower its counts, or make it smaller"
        )
