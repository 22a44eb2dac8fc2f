"""Tokens never depend on which tree a round has: with a tree drawn for each round, every drafter gives what plain
decoding gives, and the host learns from the rounds what their trees say."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from espalier.engine.acceptance import AcceptanceSample
from espalier.engine.engine import Engine
from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.kernels.ops import drafts
from espalier.layout import PLAIN_TREE, TARGET_ONLY, LaunchForm, TreeShape
from espalier.speculate.drafters import path_merging
from tests.engine.alone import plainly
from tests.engine.fake_cuda import FakeGraph, engine_on_fake_cuda, fake_cuda
from tests.gpu.traffic import mixed, run_staggered
from tests.grammar.test_lossless import asked
from tests.harness import Setup, run
from tests.properties.block_setup import BlockSetup
from tests.properties.layouts import reference_of
from tests.properties.mtp_setup import MTPSetup, mtp_reference_of
from tests.properties.peagle_setup import PEagleSetup
from tests.properties.test_ranks import Case
from tests.properties.watch import INCREMENTAL, READY, Watch, run_watched
from tests.ranks import Group

TREE: dict[str, Any] = {"steps": 4, "topk": 3, "num_draft_tokens": 14, "max_batch": 4, "page_size": 4}
SMALL = (PLAIN_TREE, TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(2, 3, 7))
# Rows that are shared out, and rounds without a draft pass.
SHARED, ALONE = TreeShape(4, 3, 14, shared_rows=3), TreeShape(4, 3, 14, drafts=False)
SOURCED = (*SMALL, SHARED, ALONE, TreeShape(2, 3, 7, shared_rows=2, drafts=False))
DRAFTERS = [
    Setup(**TREE),
    Setup(algorithm="ngram", **TREE),
    MTPSetup(form=(2, "chain"), **TREE),
    PEagleSetup(**TREE),
    BlockSetup(form="dspark", **TREE),
    Setup(keeps="hybrid", **TREE),
    Setup(num_text_paths=2, **TREE),
    MTPSetup(form=(2, "chain"), num_text_paths=2, **TREE),
    BlockSetup(form="dspark", num_text_paths=1, **TREE),
]


@dataclass
class AnyTree:
    """A TreeChooser that draws.  picked: what it drew; samples: what it was told."""

    forms: Sequence[TreeShape]
    random: Random = field(default_factory=lambda: Random(5))
    picked: list[TreeShape] = field(default_factory=list)
    samples: list[Sequence[AcceptanceSample]] = field(default_factory=list)
    num_changes: int = 0
    num_prefill_passes: int = 0

    def choose(self, batch: int, num_drafting: int, context: float, lookup_gain: Any = None) -> TreeShape:
        self.picked.append(self.random.choice(self.forms))
        return self.picked[-1]

    def record(
        self, samples: Sequence[AcceptanceSample], rows: int, lookup_samples: Sequence[AcceptanceSample]
    ) -> None:
        self.samples.append(samples)

    def prefill_launched(self) -> None:
        self.num_prefill_passes += 1

    def restart(self) -> None:
        pass


@pytest.mark.parametrize("turn", range(len(DRAFTERS)))
def test_any_tree_gives_the_tokens_of_plain_decoding(turn: int) -> None:
    setup = replace(DRAFTERS[turn], overlap=turn % 2 == 0)
    engine, requests = setup.engine(), mixed(4, max_tokens=11)
    chooser = AnyTree((*(SOURCED if setup.num_text_paths else SMALL), setup.layout.tree))
    engine.scheduler.round_trees.chooser = chooser
    run_staggered(engine, requests, every=2)
    for r in requests:
        assert r.output == plainly(setup, r).tokens, r.id
    assert len(chooser.samples) == len(chooser.picked) and set(chooser.picked) == set(chooser.forms)
    assert chooser.num_prefill_passes > 1


def test_any_tree_gives_the_tokens_of_plain_decoding_in_grammars() -> None:
    setup = Setup(**TREE)
    engine, plain = setup.engine(), run(setup.plain().engine(), asked(2, 1.2))
    engine.scheduler.round_trees.chooser = AnyTree((*SMALL, setup.layout.tree))
    assert run(engine, asked(2, 1.2)).tokens == plain.tokens


STAYING = [
    (Setup(**TREE), PLAIN_TREE),
    (MTPSetup(form=(2, "chain"), **TREE), PLAIN_TREE),
    (Setup(num_text_paths=2, **TREE), ALONE),
]


@pytest.mark.parametrize(("setup", "without"), STAYING, ids=["eagle3", "mtp", "sources"])
def test_the_draft_stays_ready_over_rounds_without_it(setup: Setup, without: TreeShape) -> None:
    engine = setup.engine()
    engine.scheduler.round_trees.chooser = AnyTree((without, without, setup.layout.tree))
    oracle = mtp_reference_of(setup) if isinstance(setup, MTPSetup) else reference_of(setup)
    run_watched(Watch(engine, setup.algorithm, oracle, (INCREMENTAL, READY)), mixed(3, max_tokens=9))


def test_any_tree_crosses_to_every_rank() -> None:
    case, group = Case("trees", setup=(("overlap", True),)), Group(2)
    setup = case.made()
    chooser = AnyTree((PLAIN_TREE, TreeShape(1, 1, 2), setup.layout.tree))
    requests = [mixed(4, max_tokens=8), mixed(4, max_tokens=8)]
    for trees, dataset_of_flags in zip((None, chooser), requests, strict=True):
        engine = group.engine(setup, case.files)
        engine.scheduler.round_trees.chooser = trees or engine.scheduler.round_trees.chooser
        # Ranks compare the sums of their trees.
        run(engine, dataset_of_flags)
    group.finish()
    assert [r.output for r in requests[0]] == [r.output for r in requests[1]]
    assert len(set(chooser.picked)) == 3


def test_on_a_gpu_every_tree_of_a_bucket_is_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(**TREE, attention="reference", overlap=True, num_text_paths=1)
    requests, sets = mixed(6, max_tokens=6), ((1, (setup.layout.tree, PLAIN_TREE)), (3, (SHARED, ALONE, PLAIN_TREE)))
    wanted = [plainly(setup, r).tokens for r in requests]
    fake_cuda(monkeypatch)
    # What only a CPU's path reads, as in test_no_sync.py.
    monkeypatch.setattr(path_merging, "have_no_paths", lambda paths: False)
    monkeypatch.setattr(drafts, "max_history_length", lambda root: setup.layout.history_width)
    monkeypatch.setattr(Setup, "layout", replace(setup.layout, choices=sets))
    engine = engine_on_fake_cuda(setup, graph_batch=4)
    forms = {at: (*dict(sets)[1 if at < 3 else 3], TARGET_ONLY) for at in (1, 2, 3, 4)}
    rounds = {LaunchForm(at, tree=tree) for at in forms for tree in forms[at]}
    graphs: Any = engine.executor
    assert {form for form in graphs.graphs if not form.width} == rounds

    class OfBucket(AnyTree):
        def choose(self, batch: int, num_drafting: int, context: float, lookup_gain: Any = None) -> TreeShape:
            self.forms = engine.layout.tree_choices_for(batch)
            return super().choose(batch, num_drafting, context)

    chooser = OfBucket(())
    engine.scheduler.round_trees.chooser = chooser
    FakeGraph.replayed = 0
    run_staggered(engine, requests, every=2)
    assert [r.output for r in requests] == wanted
    assert len(set(chooser.picked)) == 4 and FakeGraph.replayed >= len(chooser.picked)
    assert engine.scheduler.round_trees.num_rounds.total() == len(chooser.picked)


@pytest.mark.parametrize("algorithm", ["eagle3", pytest.param("ngram", marks=pytest.mark.full)])
def test_on_a_gpu_rounds_of_which_nobody_speculates_are_graphs_without_a_draft(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Also where the tree is named."""
    small = {**TREE, "max_batch": 2, "algorithm": algorithm}
    setup, requests = Setup(**small, attention="reference", overlap=True), mixed(4, max_tokens=6)
    for r in requests:
        r.params = replace(r.params, speculation=False)
    wanted = [plainly(setup, r).tokens for r in requests]
    fake_cuda(monkeypatch)
    monkeypatch.setattr(drafts, "max_history_length", lambda root: setup.layout.history_width)
    engine = engine_on_fake_cuda(setup, graph_batch=2)
    FakeGraph.replayed = 0
    run_staggered(engine, requests, every=2)
    assert [r.output for r in requests] == wanted
    tree_without_draft = TARGET_ONLY if algorithm == "eagle3" else PLAIN_TREE
    rounds = engine.scheduler.round_trees.num_rounds
    assert list(rounds) == [tree_without_draft] and FakeGraph.replayed >= rounds[tree_without_draft] > 6


