"""An order-5 n-gram model of the token stream, a baseline for the bundled target's bits per byte.

It uses interpolated absolute discounting.  Only contexts that occur in the held-out text are counted.  Each context has
a dense rank, so an n-gram is one integer, made of its context's rank and its last token, and counting is one sort.
"""

from __future__ import annotations

import math

import numpy as np

DISCOUNT = 0.75


def unique_counts(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(unique keys, counts).  Sorts `keys` in place, which takes half the memory of np.unique."""
    keys.sort()
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.diff(starts, append=len(keys))


def index_in_table(table: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The index of every key in the sorted `table`, -1 where it is missing."""
    index = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[index] == keys, index, -1)


def interpolate(lower: np.ndarray, train_keys: np.ndarray, keys: np.ndarray, vocab_size: int) -> np.ndarray:
    """The probabilities of the held-out `keys`.  lower: their probabilities at the order below."""
    if not len(train_keys):
        return lower
    grams, counts = unique_counts(train_keys)
    contexts, heldout_contexts = grams // vocab_size, keys // vocab_size
    size = int(heldout_contexts.max()) + 1
    totals = np.bincount(contexts, weights=counts, minlength=size)[heldout_contexts]
    followers = np.bincount(contexts, minlength=size)[heldout_contexts]
    index = index_in_table(grams, keys)
    seen = np.where(index >= 0, np.maximum(counts[index] - DISCOUNT, 0), 0)
    return np.where(totals > 0, (seen + DISCOUNT * followers * lower) / np.maximum(totals, 1), lower)


def ngram_probabilities(train: np.ndarray, heldout: np.ndarray, vocab_size: int, order: int) -> np.ndarray:
    """The probability of every held-out token, given up to `order - 1` tokens before it."""
    probabilities = np.full(len(heldout), 1.0 / vocab_size)
    train_rank, rank = np.zeros(len(train), dtype=np.int64), np.zeros(len(heldout), dtype=np.int64)
    for n in range(1, order + 1):
        train_keys = train_rank[: len(train) - n + 1] * vocab_size + train[n - 1 :]
        keys = rank[: len(heldout) - n + 1] * vocab_size + heldout[n - 1 :]
        probabilities[n - 1 :] = interpolate(probabilities[n - 1 :], train_keys[train_keys >= 0], keys, vocab_size)
        # The n-grams of this order are the contexts of the next.  Those that are not in the held-out text are dropped.
        table = np.unique(keys)
        train_rank, rank = index_in_table(table, train_keys), index_in_table(table, keys)
    return probabilities


def ngram_bits_per_byte(
    train: np.ndarray, heldout: np.ndarray, num_bytes: int, vocab_size: int, order: int = 5
) -> float:
    probabilities = ngram_probabilities(train.astype(np.int64), heldout.astype(np.int64), vocab_size, order)
    return float(-np.log(probabilities).sum()) / math.log(2) / num_bytes
