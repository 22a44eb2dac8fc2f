"""Weights that drafts of several formats have or borrow: the embedding, the head, the map of a reduced vocabulary."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.models.base import CausalLM
from espalier.models.config import ModelConfig
from espalier.models.layer_loading import tied_head
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear
from espalier.models.weight_formats import dense_weight
from espalier.models.weights import PLAIN_DTYPES, Weights

log = logging.getLogger(__name__)


def draft_embedding(weights: Weights, shape: Sequence[int], target: CausalLM, name: str = "embed_tokens") -> Embedding:
    """The draft's embedding, or the target's.  Raises EspalierError if the target's does not fit."""
    if is_borrowed(weights, name, "model.embed_tokens", shape, target.embed.shape):
        embed = whole_embedding(target)
        # The target's scale is left out: a draft's config would name it.
        return Embedding(embed.weight)
    return Embedding(weights.take(f"{name}.weight", *shape))


def whole_embedding(target: CausalLM) -> Embedding:
    """The target's embedding, now whole on every rank, and a tied head in its memory."""
    shards = target.embed.shards
    target.embed.make_whole()
    if shards.count > 1 and target.config.tie_word_embeddings:
        target.head = tied_head(target.embed, shards)
    return target.embed


def draft_head(weights: Weights, layer: ModelConfig, draft_vocab: int, target: CausalLM, embed: Embedding) -> Linear:
    """The draft's head; its embedding, if its config says that they are tied; else the target's head.

    Raises EspalierError if the target's does not fit.
    """
    name, shape = "lm_head", (draft_vocab, layer.hidden_size)
    if weights.has_matrix(name):
        return weights.linear("", (name,), shape[:1], shape[1], bias=False)
    if layer.tie_word_embeddings and tuple(embed.weight.shape) == shape:
        log.info("draft %s: %s is the draft's embedding (tie_word_embeddings)", weights.path, name)
        return Linear(dense_weight(embed.weight))
    is_borrowed(weights, name, name, shape, target.head.shape)
    return target.head


def is_borrowed(weights: Weights, name: str, original: str, shape: Sequence[int], target_shape: Sequence[int]) -> bool:
    """Whether the draft has no matrix `name`, or `weights` holds a copy of the target's, `original`, under that name.

    A quantised matrix counts as the draft's own.  Raises EspalierError if the target's shape does not fit.
    """
    if weights.has_matrix(name):
        return name != original and _are_equal(weights, f"{name}.weight", f"{original}.weight")
    if tuple(target_shape) != tuple(shape):
        raise EspalierError(
            f"{weights.path} has no {name!r} and cannot use the target's: it needs {list(shape)}, the target's is "
            f"{list(target_shape)}; use a draft with its own"
        )
    log.info("draft %s: %s is the target's (shared, not copied)", weights.path, name)
    return True


def _are_equal(weights: Weights, name: str, other: str) -> bool:
    """Whether both are stored, as plain tensors with the same values."""
    if name not in weights or other not in weights or weights.shape(name) != weights.shape(other):
        return False
    one, two = (weights.take_raw(each, *weights.shape(name)) for each in (name, other))
    return one.dtype in PLAIN_DTYPES and torch.equal(one, two)


def draft_to_target(weights: Weights, vocab: int, draft_vocab: int) -> Tensor | None:
    """The target id of each draft id; None if both vocabularies are the same.  Files store target id - draft id.

    Raises EspalierError for ids that are outside the target's vocabulary, or that occur twice.
    """
    if "d2t" not in weights and draft_vocab == vocab:
        return None
    ids = torch.arange(draft_vocab) + weights.take_raw("d2t", draft_vocab).to(torch.int64)
    outside = ids[(ids < 0) | (ids >= vocab)]
    if outside.numel():
        raise EspalierError(
            f"{weights.path}: d2t maps to token {int(outside[0])}, but the target's vocabulary is 0 .. {vocab - 1}; "
            "use the draft trained for this target"
        )
    values, counts = ids.unique(return_counts=True)
    if (counts > 1).any():
        raise EspalierError(
            f"{weights.path}: d2t maps two draft ids to token {int(values[counts > 1][0])}; its entries are offsets "
            "(target id - draft id), each target at most once: repair the file"
        )
    return None if torch.equal(ids, torch.arange(vocab)) else ids.to(weights.device)
