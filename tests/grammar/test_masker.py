"""Masks of trees: each node's follows its own path."""

import random

import numpy as np
import pytest

from espalier.grammar import Grammar
from espalier.masking import masker as of_masker
from espalier.masking.masker import GrammarMasker, allowed_tokens
from espalier.sampling.mask import ALL_ALLOWED, mask_words, only_token
from tests.grammar.vocabulary import END, VOCABULARY, bytes_of, compiled

SCHEMA = {
    "type": "object",
    "properties": {"red": {"enum": ["a", "aa", "ab"]}, "name": {"type": "string", "maxLength": 6}},
    "required": ["red", "name"],
}
GRAMMARS = [
    Grammar.of_json_schema(SCHEMA),
    Grammar("regex", "(ab|a)+12?"),
    Grammar.of_choices(["true", "red", "rename"]),
    Grammar("json_object"),
    Grammar("ebnf", 'root ::= "(" root ")" | "12"'),
]


def masker_of(grammar: Grammar, pushed: list[int] = (), after: str | None = None) -> GrammarMasker:
    made = GrammarMasker(compiled(grammar), len(VOCABULARY), (END,), after, bytes_of)
    for token in pushed:
        made.push(token)
    return made


def random_tree(grammar: Grammar, pushed: list[int], rng: random.Random, after: str | None = None):
    """(tokens, parents, the mask of each node that plain decoding could reach).  Some tokens break the grammar."""
    tokens, parents, masks = [7], [0], [masker_of(grammar, pushed, after).root_mask()]
    for _ in range(24):
        parent = rng.randrange(len(tokens))
        allowed = None if masks[parent] is None else allowed_tokens(masks[parent])
        kind = rng.random()
        if kind < 0.1:
            token = -1
        elif kind < 0.3 or allowed is None or not allowed.size:
            token = rng.randrange(len(VOCABULARY))
        else:
            token = int(rng.choice(allowed))
        path, at = [token], parent
        while at:
            path.append(tokens[at])
            at = parents[at]
        reached = token >= 0 and allowed is not None and token in allowed
        masks.append(masker_of(grammar, [*pushed, *path[::-1]], after).root_mask() if reached else None)
        tokens.append(token)
        parents.append(parent)
    return tokens, parents, masks


def walk(grammar: Grammar, length: int, rng: random.Random) -> list[int]:
    """Tokens that the grammar allows, one after another, up to its end."""
    pushed: list[int] = []
    for _ in range(length):
        allowed = allowed_tokens(masker_of(grammar, pushed).root_mask())
        tokens = [token for token in allowed.tolist() if token != END]
        if tokens:
            pushed.append(rng.choice(tokens))
    return pushed


def differences(grammar: Grammar, seed: int, after: str | None = None) -> int:
    """Nodes whose mask in a tree is not the mask of plain decoding along its path."""
    rng = random.Random(seed)
    pushed = [] if after else walk(grammar, rng.randrange(12), rng)
    tokens, parents, expected = random_tree(grammar, pushed, rng, after)
    masker = masker_of(grammar, pushed, after)
    found = 0
    for _ in range(2):  # the second walk starts where the first did
        out = np.full((len(tokens), mask_words(len(VOCABULARY))), ALL_ALLOWED, dtype=np.int32)
        masker.node_masks(tokens, parents, out)
        reached = [i for i, mask in enumerate(expected) if mask is not None and mask.any()]
        found += sum(not np.array_equal(tokens_in(out[i]), tokens_in(expected[i])) for i in reached)
    return found


def tokens_in(mask: np.ndarray) -> np.ndarray:
    """Bits past the vocabulary are never read."""
    allowed = allowed_tokens(mask)
    return allowed[allowed < len(VOCABULARY)]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_each_nodes_mask_follows_its_own_path(grammar):
    assert not sum(differences(grammar, seed) for seed in range(8))


def test_masks_of_the_siblings_path_are_seen(monkeypatch):
    walk_of = GrammarMasker._fill_masks

    def planted(self, nodes, tokens, parents, out):
        # Every node hangs from its elder sibling's place.
        walk_of(self, nodes, tokens, [max(parent - 1, 0) for parent in parents], out)

    monkeypatch.setattr(GrammarMasker, "_fill_masks", planted)
    assert sum(differences(GRAMMARS[0], seed) for seed in range(8))


def test_masks_one_node_late_are_seen(monkeypatch):
    node_masks = GrammarMasker.node_masks

    def planted(self, tokens, parents, out):
        node_masks(self, tokens, parents, out)
        out[1:] = out[:-1].copy()

    monkeypatch.setattr(GrammarMasker, "node_masks", planted)
    assert sum(differences(GRAMMARS[0], seed) for seed in range(8))


@pytest.mark.parametrize("seed", range(8))
def test_the_grammar_begins_behind_its_marker(seed):
    assert not differences(GRAMMARS[2], seed, after="re")


def test_a_path_over_the_marker_leaves_no_trace():
    masker = masker_of(GRAMMARS[2], [ord("r")], after="re")
    for path in ([ord("e")], [ord("e"), ord("t")], [ord("e"), ord("x")], [ord("x"), ord("r")]):
        behind = masker_of(GRAMMARS[2], [ord("r"), *path], after="re")
        mask = masker.mask_after(path)
        assert (mask is None) == behind.has_rejected and (mask is None or np.array_equal(mask, behind.root_mask()))
    # The marker is still to come: its second letter completes it.
    masker.push(ord("e"))
    assert {VOCABULARY[token][:1] for token in tokens_in(masker.root_mask())} == {b"t", b"r"}


def test_an_output_cannot_end_before_the_marker():
    masker = masker_of(GRAMMARS[2], after="red")
    assert allowed_tokens(masker.root_mask()).tolist() == list(range(END))
    for byte in b"xre":
        masker.push(byte)
    assert len(tokens_in(masker.root_mask())) == END
    masker.push(ord("d"))
    assert {VOCABULARY[token][:1] for token in tokens_in(masker.root_mask())} == {b"t", b"r"}


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_known_next_is_what_plain_decoding_must_take(grammar):
    rng = random.Random(1)
    num_forced = 0
    for length in range(12):
        pushed = walk(grammar, length, rng)
        known = masker_of(grammar, pushed).forced_tokens(5)
        num_forced += len(known.tokens)
        for i, token in enumerate(known.tokens):
            mask = masker_of(grammar, [*pushed, *known.tokens[:i]]).root_mask()
            assert tokens_in(mask).tolist() == [token] and only_token(mask) == token
        behind = masker_of(grammar, [*pushed, *known.tokens])
        assert known.mask is None or np.array_equal(known.mask, behind.root_mask())
        assert known.mask is not None or len(known.tokens) == 5 or END in known.tokens or behind.is_stuck
    assert num_forced


def test_a_token_that_is_not_allowed_leaves_none():
    masker = masker_of(GRAMMARS[2], [ord("x")])
    assert masker.is_stuck and masker.forced_tokens(3).tokens == []
    assert of_masker.allowed_tokens(masker.root_mask()).size == 0


def test_end_tokens_come_only_where_the_grammar_ends():
    masker = GrammarMasker(compiled(GRAMMARS[2]), len(VOCABULARY), (END, ord("r")), None, bytes_of)
    assert {VOCABULARY[token] for token in tokens_in(masker.root_mask())} == {b"t", b"true", b"re", b"red"}
    for token in (VOCABULARY.index(b"re"), ord("d")):
        masker.push(token)
    assert tokens_in(masker.root_mask()).tolist() == [ord("r"), END]
