"""The choice among trees, without models: rounds whose acceptance and times are made up, and none of whose predictions
is right."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest

from espalier.engine.acceptance import (
    Acceptance,
    AcceptanceSample,
    assumed_accept_length,
    depth_of,
    gains,
)
from espalier.engine.round_times import CORRECTION_ROUNDS, CpuCosts, RoundTimes
from espalier.engine.tree_choice import MAX_INTERVAL, LookupGain, MeasuredTreeChooser
from espalier.layout import PLAIN_TREE, TARGET_ONLY, RoundLayout, TreeShape, next_bucket
from espalier.startup.tree_policy import tree_sets
from tests.startup.test_tree_policy import BIG

TREE = TreeShape(5, 4, 16)
COSTS = BIG
BATCHES = (1, 3, 8, 31, 64, 96)


def layout_of(choices: tuple[tuple[int, tuple[TreeShape, ...]], ...]) -> RoundLayout:
    return RoundLayout(96, 5, 4, 16, 16, 2048, 1, 2048, choices=choices)


@dataclass
class Simulation:
    """level: how often the first child is accepted at depth 1; deeper ones are less often.  others: how often another
    child is, where the first is not; shared: how much more often that is where rows are shared out; found: how often a
    guess of the other sources is accepted; host: the least seconds of a round; slowness: the time of every tree over
    its prediction; late_reads: in one round of this many, the host launches a prefill pass before it reads the result.
    Beside that each tree takes up to 15% less or more than predicted; the host intervals now and then,
    and prompts enter."""

    seed: int
    level: float = 0.8
    others: float = 0.25
    shared: float = 0.0
    found: float | None = None
    host: float = 0.0
    slowness: float = 1.0
    late_reads: int = 0
    now: float = 0.0
    factors: dict[TreeShape, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        sets = tree_sets(TREE, COSTS, 96, self.found is not None)
        shared = (replace(TREE, shared_rows=4),) if self.shared else ()
        layout = layout_of(tuple((least, (*trees, *shared)) for least, trees in sets))
        self.choice = MeasuredTreeChooser(layout, COSTS, is_lookup=False, clock=lambda: self.now)

    def chances(self, tree: TreeShape, depth: int) -> tuple[float, float]:
        """Of the first child, and of another where the first is not accepted."""
        if not tree.drafts:
            return self.found or 0.0, 0.0
        others = self.others * self.level + self.shared * bool(tree.shared_rows)
        return self.level * (1 - 0.07 * min(depth - 1, 3)), others if tree.topk > 1 else 0.0

    def accept_length(self, tree: TreeShape) -> float:
        reached, length = 1.0, 1.0
        for depth in range(1, depth_of(tree) + 1):
            first, other = self.chances(tree, depth)
            reached *= first + (1 - first) * other
            length += reached
        return length

    def seconds(self, tree: TreeShape, batch: int) -> float:
        factor = self.factors.setdefault(tree, self.random.uniform(0.87, 1.15))
        return max(COSTS.seconds(tree, next_bucket(batch), 1024) * factor * self.slowness, self.host)

    def sample(self, tree: TreeShape) -> AcceptanceSample:
        ranks: list[int] = []
        for depth in range(1, depth_of(tree) + 1):
            first, other = self.chances(tree, depth)
            if self.random.random() < first:
                ranks.append(0)
            elif self.random.random() < other:
                ranks.append(1 + self.random.randrange(tree.topk - 1))
            else:
                break
        return AcceptanceSample(depth_of(tree), tuple(ranks), len(ranks) == depth_of(tree), False)

    def lookup_sample(self, tree: TreeShape, emitted: int) -> AcceptanceSample:
        found = len(self.sample(replace(tree, drafts=False)).sibling_ranks)
        depth = depth_of(tree)
        return AcceptanceSample(
            min(emitted, depth) if found >= emitted else depth, (0,) * min(found, emitted, depth), True, True
        )

    def run(self, batch: int, rounds: int, drafting: int | None = None) -> float:
        """Tokens of a request a second, as of the mean accept lengths and times.  drafting: requests that speculate."""
        drafting = batch if drafting is None else drafting
        tokens = seconds = 0.0
        for number in range(rounds):
            tree = self.choice.choose(batch, drafting, 1024)
            assert tree in self.choice.layout.tree_choices_for(batch)
            taken = self.seconds(tree, batch)
            is_late = self.late_reads and number % self.late_reads == self.late_reads - 1
            if is_late:
                self.choice.prefill_launched()
                self.now += 0.03
            self.now += taken * self.random.uniform(0.98, 1.02) * (10 if self.random.random() < 0.03 else 1)
            samples = [self.sample(tree) for _ in range(drafting)] if tree != PLAIN_TREE else []
            lookup_samples = [
                self.lookup_sample(tree, len(s.sibling_ranks) + 1) for s in samples if self.found is not None
            ]
            self.choice.record(samples, batch * tree.rows, lookup_samples)
            if number % 50 == 49 or is_late:
                self.now += 0.1
                self.choice.restart()
            tokens, seconds = tokens + self.mean_length(tree, drafting / batch), seconds + taken
        return tokens / seconds

    def mean_length(self, tree: TreeShape, share: float) -> float:
        return 1 + share * (self.accept_length(tree) - 1)

    def best(self, batch: int, drafting: int | None = None) -> float:
        share = 1.0 if drafting is None else drafting / batch
        trees = self.choice.layout.tree_choices_for(batch)
        return max(self.mean_length(tree, share) / self.seconds(tree, batch) for tree in trees)


SHARED, FOUND = {"shared": 0.4}, {"found": 0.9}
SIMULATIONS = [(0.1, {}, (1, 96)), (0.4, SHARED, (3, 31)), (0.9, {}, (1, 64)), (0.6, FOUND, (8,))]


@pytest.mark.parametrize(("level", "more", "batches"), SIMULATIONS)
def test_the_best_form_is_found_and_kept(level: float, more: dict[str, float], batches: Sequence[int]) -> None:
    """Rows that are shared out, and sources without a draft, are trees among others."""
    for batch in batches:
        simulated = Simulation(batch, level, **more)
        simulated.run(batch, 400)
        bucket = simulated.choice.buckets[next_bucket(batch)]
        rate, plain = simulated.run(batch, 400), 1 / simulated.seconds(PLAIN_TREE, batch)
        assert rate >= 0.97 * simulated.best(batch), batch
        assert rate >= 0.985 * plain, batch
        assert simulated.choice.num_changes <= 15, batch
        assert "found" not in more or not bucket.tree.drafts
        assert "shared" not in more or batch < 16 or bucket.tree.shared_rows


@pytest.mark.parametrize("slowness", [0.3, 0.5, 2.5])
def test_where_all_predictions_are_wrong_by_one_factor_the_best_form_is_found(slowness: float) -> None:
    """Weights in fewer bytes than was supposed, or a slower chip: the trees that did not run look slow, or fast."""
    for batch, level in ((1, 0.3), (8, 0.9), (16, 0.3)):
        simulated = Simulation(batch, level, slowness=slowness)
        simulated.run(batch, 100)
        assert simulated.run(batch, 200) >= 0.96 * simulated.best(batch), (batch, level)


def test_where_the_host_is_slower_than_the_gpu_few_rounds_are_lost() -> None:
    """A tiny model on a fast GPU: every tree takes as long, and far longer than predicted."""
    for batch in (1, 8):
        simulated = Simulation(batch, 0.9, host=1.0)
        assert simulated.run(batch, 100) >= 0.97 * simulated.best(batch), batch


def test_it_follows_when_acceptance_changes() -> None:
    found = []
    for batch in (1, 8, 48):
        simulated = Simulation(batch)
        for level in (0.8, 0.15, 0.85):
            simulated.level = level
            simulated.run(batch, 300)
            found.append(simulated.run(batch, 200) / simulated.best(batch))
    assert fmean(found) >= 0.98 and min(found) >= 0.95, found


def test_batches_of_all_sizes_in_turn_are_served_well() -> None:
    simulated, random = Simulation(3, 0.6), Random(1)
    for _ in range(150):
        simulated.run(random.choice(BATCHES), 20)
    for batch in BATCHES:
        assert simulated.run(batch, 100) >= 0.94 * simulated.best(batch), batch


def test_a_deep_tree_says_what_a_chain_would_accept() -> None:
    simulated, found = Simulation(0, 0.7), Acceptance(5, 32, 256)
    for _ in range(100):
        found.add(TREE, [simulated.sample(TREE) for _ in range(32)])
    for tree in (TREE, TreeShape(3, 1, 4), TreeShape(1, 1, 2)):
        assert found.accept_length(tree) == pytest.approx(simulated.accept_length(tree), rel=0.03)
    assert found.accept_length(PLAIN_TREE) == 1


def test_what_is_assumed_is_the_table() -> None:
    for tree in (TREE, TreeShape(3, 2, 8), TreeShape(3, 1, 4), TreeShape(1, 1, 2), TreeShape(5, 8, 64), PLAIN_TREE):
        assert Acceptance(5, 1, 1).accept_length(tree) == pytest.approx(assumed_accept_length(tree), abs=0.01)
    assert gains(TREE, [0.0] * 5) == [0.0] * 6


def paced(accepts: bool, rounds: int, choice: MeasuredTreeChooser) -> list[TreeShape]:
    """Rounds of a request on a CPU, whose guesses are all accepted, or none."""
    chosen = []
    for _ in range(rounds):
        tree = choice.choose(1, 1, 100)
        assert tree is not None
        chosen.append(tree)
        ranks = (0,) * depth_of(tree) if accepts else ()
        samples = [AcceptanceSample(depth_of(tree), ranks, accepts, False)] if tree != PLAIN_TREE else []
        choice.record(samples, tree.num_draft_tokens, samples)
    return chosen


def test_on_a_cpu_guesses_that_find_nothing_are_tried_more_and_more_seldom() -> None:
    choices = [MeasuredTreeChooser(layout_of(((1, (TREE, PLAIN_TREE)),)), CpuCosts(), is_lookup=True) for _ in range(2)]
    chosen = paced(False, 2000, choices[0])
    drafted = [number for number, tree in enumerate(chosen) if tree != PLAIN_TREE]
    # All of a trial's rows cost half a round.
    assert len(drafted) * 0.5 < 0.015 * 2000 and sum(tree != PLAIN_TREE for tree in chosen[:128]) * 0.5 < 0.04 * 128
    intervals = [after - before for before, after in pairwise(drafted) if after - before > 1]
    assert intervals == sorted(intervals) and MAX_INTERVAL - 8 < max(intervals) <= MAX_INTERVAL
    assert paced(False, 2000, choices[1]) == chosen, "equal requests run equal rounds"
    assert set(paced(True, MAX_INTERVAL + 30, choices[0])[-10:]) == {TREE}, "a text that repeats itself is noticed"
    choices[0].restart()
    assert set(paced(True, 100, choices[0])) == {TREE}
    assert PLAIN_TREE in paced(False, 60, choices[0])


def by_guesses(choice: MeasuredTreeChooser, rounds: int, tokens: Sequence[float], accepted: int) -> list[TreeShape]:
    """Rounds of a request on a CPU.  tokens: what its guesses are expected to gain, over and over; accepted: of the
    draft's tree."""
    chosen = []
    for number in range(rounds):
        gained = tokens[number % len(tokens)]
        tree = choice.choose(1, 1, 100, LookupGain(gained, 6 if gained else 1))
        assert tree is not None
        chosen.append(tree)
        samples = (
            [AcceptanceSample(5, (0,) * accepted, accepted == 5, False)] if tree.drafts and tree != PLAIN_TREE else []
        )
        choice.record(samples, tree.num_draft_tokens, [])
    return chosen


