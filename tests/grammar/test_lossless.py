"""Speculation under a grammar changes nothing: on is off, every output is in the grammar, no page leaks."""

import json
import random
from collections.abc import Sequence
from functools import lru_cache

import jsonschema
import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.engine.masks import MaskBuilder, NodeMasks
from espalier.grammar import Grammar
from espalier.grammar.token_masker import ForcedTokens
from espalier.masking.compile import compile_with_xgrammar
from espalier.masking.masker import GrammarMasker
from espalier.request import Request, SamplingParams
from espalier.sampling.mask import ALL_ALLOWED
from espalier.speculate import round as rounds
from espalier.text import TokenBytes
from tests.block import FORMS
from tests.grammar.vocabulary import compiler_of
from tests.harness import VOCAB, Setup, prompts, request, run
from tests.pages import check_pages
from tests.pairwise import fewer, in_turn_params
from tests.properties.block_setup import BlockSetup
from tests.properties.peagle_setup import PEagleSetup

TEXTS = ["{", "}", '"', "a", "b", ":", " ", ",", "[", "]", "1", "2", '": ', ', "', "ab", ""]
END = VOCAB - 1
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["a", "ab", "bb"]},
        "b": {"type": "array", "items": {"enum": [1, 12, 2]}, "maxItems": 3},
    },
    "required": ["a", "b"],
}
GRAMMARS = [
    Grammar.of_json_schema(SCHEMA),
    Grammar("regex", "(ab|ba){2,6}(1|2)*"),
    Grammar.of_choices(["ab12", "ab21", "a", "bb:1"]),
    Grammar("ebnf", 'root ::= "[" root "]" | "1" | "ab"'),
]
CELLS = [(algorithm, topk, page) for algorithm in ("eagle3", "ngram") for topk in (1, 4) for page in (1, 16)]
# Every form of block drafts: without edges, causal, with edges, with a reduced vocabulary, and with edges of some
# tokens, of the hidden state and of whole paths.
BLOCKS = FORMS
CELLS += [(form, 4, page) for form, page in zip((*BLOCKS, "peagle"), (16, 3, 1, 4, 16, 3, 4, 1), strict=True)]


# Both sizes of a page and a chain of each drafter, and the forms that differ in how their trees are made.
FEW = [
    *(cell for cell in CELLS[:8] if (cell[1] == 1) == (cell[2] == 16)),
    *(cell for cell in CELLS[8:] if cell[0] in ("dflash", "dspark", "speculators", "dflash2", "peagle")),
]


def bytes_of(token: int) -> TokenBytes:
    return TokenBytes(TEXTS[token].encode(), True)


@lru_cache
def compiled(grammar: Grammar) -> xgrammar.CompiledGrammar:
    assert len(TEXTS) == VOCAB
    return compile_with_xgrammar(compiler_of([text.encode() for text in TEXTS]), grammar)


def masker_of(grammar: Grammar) -> GrammarMasker:
    return GrammarMasker(compiled(grammar), VOCAB, (END,), None, bytes_of)


class Liar(GrammarMasker):
    """Its masks are right, and what it tells the draft is not."""

    def forced_tokens(self, most: int) -> ForcedTokens:
        rng = random.Random(self.matcher.is_completed() + 2 * most)
        forced = [rng.randrange(VOCAB) for _ in range(rng.randrange(most + 1))]
        return ForcedTokens(forced, np.array([rng.getrandbits(16)], dtype=np.int32) if len(forced) < most else None)


def setup_of(algorithm: str, topk: int, page: int, **other) -> Setup:
    """algorithm: also a form of BLOCKS."""
    how = {"steps": 3, "topk": topk, "num_draft_tokens": 9, "page_size": page, **other}
    if algorithm in BLOCKS:
        return BlockSetup(form=algorithm, **how)
    return PEagleSetup(**how) if algorithm == "peagle" else Setup(algorithm=algorithm, **how)


def asked(
    seed: int, temperature: float, make=masker_of, count: int = 5, grammars: Sequence[Grammar] = GRAMMARS, **params
) -> list[Request]:
    """Requests of which every third is free."""
    made = []
    for i, prompt in enumerate(prompts(seed, (3, 9, 17, 5, 9, 21, 4, 6)[:count])):
        settings = SamplingParams(**{"max_tokens": 20, "temperature": temperature, "stop_token_ids": [END], **params})
        made.append(request(i, prompt, settings))
        if i % 3 != 2:
            made[-1].masker = make(grammars[(seed + i) % len(grammars)])
    return made


def in_grammar(grammar: Grammar, output: Sequence[int], finish_reason: str | None) -> bool:
    masker = masker_of(grammar)
    for token in output:
        masker.push(token)
    if masker.has_rejected or finish_reason != "stop":
        return not masker.has_rejected
    text = "".join(TEXTS[token] for token in output)
    return masker.matcher.is_terminated() and (
        grammar.kind != "json_schema"
        or jsonschema.Draft202012Validator(json.loads(grammar.spec)).is_valid(json.loads(text))
    )


def check_all_in_grammar(seed: int, requests: Sequence[Request], grammars: Sequence[Grammar] = GRAMMARS) -> None:
    for i, each in enumerate(requests):
        if each.masker is not None:
            assert each.error is None
            assert in_grammar(grammars[(seed + i) % len(grammars)], each.output, each.finish_reason)


