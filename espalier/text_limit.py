"""An upper bound on the characters of a token, to refuse a text that is too long before it is tokenized.

It never refuses a text that fits.  Only tokenizers have a bound whose steps all are known to keep or add characters, or
to remove at most a known share of them.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenizers import pre_tokenizers

Step = Mapping[str, Any]
# The largest ratio of characters before a normalization step to those after it.  A canonical decomposition has 1 to 4
# characters for each original one (Unicode Standard Annex 15), so NFC leaves at least a quarter.
SHRINKS: Mapping[str, int] = MappingProxyType({"NFC": 4, "NFD": 1, "Prepend": 1, "ByteLevel": 1})
KEEPS = frozenset({"ByteLevel", "Metaspace", "Digits"})
# These keep all characters unless their behavior is "Removed".
SPLITS = frozenset({"Split", "Punctuation"})


class TextLimit:
    """characters_a_token: upper bound on a text's characters per token, None if unknown.

    swallowing: added tokens that also match any number of adjacent spaces; a text with one of them has no bound.
    """

    def __init__(self, backend: Any):
        """backend: a tokenizer of the tokenizers library, None for any other kind."""
        self.characters_a_token: int | None = None
        self.swallowing: tuple[str, ...] = ()
        if backend is None:
            return
        normalizer, pre_tokenizer = (_steps_of(step) for step in (backend.normalizer, backend.pre_tokenizer))
        added = list(backend.get_added_tokens_decoder().values())
        swallowing = [token for token in added if token.lstrip or token.rstrip]
        # Tokens that are matched after normalization may match although the text does not contain them literally.
        hidden = bool(normalizer) and any(token.normalized for token in swallowing)
        shrink = _shrink(normalizer)
        if shrink is None or hidden or not _keeps(pre_tokenizer) or not _knows_all(backend, normalizer + pre_tokenizer):
            return
        normalized = backend.normalizer.normalize_str if normalizer else str
        pieces = [*backend.get_vocab(with_added_tokens=True), *(normalized(token.content) for token in added)]
        self.characters_a_token = shrink * max(map(len, pieces), default=1)
        self.swallowing = tuple(token.content for token in swallowing)

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a text certainly has more than num_tokens tokens."""
        if self.characters_a_token is None or len(text) <= num_tokens * self.characters_a_token:
            return False
        return not any(token in text for token in self.swallowing)


def _steps_of(component: Any) -> list[Step]:
    """The steps of a normalizer or pre-tokenizer as a flat list.  A custom one in Python is a step of unknown type."""
    if component is None:
        return []
    try:
        return _flat(json.loads(component.__getstate__()))
    except Exception:  # a custom component in Python has no serialized state
        return [{"type": "unknown"}]


def _flat(step: Step) -> list[Step]:
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [each for part in inner for each in _flat(part)] if step["type"] == "Sequence" else [step]


def _shrink(normalizer: Sequence[Step]) -> int | None:
    """The largest ratio of characters before normalization to those after it, None if unknown."""
    shrink = 1
    for step in normalizer:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
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
    """Whether every character has tokens.  Other models drop characters, or fuse several into one unknown token."""
    model = backend.model
    if type(model).__name__ != "BPE":
        return False
    if model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        return True
    has_bytes = any(step["type"] == "ByteLevel" for step in steps)
    return has_bytes and all(model.token_to_id(each) is not None for each in pre_tokenizers.ByteLevel.alphabet())
