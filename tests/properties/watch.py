"""Looks over an engine's shoulder: what the device holds after every launch against what tests/oracles makes from
scratch.

The three equalities of docs/design.md, the tokens, and the pages.  A watch reads the slot table and the pages as a
model's layers do, by position through the page table, with arithmetic of its own."""

from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from espalier.engine.engine import Engine
from espalier.engine.executor import LaunchHandle
from espalier.engine.launch_input import DraftTree, LaunchInput, RequestResult, RoundTrace
from espalier.engine.state_keeper import StateKeeper
from espalier.kernels.ops.experts import grouped_experts
from espalier.models.layers import mlp
from espalier.request import Request
from espalier.speculate.tree import VOID
from tests.oracles.calibration import recalibrated
from tests.oracles.reference_round import Node, Reference, Scratch
from tests.pages import check_pages
from tests.properties.path_counts import PathCounts

# Of a row's difference, over the row (row_error).  float64 on both sides: what remains is the order of summation over
# at most a thousand terms of size one, some 1e-13.
EXACT = 1e-9
# Scores are float32 by design, sums of at most eight log-probabilities below 100: half an ulp of that each.
SCORE = 1e-5

INCREMENTAL, READY, PROPOSAL, TOKENS, RESERVE, CONSERVED, ROUTED, COUNTED = (
    "incremental",
    "ready",
    "proposal",
    "tokens",
    "reserve",
    "conserved",
    "routed",
    "counted",
)
PROPERTIES = (INCREMENTAL, READY, PROPOSAL, TOKENS, RESERVE, CONSERVED, ROUTED, COUNTED)


