"""Code that several draft formats share: reading single fields of config.json, and loading common weights.

The common weights are the embedding, the head and the table of target ids.  A draft may use the embedding and the head
of its target.  The file of each format (for example eagle3.py) checks that the fields fit together.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from espalier.errors import EspalierError, shown
from espalier.model_files import MAX_NUMBER, MAX_SIZE
from espalier.models.base import CausalLM
from espalier.models.config import ModelConfig
from espalier.models.layer_loading import load_head, tied_head
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.weight_formats import dense_weight, quantisation_of
from espalier.models.weights import PLAIN_DTYPES, Weights

log = logging.getLogger(__name__)


def draft_embedding(weights: Weights, shape: Sequence[int], target: CausalLM, name: str = "embed_tokens") -> Embedding:
    """Returns the draft's embedding `name`, or the target's if the draft has none.  shape: (vocabulary, hidden size).
    Raises EspalierError if the target's embedding is needed but has another shape."""
    if uses_target_matrix(weights, name, "model.embed_tokens", shape, target.embed.shape):
        embed = gathered_embedding(target)
        # The target's scale is not copied: a draft's scale is a field of the draft's own config.
        return Embedding(embed.weight)
    return Embedding(weights.load(f"{name}.weight", *shape))


def gathered_embedding(target: CausalLM) -> Embedding:
    """Returns the target's embedding, after every rank has gathered all rows.  The target's tied head then uses the
    gathered tensor."""
    shards = target.embed.shards
    target.embed.gather_all_rows()
    if shards.count > 1 and target.config.tie_word_embeddings:
        target.head = tied_head(target.embed, shards)
    return target.embed


def draft_head(weights: Weights, layer: ModelConfig, draft_vocab: int, target: CausalLM, embed: Embedding) -> Linear:
    """Returns the draft's lm_head.  A draft without a head uses its tied embedding `embed` or the target's head.
    Raises EspalierError if the target's head has another shape.  layer: the config of the draft's layers."""
    name, shape = "lm_head", (draft_vocab, layer.hidden_size)
    if weights.has_matrix(name):
        return load_head(weights, name, *shape)
    if layer.tie_word_embeddings and tuple(embed.weight.shape) == shape:
        log.info("draft %s: %s is the draft's embedding (tie_word_embeddings)", weights.path, name)
        return Linear(dense_weight(embed.weight))
    uses_target_matrix(weights, name, name, shape, target.head.shape)
    return target.head


def uses_target_matrix(
    weights: Weights, name: str, target_name: str, shape: Sequence[int], target_shape: Sequence[int]
) -> bool:
    """Whether the draft uses the target's matrix, because the draft has no matrix `name` or because the draft's matrix
    is a copy of the target's.

    target_name: the name of the target's matrix in `weights`, which may hold the target's weights too.  A quantised
    matrix is never treated as a copy.  Raises EspalierError if the target's matrix has another shape."""
    if weights.has_matrix(name):
        return name != target_name and _have_equal_values(weights, f"{name}.weight", f"{target_name}.weight")
    if tuple(target_shape) != tuple(shape):
        raise EspalierError(
            f"{weights.path} has no {name!r} and cannot use the target's: it needs {list(shape)}, the target's is "
            f"{list(target_shape)}; use a draft with its own"
        )
    log.info("draft %s: %s is the target's (shared, not copied)", weights.path, name)
    return True


def _have_equal_values(weights: Weights, name: str, other_name: str) -> bool:
    """Whether the tensors `name` and `other_name` are both stored, with the same values in a floating-point dtype."""
    if name not in weights or other_name not in weights or weights.shape(name) != weights.shape(other_name):
        return False
    tensor, other_tensor = (weights.load_raw(tensor_name, *weights.shape(name)) for tensor_name in (name, other_name))
    return tensor.dtype in PLAIN_DTYPES and torch.equal(tensor, other_tensor)


