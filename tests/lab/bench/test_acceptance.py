"""`lab round --acceptance --trees`: the forms of an MTP draft."""

import json

import pytest

from espalier.layout import TreeShape
from lab.__main__ import main as lab
from lab.bench.acceptance import measure_acceptance
from tests.mtp import mtp_directories

TREES = [TreeShape(3, 1, 4), TreeShape(3, 6, 40)]
PROMPTS, NUM_TOKENS = 3, 20


def measured(form, trees=TREES[1:], modules=3):
    target, draft = mtp_directories("llama", modules, form)
    settings = {"model": target, "draft": draft, "dtype": "float64", "max_context": 192, "page_size": 16}
    return measure_acceptance(settings, PROMPTS, NUM_TOKENS, lambda: None, trees)


@pytest.mark.full
def test_each_tree_runs_in_both_forms():
    by_form = {form: measured(form, TREES) for form in ("chain", "target")}
    names = ["mtp 3,1,4", "mtp 3,1,4, in the other form", "mtp 3,6,40", "mtp 3,6,40, in the other form"]
    for rows in by_form.values():
        assert [row.name for row in rows] == names
        assert all(row.same_tokens == row.requests == PROMPTS for row in rows)
    # The two heads have the same weights: each runs in the other form as the other does in its own.
    chain, target = ([row.by_depth for row in rows] for rows in by_form.values())
    assert chain[1::2] == target[::2] and target[1::2] == chain[::2] and chain[2] != chain[3]


def test_one_module_has_no_other_form():
    assert [row.name for row in measured("chain", modules=1)] == ["mtp 3,6,40"]


def test_the_command_prints_each_tree(capsys, tmp_path):
    target, draft = mtp_directories("llama", 2, "chain")
    file = tmp_path / "figures.json"
    sizes = ["--prompts", "3", "--tokens", "12", "--page-size", "16", "--max-context", "160", "--dtype", "float64"]
    flags = ["--model", str(target), "--draft", str(draft), "--trees", "2,1,3", "--json", str(file)]
    assert lab(["round", "--acceptance", *sizes, *flags]) == 0
    out = capsys.readouterr().out
    assert "mtp 2,1,3, in the other form" in out
    rows = json.loads(file.read_text())["acceptance"]
    assert [row["name"] for row in rows] == ["mtp 2,1,3", "mtp 2,1,3, in the other form"]


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
