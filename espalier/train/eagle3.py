"""Creates EAGLE-3 drafts for a frozen target, and their loss function (the training-time test)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from espalier.train.checkpoint import make_draft_shape
from espalier.train.draft import Eagle3Draft, training_loss
from espalier.train.draft_run import LossFunction, RunFiles
from espalier.train.settings import Eagle3Config
from espalier.train.target import Eagle3Target, FrozenTarget

# A draft cannot propose tokens outside its vocabulary, so these tokens end the accepted path.  With 4,096 of SmolLM2's
# 49,152 token ids, 5.3% of the target's tokens were outside.
MIN_COVERAGE = 0.995
# A short text has few token ids.  A vocabulary of only these ids would lack tokens of other texts.
MIN_VOCAB_SIZE = 4096


def choose_vocabulary(
    tokens: np.ndarray, greedy_counts: np.ndarray, vocab_size: int | None
) -> tuple[np.ndarray, float]:
    """Returns (ascending token ids of the draft vocabulary, the share of the target's greedy tokens that it contains).

    tokens: a text.  greedy_counts: how often the target chose each token id.  vocab_size: None for the smallest power
    of two with MIN_COVERAGE of the greedy tokens, but at least MIN_VOCAB_SIZE; at most all ids."""
    text_shares = np.bincount(tokens, minlength=len(greedy_counts)) / len(tokens)
    greedy_shares = greedy_counts / max(1, greedy_counts.sum())
    by_share = np.argsort(-(greedy_shares + 0.1 * text_shares), kind="stable")
    if vocab_size is None:
        num_covering = int(np.searchsorted(np.cumsum(greedy_shares[by_share]), MIN_COVERAGE)) + 1
        vocab_size = max(MIN_VOCAB_SIZE, 1 << (num_covering - 1).bit_length())
    ids = np.sort(by_share[:vocab_size])
    return ids, float(greedy_shares[ids].sum())


def new_draft(target: Eagle3Target, draft_vocabulary: np.ndarray, config: Eagle3Config) -> Eagle3Draft:
    """Returns an untrained draft.  draft_vocabulary: the target's token ids in it, ascending."""
    torch.manual_seed(config.seed)
    shape = make_draft_shape(target.config, len(draft_vocabulary), config.intermediate_size)
    draft = Eagle3Draft(shape).to(target.device)
    draft.set_vocabulary(torch.from_numpy(draft_vocabulary).to(target.device), target.lm_head.detach().float())
    draft.norm.weight.data.copy_(target.final_norm)
    return draft


def new_draft_with_vocabulary(
    target: Eagle3Target, files: RunFiles, config: Eagle3Config
) -> tuple[Eagle3Draft, dict[str, float]]:
    """Returns (a new draft whose vocabulary is the target's most frequent tokens, its figure: the share of the target's
    greedy tokens that are in the vocabulary)."""
    counts = files.own_text.greedy_counts
    tokens = files.data.stream if len(files.data.stream) else files.own_text.texts.tokens
    ids, coverage = choose_vocabulary(tokens, counts, config.draft_vocab)
    print(f"draft vocabulary {len(ids)} of {len(counts)}: {coverage:.2%} of the target's greedy tokens")
    return new_draft(target, ids, config), {"coverage": coverage}


def make_loss(
    draft: Eagle3Draft,
    target: FrozenTarget,
    config: Eagle3Config,
    loss: Callable[..., tuple[Tensor, Tensor]] = training_loss,
) -> LossFunction:
    """Returns a function for the loss of a batch.  loss: training_loss, or its compiled form."""
    return lambda embeds, features, logits, loss_mask: loss(
        draft, embeds, features, logits, loss_mask, config.ttt_steps, config.decay
    )
