"""A tree for each batch: tokens are those of plain decoding and of one tree for all, whatever shapes a request meets as
the batch grows and shrinks, and a draft that paused goes on as if it never had."""

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from espalier.engine.engine import Engine
from espalier.engine.launch_input import LaunchInput, RoundTrace
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.request import Request, SamplingParams
from tests.engine.alone import plainly
from tests.gpu.traffic import mixed, run_staggered
from tests.harness import Setup, prompts, request, run
from tests.pages import check_pages
from tests.pairwise import fewer, in_turn_params

# Rounds of 1 have the configured tree; those of 2, of 4 and of 6 are small ones of several forms.
TREES = ((2, TreeShape(2, 2, 5)), (3, PLAIN_TREE), (4, TreeShape(3, 1, 4)), (5, PLAIN_TREE), (6, TreeShape(1, 3, 3)))
SETUP = Setup(topk=3, steps=4, num_draft_tokens=14, max_batch=6, page_size=4, trees=TREES)


@dataclass
class Seen:
    """Nodes and depth of the trees of an engine's rounds, by batch."""

    engine: Engine
    shapes: dict[int, set[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        launch = self.engine.executor.launch

        def seeing(launch_input: LaunchInput) -> Any:
            handle = launch(replace(launch_input, reports_trees=True))
            if not launch_input.is_prefill:
                rows = handle.result()
                trees = [row.tree for row in rows if row.tree is not None]
                self.shapes.setdefault(len(launch_input.slots), set()).update(
                    (sum(token >= 0 for token in tree.tokens), max(tree.depths)) for tree in trees
                )
            return handle

        self.engine.executor.launch = seeing  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("algorithm", "overlap"),
    fewer(in_turn_params(["ngram", "eagle3"], [False, True]), lambda algorithm, _: algorithm == "eagle3"),
)
def test_tokens_are_those_of_plain_decoding_and_of_one_tree(algorithm, overlap):
    setup = replace(SETUP, algorithm=algorithm, overlap=overlap)
    requests = mixed(13, max_tokens=16)
    engine = setup.engine()
    seen = Seen(engine)
    run_staggered(engine, requests, every=2)
    for r, one in zip(requests, by_one_tree(algorithm), strict=True):
        assert r.output == plainly(setup, r).tokens, r.id
        assert r.output == one, r.id
    assert set(seen.shapes) == {1, 2, 3, 4, 5, 6}
    for batch, shapes in seen.shapes.items():
        tree = setup.layout.for_batch(batch).tree
        assert max(nodes for nodes, _ in shapes) <= tree.num_draft_tokens
        assert max(depth for _, depth in shapes) <= tree.steps
    if algorithm == "eagle3":
        assert all(
            max(seen.shapes[batch])[0] == setup.layout.for_batch(batch).num_draft_tokens for batch in range(1, 7)
        )


@cache
def by_one_tree(algorithm: str) -> list[list[int]]:
    return run(replace(SETUP, algorithm=algorithm, trees=()).engine(), mixed(13, max_tokens=16)).tokens


def test_few_pages_preemptions_and_aborts_change_nothing():
    engine = replace(SETUP, num_pages=28, overlap=True, max_context=64).engine()
    random, requests = Random(3), mixed(10, max_tokens=16)
    for r in requests:
        engine.add(r)
        for _ in range(random.randint(0, 3)):
            engine.step()
            check_pages(engine)
        if random.random() < 0.15:
            engine.abort(random.choice(requests[: r.arrival_index + 1]).id)
    while engine.has_work:
        engine.step()
        check_pages(engine)
    assert engine.scheduler.num_preempted > 0
    for r in requests:
        tokens = plainly(replace(SETUP, max_context=64), r).tokens
        assert r.output == (tokens[: len(r.output)] if r.finish_reason == "abort" else tokens), r.id


def paused(trees: tuple[tuple[int, TreeShape], ...], temperature: float) -> tuple[list[RoundTrace], dict[int, Any]]:
    """Rounds of a request that another joins for a while and leaves; and, by where its root then stood, what the draft
    carries and its rows of all tokens so far."""
    setup = replace(SETUP, max_batch=2, trees=trees, prefix_cache=False)
    engine, first, second = setup.engine(), *company(temperature)
    traces: list[RoundTrace] = []
    carried: dict[int, Any] = {}
    engine.scheduler.on_round = traces.append
    engine.add(first)
    joined = False
    while not first.is_done:
        if len(traces) == 3 and not joined:
            engine.add(second)
            joined = True
        engine.step()
        if first.slot is not None and first.output:
            carried[first.num_known] = drafted_state(engine, first)
    engine.close()
    assert second.is_done
    return [trace for trace in traces if trace.request_id == first.id], carried


def company(temperature: float) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=60)
    return [
        request(i, prompt, replace(params, max_tokens=tokens))
        for i, (prompt, tokens) in enumerate(zip(prompts(5, [7, 5]), (60, 14), strict=True))
    ]


def drafted_state(engine: Engine, r: Request) -> tuple[torch.Tensor, list[torch.Tensor]]:
    round = engine.executor.runner
    table, size = round.table, round.layout.page_size
    rows = [r.pages[at // size] * size + at % size for at in range(1, r.num_known + 1)]
    layer = len(round.target.layer_specs)
    return table.carried["hidden"][r.slot].clone(), [buffer[rows].clone() for buffer in round.pages.layers[layer]]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 2.0])
def test_a_draft_that_paused_goes_on_as_if_it_never_had(temperature):
    always, states = paused((), temperature)
    rounds, paused_states = paused(((2, PLAIN_TREE),), temperature)
    # The last rounds may accept no guess, and have none.
    end = 7 + 60 - 2
    single = [t for t in rounds if sum(token >= 0 for token in t.tree.tokens) == 1 and t.prefix_len < end]
    last = single[-1].prefix_len
    assert len(single) >= 13
    both = sorted(states.keys() & paused_states.keys())
    during = [at for at in both if single[0].prefix_len < at <= last]
    after = {trace.prefix_len: trace for trace in always if trace.prefix_len > last}
    common = [(trace, after[trace.prefix_len]) for trace in rounds if trace.prefix_len in after]
    assert during and len(common) >= 4 and max(len(trace.emitted) for trace, _ in common) > 1
    for at in both:
        (hidden, rows), (other, others) = states[at], paused_states[at]
        torch.testing.assert_close(hidden, other, rtol=1e-9, atol=1e-11)
        for one, two in zip(rows, others, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)
    for one, two in common:
        assert (one.emitted, one.tree.tokens) == (two.emitted, two.tree.tokens)


def test_depths_below_a_batchs_own_tree_are_not_counted_as_tried():
    ran = run(replace(SETUP, trees=((1, TreeShape(2, 2, 5)),)).engine(), mixed(4, max_tokens=20))
    assert len(ran.stats.rounds_tried_by_depth) == 2
    assert ran.stats.drafted <= 4 * ran.stats.rounds
