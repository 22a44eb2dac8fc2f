"""The three equalities hold of requests that were disturbed: chunked, preempted, aborted beside, or found in the prefix
cache."""

from dataclasses import replace

import pytest
import torch

from espalier.engine.launch_input import LaunchInput
from espalier.request import Request, SamplingParams
from tests.harness import Setup, prompts, request
from tests.pairwise import fewer, in_turn_params, product_params
from tests.properties import scenarios
from tests.properties.layouts import reference_of
from tests.properties.watch import Watch, run_watched

SETUP = Setup(steps=3, topk=2, num_draft_tokens=9, page_size=2, max_batch=3, max_context=64, chunk_size=16)
loops = pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
ALGORITHMS = ["eagle3", "ngram"]
pages_and_loops_in_turn = pytest.mark.parametrize(
    ("page_size", "overlap"), fewer(in_turn_params([1, 2, 3], [True, False]), lambda page_size, _: page_size == 3)
)


def watched(setup: Setup) -> Watch:
    return Watch(setup.engine(), setup.algorithm, reference_of(setup))


def asked(index: int, prompt: list[int], **style) -> Request:
    return request(index, prompt, SamplingParams(**{"temperature": 3.0, "max_tokens": 6, **style}))


@pages_and_loops_in_turn
def test_a_hit_of_every_length_with_every_divergence(page_size, overlap):
    """First a trunk, then prompts that leave it after each of its tokens: nothing tells a row that was found from one
    made."""
    watch = watched(replace(SETUP, page_size=page_size, overlap=overlap))
    trunk = prompts(29, [9])[0]
    branches = [[*trunk[:kept], (trunk[kept] + 1) % 16, *trunk[kept + 1 :]] for kept in range(len(trunk))]
    requests = [asked(0, trunk), *(asked(i, prompt) for i, prompt in enumerate([*branches, trunk, trunk[:5]], 1))]
    run_watched(watch, requests[:1], last=False)
    run_watched(watch, requests[1:])
    whole = [kept // page_size * page_size for kept in range(len(trunk))]
    assert [r.cached_tokens for r in requests[1 : 1 + len(trunk)]] == whole


# Far below what the equalities can see, and nothing that a computation would come to: only a write wipes it out.
MARK = 1e-11


@pages_and_loops_in_turn
def test_a_shared_page_is_never_written_not_even_what_it_holds(page_size, overlap):
    watch = watched(replace(SETUP, page_size=page_size, overlap=overlap))
    trunk = prompts(29, [9])[0]
    run_watched(watch, [asked(0, trunk)], last=False)
    prefixes, pages = watch.engine.prefix_tree, watch.engine.executor.runner.pages
    assert prefixes is not None
    shared = [page * page_size + row for page in prefixes.pages() for row in range(page_size)]
    for buffer in (buffer for pair in pages.layers.values() for buffer in pair):
        buffer[shared] *= 1 + MARK
    marked = [buffer[shared] for pair in pages.layers.values() for buffer in pair]
    hits = [asked(i, [*trunk[:kept], 5], max_tokens=4) for i, kept in enumerate([9, 8, 5, 2, 1], 1)]
    run_watched(watch, [*hits, asked(9, trunk)])
    now = [buffer[shared] for pair in pages.layers.values() for buffer in pair]
    # As bits: a row that does not exist holds the NaN that its page was handed out with.
    bits = [(a.view(torch.int64), b.view(torch.int64)) for a, b in zip(marked, now, strict=True)]
    assert all(torch.equal(before, after) for before, after in bits)
    assert sum(r.cached_tokens for r in hits) > 0


# With states, test_states.py has it by default.
@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True])
def test_pages_without_draft_rows_serve_no_draft(overlap):
    scenarios.opt_out(watched, replace(SETUP, overlap=overlap))


