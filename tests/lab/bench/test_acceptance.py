"""`bench round --acceptance --trees`: the forms of an MTP draft, and rounds after a hit and after a rejection.

In float64 a round's accept length follows from its root alone, so every round equals one that began afresh.
"""

import json

import pytest

from espalier.layout import TreeShape
from lab.__main__ import main as lab
from lab.bench.acceptance import measure
from lab.faults import planted as faults
from tests.mtp import mtp_directories

TREES = [TreeShape(3, 1, 4), TreeShape(3, 6, 40)]
# Enough prompts that a round is rejected at depth 2; a fault shows in fewer.
PROMPTS, FEW, NUM_TOKENS = 5, 3, 20


def measured(form, trees=TREES[1:], modules=3, num_prompts=FEW):
    target, draft = mtp_directories("llama", modules, form)
    settings = {"model": target, "draft": draft, "dtype": "float64", "max_context": 192, "page_size": 16}
    return measure(settings, num_prompts, NUM_TOKENS, lambda: None, trees)


def places_of(row):
    return {place.name: place for place in row.places}


@pytest.mark.full
def test_each_tree_runs_in_both_forms_and_every_round_is_as_one_that_began_afresh():
    by_form = {form: measured(form, TREES, num_prompts=PROMPTS) for form in ("chain", "target")}
    names = ["mtp 3,1,4", "mtp 3,1,4, in the other form", "mtp 3,6,40", "mtp 3,6,40, in the other form"]
    for rows in by_form.values():
        assert [row.name for row in rows] == names
        assert all(row.same_tokens == row.requests == PROMPTS for row in rows)
        for row in rows[::2]:
            places = places_of(row)
            assert {f"round {i} after a prefix hit" for i in (1, 2, 3)} < set(places)
            assert {f"after a rejection at depth {d}" for d in (1, 2)} < set(places)
            assert all(place.rounds and place.accept_length == place.afresh for place in row.places)
            assert not any(place.differing for place in row.places)
    # The two heads have the same weights: each runs in the other form as the other does in its own.
    chain, target = ([row.by_depth for row in rows] for rows in by_form.values())
    assert chain[1::2] == target[::2] and target[1::2] == chain[::2] and chain[2] != chain[3]


def test_one_module_has_no_other_form():
    assert [row.name for row in measured("chain", modules=1)] == ["mtp 3,6,40"]


@pytest.mark.parametrize(
    ("fault", "form"),
    [("stale-feed", "target"), ("stale-hidden", "chain"), pytest.param("stale-feed", "chain", marks=pytest.mark.full)],
)
def test_what_is_stale_after_a_round_shows_after_rejections(fault, form):
    with faults.plant(fault):
        [row, _] = measured(form)
    after_rounds = [place for place in row.places if place.name.startswith("after")]
    assert sum(place.differing for place in after_rounds) > 0


def test_pages_of_the_draft_that_are_wrong_show_after_a_hit(monkeypatch):
    """The rows that a hit enters again are computed by the target alone: reentry 0 leaves the draft without them."""
    from espalier.models.draft import DraftSpec

    monkeypatch.setattr(DraftSpec, "reentry", property(lambda spec: 0))
    [row, _] = measured("chain")
    assert sum(place.differing for name, place in places_of(row).items() if "hit" in name) > 0


def test_the_command_prints_a_table_for_each_tree(capsys, tmp_path):
    target, draft = mtp_directories("llama", 2, "chain")
    file = tmp_path / "figures.json"
    sizes = ["--prompts", "3", "--tokens", "12", "--page-size", "16", "--max-context", "160", "--dtype", "float64"]
    flags = ["--model", str(target), "--draft", str(draft), "--trees", "2,1,3", "--json", str(file)]
    assert lab(["round", "--acceptance", *sizes, *flags]) == 0
    out = capsys.readouterr().out
    assert "mtp 2,1,3, in the other form" in out and "round 1 after a prefix hit" in out
    row = json.loads(file.read_text())["acceptance"][0]
    assert row["places"][0]["name"] == "round 1 after a prefix hit" and row["places"][0]["rounds"] == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--acceptance", "--trees", "3,1,4", "--steps", "2"], "--steps is not for --trees, which names the tree"),
        (["--acceptance", "--trees", "0,1,1"], "a tree of steps 0 drafts nothing"),
        (["--trees", "3,1,4"], "--trees is for --acceptance"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, says, capsys):
    assert lab(["round", *flags]) == 2
    assert says in capsys.readouterr().err
