"""`bench round --shape`: which cells, what is counted, and what is said where it cannot be measured."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from espalier.bench import shaped
from espalier.bench.cells import Cell, parse_cells, with_plain
from espalier.bench.instrument import LaunchRecord
from espalier.bench.plot import Bars, plot
from espalier.bench.shaped import Measured, Settings, measure, plain_beside
from espalier.bench.synthetic_models import SyntheticModels
from espalier.cli.main import main
from espalier.errors import EspalierError
from espalier.synthetic.checkpoint import Recipe
from tests.synthetic.test_checkpoint import tiny

CPU = torch.device("cpu")
SHAPE = tiny(hot=1024)
TREE = (4, 4, 16)


@pytest.fixture(scope="module")
def found() -> list[Measured]:
    cells = with_plain(parse_cells(["2x24:4,4,16"], [1, 16]))
    settings = Settings(rounds=6, chunk_size=16)
    models = SyntheticModels(Recipe(SHAPE, skill=0.9), torch.float32, CPU, 512)
    return list(measure(models, cells, settings, None))


def test_cells_are_read_each_once_with_plain_beside_them():
    cells = parse_cells(["1x1024:5,8,64", "8x512:plain", "8x512:3,2,8@1,16", "1x1024:5,8,64@64"], [64, 256])
    assert cells == (
        Cell(1, 1024, (5, 8, 64), 64),
        Cell(1, 1024, (5, 8, 64), 256),
        Cell(8, 512, (0, 1, 1), 64),
        Cell(8, 512, (0, 1, 1), 256),
        Cell(8, 512, (3, 2, 8), 1),
        Cell(8, 512, (3, 2, 8), 16),
    )
    assert with_plain(cells) == (*cells, Cell(1, 1024, (0, 1, 1), 64))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1x1024", "is not a cell"),
        ("1x1024:5,8", "is not a cell"),
        ("x:plain", "is not a cell"),
        ("1x1024:5,8,64@", "is not a cell"),
        ("1x1024:0,1,1", "1x1024:plain"),
        ("0x1024:plain", "max_batch=0"),
        ("1x0:plain", "no context"),
        ("1x8:2,2,64", "num_draft_tokens=64"),
        ("1x8:plain@0", "page_size=0"),
    ],
)
def test_what_is_no_cell_is_refused(text, says):
    with pytest.raises(EspalierError, match=says):
        parse_cells([text], [64])


def test_rounds_are_of_the_full_batch_and_follow_the_chain(found):
    assert [each.cell.name for each in found] == ["2x24:4,4,16@1", "2x24:4,4,16@16", "2x24:plain@1"]
    for each in found:
        assert each.rounds.follows == 2
        assert each.rounds.round_ms > 0 and each.rounds.host_ms >= 0
        assert each.start.pages_bytes > 0 and each.start.kernels is None and each.roofline is None
    tree, other, plain = (each.rounds for each in found)
    assert plain.accept_length == 1.0 and tree.accept_length > 2
    # Pages decide nothing.
    assert tree.accept_length == other.accept_length and tree.context == other.context > 24


def test_a_tree_stands_beside_plain_decoding_of_its_batch_and_context(found):
    tree, _, plain = found
    others = [replace(plain, cell=replace(plain.cell, **other)) for other in ({"batch": 1}, {"context": 25})]
    assert plain_beside([*others, *found], tree) is plain
    elsewhere = replace(plain, cell=replace(plain.cell, page_size=16))
    assert plain_beside([elsewhere, *found], tree) is plain and plain_beside([elsewhere], tree) is elsewhere
    assert plain_beside(others, tree) is None
    figures = tree.as_dict(plain)
    assert figures["tree_over_plain"] == tree.rounds.tokens_per_second / plain.rounds.tokens_per_second
    assert plain.as_dict(plain)["tree_over_plain"] is None
    assert json.loads(json.dumps(figures))["num_draft_tokens"] == 16


def test_weights_are_counted(found):
    models = SyntheticModels(Recipe(SHAPE), torch.float32, CPU, 64)
    tensors, draft = models.recipe.tensors(torch.float32, CPU)
    assert models.weights_bytes == 4 * sum(
        each.tensor(name).numel() for each in (tensors, draft) for name in each.shapes
    )


def test_the_command_prints_a_line_a_cell_and_writes_all(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("espalier.bench.synthetic_models.find_shape", lambda name: SHAPE)
    monkeypatch.setattr("espalier.bench.shaped.require_gpu", lambda what: CPU)
    file = tmp_path / "figures.json"
    flags = ["--shape", "tiny", "--cells", "1x20:4,4,16", "--page-size", "16", "--rounds", "4", "--json", str(file)]
    assert main(["bench", "round", *flags]) == 0
    out = capsys.readouterr().out
    assert "1x20:4,4,16@16" in out and "1x20:plain@16" in out
    figures = json.loads(file.read_text())
    assert [cell["batch"] for cell in figures["cells"]] == [1, 1] and figures["recipe"]["shape"] == "tiny"
    # And what was written can be drawn elsewhere.
    drawn = []
    monkeypatch.setattr("espalier.bench.shaped.plot", lambda bars, title, path: drawn.extend(bars))
    monkeypatch.setattr("espalier.bench.round.require_plot", lambda path: None)
    assert main(["bench", "round", "--figures", str(file), "--plot", "cells.svg"]) == 0
    assert [bars.name for bars in drawn] == ["1x20:4,4,16@16", "1x20:plain@16"]
    assert drawn[0].plain == figures["cells"][1]["rounds"]["tokens_per_second"] and drawn[0].roofline_ms is None


def test_a_failure_leaves_what_was_measured(monkeypatch, capsys, tmp_path):
    full_rounds = shaped.full_rounds

    def failing(engine, launches, models, cell, num_rounds):
        if not cell.drafts:
            raise EspalierError("the second cell fails")
        return full_rounds(engine, launches, models, cell, num_rounds)

    monkeypatch.setattr(shaped, "full_rounds", failing)
    monkeypatch.setattr("espalier.bench.synthetic_models.find_shape", lambda name: SHAPE)
    monkeypatch.setattr("espalier.bench.shaped.require_gpu", lambda what: CPU)
    file = tmp_path / "figures.json"
    assert main(["bench", "round", "--shape", "tiny", "--cells", "1x20:4,4,16", "--json", str(file)]) == 2
    assert "1x20:4,4,16@64" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["cells"]) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--shape", "llama-3.1-8b", "--batch", "2"], "--batch is not for --shape"),
        (["--shape", "llama-3.1-8b", "--memory"], "--memory is not for --shape"),
        (["--shape", "llama-3.1-8b", "--max-batch", "2"], "--max-batch is not for --shape"),
        (["--cells", "1x8:plain"], "--cells is for --shape"),
        (["--page-size", "1,64"], "several are for --shape"),
        (["--figures", "none.json"], "give --plot"),
        (["--acceptance", "--plot", "a.txt"], "--plot"),
    ],
)
def test_flags_of_the_other_kind_are_refused(flags, says, capsys):
    assert main(["bench", "round", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "round", "--shape", "llama-3.1-8b"]) == 2
    assert "on a GPU" in capsys.readouterr().err


def test_a_picture_is_drawn_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "cells.svg"
    plot([Bars("1x1024:plain@64", 4.7, 3.7, 213.0, 213.0), Bars("1x8", 6.8, None, 624.0, None)], "llama", file)
    drawn = file.read_text()
    assert "1x1024:plain@64" in drawn or "<svg" in drawn
    with pytest.raises(EspalierError, match="cannot be written"):
        plot([Bars("1x8", 6.8, None, 624.0, None)], "llama", tmp_path / "none" / "cells.svg")


def test_without_matplotlib_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "round", "--plot", "cells.svg"]) == 2
    assert "pip install espalier-llm[bench]" in capsys.readouterr().err


def test_a_picture_of_no_known_kind_is_refused(capsys):
    assert main(["bench", "round", "--plot", "cells.txt"]) == 2
    assert ".png, .svg" in capsys.readouterr().err


class Event:
    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


def test_a_gpu_is_idle_from_the_end_of_a_round_to_the_next_ones_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    record = LaunchRecord()
    record.replays += [(Event(a), Event(b)) for a, b in [(0, 6), (7, 13), (13, 20)]]
    assert record.gpu_times() == (pytest.approx(19 / 3), pytest.approx(1 / 20))


@pytest.mark.gpu
def test_on_a_gpu_graphs_are_timed_and_counted():
    models = SyntheticModels(Recipe(SHAPE, skill=0.9), torch.bfloat16, torch.device("cuda"), 512)
    cells = with_plain(parse_cells(["2x24:4,4,16"], [16]))
    tree, plain = measure(models, cells, Settings(rounds=6, chunk_size=16), None)
    for each in (tree, plain):
        rounds = each.rounds
        assert rounds.replays == 1 and rounds.follows == 2
        assert rounds.gpu_ms > 0 and 0 <= rounds.idle_share < 1
        assert each.start.graphs_bytes > 0
    assert tree.start.kernels > plain.start.kernels > 10