@pytest.mark.parametrize(
    ("algorithm", "overlap"),
    fewer(in_turn_params(ALGORITHMS, [False, True]), lambda algorithm, _: algorithm == "eagle3"),
)
def test_preempted_requests_are_as_if_undisturbed(algorithm, overlap):
    setup = replace(SETUP, algorithm=algorithm, overlap=overlap, num_pages=26, max_context=40)
    watch = watched(setup)
    style = {"max_tokens": 22, "presence_penalty": 0.6, "repetition_penalty": 1.3}
    run_watched(watch, [asked(i, prompt, **style) for i, prompt in enumerate(prompts(31, [5, 9, 7, 12]))])
    assert watch.engine.scheduler.num_preempted > 0


@loops
def test_a_prompt_of_many_chunks_beside_running_requests(overlap):
    watch = watched(replace(SETUP, overlap=overlap, page_size=3))
    lengths = [3, 52, 49]
    run_watched(watch, [asked(i, prompt, max_tokens=12) for i, prompt in enumerate(prompts(37, lengths))])


@pytest.mark.parametrize(
    ("keeps", "algorithm", "overlap"),
    fewer(
        product_params(["kv", "latent"], ALGORITHMS, [False, True]),
        lambda *cell: cell in (("kv", "eagle3", True), ("latent", "ngram", False)),
    ),
)
def test_a_prompt_in_pieces_of_one_pass(keeps, algorithm, overlap):
    """A piece reads the pieces before it through the pages, in the pass that enters them all."""
    setup = replace(SETUP, overlap=overlap, algorithm=algorithm, keeps=keeps, chunk_size=64, max_context=128)
    watch = watched(setup)
    launch, pieces = watch.engine.executor.launch, []

    def launching(launch_input: LaunchInput):
        pieces.append(len(launch_input.pieces))
        return launch(launch_input)

    watch.engine.executor.launch = launching  # type: ignore[method-assign]
    run_watched(watch, [asked(i, prompt) for i, prompt in enumerate(prompts(43, [90, 5, 40]))])
    assert max(pieces) >= 3


@pytest.mark.parametrize(
    ("keeps_and_batch", "algorithm", "overlap"),
    fewer(
        in_turn_params([("kv", 4), ("kv", 2), ("latent", 4)], ALGORITHMS, [False, True]),
        lambda keeps_and_batch, *_: keeps_and_batch != ("kv", 2),
    ),
)
def test_prompts_in_passes_that_are_padded_as_for_a_graph(keeps_and_batch, algorithm, overlap):
    keeps, max_batch = keeps_and_batch
    setup = replace(SETUP, overlap=overlap, algorithm=algorithm, keeps=keeps, max_batch=max_batch)
    setup = replace(setup, chunk_size=192, max_context=128)
    watch = watched(setup)
    engine, padding = watch.engine, []
    captured = engine.layout.captured_passes
    engine.scheduler.captured_passes = engine.executor.captured_passes = captured
    launch = engine.executor.launch

    def launching(launch_input: LaunchInput):
        if launch_input.is_prefill:
            form = launch_input.form(captured)
            rows = sum(-(-length // form.width) for length in launch_input.lengths)
            padding.append((form.batch - len(launch_input.slots), form.pieces - rows))
        return launch(launch_input)

    engine.executor.launch = launching  # type: ignore[method-assign]
    lengths = [40, 5, 20, 70, 5, 52, 3, 18, 33]
    run_watched(watch, [asked(i, prompt) for i, prompt in enumerate(prompts(43, lengths))])
    assert max(requests for requests, _ in padding) > 0 and max(pieces for _, pieces in padding) > 0


@loops
def test_an_aborted_request_leaves_the_others_as_they_were(overlap):
    watch = watched(replace(SETUP, overlap=overlap))
    requests = [asked(i, prompt, max_tokens=20) for i, prompt in enumerate(prompts(41, [5, 9, 7, 6]))]
    for added in requests:
        watch.engine.add(added)
    for _ in range(5):
        watch.engine.step()
    watch.engine.abort("r1")
    run_watched(watch, [])
    assert [r.finish_reason for r in requests] == ["length", "abort", "length", "length"]
    watch.check_outputs([r for r in requests if r.id != "r1"])
    aborted = requests[1].output
    assert aborted == watch.reference.plain(requests[1]).output(64)[: len(aborted)]
