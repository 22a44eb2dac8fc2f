"""The configurations of the reports that docs/seeds.md answers, by the names their readers know.

Each runs greedy and sampled requests to the end: pages are counted after every step, bytes of shared pages held, and
tokens equal plain decoding's.
"""

from dataclasses import replace
from itertools import product
from typing import ClassVar

import pytest
import torch

from espalier.engine.launch_input import LaunchInput
from espalier.request import Request, SamplingParams
from espalier.sampling.logit_processors import SamplingFeatures
from tests.engine.alone import plainly
from tests.engine.test_disturbance import all_undisturbed
from tests.engine.watching import run_watched
from tests.harness import Setup, prompts, request
from tests.pages import check_pages
from tests.pairwise import fewer, in_turn_params

TREE = {"topk": 8, "steps": 5, "num_draft_tokens": 64}


def conversation_of(setup: Setup, turns: int, told: int, said: int) -> None:
    """Each turn asks all of the talk so far and something new; what was said before is not computed again."""
    engine = setup.engine()
    assert engine.prefix_tree is not None
    talk: list[int] = []
    for turn, new in enumerate(prompts(21, [told] * turns)):
        talk += new
        r = request(turn, talk, SamplingParams(temperature=turn % 2, max_tokens=said))
        known = len(talk) - len(new) - 1  # the last token said has no row yet
        engine.add(r)
        while engine.has_work:
            engine.step()
            check_pages(engine)
        assert r.cached_tokens >= max(0, known) // setup.page_size * setup.page_size
        assert engine.pool.num_free + len(engine.prefix_tree) + 1 == engine.pool.num_pages
        assert r.output == plainly(setup, r).tokens
        talk = talk + r.output
    assert len(engine.prefix_tree) == (len(talk) - 1) // setup.page_size, "one copy of the talk, and nothing leaked"
    engine.close()


def ragged(setup: Setup, lengths: tuple[int, ...], most: int = 12) -> list[Request]:
    requests = [
        request(i, p, SamplingParams(temperature=i % 2, max_tokens=most)) for i, p in enumerate(prompts(20, lengths))
    ]
    run_watched(setup.engine(), [(i, r) for i, r in enumerate(requests)])
    all_undisturbed(setup, requests)
    assert sum(sum(r.from_draft) for r in requests) > 10, "hardly a draft token was accepted: nothing was tried"
    return requests


class TestEagle3Page64Topk8:
    """Spec v2: trees over large pages, overlapped (reports 26972 and 26866)."""

    setup = Setup(page_size=64, overlap=True, max_context=200, chunk_size=64, **TREE)

    def test_ragged(self) -> None:
        """Prompts that end before, on and after a page's last row."""
        ragged(self.setup, (1, 63, 64, 65, 128))

    def test_conversation(self) -> None:
        conversation_of(replace(self.setup, num_pages=20), turns=4, told=20, said=12)


class TestEagleLlama2Page4Topk8:
    """Spec v1: trees over small pages, in lock-step (report 26972)."""

    setup = Setup(page_size=4, overlap=False, max_context=96, **TREE)

    @pytest.mark.full
    def test_ragged(self) -> None:
        ragged(self.setup, (1, 3, 4, 5, 17, 40, 31, 32))

    def test_few_pages(self) -> None:
        ragged(replace(self.setup, num_pages=34), (20, 40, 31, 32), most=16)


class TestEagle3Page2Topk8:
    """Draft decode with page_size and topk above one (report 27360)."""

    @pytest.mark.parametrize(
        "overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["lockstep", "overlap"]
    )
    def test_ragged(self, overlap: bool) -> None:
        ragged(Setup(page_size=2, overlap=overlap, **TREE), (1, 2, 3, 33))


class TestPage512FiveTurns:
    """A talk of several turns over pages larger than a turn ("pool memory leak detected", report 26972)."""

    @pytest.mark.parametrize(
        "overlap", [False, pytest.param(True, marks=pytest.mark.full)], ids=["lockstep", "overlap"]
    )
    def test_conversation(self, overlap: bool) -> None:
        setup = Setup(
            page_size=512, overlap=overlap, max_context=1536, chunk_size=512, max_batch=2, num_pages=9, **TREE
        )
        conversation_of(setup, turns=5, told=230, said=8)


class TestPage256LongPrompt:
    """A prompt 20 tokens short of the context (out-of-bounds gather, report 26972): what is ahead goes past the
    context's end, and the page table holds it."""

    @pytest.mark.parametrize(
        ("overlap", "context"),
        [
            *(pytest.param(*each, marks=pytest.mark.full) for each in ((False, 512), (True, 500), (False, 513))),
            (True, 512),
        ],
    )
    def test_to_the_end(self, overlap: bool, context: int) -> None:
        setup = Setup(page_size=256, overlap=overlap, max_context=context, chunk_size=512, max_batch=2, **TREE)
        for r in ragged(setup, (context - 20, 7), most=40):
            assert r.finish_reason == "length"
        assert setup.layout.table_width * 256 >= context + setup.layout.max_tokens_ahead(2)


