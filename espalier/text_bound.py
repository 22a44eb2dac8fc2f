"""How much text so many tokens can hold: what is longer is refused before it is tokenized, and nothing that fits is.

Only for tokenizers all of whose steps are known to keep or add characters, or to take away a bounded share of them.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenizers import pre_tokenizers

Step = Mapping[str, Any]
# Characters before normalization for each after it, at most.  A canonical decomposition has up to four characters and
# never fewer than what it was made of (Unicode Standard Annex 15), so that composing leaves at least a quarter.
SHRINKS: Mapping[str, int] = MappingProxyType({"NFC": 4, "NFD": 1, "Prepend": 1, "ByteLevel": 1})
KEEPS = frozenset({"ByteLevel", "Metaspace", "Digits"})
# They keep all characters unless they are told to remove what they find.
SPLITS = frozenset({"Split", "Punctuation"})


class TextBound:
    """characters_a_token: no text has more of them for each of its tokens, None where that is not known.

    swallowing: added tokens that take the spaces beside them with them, as many as there are; a text with one of them
    has no bound.
    """

    def __init__(self, backend: Any):
        """backend: a tokenizer of the library tokenizers, None for any other kind."""
        self.characters_a_token: int | None = None
        self.swallowing: tuple[str, ...] = ()
        if backend is None:
            return
        normalizer, pre_tokenizer = (_steps_of(step) for step in (backend.normalizer, backend.pre_tokenizer))
        added = list(backend.get_added_tokens_decoder().values())
        swallowing = [token for token in added if token.lstrip or token.rstrip]
        # Found in the normalized text, they may be there though the text does not spell them.
        hidden = bool(normalizer) and any(token.normalized for token in swallowing)
        shrink = _shrink(normalizer)
        if shrink is None or hidden or not _keeps(pre_tokenizer) or not _knows_all(backend, normalizer + pre_tokenizer):
            return
        normalized = backend.normalizer.normalize_str if normalizer else str
        pieces = [*backend.get_vocab(with_added_tokens=True), *(normalized(token.content) for token in added)]
        self.characters_a_token = shrink * max(map(len, pieces), default=1)
        self.swallowing = tuple(token.content for token in swallowing)

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a text surely has more tokens than that."""
        if self.characters_a_token is None or len(text) <= num_tokens * self.characters_a_token:
            return False
        return not any(token in text for token in self.swallowing)


def _steps_of(component: Any) -> list[Step]:
    """A normalizer's or pre-tokenizer's steps, in a row; one step of an unknown type for one that is no file's."""
    if component is None:
        return []
    try:
        return _flat(json.loads(component.__getstate__()))
    except Exception:  # written in Python, it has no state
        return [{"type": "unknown"}]


def _flat(step: Step) -> list[Step]:
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [each for part in inner for each in _flat(part)] if step["type"] == "Sequence" else [step]


def _shrink(normalizer: Sequence[Step]) -> int | None:
    """Characters before it for each after it, at most; None where that is not known."""
    shrink = 1
    for step in normalizer:
        if step["type"] == "Replace":
            found = step["pattern"].get("String")
            if found is None or len(step["content"]) < len(found):
                return None
        elif step["type"] not in SHRINKS:
            return None
        else:
            shrink *= SHRINKS[step["type"]]
    return shrink


def _keeps(pre_tokenizer: Sequence[Step]) -> bool:
    return all(
        step["type"] in KEEPS or (step["type"] in SPLITS and step["behavior"] != "Removed") for step in pre_tokenizer
    )


def _knows_all(backend: Any, steps: Sequence[Step]) -> bool:
    """Whether every character becomes tokens: one that has none is left out, or several become one unknown token."""
    model = backend.model
    if type(model).__name__ != "BPE":
        return False
    if model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        return True
    has_bytes = any(step["type"] == "ByteLevel" for step in steps)
    return has_bytes and all(model.token_to_id(each) is not None for each in pre_tokenizers.ByteLevel.alphabet())