def test_a_round_whose_guesses_are_known_runs_without_a_draft_where_they_are_worth_more() -> None:
    alone = TreeShape(5, 4, 16, drafts=False)
    choice = MeasuredTreeChooser(
        layout_of(((1, (TREE, alone, PLAIN_TREE)),)), CpuCosts(draft_cost=0.15), is_lookup=False
    )
    assert by_guesses(choice, 60, (4.0, 0.2), 3) == [alone, TREE] * 30
    known = choice.acceptance.accept_length(TREE)
    choice.restart()
    assert choice.acceptance.accept_length(TREE) == known and known > 3.5, "a new prompt forgets nothing"
    # A draft that finds nothing ends.  Guesses that gain little go on, and do not keep it from being tried again.
    chosen = by_guesses(choice, 300, (0.8, 0.0), 0)[-100:]
    assert chosen.count(TREE) <= 16 and chosen.count(alone) > 40
    assert by_guesses(choice, MAX_INTERVAL + 100, (0.8, 0.0), 4)[-50:].count(TREE) >= 45


def test_a_draft_that_is_better_where_guesses_are_likely_is_not_left_there() -> None:
    """Both find the same places easy.  So the mean of the draft's tokens is too low where guesses gain something."""
    alone = TreeShape(5, 4, 16, drafts=False)
    choice = MeasuredTreeChooser(
        layout_of(((1, (TREE, alone, PLAIN_TREE)),)), CpuCosts(draft_cost=0.15), is_lookup=False
    )
    for _ in range(40):
        by_guesses(choice, 1, (0.0,), 1)
        by_guesses(choice, 1, (1.5,), 4)
    assert [*by_guesses(choice, 1, (0.0,), 1), *by_guesses(choice, 1, (1.5,), 4)] == [TREE] * 2
    # Guesses that gain more than the draft are still verified alone.
    assert by_guesses(choice, 1, (4.0,), 4) == [alone]


