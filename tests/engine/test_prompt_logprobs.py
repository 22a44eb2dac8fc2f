"""Log-probabilities of a prompt: transformers' own, in whatever chunks it is entered, and once each."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import nan

import numpy as np
import pytest
import torch
from torch import Tensor

from espalier.engine.engine import Engine
from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.logprobs import CHOSEN, TokenLogprob
from espalier.request import OutputChunk, Request, SamplingParams
from espalier.sampling import prompt as sampling_prompt
from espalier.speculate import round
from espalier.speculate.logit_slices import MAX_PROMPT_LOGIT_BYTES, max_logit_rows
from tests.engine.watching import SharedPages, run_watched
from tests.harness import DTYPE, VOCAB, Setup, directories, prompts, request
from tests.models.reference import load_reference, reference_logits
from tests.pages import check_pages
from tests.pairwise import fewer, in_turn_params, pairwise_params

SETUP = Setup(page_size=2, topk=4, steps=3, num_draft_tokens=10, max_batch=3, chunk_size=16)
WISH = SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=3)
# Longest first: what is narrower joins its passes.
LENGTHS = (41, 33, 16, 17, 2, 1, 8)
each_loop = pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])


@cache
def reference(family: str):
    return load_reference(directories(family)[0], DTYPE)


@cache
def expected(prompt: tuple[int, ...], family: str = "llama") -> Tensor:
    """Row i: of the token at i + 1."""
    return torch.log_softmax(reference_logits(reference(family), torch.tensor([prompt]))[0][0], -1)


def check(r: Request, family: str = "llama") -> None:
    """What was reported is transformers', of every position but the first."""
    count = r.params.prompt_logprobs
    assert count is not None and r.prompt_logprobs_to_report is not None
    assert r.prompt_logprobs_to_report[0] is None and len(r.prompt_logprobs_to_report) == len(r.prompt)
    rows = expected(tuple(r.prompt), family)
    for entry, row, token in zip(r.prompt_logprobs, rows, r.prompt[1:], strict=False):
        assert entry.token_id == token
        assert abs(entry.logprob - float(row[token])) < 1e-10
        order = row.sort(descending=True)
        assert entry.rank == 1 + order.indices.tolist().index(token)
        assert [found for found, _ in entry.top] == order.indices[:count].tolist()
        assert torch.allclose(torch.tensor([v for _, v in entry.top], dtype=DTYPE), order.values[:count], atol=1e-10)


def wishing(seed: int, lengths: Iterable[int] = LENGTHS, wish: SamplingParams = WISH) -> list[Request]:
    """Each asks for another number of alternatives."""
    return [
        request(i, p, replace(wish, prompt_logprobs=(3, 0, 1, 16)[i % 4]))
        for i, p in enumerate(prompts(seed, list(lengths)))
    ]


def pieces_of(engine: Engine, requests: list[Request]) -> list[OutputChunk]:
    for r in requests:
        engine.add(r)
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    engine.close()
    return pieces


@pytest.mark.parametrize(
    ("page_size", "chunk_size", "overlap"),
    fewer(
        pairwise_params([1, 3, 16], [16, 24, 512], [False, True]),
        lambda page_size, chunk_size, _: page_size != 16 and chunk_size != 24,
    ),
)
def test_they_are_transformers(page_size: int, chunk_size: int, overlap: bool) -> None:
    requests = wishing(1)
    # Who does not ask shares the passes, and hears nothing.
    silent = [request(10 + i, p, replace(WISH, prompt_logprobs=None)) for i, p in enumerate(prompts(2, (20, 40)))]
    setup = replace(SETUP, page_size=page_size, chunk_size=chunk_size, overlap=overlap)
    run_watched(
        setup.engine(), [(0, r) for pair in zip(requests, [*silent, *[None] * 5], strict=True) for r in pair if r]
    )
    for r in requests:
        check(r)
    assert [r.prompt_logprobs_to_report for r in silent] == [None, None]


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [
        ("qwen2", "eagle3"),
        ("qwen3", "ngram"),
        ("mistral", "none"),
        ("mistral", "eagle3"),
    ],
)
def test_of_each_family_and_drafter(family: str, algorithm: str) -> None:
    setup = SETUP if algorithm != "none" else SETUP.plain()
    requests = wishing(3)
    run_watched(replace(setup, family=family, algorithm=algorithm).engine(), [(0, r) for r in requests])
    for r in requests:
        check(r, family)


