"""Layers that keep a state: after every launch the state of every slot is that of one plain pass over its tokens, and
so is every snapshot; tokens are plain decoding's.

The watch holds these beside the three equalities (tests/properties/watch.py:check_state, check_snapshots)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from espalier.engine.engine import Engine
from espalier.engine.launch_input import LaunchInput
from espalier.engine.state_keeper import StateKeeper
from espalier.layout import TreeShape, max_draft_tokens
from espalier.request import Request, SamplingParams
from tests.grammar.test_lossless import asked as in_grammars
from tests.harness import Setup, prompts, request, run
from tests.pages import check_pages
from tests.pairwise import fewest_params, pairwise, rows_of
from tests.properties import scenarios
from tests.properties.layouts import reference_of
from tests.properties.mtp_setup import MTPSetup, mtp_reference_of
from tests.properties.watch import Watch, run_watched

# A draft, and the blocks of the target.
SETUPS: dict[str, Setup] = {
    "eagle3, toy": Setup(keeps="hybrid"),
    "ngram, toy": Setup(keeps="hybrid_conv", algorithm="ngram"),
    "mtp, qwen3_5": MTPSetup(family="qwen3_5"),
    "eagle3, qwen3_next": Setup(family="qwen3_next"),
    "eagle3, lfm2": Setup(family="lfm2"),
    "eagle3, granite_hybrid": Setup(family="granite_hybrid"),
    "eagle3, nemotron_h": Setup(family="nemotron_h"),
}
# nodes: of a tree, or all that its steps and topk allow.
TREES: dict[str, Sequence[Any]] = {
    "topk": (1, 2, 4, 8),
    "steps": (1, 3, 5),
    "nodes": (8, 33, 129),
    "page_size": (1, 16, 64, 256),
}
AROUND: dict[str, Sequence[Any]] = {
    "overlap": (False, True),
    "chunk_size": (16, 48),
    "num_snapshots": (0, 3, 12),
    "attention": ("sdpa", "reference"),
}
# What the other setups have, tests/models and test_faults.py show.
ARRAY = {"setup": tuple(SETUPS)[:3], "topk": (1, 4), "steps": (1, 5), "page_size": (1, 16), "num_snapshots": (0, 12)}
CELLS = pairwise({**TREES, "nodes": (8, 33), **AROUND, **ARRAY}, lambda cell: False)
STYLES = ({"temperature": 0.0}, {"temperature": 6.0}, {"temperature": 1.2, "presence_penalty": 0.5})


def whole_product() -> Iterator[dict[str, Any]]:
    """All trees for each setup; what stands around them changes from one to the next."""
    trees = [cell for cell in rows_of(TREES) if cell["nodes"] <= fewest_for_all(cell)]
    around = list(rows_of({name: AROUND[name] for name in ("overlap", "chunk_size")}))
    for setup in SETUPS:
        yield from ({"setup": setup, **cell, **around[i % len(around)]} for i, cell in enumerate(trees))


def fewest_for_all(cell: Mapping[str, Any]) -> int:
    """The smallest of the product's numbers of nodes that holds every node of these steps and topk, or the largest."""
    most = max_draft_tokens(cell["steps"], cell["topk"])
    return min((nodes for nodes in TREES["nodes"] if nodes >= most), default=max(TREES["nodes"]))


def watched(setup: Setup, prompt_tokens: int = 12) -> Watch:
    """prompt_tokens: a pass ends where a snapshot of a prompt is taken, if another one follows."""
    reference = mtp_reference_of(setup) if isinstance(setup, MTPSetup) else reference_of(setup)
    watch = Watch(setup.engine(), setup.algorithm, reference)
    keeper = watch.engine.scheduler.state_keeper
    assert isinstance(keeper, StateKeeper)
    # So that short texts have several snapshots.
    keeper.decode_interval, keeper.prompt_interval = 5, prompt_tokens
    return watch


def asked(index: int, prompt: list[int], **style: Any) -> Request:
    return request(index, prompt, SamplingParams(**{**STYLES[index % 3], "max_tokens": 7, **style}))