def test_samples_are_what_the_trees_say() -> None:
    """Ranks, and where a path ends, against the traced trees."""
    setup = Setup(**{**TREE, "max_batch": 3})
    engine: Engine = setup.engine()
    engine.scheduler.round_trees.chooser = AnyTree((*SMALL[1:], setup.layout.tree))
    launch, checked = engine.executor.launch, 0

    def traced(launch_input: LaunchInput) -> Any:
        nonlocal checked
        handle = launch(replace(launch_input, reports_trees=True))
        for row in () if launch_input.is_prefill else handle.result():
            assert launch_input.tree is not None
            checked += check_row(row, launch_input.tree)
        return handle

    engine.executor.launch = traced  # type: ignore[method-assign]
    run(engine, mixed(9, max_tokens=24, temperature=1.0))
    assert checked > 10


def check_row(row: RequestResult, form: TreeShape) -> int:
    """Returns how many accepted nodes are not first children."""
    assert row.tree is not None and row.tree_size.depth <= form.steps
    assert sum(row.tree_size.tokens_by_depth) < form.num_draft_tokens
    tree, path = row.tree, row.tree.path_rows
    children = {
        node: [i for i in range(1, len(tree.tokens)) if tree.parents[i] == node and tree.tokens[i] >= 0]
        for node in path
    }
    in_order = [sorted(children[parent], key=lambda i: -tree.scores[i]) for parent in path[:-1]]
    assert list(row.sibling_ranks) == [order.index(node) for order, node in zip(in_order, path[1:], strict=True)]
    assert row.is_leaf == (not children[path[-1]])
    return sum(rank > 0 for rank in row.sibling_ranks)