class TestLastPositionOfTheContext:
    """A request that fills the context to its last position, whichever way it gets there."""

    TREES: ClassVar = {
        "plain": {"steps": 0, "topk": 1, "num_draft_tokens": 1, "algorithm": "none"},
        "eagle3": TREE,
        "ngram": {"steps": 3, "topk": 2, "num_draft_tokens": 7, "algorithm": "ngram"},
    }

    @pytest.mark.parametrize(
        ("page_size", "tree", "overlap"),
        fewer(in_turn_params([1, 3, 16, 64], [*TREES], [False, True]), lambda page_size, *_: page_size != 64),
    )
    def test_ends_there(self, page_size: int, tree: str, overlap: bool) -> None:
        setup = Setup(page_size=page_size, overlap=overlap, max_context=64, **self.TREES[tree])
        lengths = (63, 62, 61, 58, 57, 50)
        requests = [request(i, p, SamplingParams(temperature=0.0)) for i, p in enumerate(prompts(22, lengths))]
        run_watched(setup.engine(), [(0, r) for r in requests])
        all_undisturbed(setup, requests)
        assert [(len(r.tokens), r.finish_reason) for r in requests] == [(64, "length")] * len(lengths)

    @pytest.mark.parametrize(
        "overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["lockstep", "overlap"]
    )
    def test_in_a_pool_that_holds_just_that(self, overlap: bool) -> None:
        setup = Setup(page_size=8, overlap=overlap, max_context=32, num_pages=1 + 4 + overlap, **TREE)
        requests = [request(i, p, SamplingParams(temperature=0.0)) for i, p in enumerate(prompts(23, (1, 31)))]
        run_watched(setup.engine(), [(0, r) for r in requests])
        all_undisturbed(setup, requests)


class TestEmptyBatch:
    """The maximum of nothing (report 27360): a launch of no requests is legal in every form and changes nothing."""

    @pytest.mark.parametrize(
        ("algorithm", "attention", "width"),
        fewer(
            product(["eagle3", "ngram", "none"], ["sdpa", "reference"], [0, 16]),
            lambda algorithm, attention, width: (attention == "sdpa") == (width == 0),
        ),
    )
    @pytest.mark.parametrize(
        "needs", [SamplingFeatures(), SamplingFeatures(True, True, True, True)], ids=["greedy", "shaped"]
    )
    def test_launch(self, algorithm: str, attention: str, width: int, needs: SamplingFeatures) -> None:
        setup = Setup(attention=attention, **TREE) if algorithm != "none" else Setup(attention=attention).plain()
        engine = replace(setup, algorithm=algorithm).engine()
        table = engine.executor.runner.table
        before = {name: value.clone() for name, value in vars(table).items() if isinstance(value, torch.Tensor)}
        launch_input = LaunchInput(slots=(), sampling_features=needs, width=width)
        assert engine.executor.launch(launch_input).result() == []
        for name, value in before.items():
            assert torch.equal(getattr(table, name), value), name

    def test_the_dummy_request_alone(self) -> None:
        """A batch of padding decides nothing and leaves the dummy row as it was."""
        engine = Setup(**TREE).engine()
        table = engine.executor.runner.table
        for root in range(4):
            table.root[0] = root
            (row,) = engine.executor.launch(LaunchInput(slots=(0,), sampling_features=SamplingFeatures())).result()
            assert row.tokens == []
            assert row.is_finite
            assert (int(table.prefix_len[0]), int(table.root[0])) == (0, root)

    def test_padding_changes_nobody(self) -> None:
        """Requests beside dummy rows say what they say alone."""
        setup = Setup(page_size=2, **TREE)
        engine, requests = setup.engine(), [request(i, p) for i, p in enumerate(prompts(24, (5, 20, 33)))]
        right = engine.executor.run

        def padded(launch_input: LaunchInput) -> list:
            lengths = (*launch_input.lengths, 0) if launch_input.is_prefill else ()
            pieces = (*launch_input.pieces, (len(launch_input.lengths), 0)) if launch_input.pieces else ()
            used = len(launch_input.pieces or launch_input.lengths)
            if launch_input.is_prefill and used == engine.layout.max_pieces(launch_input.width):
                return right(launch_input)
            return right(replace(launch_input, slots=(*launch_input.slots, 0), lengths=lengths, pieces=pieces))[:-1]

        engine.executor.run = padded  # type: ignore[method-assign]
        run_watched(engine, [(i, r) for i, r in enumerate(requests)])
        all_undisturbed(setup, requests)