def hold(cell: Mapping[str, Any]) -> list[Request]:
    """Four prompts over three slots, some cut; then each text goes on, as the next turn of a conversation."""
    fields = {name: value for name, value in cell.items() if name not in ("setup", "nodes")}
    nodes = min(max_draft_tokens(cell["steps"], cell["topk"]), cell["nodes"])
    # One text is longer than a page.
    long = max(cell["page_size"] + 6, 34)
    sizes = {"num_draft_tokens": nodes, "max_batch": 3, "max_context": long + 62}
    watch = watched(replace(SETUPS[cell["setup"]], **fields, **sizes))
    first = [asked(i, prompt) for i, prompt in enumerate(prompts(11, [23, 1, long, 18]))]
    run_watched(watch, first, last=False)
    turns = [asked(i, [*r.prompt, *r.output, 5, 2], max_tokens=5) for i, r in enumerate(first, 10)]
    run_watched(watch, turns)
    return turns


# Pairs of sizes, and of what is around, meet in test_layouts.py.
@pytest.mark.parametrize("cell", fewest_params(CELLS))
def test_every_property_holds(cell):
    turns = hold(cell)
    if cell["num_snapshots"] == 12 and cell["page_size"] < 64:
        assert sum(r.cached_tokens for r in turns) > 0


@pytest.mark.full
@pytest.mark.parametrize("cell", list(whole_product()), ids=lambda cell: "-".join(map(str, cell.values())))
def test_every_property_holds_in_the_whole_product(cell):
    hold(cell)


SMALL = Setup(
    steps=3, topk=2, num_draft_tokens=9, page_size=2, max_batch=3, max_context=64, chunk_size=16, keeps="hybrid"
)
DELTA = replace(SMALL, keeps="kv", family="qwen3_5", overlap=True)
THREE_MODULES = MTPSetup(**{**vars(DELTA), "algorithm": "mtp"}, form=(3, "chain"))
both = pytest.mark.parametrize("setup", [SMALL, pytest.param(DELTA, marks=pytest.mark.full)], ids=["toy", "delta"])


@pytest.mark.parametrize(
    ("page_size", "setup"),
    [(1, SMALL), pytest.param(3, THREE_MODULES, marks=pytest.mark.full)],
    ids=["toy", "three modules"],
)
def test_a_prefix_hit_of_every_length_and_divergence(page_size, setup):
    scenarios.hit_every_length(watched, replace(setup, page_size=page_size, num_snapshots=40))


@both
@pytest.mark.parametrize("chunk_size", [16, 64], ids=["chunks", "pieces"])
def test_a_prompt_is_cut_behind_every_hit(chunk_size, setup):
    scenarios.cut_behind_hits(partial(watched, prompt_tokens=64), setup, chunk_size)


def test_log_probabilities_of_a_cached_prompt_compute_rows_again():
    scenarios.ask_of_cached_prompts(watched, SMALL)


def test_pages_without_draft_rows_serve_no_draft():
    scenarios.opt_out(watched, replace(SMALL, overlap=True))


@both
def test_preempted_requests_are_as_if_undisturbed(setup):
    scenarios.preempt(watched, setup)


def test_a_tree_a_batch():
    scenarios.tree_a_batch(watched, SMALL, TreeShape(2, 2, 5))


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["lock-step", "overlap"])
def test_an_aborted_request_leaves_the_others_as_they_were(overlap):
    watch = watched(replace(SMALL, overlap=overlap))
    requests = [asked(i, prompt, max_tokens=20) for i, prompt in enumerate(prompts(41, [5, 9, 7, 6, 40]))]
    for added in requests:
        watch.engine.add(added)
    for step in range(5):
        watch.engine.step()
        # Before its first launch, and in the middle.
        watch.engine.abort({0: "r4", 4: "r1"}.get(step, ""))
    run_watched(watch, [])
    assert [r.finish_reason for r in requests] == ["length", "abort", "length", "length", "abort"]
    watch.check_outputs([r for r in requests if r.finish_reason == "length"])