# test_ahead.py compares the loops.
@pytest.mark.parametrize(
    ("cell", "temperature", "overlap"),
    fewer(in_turn_params(CELLS, [0.0, 1.2], [False, True]), lambda cell, *_: cell in FEW),
)
def test_on_is_off_and_every_output_is_in_its_grammar(cell, temperature, overlap):
    algorithm, topk, page = cell
    setup = setup_of(algorithm, topk, page, overlap=overlap)
    seed = topk + page
    tree, plain = (run(each.engine(), asked(seed, temperature)) for each in (setup, setup.plain()))
    assert tree.tokens == plain.tokens
    check_all_in_grammar(seed, tree.requests)
    assert any(each.finish_reason == "stop" for each in tree.requests)


@pytest.mark.parametrize(
    ("algorithm", "topk", "page"),
    fewer(CELLS[::3], lambda algorithm, topk, page: (topk, page) != (1, 1) and algorithm != "dflash2"),
)
def test_what_the_draft_is_told_changes_no_output(algorithm, topk, page):
    setup = setup_of(algorithm, topk, page)

    def lying(grammar: Grammar) -> Liar:
        return Liar(compiled(grammar), VOCAB, (END,), None, bytes_of)

    temperature = 0.0 if page == 16 else 1.2
    told, lied_to = (run(setup.engine(), asked(1, temperature, make)) for make in (masker_of, lying))
    assert told.tokens == lied_to.tokens


def test_a_forced_token_that_is_emitted_unverified_is_seen(monkeypatch):
    accept = rounds.accept

    def planted(tree, picks, *rest):
        tokens = picks.clone()
        # The first child of the root counts as what the target picked.
        tokens[:, 0] = tree.tokens[:, 1]
        return accept(tree, tokens, *rest)

    monkeypatch.setattr(rounds, "accept", planted)
    with pytest.raises(AssertionError):
        test_what_the_draft_is_told_changes_no_output("eagle3", 4, 16)


@pytest.mark.parametrize("fault", ["sibling", "late", "free"])
def test_wrong_masks_are_seen(monkeypatch, fault):
    node_masks = MaskBuilder.node_masks

    def planted(self, batch, trees):
        if fault == "sibling":
            trees = [(tokens, [max(parent - 1, 0) for parent in parents]) for tokens, parents in trees]
        found = node_masks(self, batch, trees)
        if fault == "late":
            return NodeMasks(found.rows, np.concatenate([found.masks[:, :1], found.masks[:, :-1]], 1))
        return found if fault == "sibling" else NodeMasks(found.rows, np.full_like(found.masks, ALL_ALLOWED))

    monkeypatch.setattr(MaskBuilder, "node_masks", planted)
    with pytest.raises(AssertionError):
        for seed in range(4):
            setup = setup_of("eagle3", 4, 16)
            check_all_in_grammar(seed, run(setup.engine(), asked(seed, 1.2), check=False).requests)


@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_the_guide_raises_the_accept_length(monkeypatch, algorithm):
    setup = setup_of(algorithm, 4, 16)
    with_guide = run(setup.engine(), asked(2, 0.0)).stats.accept_length
    monkeypatch.setattr(MaskBuilder, "guide_rows", lambda self, batch: None)
    assert with_guide > run(setup.engine(), asked(2, 0.0)).stats.accept_length


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    """A JSON schema whose values TEXTS can spell."""
    kind = rng.randrange(5 if depth < 2 else 2)
    if kind == 0:
        return {"enum": rng.sample(["a", "b", "ab", "ba", "bb"], rng.randint(1, 3))}
    if kind == 1:
        least = rng.choice((1, 2, 11))
        return {"enum": [each for each in (1, 2, 11, 12, 21, 22) if each >= least]}
    if kind == 2:
        least = rng.randint(0, 1)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": least + 2}
    if kind == 3:
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    names = rng.sample(["a", "b", "ab", "ba"], rng.randint(1, 3))
    properties = {name: random_schema(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def fuzz(seed: int) -> tuple[int, int]:
    """Random schemas, arrivals and aborts on few pages, with equal prompts.  Returns (preemptions, cached tokens)."""
    rng = random.Random(seed)
    grammars = [*(Grammar.of_json_schema(random_schema(rng)) for _ in range(4)), *GRAMMARS[1:]]
    topk, page = rng.choice((1, 4)), rng.choice((1, 4, 16))
    algorithm, overlap = rng.choice(("eagle3", "ngram")), rng.random() < 0.5
    pages = 1 + -(-90 // page)
    setup = setup_of(algorithm, topk, page, max_context=64, num_pages=pages, overlap=overlap)
    engine, temperature, most = setup.engine(), rng.choice((0.0, 1.2)), rng.randint(4, 30)
    waiting = asked(seed, temperature, count=8, grammars=grammars, max_tokens=most)
    for each in waiting[1::2]:
        each.prompt = list(waiting[2].prompt)
    added: list[Request] = []
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.5:
            added.append(waiting.pop(0))
            engine.add(added[-1])
        if added and rng.random() < 0.06:
            engine.abort(rng.choice(added).id)
        engine.step()
        check_pages(engine)
    assert len(engine.scheduler.free_slots) == setup.max_batch
    check_all_in_grammar(seed, added, grammars)
    engine.close()
    return engine.scheduler.num_preempted, sum(each.cached_tokens for each in added)


def test_aborts_preemption_and_prefix_hits_leave_no_invalid_output_and_no_page():
    # Both drafters, chains and trees, each size of a page, with overlap and without; the second and third preempt.
    preempted, cached = zip(*map(fuzz, (8, 11, 13, 14)), strict=True)
    assert sum(preempted) and sum(cached)


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1_000_000))
def test_the_same_many_times(seed):
    fuzz(seed)
