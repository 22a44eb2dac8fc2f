"""Makes the token masks of one output under a grammar: for the next token, and for every node of a draft tree.

xgrammar's matcher walks the tree depth first.  It accepts a node's token, fills the node's mask, visits the node's
descendants, and then rolls the node's token back.  So each mask depends only on the path from the root to the node.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from espalier.grammar.token_masker import ForcedTokens
from espalier.sampling.mask import ALL_ALLOWED, WORD_BITS, mask_words, only_token
from espalier.text import TokenBytes

if TYPE_CHECKING:
    import xgrammar


class GrammarMasker:
    """Implements TokenMasker (grammar/token_masker.py) for one output.

    A pushed token is matched only at the next call that needs the grammar's state, because matching may take long.

    end_tokens: allowed only where the grammar ends.
    start_marker: a text after which the grammar begins; None if it begins at the first token.  Up to the marker, every
    token is allowed except end tokens.  Text after the marker in the token that completes it is not checked."""

    def __init__(
        self,
        xgrammar_form: "xgrammar.CompiledGrammar",
        vocab_size: int,
        end_tokens: Sequence[int],
        start_marker: str | None,
        bytes_of: Callable[[int], TokenBytes],
    ):
        from xgrammar import GrammarMatcher

        self.matcher = GrammarMatcher(xgrammar_form, override_stop_tokens=sorted(end_tokens))
        self.bytes_of = bytes_of
        # No grammar allows special tokens.  xgrammar would write a line to stderr for each special token that it gets.
        self.special_tokens = frozenset(xgrammar_form.tokenizer_info.special_token_ids).difference(end_tokens)
        self.num_mask_words = mask_words(vocab_size)
        # xgrammar may set bits beyond the vocabulary.
        self.last_word_mask = (1 << vocab_size % WORD_BITS) - 1 if vocab_size % WORD_BITS else ALL_ALLOWED
        self.start_marker = None if start_marker is None else start_marker.encode()
        self.text_tail = b""
        self.unmatched_tokens: list[int] = []
        self._has_rejected = False
        self.mask_before_marker = np.full(self.num_mask_words, ALL_ALLOWED, dtype=np.int32)
        self.mask_before_marker[-1] &= self.last_word_mask
        for token in end_tokens:
            self.mask_before_marker[token // WORD_BITS] &= ~np.int32(np.uint32(1 << token % WORD_BITS).view(np.int32))

    def push(self, token_id: int) -> None:
        self.unmatched_tokens.append(token_id)

    def _match(self, token_id: int) -> None:
        """Reads one token of the output: as a part of the text before the marker, or with the grammar's matcher."""
        if self.start_marker is not None:
            text_tail = self._tail_after(self.text_tail, token_id)
            self.start_marker, self.text_tail = (None, b"") if text_tail is None else (self.start_marker, text_tail)
        elif not self.matcher.is_terminated() and not self._accept(token_id):
            # This never happens if the masks are correct.  If a mask is wrong, only this request ends with an error.
            self._has_rejected = True

    @property
    def has_rejected(self) -> bool:
        """Whether a token was pushed that the grammar does not allow."""
        tokens, self.unmatched_tokens = self.unmatched_tokens, []
        for token in tokens:
            self._match(token)
        return self._has_rejected

    def _accept(self, token_id: int) -> bool:
        """Advances the matcher by one token.  Returns whether the grammar allows the token."""
        return token_id >= 0 and token_id not in self.special_tokens and self.matcher.accept_token(token_id)

    def _tail_after(self, text_tail: bytes, token_id: int) -> bytes | None:
        """Returns the output's last bytes after this token; None if the marker is complete.  text_tail: the last bytes
        before this token."""
        assert self.start_marker is not None
        text = text_tail + self.bytes_of(token_id).bytes
        return None if self.start_marker in text else text[max(0, len(text) - len(self.start_marker) + 1) :]

    def root_mask(self) -> np.ndarray:
        has_rejected = self.has_rejected
        if self.start_marker is not None:
            return self.mask_before_marker
        mask = np.zeros((1, self.num_mask_words), dtype=np.int32)
        if not has_rejected and not self.matcher.is_terminated():
            self.matcher.fill_next_token_bitmask(mask)
            mask[0, -1] &= self.last_word_mask
        return mask[0]

    @property
    def is_stuck(self) -> bool:
        return not self.root_mask().any()

    def forced_tokens(self, max_tokens: int) -> ForcedTokens:
        """Returns the tokens that must come next, at most `max_tokens`, and the mask after them if it is known."""
        forced: list[int] = []
        mask = None
        while not self.has_rejected and self.start_marker is None and not self.matcher.is_terminated():
            mask = self.root_mask()
            only_allowed = only_token(mask)
            if only_allowed is None or len(forced) == max_tokens:
                break
            forced.append(only_allowed)
            self.matcher.accept_token(only_allowed)
            mask = None
        self.matcher.rollback(len(forced))
        return ForcedTokens(forced, mask)

    def mask_after(self, path: Sequence[int]) -> np.ndarray | None:
        """Returns the mask after the root and the tokens `path`; None if `path` is forbidden or ends the text."""
        if self.has_rejected:
            return None
        start_marker, text_tail, num_accepted, is_allowed = self.start_marker, self.text_tail, 0, True
        for token in path:
            if self.start_marker is not None:
                self._match(token)
                continue
            is_allowed = not self.matcher.is_terminated() and self._accept(token)
            if not is_allowed:
                break
            num_accepted += 1
        mask = self.root_mask() if is_allowed and not self.matcher.is_terminated() else None
        self.matcher.rollback(num_accepted)
        self.start_marker, self.text_tail = start_marker, text_tail
        return mask

    def node_masks(self, tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> None:
        """Writes the mask after each node of a tree to `out` [D, words] int32.  parents: the index of the parent."""
        if self.has_rejected:
            out[:] = 0
        elif self.start_marker is None:
            self._fill_masks(list(range(len(tokens))), tokens, parents, out)
        else:
            self._fill_masks_before_marker(tokens, parents, out)

    def _fill_masks(self, nodes: list[int], tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> None:
        """Fill the masks of `nodes`: a node and its descendants.  The matcher has read the text up to the first
        node.  tokens, parents, out: see node_masks."""
        if self.matcher.is_terminated():
            return
        index_of_node = {node: i for i, node in enumerate(nodes)}
        first_child, next_sibling, last_child = ([-1] * len(nodes) for _ in range(3))
        for i, node in enumerate(nodes[1:], start=1):
            if tokens[node] < 0 or tokens[node] in self.special_tokens:
                continue
            parent_index = index_of_node[parents[node]]
            if last_child[parent_index] < 0:
                first_child[parent_index] = i
            else:
                next_sibling[last_child[parent_index]] = i
            last_child[parent_index] = i
        masks = (
            out if len(nodes) == len(out) else np.full((len(nodes), self.num_mask_words), ALL_ALLOWED, dtype=np.int32)
        )
        children, siblings, drafted = (
            torch.tensor(ids) for ids in (first_child, next_sibling, [tokens[n] for n in nodes])
        )
        self.matcher.traverse_draft_tree(children, siblings, drafted, torch.from_numpy(masks))
        if masks is not out:
            out[nodes] = masks

    def _fill_masks_before_marker(self, tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> None:
        """Fill the masks of a tree whose root comes before the end of the marker.  The grammar begins below each node
        that completes the marker.  Arguments: see node_masks."""
        # For each node: the last bytes of the text up to the node; None if the node completes the marker.
        text_tails: list[bytes | None] = [self.text_tail]
        # For each node that completes the marker: the node and its descendants.
        subtrees: dict[int, list[int]] = {}
        # For each node of a subtree: the first node of the subtree.
        completing_node: dict[int, int] = {}
        out[:] = self.mask_before_marker
        for node in range(1, len(tokens)):
            parent_tail = text_tails[parents[node]]
            text_tails.append(parent_tail)
            if tokens[node] < 0:
                continue
            if parents[node] in completing_node:
                completing_node[node] = completing_node[parents[node]]
                subtrees[completing_node[node]].append(node)
                continue
            assert parent_tail is not None
            text_tails[node] = self._tail_after(parent_tail, tokens[node])
            if text_tails[node] is None:
                completing_node[node] = node
                subtrees[node] = [node]
        for nodes in subtrees.values():
            self._fill_masks(nodes, tokens, parents, out)


def allowed_tokens(mask: np.ndarray) -> np.ndarray:
    """Returns the tokens that a mask [words] allows, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
