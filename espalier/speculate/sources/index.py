"""A source that finds the request's last tokens in texts that the engine has served, and guesses what followed there.

The texts are kept in a ring buffer of tokens.  For the latest occurrence of each n-gram, a hash table holds the ring
index of the n-gram's last token.  Ring and tables have a fixed size, so another text may have replaced the text at that
index.  So before a guess is made, the tokens at the index are compared.  A request sees only texts of its own client.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from espalier.request import Request
from espalier.slots import Guess
from espalier.speculate.sources.base import MAX_MATCHING, HostSource, match_strength, path_kind

# The lengths of the n-grams that are looked up, the longest first.
NGRAM_LENGTHS = (12, 6, 3)
# The memory of one token: its id (4 bytes), its entry of `text_ids` (8), and one entry in each hash table (8).
BYTES_PER_TOKEN = 4 + 8 + 8 * len(NGRAM_LENGTHS)
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class IndexSource(HostSource):
    """A source over the served texts.  num_bytes: the size of the ring and its tables together."""

    def __init__(self, num_bytes: int) -> None:
        self.ring_size = max(num_bytes // BYTES_PER_TOKEN, 1)
        self.tokens = np.full(self.ring_size, -1, dtype=np.int32)
        # For each token of the ring: the salt of its client in the high bits, and the number of its text in the low
        # TEXT_NUMBER_BITS bits.
        self.text_ids = np.zeros(self.ring_size, dtype=np.int64)
        self.ring_index_tables = {length: np.full(self.ring_size, -1, dtype=np.int64) for length in NGRAM_LENGTHS}
        self.ring_end = 0
        self.num_texts = 0

    def remove_request(self, request: Request) -> None:
        """Adds the text of a request that has ended to the ring, unless it ended by an error."""
        if request.error is None and request.output:
            self.add_text(request.tokens, client_salt(request.client))

    def add_text(self, tokens: Sequence[int], salt: int) -> None:
        """Appends a client's text, or its last tokens if the text is longer than the ring.  salt: from client_salt."""
        text = np.array(tokens[-self.ring_size :], dtype=np.int64)
        places = (self.ring_end + np.arange(len(text))) % self.ring_size
        self.num_texts += 1
        self.tokens[places] = text
        # Salt and number tell neighbouring texts apart, so that a match ends where its text begins.
        self.text_ids[places] = salt << TEXT_NUMBER_BITS | self.num_texts % (1 << TEXT_NUMBER_BITS)
        self.ring_end = (self.ring_end + len(text)) % self.ring_size
        for length, table in self.ring_index_tables.items():
            if len(text) >= length:
                table[_ngram_hashes(text, length, salt) % np.uint64(self.ring_size)] = places[length - 1 :]

    def guesses(self, request: Request, max_length: int) -> list[Guess]:
        """Returns the continuations, in served texts of the same client, of the last tokens of the request."""
        last = (request.prompt[-MAX_MATCHING:] + request.output[-MAX_MATCHING:])[-MAX_MATCHING:]
        start = request.num_tokens - 1
        return [
            Guess(start, path_kind("index", match_strength(matching // 2)), continuation)
            for matching, continuation in self.find_continuations(last, client_salt(request.client), max_length)
        ]

    def find_continuations(
        self, last_tokens: Sequence[int], salt: int, max_length: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Returns (number of matching tokens, the tokens that followed) for each place with the same last tokens.

        The places of longer n-grams come first.  salt: from `client_salt`, of the client whose texts are searched."""
        text, found_continuations, seen_places = np.array(last_tokens, dtype=np.int64), [], set()
        for length, table in self.ring_index_tables.items():
            if len(last_tokens) < length:
                continue
            place = int(table[_ngram_hash(last_tokens[-length:], salt) % self.ring_size])
            if place < 0 or place in seen_places:
                continue
            seen_places.add(place)
            matching = self._num_matching(text, place, salt)
            continuation = self._tokens_after(place, max_length)
            if matching >= length and continuation:
                found_continuations.append((matching, continuation))
        return found_continuations

    def _num_matching(self, text: np.ndarray, place: int, salt: int) -> int:
        """Returns how many tokens of the ring, up to index `place`, equal the last tokens of `text`.

        The count ends where the stored text at `place` begins.  It is 0 if that text is from a client with another
        salt."""
        if self.text_ids[place] >> TEXT_NUMBER_BITS != salt:
            return 0
        # The comparison stops at the oldest token of the ring.  In the ring, the newest token comes right before it.
        text = text[-((place - self.ring_end) % self.ring_size + 1) :]
        places = (place - np.arange(len(text))) % self.ring_size
        equal = (self.tokens[places] == text[::-1]) & (self.text_ids[places] == self.text_ids[place])
        return int(equal.cumprod().sum())

    def _tokens_after(self, place: int, max_length: int) -> tuple[int, ...]:
        """Returns up to `max_length` tokens that follow ring index `place` in the same text."""
        places = (place + 1 + np.arange(min(max_length, (self.ring_end - place - 1) % self.ring_size))) % self.ring_size
        inside = (self.text_ids[places] == self.text_ids[place]).cumprod().sum()
        return tuple(self.tokens[places[:inside]].tolist())


# The low bits hold a text's number, which tells texts of one client apart.  The high bits hold the client's salt.
TEXT_NUMBER_BITS = 16


def client_salt(client: str) -> int:
    """Returns a hash of the client's name, of 47 bits."""
    return int.from_bytes(blake2b(client.encode(), digest_size=8).digest()) >> (TEXT_NUMBER_BITS + 1)


def _ngram_hash(ngram: Sequence[int], salt: int) -> int:
    """Returns the hash of one n-gram, as in `_ngram_hashes`.  For one n-gram, plain integers are faster than NumPy."""
    hash_value = salt
    for token in ngram:
        hash_value = (hash_value ^ token) * int(HASH_FACTOR) & (1 << 64) - 1
        hash_value ^= hash_value >> 29
    return hash_value


def _ngram_hashes(text: np.ndarray, ngram_length: int, salt: int) -> np.ndarray:
    """Returns [n - ngram_length + 1] uint64: the hashes of all n-grams of text [n], in order.  salt: client_salt."""
    hashes = np.full(len(text) - ngram_length + 1, salt, dtype=np.uint64)
    for at in range(ngram_length):
        hashes = (hashes ^ text[at : at + len(hashes)].astype(np.uint64)) * HASH_FACTOR
        hashes ^= hashes >> np.uint64(29)
    return hashes
