"""Tries a grammar's masks over sample texts, before a request with it may run.

Where a text can be read in many ways, xgrammar's parser takes the square or the cube of its length for each token that
it tries.  Such a grammar is refused.  Ambiguity that shows only later in a text is left to the engine, which bounds its
time (engine/mask_threads.py).
"""

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from espalier.errors import EspalierError

if TYPE_CHECKING:
    from espalier.masking.masker import GrammarMasker

# The processor time of one mask, and of reading one byte.  A mask reads the first bytes of many tokens, so a byte that
# takes this long foretells a mask that takes a thousand times as long.
MASK_S = 0.02
BYTE_S = 0.001
# The sample texts.  With longer tokens the first masks might take too long already.
NUM_SAMPLES = 4
NUM_TOKENS = 64
MAX_TOKEN_BYTES = 8
NUM_FIRST_BYTES = 16
# The processor time after which no sample begins.
TRIAL_S = 0.5


def try_first_bytes(matcher: Any) -> None:
    """Read a text that repeats each byte while it can, without a mask.  Raises EspalierError.

    matcher: xgrammar.GrammarMatcher, which is left where it was.
    """
    byte = b"\0"
    count = 0
    while count < NUM_FIRST_BYTES:
        each = (byte, *(bytes([code]) for code in range(256)))
        took_s, byte = next(((s, b) for b in each for s, ok in [_timed(matcher.accept_string, b)] if ok), (0.0, b""))
        if not byte:
            break
        count += 1
        _require(took_s <= BYTE_S, count)
    matcher.reset()


def try_masks(masker: Callable[[], "GrammarMasker"], num_bytes: np.ndarray, end: int) -> None:
    """Generate texts from the masks alone.  Raises EspalierError if a mask, or reading a token, takes too long.

    masker: makes one at the beginning of a text; num_bytes: [vocab_size] int, of each token; end: ends a text.
    """
    begun = time.thread_time()
    for seed in range(NUM_SAMPLES):
        if time.thread_time() - begun > TRIAL_S:
            return
        _try_one(masker(), num_bytes, end, random.Random(seed), repeats=seed == 0, prefers_long=seed < 2)


def _try_one(
    masker: "GrammarMasker", num_bytes: np.ndarray, end: int, rng: random.Random, repeats: bool, prefers_long: bool
) -> None:
    """repeats: a token comes again while it may, since a repeated text can often be read in the most ways."""
    length, token = 0, end
    for _ in range(NUM_TOKENS):
        took_s, mask = _timed(masker.root_mask)
        # Once more, because the first time may be the system's.
        _require(took_s <= MASK_S or _timed(masker.root_mask)[0] <= MASK_S, length)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != end]
        if not allowed.size:
            return
        if not (repeats and token in allowed):
            token = int(rng.choice(_longest(allowed, num_bytes) if prefers_long else allowed))
        masker.push(token)
        took_s, _ = _timed(lambda: masker.is_lost)
        length += int(num_bytes[token])
        _require(took_s <= BYTE_S * max(1, num_bytes[token]), length)


def _longest(tokens: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    sizes = np.minimum(num_bytes[tokens], MAX_TOKEN_BYTES)
    return tokens[sizes == sizes.max()]


def _timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """(processor time in seconds, result)"""
    begun = time.thread_time()
    result = call(*arguments)
    return time.thread_time() - begun, result


def _require(is_fast: bool, length: int) -> None:
    if not is_fast:
        raise EspalierError(
            f"the grammar is too ambiguous: after {length} bytes of a sample text, to find the next tokens takes more "
            f"than {1e3 * MASK_S:g} ms; write it so that each text can be read in one way only, or make it smaller"
        )
