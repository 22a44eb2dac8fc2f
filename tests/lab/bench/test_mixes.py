"""`lab mixes`: each request's draft has the skill of its kind, and every way to choose trees runs the same requests."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from espalier.engine.round_trees import tree_label
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.startup.tree_cost import ChipFigures, pass_weights
from espalier.startup.tree_policy import PredictedCosts
from lab import __main__ as lab
from lab.bench import mixes
from lab.bench.mixes import ADAPTIVE_LABEL, MIXES, SHARED_ROWS_LABEL, SKILLS_BY_KIND, MixSizes, TimedRounds
from lab.bench.synthetic_models import SyntheticModels
from lab.synthetic.checkpoint import Recipe
from tests.lab.synthetic.test_checkpoint import tiny

CPU = torch.device("cpu")
RECIPE = mixes.mixed_recipe(Recipe(tiny(hot=4000, intermediate_size=320)))
COSTS = PredictedCosts(pass_weights(RECIPE.shape.target, RECIPE.draft_config), ChipFigures("a CPU", 2e10, 4e10))
SIZES = MixSizes((1, 4, 8), context=16, search_rounds=2, timed_rounds=2)


@pytest.mark.parametrize("mix", MIXES)
def test_a_requests_draft_is_as_good_as_its_kind(mix):
    """Over the first 200 tokens that follow the prompt: the share of right first guesses, without the draft's pass."""
    models = SyntheticModels.__new__(SyntheticModels)
    models.chain = chain = RECIPE.chain()
    is_right = chain.draft_logp.argmax(1) == 0
    found: dict[str, list[float]] = {}
    for at, prompt in enumerate(mixes.prompts_of(models, MIXES[mix], [SIZES.context] * 20, SIZES)):
        after = (chain.place[prompt[-1]] + torch.arange(200) * chain.shifts[0]) % chain.size
        found.setdefault(MIXES[mix][at % len(MIXES[mix])], []).append(float(is_right[after].float().mean()))
    for kind, shares in found.items():
        skills = SKILLS_BY_KIND[kind]
        assert sum(shares) / len(shares) == pytest.approx(sum(skills) / len(skills), abs=0.06)
    assert set(found) == set(MIXES[mix])


def test_every_tree_of_a_chooser_has_a_graph_and_rows_are_shared_by_several_alone():
    layout, chosen = mixes.make_layouts(RECIPE, SIZES, COSTS)
    assert [least for least, _ in layout.choices] == [1, 2, 5]
    for batch in range(1, 9):
        every = set(layout.tree_choices_for(batch))
        assert PLAIN_TREE in every and len(every) > 3
        assert not any(tree.shared_rows for tree in chosen[ADAPTIVE_LABEL].tree_choices_for(batch))
        assert any(tree.shared_rows for tree in chosen[SHARED_ROWS_LABEL].tree_choices_for(batch)) == (batch > 1)
        assert all(set(of_name.tree_choices_for(batch)) <= every for of_name in chosen.values())


def test_ways_run_the_same_requests_with_the_same_tokens(monkeypatch):
    begun, reached = [], []
    run, find = mixes.enter_and_step, mixes.search_trees

    def noted(engine, chooser, prompts, sizes, rounds):
        begun.append((list(map(len, prompts)), rounds))
        return run(engine, chooser, prompts, sizes, rounds)

    monkeypatch.setattr(mixes, "enter_and_step", noted)
    monkeypatch.setattr(mixes, "search_trees", lambda *args: reached.append(find(*args)) or reached[-1])
    [cell] = mixes.measure_mixes(RECIPE, replace(SIZES, batches=(4,)), COSTS, CPU, [4], ["half 0.95, half 0.3"])
    assert cell["same tokens"] == "4" and cell["trees"][ADAPTIVE_LABEL]
    assert cell["accept length"][tree_label(mixes.SHARED_ROWS_TREES[0])] > 1.2
    assert set(cell["tokens/s"]) > {tree_label(PLAIN_TREE), ADAPTIVE_LABEL, SHARED_ROWS_LABEL}
    # All ways are timed over the same text, after as many rounds.
    assert begun[:2] == [([SIZES.context] * 4, SIZES.search_rounds)] * 2
    assert begun[2:] == [(reached[0], mixes.WARM_UP_ROUNDS)] * len(cell["tokens/s"])


def test_the_best_fixed_tree_shares_no_rows():
    shared = TreeShape(5, 4, 16, shared_rows=4)
    rates = {tree_label(PLAIN_TREE): 10.0, "3,1,4": 20.0, tree_label(shared): 30.0, ADAPTIVE_LABEL: 25.0}
    found = {name: TimedRounds(rate, 2.0, 4, Counter({PLAIN_TREE: 1})) for name, rate in rates.items()}
    cell = mixes.cell_figures(found, list(rates)[:-1], [ADAPTIVE_LABEL])
    assert (cell["best fixed"], cell["best over plain"]) == ("3,1,4", 2.0)
    assert cell["over best"] == {tree_label(shared): 1.5, ADAPTIVE_LABEL: 1.25}


def test_an_unknown_mix_is_refused_before_a_gpu_is_asked_for(capsys):
    assert lab.main(["mixes", "--shape", "llama-3.1-8b", "--mix", "all 0.9"]) == 2
    assert "--mix 'all 0.9' is unknown; use one of 'all 0.8', " in capsys.readouterr().err