def test_a_chunk_without_rows_beside_a_request_that_wants_fewer() -> None:
    """The first prompt ends one row after a chunk, so its last chunk reports nothing, in a pass of fewer columns."""
    requests = [
        request(i, p, replace(WISH, prompt_logprobs=count))
        for i, (p, count) in enumerate(zip(prompts(9, [33, 5]), (4, 1), strict=True))
    ]
    run_watched(replace(SETUP, chunk_size=32).engine(), [(0, r) for r in requests])
    for r in requests:
        check(r)


def test_a_chunk_of_one_row() -> None:
    """A prompt that ends one row after a chunk: its token is the next chunk's first."""
    for length in (16, 17, 18, 32, 33, 34):
        [r] = wishing(4, [length])
        run_watched(SETUP.engine(), [(0, r)])
        check(r)


@pytest.mark.parametrize(
    ("style", "overlap"), fewer(in_turn_params(["shaped", "greedy"], [False, True]), lambda style, _: style == "shaped")
)
def test_speculation_changes_nothing(style: str, overlap: bool) -> None:
    """Equal to the bit, and raw: neither temperature nor bias nor penalties touch them."""
    shaped = replace(WISH, temperature=1.0, presence_penalty=0.5, logit_bias={3: 2.0})
    wish = shaped if style == "shaped" else WISH
    with_trees, plain = wishing(5, wish=wish), wishing(5, wish=wish)
    run_watched(replace(SETUP, overlap=overlap).engine(), [(0, r) for r in with_trees])
    run_watched(replace(SETUP.plain(), overlap=overlap).engine(), [(0, r) for r in plain])
    for a, b in zip(with_trees, plain, strict=True):
        check(a)
        assert a.prompt_logprobs == b.prompt_logprobs and a.output == b.output