@dataclass
class Coverage:
    """What was accepted: rounds by accept length, nodes by depth, nodes by rank among their siblings (0: the draft's
    first)."""

    lengths: Counter[int] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)

    def add(self, trace: RoundTrace) -> None:
        tree = trace.tree
        self.lengths[len(trace.emitted)] += 1
        for node in tree.path_rows[1:]:
            self.depths[tree.depths[node]] += 1
            before = zip(tree.tokens[1:node], tree.parents[1:node], strict=True)
            self.ranks[sum(parent == tree.parents[node] and token != VOID for token, parent in before)] += 1

    @property
    def mean_accept_length(self) -> float:
        rounds = sum(self.lengths.values())
        return sum(length * count for length, count in self.lengths.items()) / rounds if rounds else 0.0

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Plain values, so that a test worker can send them."""
        return {
            name: {str(k): v for k, v in sorted(getattr(self, name).items())} for name in ("lengths", "depths", "ranks")
        }


@dataclass(frozen=True)
class Decided:
    """A slot between two launches: tokens 0 .. n, the root last."""

    tokens: tuple[int, ...]

    @property
    def root_at(self) -> int:
        return len(self.tokens) - 1


class Watch:
    """Hooks itself between an engine's launches.  properties: those to hold; a property that fails raises
    AssertionError."""

    exact, score = EXACT, SCORE

    def __init__(self, engine: Engine, algorithm: str, reference: Reference, properties: Collection[str] = PROPERTIES):
        self.engine = engine
        self.algorithm = algorithm
        self.reference = reference
        self.properties = frozenset(properties)
        self.coverage = Coverage()
        self.launches = 0
        self.most_excess = 0
        self.paths = PathCounts(engine.layout.steps)
        self._owners: deque[dict[int, Request]] = deque()
        self._handed_out: deque[list[int]] = deque()
        self._allocated: list[int] = []
        self._allocate = engine.pool.allocate
        engine.pool.allocate = self.allocate  # type: ignore[method-assign]
        self._launch, self._run = engine.executor.launch, engine.executor.run
        engine.executor.launch = self.launch  # type: ignore[method-assign]
        engine.executor.run = self.run  # type: ignore[method-assign]
        engine.scheduler.on_round = self.coverage.add
        states = engine.executor.runner.cache.states
        for held in () if states is None else states.states.values():
            # A snapshot that is read before it is taken would show.
            for rows in (held.recurrent_state, held.conv_tail):
                if rows is not None:
                    rows[states.first_snapshot :] = torch.nan

    def launch(self, launch_input: LaunchInput) -> LaunchHandle:
        """On the engine's own thread: who is in which slot, and on how many pages."""
        running = self.engine.scheduler.running
        self._owners.append({r.slot: r for r in running if r.slot is not None})
        self._handed_out.append(self._allocated)
        self._allocated = []
        if RESERVE in self.properties:
            for request in running:
                self.check_reserve(request)
        return self._launch(launch_input)

    def run(self, launch_input: LaunchInput) -> list[RequestResult]:
        """On the thread that runs launches, in their order."""
        owners = self._owners.popleft()
        for request in owners.values():
            self.reference.prepare(request, self.engine.layout.max_context)
        self.spoil(self._handed_out.popleft())
        before = [self.decided(slot) for slot in launch_input.slots]
        with routed_rows() as routed:
            rows = self._run(launch_input)
        if ROUTED in self.properties:
            self.check_routed(launch_input, rows, routed)
        self.launches += 1
        for slot in launch_input.slots:
            self.check_slot(slot, owners[slot])
        if not launch_input.is_prefill:
            self.check_round([owners[slot] for slot in launch_input.slots], before, rows)
            self.paths.note(launch_input, [decided.tokens for decided in before], rows)
        return rows

    def allocate(self, count: int) -> list[int]:
        pages = self._allocate(count)
        self._allocated += pages
        return pages

    def spoil(self, pages: list[int]) -> None:
        """NaN in every row of pages that change hands: a row that is read before it is decided would show."""
        size = self.engine.layout.page_size
        for buffers in self.engine.executor.runner.pages.layers.values():
            for buffer in buffers:
                buffer.view(-1, size, *buffer.shape[1:])[pages] = torch.nan

    # After every launch

    def check_slot(self, slot: int, owner: Request) -> None:
        decided = self.decided(slot)
        if INCREMENTAL in self.properties:
            self.check_incremental(slot, decided, self.speculates(owner))
        if READY in self.properties:
            self.check_ready(slot, decided, self.speculates(owner))

    def speculates(self, request: Request) -> bool:
        return request.params.depth_limit(self.engine.layout.steps) > 0

    def check_incremental(self, slot: int, decided: Decided, drafted: bool) -> None:
        """(a) Committed rows of every layer are those of one plain pass: target rows 0 .. n-1, rows k .. n of draft
        module k (0 .. n-1 of a block draft).  All else in the request's pages is as spoilt as it was handed out, and
        the dummy page is clear.  drafted: if not, nobody reads the draft's rows of this request."""
        scratch, n = self.reference.scratch(decided.tokens), decided.root_at
        held = [(0, n, layer) for layer in scratch.target]
        for first, layers_of_module in enumerate(scratch.draft, 1):
            held += [(*self.reference.committed(first, n), layer) for layer in layers_of_module]
        runner = self.engine.executor.runner
        layers, states = runner.pages.layers, runner.cache.states
        # Shared pages hold rows behind those that a slot has entered again.
        shared = int(runner.table.commit_from[slot])
        others = {first: self.undecided_rows(slot, first, max(end, shared)) for first, end, _ in held}
        kept = {} if states is None else states.states
        # An MLP of its own keeps nothing.
        keeping = {layer for layer, (_, _, planes) in enumerate(held) if planes}
        assert {*layers, *kept} == keeping, f"layers {[*layers, *kept]} keep something, {keeping} are due to"
        for layer, (first, end, expected) in enumerate(held):
            if layer not in keeping or (layer >= len(scratch.target) and not drafted):
                continue
            if layer in kept:
                self.check_state(layer, slot, n, expected)
                self.check_state(layer, 0, 0, expected)
                continue
            rows = self.rows(slot, first, end)
            for plane, buffer in enumerate(layers[layer]):
                what = f"plane {plane} of layer {layer}"
                if end > first:
                    error = row_error(buffer[rows].double(), expected[plane][: end - first])
                    assert error < self.exact, f"{what}, rows {first} to {end - 1}: off by {error:.2g} of a row"
                assert buffer[others[first]].isnan().all(), f"{what} holds rows that nobody decided"
                assert not buffer[: self.engine.layout.page_size].double().any(), f"{what}: the dummy page"

    def check_state(self, layer: int, row: int, count: int, expected: tuple[Tensor, ...]) -> None:
        """A row of the state table is what one plain pass over `count` tokens leaves.  expected: the planes of a
        DensePass."""
        states = self.engine.executor.runner.cache.states
        assert states is not None
        held, what = states.states[layer], f"of layer {layer}, row {row}, behind {count} tokens"
        *behind, inputs = expected
        for recurrent in behind:
            due = recurrent[count - 1] if count else torch.zeros_like(recurrent[0])
            error = float((held.recurrent_state[row] - due).norm() / max(due.norm(), 1e-6))
            assert error < self.exact, f"the state {what}: off by {error:.2g} of itself"
        tail = torch.cat((torch.zeros_like(held.conv_tail[0]), inputs[:count]))[count:]
        error = float((held.conv_tail[row] - tail).norm() / max(tail.norm(), 1e-6))
        assert error < self.exact, f"the convolution's tail {what}: off by {error:.2g} of itself"

    def check_snapshots(self) -> None:
        """Each snapshot of the prefix tree is the state before the last tokens of its page."""
        keeper, prefixes = self.engine.scheduler.state_keeper, self.engine.prefix_tree
        if not isinstance(keeper, StateKeeper) or prefixes is None:
            return
        for page, row in keeper.snapshot_rows._row_of_page.items():
            node, tokens = prefixes._nodes[page], ()
            while node.parent is not None:
                node, tokens = node.parent, (*node.key, *tokens)
            scratch = self.reference.scratch(tokens)
            for layer in self.engine.executor.runner.cache.states.states:
                self.check_state(layer, row, len(tokens) - keeper.tokens_before_end, scratch.target[layer])

    def check_ready(self, slot: int, decided: Decided, drafted: bool) -> None:
        """(b) The slot carries the root, and the draft's hidden there unless its request never speculates."""
        table, n = self.engine.executor.runner.table, decided.root_at
        root = int(table.root[slot])
        assert root == decided.tokens[n], f"the root is {root}, the history ends in {decided.tokens[n]}"
        scratch = self.reference.scratch(decided.tokens)
        if not drafted:
            return
        for name, expected in self.carried(
            scratch, n, max(0, int(table.commit_from[slot]) - len(scratch.outs))
        ).items():
            error = row_error(table.carried[name][slot][None], expected[None])
            assert error < self.exact, f"{name} carried to root {n} is off by {error:.2g} of itself"

    def carried(self, scratch: Scratch, n: int, entered: int) -> dict[str, Tensor]:
        """What a slot with root n carries.  entered: the first token whose target feature was computed for this slot;
        a module k has had no row to carry before token entered + k."""
        if not scratch.outs:
            return {}
        names = self.engine.executor.runner.table.carried
        due = {"hidden": scratch.out(1, n)}
        for module in range(2, len(scratch.outs) + 1):
            if n + 1 >= entered + module:
                due[f"feed{module}"] = self.reference.fed(scratch, module, n + 1)
        assert names.keys() == {"hidden", *(f"feed{module}" for module in range(2, len(scratch.outs) + 1))}
        return due

    # After every round

    def check_round(self, requests: list[Request], before: list[Decided], rows: list[RequestResult]) -> None:
        if PROPOSAL in self.properties:
            trees = self.trees_from_scratch(requests, before)
            for request, decided, row, expected in zip(requests, before, rows, trees, strict=True):
                assert row.tree is not None
                if not self.speculates(request):
                    continue
                self.check_proposal(request, decided, row.tree, expected)
        if TOKENS in self.properties:
            for request, decided, row in zip(requests, before, rows, strict=True):
                self.check_tokens(request, decided, row)

    def trees_from_scratch(self, requests: list[Request], before: list[Decided]) -> list[list[Node]]:
        """The brute-force trees; of their nodes the best of the batch, where rows are shared out."""
        layout = self.engine.layout
        sizes = layout.steps, layout.topk, layout.num_draft_tokens
        trees = [
            self.reference.tree(self.algorithm, request, decided.tokens, *sizes)
            for request, decided in zip(requests, before, strict=True)
        ]
        if not 0 < layout.shared_rows < layout.num_draft_tokens:
            return trees
        table = self.engine.executor.runner.table
        trees = [
            recalibrated(
                tree, request.params.temperature > 0, table.survival.numpy(), float(table.draft_skill[request.slot])
            )
            for request, tree in zip(requests, trees, strict=True)
        ]
        most = [self.most_depth(request, decided) for request, decided in zip(requests, before, strict=True)]
        nodes = sorted(
            (-node.score, row, at)
            for row, tree in enumerate(trees)
            for at, node in enumerate(tree)
            if len(node.path) <= most[row]
        )
        kept = {(row, at) for _, row, at in nodes[: (layout.shared_rows - 1) * len(trees)]}
        return [[node for at, node in enumerate(tree) if (row, at) in kept] for row, tree in enumerate(trees)]

    def check_proposal(self, request: Request, decided: Decided, tree: DraftTree, expected: list[Node]) -> None:
        """(c) The tree is the brute-force tree, and so is every node's score: same paths in the same order, void nodes
        aside.  At its end, nodes may be left out that are deeper than this round may accept."""
        got, most = paths(tree), self.most_depth(request, decided)
        while len(expected) > len(got) and len(expected[-1].path) > most:
            expected.pop()
        assert got == [node.path for node in expected], difference_of(got, expected)
        scores = [score for token, score in zip(tree.tokens[1:], tree.scores[1:], strict=True) if token != VOID]
        for node, score in zip(expected, scores, strict=True):
            assert abs(score - node.score) < self.score, f"path {node.path} scores {score}, from scratch {node.score}"

    def most_depth(self, request: Request, decided: Decided) -> int:
        """The deepest node that the round after `decided` may accept."""
        layout = self.engine.layout
        left = layout.max_accept_depth(request.max_num_tokens(layout.max_context), decided.root_at)
        return max(0, min(request.params.depth_limit(layout.steps), left))

    def check_tokens(self, request: Request, decided: Decided, row: RequestResult) -> None:
        """Emitted are plain decoding's tokens, as many of them as walking down the tree finds, and one more."""
        plain, n = self.reference.plain(request), decided.root_at
        depth = self.most_depth(request, decided)
        wanted = tuple(plain.upto(n + depth + 2)[n + 1 :])
        assert decided.tokens == tuple(plain.upto(n + 1)), "decided tokens are not plain decoding's"
        assert row.tree is not None
        there = set(paths(row.tree))
        accepted = max(d for d in range(depth + 1) if d == 0 or wanted[:d] in there)
        assert tuple(row.tokens) == wanted[: accepted + 1], (
            f"emitted {row.tokens}, plain decoding goes on {wanted[: accepted + 1]}"
        )

    def check_outputs(self, requests: list[Request]) -> None:
        """What the users got."""
        for request in requests:
            expected = self.reference.plain(request).output(self.engine.layout.max_context)
            assert request.output == expected, (
                f"request {request.id} got {request.output}, plain decoding gives {expected}"
            )

    def check_routed(
        self, launch_input: LaunchInput, rows: list[RequestResult], routed: list[tuple[Tensor, int]]
    ) -> None:
        """Each layer with experts routes the rows of requests, and neither padding nor void nodes.  The draft's extend
        comes last; there module k has at most k - 1 rows fewer than there are new tokens.  Where only the output at
        the last tokens of a prefill pass is read, the last layer routes those of its pieces alone."""
        runner = self.engine.executor.runner
        target = runner.target
        layers = () if target.config.experts is None else target.config.experts.layers
        layered = getattr(target, "layers", ())
        blocks = (getattr(layer.mlp, "mixture", layer.mlp) for layer in layered)
        own = {id(block.gate_up) for block in blocks if hasattr(block, "gate_up")}
        if launch_input.is_prefill:
            count = extended = sum(launch_input.lengths)
        else:
            count = sum(token != VOID for row in rows if row.tree is not None for token in row.tree.tokens)
            extended = sum(len(row.tokens) for row in rows)
        of_target = [number for held, number in routed if id(held) in own]
        due, last = dict.fromkeys(sorted(layers), count), target.config.num_layers - 1
        modules = len(self.reference.modules)
        if launch_input.is_prefill:
            reads_all = launch_input.prompt_rows is not None or runner.drafter.spec.target_output == "hidden"
            if last in due and not reads_all and last + 1 not in target.captured_layers:
                due[last] = len(launch_input.pieces or launch_input.lengths)
            extended = len(launch_input.pieces or launch_input.lengths) if modules == 1 else extended
        assert of_target == [*due.values()], f"{of_target} rows were routed to experts, {due} are due by layer"
        for module, (held, number) in enumerate(routed[-modules:] if modules else (), 1):
            # Where cached tokens are entered again, for the prompt's log-probabilities, each piece may leave rows out.
            fewer = (module - 1) * len(launch_input.pieces or launch_input.lengths or rows)
            assert id(held) in own or extended - fewer <= number <= extended, (
                f"{number} rows of draft module {module} were routed to experts, {extended} tokens are new"
            )

    # On the host

    def check_reserve(self, request: Request) -> None:
        """No running request holds more pages than the rounds ahead of it may fill."""
        layout, rounds = self.engine.layout, self.engine.scheduler.rounds_in_flight
        ahead = rounds * (layout.steps + 1) + 1
        excess = len(request.pages) - -(-(request.num_known + ahead) // layout.page_size)
        self.most_excess = max(self.most_excess, excess)
        assert excess <= 0, (
            f"{len(request.pages)} pages are held for {request.num_known} tokens and {ahead} ahead: {excess} too many"
        )

    # Reading the device

    def decided(self, slot: int) -> Decided:
        table = self.engine.executor.runner.table
        return Decided(tuple(table.history[slot, : int(table.prefix_len[slot]) + 1].tolist()))

    def undecided_rows(self, slot: int, first: int, end: int) -> Tensor:
        """Rows at all other positions of the request's pages."""
        page = self.engine.layout.page_size
        held = int((self.engine.executor.runner.table.page_table[slot] > 0).sum()) * page
        return torch.cat((self.rows(slot, 0, first), self.rows(slot, end, held)))

    def rows(self, slot: int, first: int, end: int) -> Tensor:
        """Rows of pages at positions first .. end-1."""
        table, page = self.engine.executor.runner.table, self.engine.layout.page_size
        held = table.page_table[slot].tolist()
        return torch.tensor([held[q // page] * page + q % page for q in range(first, end)], dtype=torch.int64)


@contextmanager
def routed_rows() -> Iterator[list[tuple[Tensor, int]]]:
    """The experts and the number of rows that go to them, one entry for each call of the expert product."""
    routed: list[tuple[Tensor, int]] = []

    def counted(x: Tensor, gate_up: Tensor, *args: Any, live_rows: Tensor | None, **kwargs: Any) -> Tensor:
        routed.append((gate_up, len(x) if live_rows is None else int(live_rows.sum())))
        return grouped_experts(x, gate_up, *args, live_rows=live_rows, **kwargs)

    with patch.object(mlp, "grouped_experts", counted):
        yield routed


def run_watched(watch: Watch, requests: list[Request], last: bool = True) -> dict[str, Any]:
    """Run the requests to their end under a watch, and close its engine after the last of them.

    Returns figures for the summary; raises AssertionError where a property fails.
    """
    engine = watch.engine
    for request in requests:
        engine.add(request)
    try:
        while engine.has_work:
            engine.step()
            if CONSERVED in watch.properties:
                check_pages(engine)
        if INCREMENTAL in watch.properties:
            watch.check_snapshots()
        if COUNTED in watch.properties:
            watch.paths.check(engine.scheduler.guess_sources.survival)
    finally:
        if last:
            engine.close()
    if TOKENS in watch.properties:
        watch.check_outputs(requests)
    return {"launches": watch.launches, "excess": watch.most_excess, **watch.coverage.as_dict()}


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The drafted tokens from the root down to each node but the root, void nodes left out, in the order of nodes."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return [path for path, token in zip(found, tree.tokens, strict=True) if token != VOID][1:]


def difference_of(got: list[tuple[int, ...]], expected: list[Node]) -> str:
    wanted = [node.path for node in expected]
    surplus, missing = sorted(set(got) - set(wanted)), sorted(set(wanted) - set(got))
    return f"paths {surplus} are not of the brute-force tree, {missing} of it are missing, or the order is another"


def row_error(got: Tensor, expected: Tensor) -> float:
    """How far a row is off at most: the norm of its difference over its own.  [rows, ...]; not a number if a row is."""
    if not len(got):
        return 0.0
    differences = (got - expected).flatten(1).norm(dim=1)
    return float((differences / expected.flatten(1).norm(dim=1)).max())
