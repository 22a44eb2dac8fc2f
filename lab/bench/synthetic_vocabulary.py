"""Tokens with text for a synthetic model: all bytes, pieces of JSON, and words made from a seed."""

import random

LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
JSON_PIECES = ('{"', '"}', '": "', '", "', '":', '",', "},", "[{", "}]", '"],', ": ", ", ", "\n  ", "\n    ")


def synthetic_vocabulary(size: int) -> list[bytes]:
    """`size` tokens; the last has no text: it ends an output."""
    rng = random.Random(0)
    tokens = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in JSON_PIECES]
    known = set(tokens)
    while len(tokens) < size - 1:
        space = " " if rng.random() < 0.5 else ""
        length = rng.randint(2, 9)
        word = (space + "".join(rng.choices(LETTERS, weights=range(26, 0, -1), k=length))).encode()
        if word not in known:
            known.add(word)
            tokens.append(word)
    return [*tokens[: size - 1], b""]