def test_one_request_gives_its_draft_more_than_a_few_rounds() -> None:
    alone = TreeShape(5, 4, 16, drafts=False)
    choice = MeasuredTreeChooser(
        layout_of(((1, (TREE, alone, PLAIN_TREE)),)), CpuCosts(draft_cost=0.15), is_lookup=False
    )
    assert by_guesses(choice, 12, (0.0, 0.7), 0) + by_guesses(choice, 100, (0.0, 0.7), 4) == [TREE] * 112


def test_however_long_a_choice_lasts_others_are_tried() -> None:
    simulated, others = Simulation(0, 0.9), []
    for number in range(5 * MAX_INTERVAL):
        simulated.run(8, 1)
        bucket = simulated.choice.buckets[8]
        if bucket.last_round[bucket.tree] != simulated.choice.num_choices:
            others.append(number)
    intervals = [after - before for before, after in pairwise(others)]
    assert simulated.choice.num_changes <= 15 and MAX_INTERVAL - 16 < max(intervals) <= MAX_INTERVAL


def test_where_few_can_use_guesses_the_others_do_not_wait_for_them() -> None:
    simulated = Simulation(1, 0.95)
    simulated.run(64, 100, drafting=4)
    assert simulated.run(64, 100, drafting=4) >= 0.97 * simulated.best(64, drafting=4)


