"""Reads single fields of a draft's config.json.  The reader of each format checks how they fit together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from espalier.errors import EspalierError, shown
from espalier.model_files import MAX_NUMBER, MAX_SIZE
from espalier.models.weight_formats import quantisation_of

Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True)
class Fields:
    """The fields of an object in a draft's config.json.  A field that is read and is wrong raises EspalierError."""

    raw: Mapping[str, Any]
    path: Path

    def error(self, message: str) -> EspalierError:
        """The error with this message, which begins with the draft's path."""
        return EspalierError(f"{self.path}: {message}")

    def over(self, defaults: Mapping[str, Any]) -> "Fields":
        """These fields, with the values of `defaults` for missing ones."""
        return Fields({**defaults, **self.raw}, self.path)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field as it is."""
        return self.raw.get(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.raw.get(name, default))

    def object(self, name: str) -> "Fields":
        """The fields of the object `name`; null is an empty one."""
        value = self.raw.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.error(f"{name} = {value!r}; an object is needed; correct the config")
        return Fields(value, self.path)

    def layer(self) -> dict[str, Any]:
        """The layers' config in speculators' form: an object of its own, with quantised weights described beside it."""
        return {**self.object("transformer_layer_config").raw, **quantisation_of(self.raw)}

    def count(self, name: str, least: int = 2, most: int = MAX_SIZE) -> int:
        value = self.raw.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            needed = f"an integer of at least {least}" if most == MAX_SIZE else f"{least} to {most}"
            raise self.error(f"{name} = {value!r}; {needed} is needed; correct the config")
        return value

    def number(self, name: str) -> float | None:
        value = self.raw.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
        if value is not None and not is_number:
            raise self.error(f"{name} = {shown(value)}; a number or null is needed; correct the config")
        return None if value is None else float(value)

    def choice(self, name: str, choices: Sequence[Choice], remedy: str) -> Choice:
        """One of `choices`, by default the first.  remedy: behind "use"."""
        value = self.raw.get(name, choices[0])
        found = next((choice for choice in choices if choice == value), None)
        if found is None:
            raise self.error(f"{name} = {value!r} is not supported; use {remedy}")
        return found

    def layers(self, name: str) -> tuple[int, ...]:
        """A list of target layers."""
        ids = self.raw.get(name)
        if not ids or not isinstance(ids, list | tuple) or not all(type(layer) is int for layer in ids):
            raise self.error(f"{name} = {ids!r}; a list of target layers is needed; correct the config")
        return tuple(ids)

    def mask_token(self, vocab: int, names: Sequence[str] = ("mask_token_id",)) -> int:
        """The mask token, which config.json may call by any of `names`."""
        given = {name: self.raw[name] for name in names if self.raw.get(name) is not None}
        name, token = next(iter(given.items()), (names[0], None))
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise self.error(
                f"{name} = {token!r}; a token of the vocabulary, 0 .. {vocab - 1}, is needed as {' or '.join(names)}; "
                "correct the config"
            )
        if any(other != token for other in given.values()):
            raise EspalierError(f"{self.path} names different masks: {given}; correct the config")
        return token

    def draft_vocab(self, vocab: int) -> int:
        """The size of a draft's vocabulary: draft_vocab_size, or the target's without it."""
        name = "draft_vocab_size"
        return vocab if self.raw.get(name) is None else self.count(name, least=1)
