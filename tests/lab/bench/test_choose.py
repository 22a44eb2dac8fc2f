"""`python -m lab choose`: named shapes, and accept lengths that are predicted from one."""

import json

import pytest
import torch

from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE, TreeShape
from lab.bench import engines, synthetic_models
from lab.bench.choose import predicted_accept_lengths
from tests.cli.test_cli import run, tiny, tiny_heldout  # noqa: F401  (fixtures)
from tests.lab.synthetic.mixtures import mixture
from tests.lab.synthetic.test_checkpoint import tiny as dense
from tests.test_llm import paths  # noqa: F401  (a fixture)

WIDE, MIDDLE, NARROW = TreeShape(5, 8, 64), TreeShape(5, 4, 16), TreeShape(3, 2, 8)


def test_a_block_drafts_shallower_tree_is_foretold_to_accept_less():
    large, small, shallow = TreeShape(7, 4, 16), TreeShape(7, 4, 8), TreeShape(3, 4, 16)
    lengths = predicted_accept_lengths(3.0, large, [large, small, shallow, PLAIN_TREE], is_block=True)
    assert lengths[large] == 3.0 > lengths[small] > lengths[PLAIN_TREE] == 1.0
    # A shallower tree of as many nodes accepts less and costs as much.
    assert lengths[shallow] < 3.0


def test_a_larger_tree_is_foretold_to_accept_more():
    lengths = predicted_accept_lengths(4.0, WIDE, [WIDE, MIDDLE, NARROW, PLAIN_TREE])
    assert lengths[WIDE] == 4.0 > lengths[MIDDLE] > lengths[NARROW] > lengths[PLAIN_TREE] == 1.0
    assert lengths[NARROW] > 2
    with pytest.raises(EspalierError, match="out of reach"):
        predicted_accept_lengths(9.0, WIDE, [WIDE])


def test_a_named_shape_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "require_gpu", lambda what: torch.device("cpu"))
    monkeypatch.setattr(synthetic_models, "find_shape", lambda name: mixture("qwen3-moe", hot=1024))
    figures = tmp_path / "figures.json"
    flags = ["--shape", "tiny", "--routing-correlation", "1", "--tokens", "8", "--context", "8"]
    tree = ["--steps", "3", "--topk", "2", "--num-draft-tokens", "8", "--candidates", "3,2,8", "0,1,1"]
    sizes = ["--repeats", "1", "--max-batch", "2", "--max-context", "256"]
    assert run("lab", "choose", *flags, *tree, *sizes, "--json", figures) == 0
    cells = json.loads(figures.read_text())["cells"]
    assert [(cell["batch"], cell["num_draft_tokens"]) for cell in cells] == [(1, 8), (2, 8), (1, 1), (2, 1)]


def test_a_block_draft_of_a_named_shape_is_measured_at_its_own_depth(monkeypatch, tmp_path):
    """No tree is named: the depth is what one pass proposes."""
    monkeypatch.setattr(engines, "require_gpu", lambda what: torch.device("cpu"))
    monkeypatch.setattr(synthetic_models, "find_shape", lambda name: dense(hot=1024))
    figures = tmp_path / "figures.json"
    flags = ["--shape", "tiny", "--block-size", "6", "--accept-length", "4", "--tokens", "8"]
    sizes = ["--context", "8", "--repeats", "1", "--max-batch", "1", "--max-context", "256"]
    assert run("lab", "choose", *flags, *sizes, "--json", figures) == 0
    cells = json.loads(figures.read_text())["cells"]
    assert [(cell["steps"], cell["num_draft_tokens"]) for cell in cells] == [(6, 16), (6, 8), (0, 1), (0, 1)]


def test_one_accept_length_gives_those_of_all(tiny, tiny_heldout, capsys):  # noqa: F811
    flags = ["--tokens", "6", "--context", "8", "--repeats", "1", "--max-batch", "1"]
    assert run("lab", "choose", *flags, "--accept-length", "2.5", "--candidates", "3,2,8", "2,1,3", *tiny) == 0
    said = capsys.readouterr().out
    assert "predicted from 2.5 of steps 3, topk 2, num_draft_tokens 8" in said
    assert "2.50" in said and "plain decoding" not in said


def test_a_flag_of_a_shape_is_refused_without_one(tiny, capsys):  # noqa: F811
    assert run("lab", "choose", "--mtp-layers", "2", *tiny) == 2
    assert "--mtp-layers is for a named shape" in capsys.readouterr().err
    assert run("lab", "choose", "--accept-length", "8", "--context", "8", "--tokens", "12", *tiny) == 2
    assert "out of reach" in capsys.readouterr().err