def test_where_nobody_can_use_guesses_nothing_is_drafted() -> None:
    simulated = Simulation(0, 0.95)
    simulated.run(8, 50)
    before = simulated.choice.buckets[8].tree
    for _ in range(20):
        assert simulated.choice.choose(8, 0, 1024) == TARGET_ONLY
        simulated.choice.record([], 8, [])
    assert simulated.choice.buckets[8].tree == before != PLAIN_TREE, "nothing was found out"


def test_rounds_in_flight_are_read_in_order() -> None:
    chain = TreeShape(3, 1, 4)
    choice = MeasuredTreeChooser(layout_of(((1, (TREE,)), (2, (chain,)))), COSTS, is_lookup=False)
    assert [choice.choose(batch, batch, 1024) for batch in (1, 8)] == [TREE, chain]
    for known in ([TREE], [TREE, chain]):
        choice.record([AcceptanceSample(3, (0,), False, False)], 4, [])
        choice.acceptance.accept_length(TREE)
        assert [*choice.acceptance.counts_by_tree] == known


def test_a_round_is_timed_from_the_end_of_the_one_before() -> None:
    """Rounds overlap: a round waits for the one before it.  A round beside a prefill pass is not timed: it waited for
    the pass, or the host launched the pass before it read the round."""
    now = 0.0
    choice = MeasuredTreeChooser(layout_of(((1, (TREE,)),)), COSTS, is_lookup=False, clock=lambda: now)
    taken = 2 * COSTS.seconds(TREE, 1, 1024)
    choice.choose(1, 1, 1024)
    for number in range(9):
        if number in (3, 6):
            choice.prefill_launched()
            now += 5 * taken  # the host's time of this launch
        # Before its result is read, the next round is in flight.
        choice.choose(1, 1, 1024)
        now += taken
        choice.record([], 16, [])
        if number in (3, 6):
            choice.restart()
            now += 50 * taken  # the pass
    assert [*choice.times.latest_ratios[1, TREE]] == pytest.approx([1.0] * 2 + [2.0] * 4)


def test_prompts_that_enter_all_the_time_do_not_rule_a_tree_out() -> None:
    """Where each second round is read late, behind the launch of a pass, the trees are those of a batch without
    prompts."""
    for seed in range(3):
        simulated = Simulation(seed, late_reads=3)
        simulated.run(64, 300)
        tree = simulated.choice.buckets[64].tree
        assert simulated.accept_length(tree) / simulated.seconds(tree, 64) >= 0.97 * simulated.best(64)
        for (_, timed), ratio in simulated.choice.times.corrections.items():
            real = simulated.seconds(timed, 64) / COSTS.seconds(timed, 64, 1024)
            assert ratio == pytest.approx(real, rel=0.1), timed