@both
def test_passes_that_are_padded_as_for_a_graph(setup):
    """Padding requests and pieces touch no state; a request's last piece is followed by pieces without tokens."""
    watch = watched(replace(setup, chunk_size=192, max_context=128), prompt_tokens=128)
    engine, padding = watch.engine, []
    captured = engine.layout.captured_passes
    engine.scheduler.captured_passes = engine.executor.captured_passes = captured
    launch = engine.executor.launch

    def launching(launch_input: LaunchInput):
        if launch_input.is_prefill:
            form = launch_input.form(captured)
            padding.append((form.batch - len(launch_input.slots), form.pieces - len(launch_input.pieces)))
        return launch(launch_input)

    engine.executor.launch = launching  # type: ignore[method-assign]
    run_watched(watch, [asked(i, prompt) for i, prompt in enumerate(prompts(43, [40, 5, 70, 52, 3, 18]))])
    assert max(requests for requests, _ in padding) > 0 and max(pieces for _, pieces in padding) > 0


def test_a_conversation_finds_its_text_again():
    """Three users behind one system prompt: what was said before is computed once, and no token shows it."""
    setup = replace(SMALL, max_context=512, page_size=4, chunk_size=64)
    with_cache, without = (replace(setup, prefix_cache=on).engine() for on in (True, False))
    with_cache.scheduler.state_keeper.decode_interval = 4
    system, cached, asked_tokens = prompts(3, [30])[0], 0, 0
    said = [[*system, *own] for own in prompts(5, [5, 6, 7])]
    for turn in range(6):
        both_runs = [[asked(10 * turn + i, text, max_tokens=6) for i, text in enumerate(said)] for _ in range(2)]
        for engine, requests in zip((with_cache, without), both_runs, strict=True):
            add_and_step(engine, requests)
        requests, others = both_runs
        assert [r.output for r in requests] == [r.output for r in others]
        asked_tokens += sum(len(r.prompt) for r in requests)
        cached += sum(r.cached_tokens for r in requests)
        said = [[*r.prompt, *r.output, turn, 3] for r in requests]
    assert cached / asked_tokens > 0.75, f"{cached} of {asked_tokens} prompt tokens came from the cache"


def add_and_step(engine: Engine, requests: list[Request]) -> None:
    for added in requests:
        engine.add(added)
    while engine.has_work:
        engine.step()
        check_pages(engine)


def test_snapshots_are_taken_back_least_recently_used_first():
    watch = watched(replace(SMALL, num_snapshots=3, max_batch=1))
    keeper, texts = watch.engine.scheduler.state_keeper, prompts(7, [8, 9, 10, 11])
    run_watched(watch, [asked(i, text, max_tokens=1) for i, text in enumerate(texts)], last=False)
    assert len(keeper.snapshot_rows) == 3
    again = [asked(10 + i, text, max_tokens=1) for i, text in enumerate(texts[::-1])]
    run_watched(watch, again)
    assert [r.cached_tokens for r in again] == [10, 10, 8, 0]


def test_rounds_in_stages_leave_the_same_states():
    """Grammars mask some requests; their snapshots are taken in the settle stage."""
    masked, free = (replace(SMALL, overlap=on, max_context=96, page_size=4) for on in (True, False))
    engine = masked.engine()
    engine.scheduler.state_keeper.decode_interval = 4
    requests, others = (in_grammars(2, 1.2, max_tokens=12) for _ in range(2))
    add_and_step(engine, requests)
    assert [r.output for r in requests] == run(free.plain().engine(), others).tokens
    turns = [asked(20 + i, [*r.prompt, *r.output, 5]) for i, r in enumerate(requests)]
    again = [asked(20 + i, turn.prompt) for i, turn in enumerate(turns)]
    add_and_step(engine, turns)
    assert [r.output for r in turns] == run(free.plain().engine(), again).tokens
    assert sum(r.cached_tokens > len(r.prompt) - 9 for r in turns) > 2
