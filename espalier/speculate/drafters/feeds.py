"""Chooses the hidden state that feeds each row of a draft module, by DraftSpec.hidden_source.

A draft has modules 1 to N.  The root is token n.  A feature is a hidden state of the target.  At token n + 1, module 1
reads the feature of token n.  Module k > 1 reads the hidden state feed{k}, which the slot keeps from the launch before.
At later tokens, hidden_source decides:

"chain": at a token, module k reads the output of module k - 1 at the previous token (DeepSeek-AI 2024,
arXiv:2412.19437, equation 21).  "target": at token t, module k reads the feature of token t - k.  So the hidden states,
in the order of tokens, are feedN, ..., feed2, and then the features of tokens n, n + 1, ...

After a prefix hit, and at the start of a text, module k cannot compute the first rows of a pass.  Its first row comes
k - 1 rows after the first row of module 1 (`module_rows`)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from espalier.attention import Prefix
from espalier.kernels.ops.state import load_carried_field
from espalier.kernels.ops.tree import gather_rows
from espalier.slots import BatchState

# (hidden states [B, R, H], indices [B, Q] or None).  Row q of a module reads the hidden state with the q-th index.
# Without indices, row q reads state q.
Feed = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class ModuleRows:
    """The rows of one module in a pass.

    slots: the batch, with `num_missing` added to prefix_len, so the module's first row belongs to token prefix_len + 1.
    prefix: the module's committed rows.  Module k has the rows of tokens k .. n, where token n is the root.
    num_missing: [B], how many rows at the start of the pass the module cannot compute; None for module 1, which
    computes all rows."""

    slots: BatchState
    prefix: Prefix
    num_missing: Tensor | None = None

    def module_length(self, pass_length: Tensor) -> Tensor:
        """Returns [B]: how many rows the module has in a pass in which module 1 has `pass_length` [B] rows; 0 or less
        if the module has no rows."""
        return pass_length if self.num_missing is None else pass_length - self.num_missing


def module_rows(slots: BatchState, num_modules: int) -> list[ModuleRows]:
    """Returns the rows of each module in a pass.  num_modules: the number of modules of the draft."""
    rows = [ModuleRows(slots, Prefix(slots.page_table, slots.num_tokens, first_position=1))]
    if num_modules > 1:
        # Cached pages hold the rows below commit_from.  The target runs again from row commit_from - num_modules on, or
        # from an earlier row, so the features before that row are unknown.
        num_unknown = (slots.commit_from - num_modules).clamp(min=0) - slots.prefix_len
    for max_missing in range(1, num_modules):
        num_missing = (num_unknown + max_missing).clamp(min=0, max=max_missing)
        advanced = replace(slots, prefix_len=slots.prefix_len + num_missing, num_tokens=slots.num_tokens + num_missing)
        rows.append(
            ModuleRows(
                advanced, Prefix(advanced.page_table, advanced.num_tokens, first_position=max_missing + 1), num_missing
            )
        )
    return rows


class ModuleFeeds(ABC):
    """The hidden states that the modules read in one call of Drafter.extend.  The modules run one after another, and
    the caller appends the output [B, W, H] of each module to `outputs`."""

    def __init__(
        self, slots: BatchState, rows: Sequence[ModuleRows], features: Tensor, length: Tensor, is_split: bool
    ) -> None:
        """rows: the rows of each module.  features: [B, W, H], the target's features at tokens n .. n+W-1.
        length: [B], how many of these tokens exist.
        is_split: whether adjacent rows of the batch may be pieces of the same prompt (speculate/pieces.py)."""
        self.outputs: list[Tensor] = []
        self.slots, self.rows, self.features, self.length, self.is_split = slots, rows, features, length, is_split
        self.offsets = torch.arange(features.shape[1], device=features.device)

    @abstractmethod
    def feed_of(self, module: int) -> Feed:
        """Returns the hidden states that a module (2 to N) reads in this pass."""
        ...

    @abstractmethod
    def state_to_carry(self, module: int) -> tuple[Tensor, Tensor]:
        """Returns (values [B, R, H], count [B]).  At its first token in the next launch, the module (2 to N) reads
        values[:, count - 1]."""
        ...

    @staticmethod
    @abstractmethod
    def tree_feed(
        slots: BatchState, num_modules: int, module: int, previous_output: Tensor, parents: Tensor, topk: int
    ) -> Feed:
        """Returns the hidden states that a module (2 to N) reads at the beams of all levels so far.

        previous_output: [B, R, H], the output of the module before, at the beams of all levels except the last level;
        for module 2, its output at the root.
        parents: [B, (module-1)·topk], each beam's parent: 0 for the root, else 1 + the parent's index among all beams.
        """
        ...


class ChainFeeds(ModuleFeeds):
    def feed_of(self, module: int) -> Feed:
        """Returns, for a module (2 to N), the outputs of the module before it, each at the previous token."""
        previous_rows, own_rows = self.rows[module - 2], self.rows[module - 1]
        previous_output = self.outputs[module - 2]
        first = load_carried_field(self.slots, feed_name(module))
        if self.is_split:
            last = (previous_rows.module_length(self.length) - 1).clamp(min=0)
            first = _from_previous_piece(self.slots, first, gather_rows(last[:, None], previous_output))
        assert own_rows.num_missing is not None
        num_missing = (
            own_rows.num_missing
            if previous_rows.num_missing is None
            else own_rows.num_missing - previous_rows.num_missing
        )
        return torch.cat((first, previous_output), 1), self.offsets + num_missing[:, None]

    def state_to_carry(self, module: int) -> tuple[Tensor, Tensor]:
        """Returns (values, count): the outputs of the module before, and how many rows they have."""
        return self.outputs[module - 2], self.rows[module - 2].module_length(self.length)

    @staticmethod
    def tree_feed(
        slots: BatchState, num_modules: int, module: int, previous_output: Tensor, parents: Tensor, topk: int
    ) -> Feed:
        """Returns what a module reads at the beams: its carried state, then the outputs of the module before."""
        first = load_carried_field(slots, feed_name(module))
        return first if module == 2 else torch.cat((first, previous_output), 1), parents


class TargetFeeds(ModuleFeeds):
    @cached_property
    def hidden(self) -> Tensor:
        """The hidden states that the slots keep (feedN, ..., feed2), followed by the target's features."""
        first = _carried_features(self.slots, len(self.rows))
        if self.is_split:
            first = _from_previous_piece(self.slots, first, self.features[:, self.features.shape[1] - first.shape[1] :])
        return torch.cat((first, self.features), 1)

    def feed_of(self, module: int) -> Feed:
        """Returns what a module (2 to N) reads: at each token, the target's feature of the token `module` before."""
        num_missing = self.rows[module - 1].num_missing
        assert num_missing is not None
        return self.hidden, self.offsets + (num_missing + len(self.rows) - module)[:, None]

    def state_to_carry(self, module: int) -> tuple[Tensor, Tensor]:
        """Returns (values, count): at its first token in the next launch, the module reads values[:, count - 1]."""
        return self.hidden, self.length + (len(self.rows) - module + 1)

    @staticmethod
    def tree_feed(
        slots: BatchState, num_modules: int, module: int, previous_output: Tensor, parents: Tensor, topk: int
    ) -> Feed:
        """Returns what a module reads at the beams: the target's features that the slots carry."""
        # A beam at depth d reads feed{module - d + 1}.
        depths = torch.arange(parents.shape[1], device=parents.device) // topk
        return _carried_features(slots, num_modules), (depths + (num_modules - module)).expand_as(parents)


def feeds_class(hidden_source: str) -> type[ModuleFeeds]:
    """Returns the class for a value of DraftSpec.hidden_source."""
    return {"chain": ChainFeeds, "target": TargetFeeds}[hidden_source]


def feed_name(module: int) -> str:
    """Returns the name, in DraftSpec.slot_tensor_shapes, of the hidden state that a module (2 to N) reads at the token
    after the root."""
    return f"feed{module}"


def _carried_features(slots: BatchState, num_modules: int) -> Tensor:
    """Returns [B, N-1, H]: feedN, ..., feed2."""
    return torch.cat([load_carried_field(slots, feed_name(module)) for module in range(num_modules, 1, -1)], 1)


def _from_previous_piece(slots: BatchState, carried: Tensor, last: Tensor) -> Tensor:
    """Returns [P, R, H]: the values of `carried` for each request's first piece; for any other piece, the values that
    `last` has for the piece before it."""
    follows = slots.index[1:] == slots.index[:-1]
    return torch.cat((carried[:1], torch.where(follows[:, None, None], last[:-1], carried[1:])))