def draft_to_target(weights: Weights, target_vocab: int, draft_vocab: int) -> Tensor | None:
    """Returns the target id of each draft id; None if both vocabularies are the same.
    The tensor d2t of a file contains the differences (target id - draft id).  Raises EspalierError for target ids
    outside the target's vocabulary, and for target ids that occur twice."""
    if "d2t" not in weights and draft_vocab == target_vocab:
        return None
    ids = torch.arange(draft_vocab) + weights.load_raw("d2t", draft_vocab).to(torch.int64)
    outside = ids[(ids < 0) | (ids >= target_vocab)]
    if outside.numel():
        raise EspalierError(
            f"{weights.path}: d2t maps to token {int(outside[0])}, but the target's vocabulary is 0 .. "
            f"{target_vocab - 1}; use the draft trained for this target"
        )
    values, counts = ids.unique(return_counts=True)
    if (counts > 1).any():
        raise EspalierError(
            f"{weights.path}: d2t maps two draft ids to token {int(values[counts > 1][0])}; its entries are offsets "
            "(target id - draft id), each target at most once: repair the file"
        )
    return None if torch.equal(ids, torch.arange(target_vocab)) else ids.to(weights.device)


Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True)
class DraftFields:
    """The fields of an object in a draft's config.json.  name: a field's name.  default: the value of a missing field.
    Methods raise EspalierError for a field with a wrong value."""

    raw: Mapping[str, Any]
    path: Path

    def error(self, message: str) -> EspalierError:
        """Returns an error whose text is the draft's path and this message."""
        return EspalierError(f"{self.path}: {message}")

    def with_defaults(self, defaults: Mapping[str, Any]) -> "DraftFields":
        """Returns the fields, with missing fields taken from `defaults`."""
        return DraftFields({**defaults, **self.raw}, self.path)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of a field without a check."""
        return self.raw.get(name, default)

    def is_set(self, name: str, default: bool = False) -> bool:
        """Whether the value of the field is true."""
        return bool(self.raw.get(name, default))

    def nested_object(self, name: str) -> "DraftFields":
        """Returns the fields of the nested object `name`; no fields if the object is null or missing."""
        value = self.raw.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.error(f"{name} = {value!r}; an object is needed; correct the config")
        return DraftFields(value, self.path)

    def layer_config(self) -> dict[str, Any]:
        """Returns the config of the draft's layers in the format of speculators: the object transformer_layer_config,
        and the fields at the top level that describe quantised weights."""
        return {**self.nested_object("transformer_layer_config").raw, **quantisation_of(self.raw)}

    def integer(self, name: str, min_value: int = 2, max_value: int = MAX_SIZE) -> int:
        """Returns the value of a field that must be an integer from `min_value` to `max_value`."""
        value = self.raw.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not min_value <= value <= max_value:
            needed = f"an integer of at least {min_value}" if max_value == MAX_SIZE else f"{min_value} to {max_value}"
            raise self.error(f"{name} = {value!r}; {needed} is needed; correct the config")
        return value

    def number(self, name: str) -> float | None:
        """Returns the value of a field that must be a number; None if it is null or missing."""
        value = self.raw.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
        if value is not None and not is_number:
            raise self.error(f"{name} = {shown(value)}; a number or null is needed; correct the config")
        return None if value is None else float(value)

    def choice(self, name: str, choices: Sequence[Choice], remedy: str) -> Choice:
        """Returns the value of a field, which must be one of `choices`; the first choice if the field is missing.
        remedy: what the error tells the user to use."""
        value = self.raw.get(name, choices[0])
        chosen = next((choice for choice in choices if choice == value), None)
        if chosen is None:
            raise self.error(f"{name} = {value!r} is not supported; use {remedy}")
        return chosen

    def target_layers(self, name: str) -> tuple[int, ...]:
        """Returns the value of a field that lists target layers."""
        ids = self.raw.get(name)
        if not ids or not isinstance(ids, list | tuple) or not all(type(layer) is int for layer in ids):
            raise self.error(f"{name} = {ids!r}; a list of target layers is needed; correct the config")
        return tuple(ids)

    def mask_token(self, vocab: int, names: Sequence[str] = ("mask_token_id",)) -> int:
        """Returns the mask token's id, from the first of the fields `names` that is set.  vocab: the vocabulary's
        size."""
        tokens = {name: self.raw[name] for name in names if self.raw.get(name) is not None}
        name, token = next(iter(tokens.items()), (names[0], None))
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise self.error(
                f"{name} = {token!r}; a token of the vocabulary, 0 .. {vocab - 1}, is needed as {' or '.join(names)}; "
                "correct the config"
            )
        if any(other != token for other in tokens.values()):
            raise EspalierError(f"{self.path} names different masks: {tokens}; correct the config")
        return token

    def draft_vocab(self, vocab: int) -> int:
        """Returns the size of the draft's vocabulary: draft_vocab_size, or by default `vocab`, the target's size."""
        name = "draft_vocab_size"
        return vocab if self.raw.get(name) is None else self.integer(name, min_value=1)
