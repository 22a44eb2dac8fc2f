"""An order-5 n-gram model of the token stream: what the bundled target's bits per byte are compared with.

Interpolated absolute discounting.  Only the n-grams that the held-out text asks for are counted, by sorting hashes, so
that a stream of hundreds of millions of tokens fits in memory.
"""

from __future__ import annotations

import math

import numpy as np

MULTIPLIER = 0x9E3779B97F4A7C15
DISCOUNT = 0.75


def gram_hashes(stream: np.ndarray, order: int) -> np.ndarray:
    """A 64-bit hash of every run of `order` tokens; order 0 is one empty run a position."""
    count = len(stream) - max(order, 1) + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(order):
        hashes *= np.uint64(MULTIPLIER)
        hashes += stream[offset : offset + count].astype(np.uint64) + np.uint64(1)
        hashes ^= hashes >> np.uint64(31)
    return hashes


def look_up(table: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """values of `keys` in the sorted `table`, zero where a key is missing."""
    if not len(table):
        return np.zeros(len(keys))
    index = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[index] == keys, values[index], 0).astype(np.float64)


def refine(lower: np.ndarray, train: np.ndarray, heldout: np.ndarray, order: int) -> np.ndarray:
    """Probabilities of every held-out token at `order`, from those at the order below."""
    grams, contexts = gram_hashes(train, order), gram_hashes(train, order - 1)[: len(train) - order + 1]
    asked, asked_contexts = gram_hashes(heldout, order), gram_hashes(heldout, order - 1)[: len(heldout) - order + 1]
    wanted = np.isin(contexts, np.unique(asked_contexts))
    grams, first, counts = np.unique(grams[wanted], return_index=True, return_counts=True)
    of_gram = contexts[wanted][first]
    known, inverse, num_followers = np.unique(of_gram, return_inverse=True, return_counts=True)
    totals = look_up(known, np.bincount(inverse, weights=counts), asked_contexts)
    followers = look_up(known, num_followers, asked_contexts)
    seen = np.maximum(look_up(grams, counts, asked) - DISCOUNT, 0)
    refined, rest = lower.copy(), lower[order - 1 :]
    refined[order - 1 :] = np.where(totals > 0, (seen + DISCOUNT * followers * rest) / np.maximum(totals, 1), rest)
    return refined


def ngram_bits_per_byte(
    train: np.ndarray, heldout: np.ndarray, num_bytes: int, vocab_size: int, order: int = 5
) -> float:
    probabilities = np.full(len(heldout), 1.0 / vocab_size)
    for n in range(1, order + 1):
        probabilities = refine(probabilities, train, heldout, n)
    return float(-np.log(probabilities).sum()) / math.log(2) / num_bytes