class TestPrefixHits:
    """A hit's shared pages are read, never written, and every position is reported all the same."""

    @pytest.mark.parametrize(
        ("page_size", "algorithm", "overlap"), in_turn_params([1, 3, 16], ["eagle3", "none"], [False, True])
    )
    def test_equal_no_hit(self, page_size: int, algorithm: str, overlap: bool) -> None:
        setup = replace(SETUP if algorithm == "eagle3" else SETUP.plain(), page_size=page_size, overlap=overlap)
        engine = setup.engine()
        shared = SharedPages(engine)
        first, again, longer = (request(i, p, WISH) for i, p in enumerate(hits(page_size)))
        for r in (first, again, longer):
            engine.add(r)
            while engine.has_work:
                engine.step()
                check_pages(engine)
                shared.check()
        engine.close()
        assert shared.compared and (first.cached_tokens, again.cached_tokens) == (0, 40 // page_size * page_size)
        assert again.prompt_logprobs == first.prompt_logprobs, "the same chunks: equal to the bit"
        assert again.output == first.output
        for r in (first, again, longer):
            check(r)

    @pytest.mark.parametrize(
        ("page_size", "overlap"), fewer(in_turn_params([1, 2, 5], [False, True]), lambda page_size, _: page_size != 2)
    )
    def test_of_rows_that_rounds_wrote(self, page_size: int, overlap: bool) -> None:
        """What a request said is the next one's prompt, and who asks for nothing hits as far as ever."""
        setup = replace(SETUP, page_size=page_size, overlap=overlap)
        engine = setup.engine()
        first = request(0, prompts(6, [9])[0], replace(WISH, max_tokens=30))
        run_on(engine, first)
        pages = engine.executor.runner.pages
        for stack in (*pages.target_stacks, *pages.draft_stacks):
            # Whoever writes a shared row again takes this away.
            for rows in stack.planes:
                rows[:, 1:] *= 1 + 1e-13
        second, third = request(1, first.tokens, WISH), request(2, first.tokens, replace(WISH, prompt_logprobs=None))
        run_on(engine, second)
        assert second.cached_tokens > 30
        check(second)
        passes: list[int] = []
        right = engine.scheduler._launch_prefill

        def counted(entering: list[Request], max_rows: int):
            launch = right(entering, max_rows)
            passes.extend(launch.launch_input.lengths)
            return launch

        engine.scheduler._launch_prefill = counted  # type: ignore[method-assign]
        run_on(engine, third)
        assert sum(passes) <= page_size + 1, "who asks for nothing is not entered from the start"
        assert second.output == third.output


def hits(page_size: int) -> list[list[int]]:
    base = prompts(7, [40])[0]
    return [base, base, [*base[:-page_size], *prompts(8, [12])[0]]]


def run_on(engine: Engine, r: Request) -> None:
    shared = SharedPages(engine)
    shared.check()
    engine.add(r)
    while engine.has_work:
        engine.step()
        check_pages(engine)
        shared.check()


class TestPreemption:
    """Whoever is put back goes on with the first position that was not reported."""

    @pytest.mark.parametrize(
        ("prefix_cache", "overlap"),
        [
            pytest.param(False, False, id="uncached", marks=pytest.mark.full),
            pytest.param(True, True, id="cached"),
            pytest.param(False, True, id="uncached-overlap", marks=pytest.mark.full),
            pytest.param(True, False, id="cached-lockstep", marks=pytest.mark.full),
        ],
    )
    def test_in_the_midst_of_a_prompt(self, prefix_cache: bool, overlap: bool) -> None:
        """At any step; half of its prompt is a hit, so that it re-enters below, at and above what is shared."""
        base, been = prompts(9, [60])[0], set()
        for at in range(4, 12, 2):
            engine = replace(SETUP, prefix_cache=prefix_cache, overlap=overlap).engine()
            decoding, r = request(0, base[:30], replace(WISH, max_tokens=20)), request(1, base, WISH)
            decoding.streamed = True  # rounds come between the chunks of the prompt
            sizes: list[int] = []
            watch_sizes(engine, sizes)
            short = ShortOfPages(engine)
            run_watched(engine, [(0, decoding), (3, r)], lambda step, short=short, at=at: short.ask(step == at))
            check(decoding)
            check(r)
            assert sum(sizes) == 29 + 59, "each position is asked for once"
            been |= {read for name, read in short.put_back if name == "r1"}
        assert {16, 32, 59} <= been, "in the midst and at the end"

    @pytest.mark.parametrize(
        ("num_pages", "overlap"), fewer(in_turn_params([24, 33], [True, False]), lambda num_pages, _: num_pages == 24)
    )
    def test_for_want_of_pages(self, num_pages: int, overlap: bool) -> None:
        setup = replace(SETUP, page_size=4, overlap=overlap, max_context=80, max_batch=4, num_pages=num_pages)
        requests = wishing(20, (5, 9, 7, 60), replace(WISH, max_tokens=40))
        engine = setup.engine()
        run_watched(engine, [(i + 6 * (i == 3), r) for i, r in enumerate(requests)])
        assert engine.scheduler.num_preempted > 0
        for r in requests:
            check(r)


class ShortOfPages:
    """An engine whose pool seems empty when asked, until somebody is put back.  put_back: (its id, positions read)."""

    def __init__(self, engine: Engine) -> None:
        self.is_short = False
        self.put_back: list[tuple[str, int]] = []
        scheduler = engine.scheduler
        extend, preempt = scheduler._extend_pages, scheduler._preempt

        def put_back(r: Request) -> None:
            self.is_short = False
            self.put_back.append((r.id, len(r.prompt_logprobs)))
            preempt(r)

        scheduler._extend_pages = lambda r: not self.is_short and extend(r)  # type: ignore[method-assign]
        scheduler._preempt = put_back  # type: ignore[method-assign]

    def ask(self, now: bool) -> None:
        self.is_short |= now


def watch_sizes(engine: Engine, sizes: list[int]) -> None:
    """Rows that launches are asked to report, as they come."""
    right = engine.executor.run

    def run(launch_input: LaunchInput) -> list[RequestResult]:
        sizes.extend([] if launch_input.prompt_rows is None else launch_input.prompt_rows.num_rows_by_request)
        return right(launch_input)

    engine.executor.run = run  # type: ignore[method-assign]


@each_loop
def test_what_is_no_number_ends_the_request(overlap: bool) -> None:
    """One position of the second chunk: who asked fails by name, whoever comes after does not."""
    engine = replace(SETUP, overlap=overlap).engine()
    [r, mate] = wishing(17, (40, 30))
    right, launches = engine.executor.run, []

    def run(launch_input: LaunchInput) -> list[RequestResult]:
        launches.append(launch_input)
        [row, *others] = right(launch_input)
        if len(launches) == 2:
            row.prompt_logprobs.view(np.float64)[0, CHOSEN] = nan
        return [row, *others]

    engine.executor.run = run  # type: ignore[method-assign]
    run_watched(engine, [(0, r), (9, mate)])
    assert (r.finish_reason, r.output) == ("abort", []) and "not finite" in (r.error or "")
    check(mate)


@each_loop
def test_no_tokens_at_all(overlap: bool) -> None:
    """max_tokens=0: the prompt is scored, and nothing is said; with a round in flight or without."""
    requests = wishing(12, wish=replace(WISH, max_tokens=0))
    beside = request(20, prompts(13, [5])[0], SamplingParams(temperature=0.0, max_tokens=9))
    pieces = pieces_of(replace(SETUP, overlap=overlap).engine(), [*requests, beside])
    for r in requests:
        check(r)
        assert (r.output, r.finish_reason, r.error) == ([], "length", None)
        [piece] = [p for p in pieces if p.request_id == r.id]
        assert (piece.token_ids, piece.prompt_logprobs, piece.finish_reason) == (
            [],
            r.prompt_logprobs_to_report,
            "length",
        )
    assert len(beside.output) == 9


@each_loop
def test_they_come_once_with_the_first_token(overlap: bool) -> None:
    requests = wishing(14)
    pieces = pieces_of(replace(SETUP, overlap=overlap).engine(), requests)
    for r in requests:
        own = [piece for piece in pieces if piece.request_id == r.id]
        assert own[0].prompt_logprobs == r.prompt_logprobs_to_report and own[0].token_ids
        assert [piece.prompt_logprobs for piece in own[1:]] == [None] * (len(own) - 1)


def test_a_fit_to_the_contexts_end() -> None:
    """The longest prompt there is, in the pages that it just fills."""
    for page_size in (1, 4, 16):
        setup = replace(SETUP, page_size=page_size, max_context=48, max_batch=1)
        r = request(0, prompts(15, [47])[0], replace(WISH, max_tokens=0))
        run_watched(replace(setup, num_pages=1 + setup.layout.pages_for(48)).engine(), [(0, r)])
        check(r)


def test_pieces_of_the_head_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(most: int) -> list[list[TokenLogprob]]:
        asked: list[int] = []
        requests, engine = wishing(16), replace(SETUP, chunk_size=512).engine()
        right = sampling_prompt.logprobs
        monkeypatch.setattr(round, "max_logit_rows", lambda vocab: most)
        monkeypatch.setattr(
            sampling_prompt, "logprobs", lambda rows, *others: asked.append(len(rows)) or right(rows, *others)
        )
        run_watched(engine, [(0, r) for r in requests])
        monkeypatch.undo()
        assert max(asked) <= most
        return [r.prompt_logprobs for r in requests]

    whole = ran(512)
    for most in (1, 2, 7):
        for apart, together in zip(ran(most), whole, strict=True):
            assert [(e.token_id, e.rank, [t for t, _ in e.top]) for e in apart] == [
                (e.token_id, e.rank, [t for t, _ in e.top]) for e in together
            ]
            assert all(abs(a.logprob - b.logprob) < 1e-12 for a, b in zip(apart, together, strict=True))


def test_the_bound_is_in_bytes() -> None:
    for vocab in (VOCAB, 32_000, 128_256, 2 * MAX_PROMPT_LOGIT_BYTES):
        rows = max_logit_rows(vocab)
        assert rows >= 1 and (rows == 1 or rows * vocab * 4 <= MAX_PROMPT_LOGIT_BYTES < (rows + 1) * vocab * 4)