def test_times_are_corrected_by_what_was_found_at_the_nearest_batch() -> None:
    times, chain = RoundTimes(COSTS), TreeShape(3, 1, 4)
    for batch, factor in ((4, 1.5), (64, 3.0)):
        for _ in range(2 * CORRECTION_ROUNDS):
            times.add(TREE, batch, 1024, factor * COSTS.seconds(TREE, batch, 1024))
    times.add(TREE, 4, 1024, 90.0)
    for batch, factor in ((1, 1.5), (4, 1.5), (8, 1.5), (48, 3.0), (64, 3.0)):
        assert times.seconds(TREE, batch, 1024) == pytest.approx(factor * COSTS.seconds(TREE, batch, 1024))
        # What is beyond an error of a prediction, a tree that has not run takes longer too.
        assert times.seconds(chain, batch, 1024) > 1.2 * COSTS.seconds(chain, batch, 1024)
    for _ in range(CORRECTION_ROUNDS):
        times.add(TREE, 4, 1024, 0.7 * COSTS.seconds(TREE, 4, 1024))
    assert times.seconds(TREE, 4, 1024) == pytest.approx(0.7 * COSTS.seconds(TREE, 4, 1024)), "old times are forgotten"


@pytest.mark.parametrize(
    ("sample", "counts"),
    [
        (AcceptanceSample(5, (0, 0), False, False), [(1, 1), (1, 1), (1, 0), (0, 0)]),
        # Behind another child than the first, paths of first children say nothing.
        (AcceptanceSample(5, (0, 2, 0), False, False), [(1, 1), (1, 0), (0, 0), (0, 0)]),
        # Other nodes were more probable than a child of this one; or the draft guessed nothing here.
        (AcceptanceSample(5, (0,), True, False), [(1, 1), (0, 0), (0, 0), (0, 0)]),
        (AcceptanceSample(5, (0,), True, True), [(1, 1), (1, 0), (0, 0), (0, 0)]),
        (AcceptanceSample(2, (0, 0), False, False), [(1, 1), (1, 1), (0, 0), (0, 0)]),
    ],
)
def test_what_a_path_says_of_first_children(sample: AcceptanceSample, counts: list[tuple[int, int]]) -> None:
    found = Acceptance(5, 1, 1)
    found.add(TREE, [sample])
    found.accept_length(TREE)
    assert [(count.denominator, count.numerator) for count in found.first_child_counts[:4]] == counts


def test_rounds_that_are_counted_together_give_the_estimates_of_rounds_that_are_counted_alone() -> None:
    simulated, alone, together = Simulation(3, 0.6), Acceptance(5, 24, 24, 0.25), Acceptance(5, 24, 24, 0.25)
    for number in range(80):
        # The text changes, which the two may notice a few rounds apart.
        simulated.level = 0.8 if number < 40 else 0.3
        samples = [simulated.sample(TREE) for _ in range(4)]
        for found in (alone, together):
            found.add(TREE, samples)
        length = alone.accept_length(TREE)
        if number % 4 == 3 and number not in range(40, 64):
            assert together.accept_length(TREE) == pytest.approx(length, rel=0.01 if number < 40 else 0.1), number
            if number < 40:
                weights = [(each.first_child_counts[0].denominator, each.prior_weight) for each in (alone, together)]
                assert weights[1] == pytest.approx(weights[0], rel=0.1), number


def test_a_change_of_the_text_is_noticed_though_no_estimate_is_asked() -> None:
    simulated, found = Simulation(3, 0.8), Acceptance(5, 24, 400)
    for _ in range(20):
        found.add(TREE, [simulated.sample(TREE) for _ in range(8)])
    found.accept_length(TREE)
    weight = found.first_child_counts[0].denominator
    for _ in range(4):
        found.add(TREE, [AcceptanceSample(5, (), False, False)] * 8)
    assert found.first_child_counts[0].denominator < weight / 4


def test_trees_are_compared_in_one_round_of_several() -> None:
    compared: list[TreeShape] = []
    simulated = Simulation(3, 0.6)
    rate = simulated.choice.rate
    simulated.choice.rate = lambda tree, *rest: compared.append(tree) or rate(tree, *rest)  # type: ignore[func-returns-value, method-assign]
    simulated.run(8, 40)
    assert len(compared) <= (40 / simulated.choice.pace.rounds_per_choice + 1) * len(set(compared))


def test_a_lasting_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "espalier")
    simulated = Simulation(0, 0.02)
    simulated.run(64, 600)
    # Once more, as after another form that did not last.
    simulated.choice.buckets[64].rounds_since_change = 0
    simulated.run(64, 100)
    lines = [record.message for record in caplog.records if "trees: rounds" in record.message]
    assert 1 <= len(lines) <= 3 and "plain decoding: 1.00 tokens in" in lines[-1]
    assert len({line.split(":")[1] for line in lines}) == len(lines), lines
