"""`bench round --shape`: which cells, what is counted, and what is said where it cannot be measured."""

import json
import sys
import weakref
from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.layout import TreeShape
from espalier.startup.resolve import DEVICE_DEFAULTS
from lab.__main__ import main as lab
from lab.bench import shaped
from lab.bench.cells import RoundCell, parse_cells, with_plain_cells
from lab.bench.engine_sizes import CellEngineSizes, UserEngineSizes
from lab.bench.floor import FloorMeter
from lab.bench.instrument import LaunchRecord
from lab.bench.plot import Bars, plot_bars
from lab.bench.ranked_models import synthetic_models
from lab.bench.shaped import MeasuredCell, measure_cells, plain_cell_beside
from lab.bench.synthetic_models import SyntheticModels, recipe_sizes
from lab.synthetic.chain import predicted_accept_length
from lab.synthetic.checkpoint import Recipe
from tests.lab.synthetic.mixtures import mixture
from tests.lab.synthetic.test_checkpoint import tiny

CPU = torch.device("cpu")
SHAPE = tiny(hot=1024, num_hidden_layers=3, intermediate_size=320)


@pytest.fixture(scope="module")
def found() -> list[MeasuredCell]:
    cells = with_plain_cells(parse_cells(["2x24:4,4,16"], [1, 16]))
    models = SyntheticModels(Recipe(SHAPE, skill=0.9), torch.float32, CPU, 512)
    return list(measure_cells(models, cells, CellEngineSizes(models.recipe.draft_config.spec, chunk_size=16), 6, None))


def test_cells_are_read_each_once_with_plain_beside_them():
    cells = parse_cells(["1x1024:5,8,64", "8x512:plain", "8x512:3,2,8@1,16", "1x1024:5,8,64@64"], [64, 256])
    assert cells == (
        RoundCell(1, 1024, (5, 8, 64), 64),
        RoundCell(1, 1024, (5, 8, 64), 256),
        RoundCell(8, 512, (0, 1, 1), 64),
        RoundCell(8, 512, (0, 1, 1), 256),
        RoundCell(8, 512, (3, 2, 8), 1),
        RoundCell(8, 512, (3, 2, 8), 16),
    )
    assert with_plain_cells(cells) == (*cells, RoundCell(1, 1024, (0, 1, 1), 64))


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
        start = each.engine.start
        assert start.pages_bytes > 0 and start.kernels is None and each.floor is None
        assert (each.engine.name, each.engine.max_batch) == (each.cell.name, 2)
    tree, other, plain = (each.rounds for each in found)
    assert plain.accept_length == 1.0 and tree.accept_length > 2
    # Pages decide nothing.
    assert tree.accept_length == other.accept_length and tree.context == other.context > 24


def test_a_tree_stands_beside_plain_decoding_of_its_batch_and_context(found):
    tree, _, plain = found
    others = [replace(plain, cell=replace(plain.cell, **other)) for other in ({"batch": 1}, {"context": 25})]
    assert plain_cell_beside([*others, *found], tree) is plain
    elsewhere = replace(plain, cell=replace(plain.cell, page_size=16))
    assert plain_cell_beside([elsewhere, *found], tree) is plain and plain_cell_beside([elsewhere], tree) is elsewhere
    assert plain_cell_beside(others, tree) is None
    figures = tree.as_dict(plain)
    assert figures["tree_over_plain"] == tree.rounds.tokens_per_second / plain.rounds.tokens_per_second
    assert plain.as_dict(plain)["tree_over_plain"] is None
    assert json.loads(json.dumps(figures))["num_draft_tokens"] == 16


SETTINGS = {"max_batch": 4, "max_context": 256, "chunk_size": 16}


@pytest.mark.full
def test_cells_of_a_tree_share_an_engine_of_a_users_size(monkeypatch):
    recipe = Recipe(SHAPE, skill=0.9)
    sizes = UserEngineSizes(recipe, SETTINGS, CPU)
    cells = with_plain_cells(parse_cells(["2x24:4,4,16", "1x24:3,2,8", "3x40:4,4,16"], [16]))
    models = SyntheticModels(recipe, torch.float32, CPU, 512)
    started = []
    make_engine = SyntheticModels.make_engine

    def noting(self, config, num_pages):
        layout = config.layout
        started.append((layout.steps, layout.max_batch, layout.max_context, layout.trees, config.prefix_cache))
        return make_engine(self, config, num_pages)

    monkeypatch.setattr(SyntheticModels, "make_engine", noting)
    measured = list(measure_cells(models, cells, sizes, 6, None))
    # The cells of a tree come together: an engine starts once.
    assert started == [(steps, 4, 256, (), True) for steps in (4, 3, 0)]
    names = [each.cell.name for each in measured]
    assert names == [
        "2x24:4,4,16@16",
        "3x40:4,4,16@16",
        "1x24:3,2,8@16",
        *("2x24:plain@16", "1x24:plain@16", "3x40:plain@16"),
    ]
    # full_rounds has checked that every timed round ran the cell's batch and no other.
    assert all(each.rounds.follows == each.cell.batch and each.engine.max_batch == 4 for each in measured)
    assert [engine.name for engine in shaped.engines_of_cells(measured)] == ["4,4,16@16", "3,2,8@16", "plain@16"]
    figures = shaped.as_dicts(measured)
    assert [each["max_batch"] for each in figures] == [4] * 6 and figures[0]["engine"] == "4,4,16@16"
    assert len(shaped.engine_table(measured)) == 1 + 3


@pytest.mark.parametrize(
    ("settings", "text", "says"),
    [
        ({"max_batch": 2}, "3x24:4,4,16", r"above max_batch=2; give --max-batch 3"),
        ({"max_context": 40}, "1x24:plain", r"max_context=40; give --max-context 4"),
        ({}, "1x99999:plain", r"cell 1x99999:plain@\d+ and --rounds \d+ need \d+ tokens a request, and"),
    ],
)
def test_a_cell_larger_than_its_engine_is_refused_before_models_are_made(settings, text, says):
    [cell] = parse_cells([text], [16])
    with pytest.raises(EspalierError, match=says):
        UserEngineSizes(Recipe(SHAPE), SETTINGS | settings, CPU).layout(cell, 6)


class NotingFloors:
    """Floors that note what they are asked for, and that no engine held the memory then."""

    def __init__(self, engines):
        self.engines, self.asked = engines, []

    def ceilings(self):
        return "ceilings"

    def round(self, size, ceilings):
        assert [engine() for engine in self.engines] == [None] * len(self.engines)
        self.asked.append((size.batch, size.tree, ceilings, size.has_draft, size.num_touched_experts))
        return f"floor of {size.batch}"


@pytest.fixture
def floors(monkeypatch):
    engines, full_rounds = [], shaped.measure_full_rounds

    def noting(engine, models, cell, num_rounds):
        engines.append(weakref.ref(engine))
        if cell.batch == 3:
            raise EspalierError("the third cell fails")
        return full_rounds(engine, models, cell, num_rounds)

    monkeypatch.setattr(shaped, "measure_full_rounds", noting)
    return NotingFloors(engines)


def test_floors_are_timed_when_the_engine_has_closed_and_for_the_experts_that_it_touched(floors):
    recipe = Recipe(mixture("qwen3-moe", hot=1024), skill=0.9)
    models = SyntheticModels(recipe, torch.float32, CPU, 512)
    cells = parse_cells(["1x20:2,2,4", "2x20:2,2,4"], [16])
    one, two = measure_cells(models, cells, UserEngineSizes(recipe, SETTINGS, CPU), 2, floors)
    assert (one.floor, two.floor) == ("floor of 1", "floor of 2") and one.engine is two.engine
    touched = [each.rounds.experts_touched for each in (one, two)]
    tree = TreeShape(2, 2, 4)
    assert floors.asked == [(n, tree, "ceilings", True, each) for n, each in zip((1, 2), touched, strict=True)]
    assert 4 <= touched[0] <= touched[1] <= 16


def test_cells_before_one_that_fails_are_kept_without_a_floor(floors):
    recipe = Recipe(SHAPE, skill=0.9)
    cells = parse_cells(["1x20:2,2,4", "3x20:2,2,4"], [16])
    measuring = measure_cells(
        SyntheticModels(recipe, torch.float32, CPU, 512), cells, UserEngineSizes(recipe, SETTINGS, CPU), 2, floors
    )
    one = next(measuring)
    assert one.cell.batch == 1 and one.rounds.follows == 1 and one.floor is None
    with pytest.raises(EspalierError, match="the third cell fails"):
        next(measuring)
    assert not floors.asked


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_cells_are_kept_without_a_floor_where_one_cannot_be_timed(floors, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(floors, "round", fails)
    recipe = Recipe(SHAPE, skill=0.9)
    cells = parse_cells(["1x20:2,2,4", "2x20:2,2,4"], [16])
    measuring = measure_cells(
        SyntheticModels(recipe, torch.float32, CPU, 512), cells, UserEngineSizes(recipe, SETTINGS, CPU), 2, floors
    )
    kept = [next(measuring), next(measuring)]
    assert [(one.cell.batch, one.floor) for one in kept] == [(1, None), (2, None)]
    with pytest.raises(error):
        next(measuring)


def test_a_cell_that_the_pages_do_not_hold_is_refused():
    recipe = Recipe(SHAPE)
    sizes = UserEngineSizes(recipe, SETTINGS | {"num_pages": 20}, CPU)
    models = SyntheticModels(recipe, torch.float32, CPU, 512)
    one, four = parse_cells(["1x80:4,4,16", "4x80:4,4,16"], [16])
    assert len(list(measure_cells(models, [one], sizes, 6, None))) == 1
    with pytest.raises(EspalierError, match="and the engine has 19"):
        list(measure_cells(models, [four], sizes, 6, None))


def test_weights_are_counted(found):
    models = SyntheticModels(Recipe(SHAPE), torch.float32, CPU, 64)
    tensors, draft = models.recipe.tensors(torch.float32, CPU)
    assert models.weights_bytes == 4 * sum(
        each.tensor(name).numel() for each in (tensors, draft) for name in each.shapes
    )


def test_the_command_prints_a_line_a_cell_and_writes_all(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: SHAPE)
    monkeypatch.setattr("lab.bench.shaped.require_gpu", lambda what: CPU)
    file = tmp_path / "figures.json"
    flags = ["--shape", "tiny", "--cells", "1x20:4,4,16", "--page-size", "16", "--rounds", "4", "--json", str(file)]
    assert lab(["round", *flags]) == 0
    out = capsys.readouterr().out
    assert "1x20:4,4,16@16" in out and "1x20:plain@16" in out
    figures = json.loads(file.read_text())
    assert [cell["batch"] for cell in figures["cells"]] == [1, 1] and figures["recipe"]["shape"] == "tiny"
    assert [engine["name"] for engine in figures["engines"]] == ["4,4,16@16", "plain@16"]
    # And what was written can be drawn elsewhere.
    drawn = []
    monkeypatch.setattr("lab.bench.shaped.plot_bars", lambda bars, title, path: drawn.extend(bars))
    monkeypatch.setattr("lab.bench.round.check_plot_path", lambda path: None)
    assert lab(["round", "--figures", str(file), "--plot", "cells.svg"]) == 0
    assert [bars.name for bars in drawn] == ["1x20:4,4,16@16", "1x20:plain@16"]
    assert drawn[0].plain_tokens_per_second == figures["cells"][1]["rounds"]["tokens_per_second"]
    assert drawn[0].floor_ms is None


HEADS = [
    ("v2", 3, "target"),
    pytest.param("qwen3-moe", 1, "chain", marks=pytest.mark.full),
    ("llama", 2, "chain"),
]


@pytest.mark.parametrize(("name", "layers", "form"), HEADS)
def test_an_mtp_head_is_measured_like_an_eagle_head(name, layers, form, monkeypatch, capsys, tmp_path):
    shape = SHAPE if name == "llama" else mixture(name, hot=1024)
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: shape)
    monkeypatch.setattr("lab.bench.shaped.require_gpu", lambda what: CPU)
    seen = []
    make_engine = SyntheticModels.make_engine
    monkeypatch.setattr(
        SyntheticModels,
        "make_engine",
        lambda self, config, pages: seen.append(config) or make_engine(self, config, pages),
    )
    file = tmp_path / "figures.json"
    flags = ["--shape", name, "--mtp-layers", str(layers), "--mtp-form", form, "--accept-length", "5"]
    sizes = ["--cells", "2x40:3,4,16", "--page-size", "16", "--rounds", "8", "--chunk-size", "64"]
    assert lab(["round", *flags, *sizes, "--json", str(file)]) == 0
    assert f"an MTP head, {layers} x {form}, of skill" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    tree, plain = figures["cells"]
    assert [config.algorithm for config in seen] == ["mtp", "none"]
    # Whatever drafts, the text is the chain's; and the planted head is accepted about as the tables say.
    assert tree["rounds"]["follows"] == plain["rounds"]["follows"] == 2
    recipe = Recipe(shape, skill=figures["recipe"]["skill"], mtp_layers=layers)
    predicted = predicted_accept_length(recipe.chain(), 3, 4, 16)
    assert tree["rounds"]["accept_length"] == pytest.approx(predicted, abs=0.8) and predicted > 2.5


@pytest.mark.parametrize("own_size", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_block_draft_is_measured_like_an_eagle_head(own_size, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: SHAPE)
    monkeypatch.setattr("lab.bench.shaped.require_gpu", lambda what: CPU)
    file = tmp_path / "figures.json"
    flags = ["--shape", "tiny", "--block-size", "8", "--block-fade", "0.97", "--accept-length", "3.5"]
    sizes = ["--cells", "2x40:8,4,32", "--page-size", "16", "--rounds", "8", "--chunk-size", "64"]
    assert lab(["round", *flags, *sizes, "--json", str(file), *(["--own-size"] if own_size else [])]) == 0
    assert "a block draft of 8, fade 0.97, of skill" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    tree, plain = figures["cells"]
    assert tree["rounds"]["follows"] == plain["rounds"]["follows"] == 2 and plain["rounds"]["accept_length"] == 1
    recipe = Recipe(SHAPE, skill=figures["recipe"]["skill"], block_size=8, block_fade=0.97)
    predicted = predicted_accept_length(recipe.chain(), 8, 4, 32, samples=128)
    assert tree["rounds"]["accept_length"] == pytest.approx(predicted, abs=1.0) and predicted > 2.5


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mtp-layers", "0"], "--mtp-layers=0 is not supported; use 1 to"),
        (["--mtp-form", "chain"], "--mtp-form is for an MTP head; give --mtp-layers"),
        (["--block-size", "1"], "--block-size=1 is not supported; use 2 to 63"),
        (["--block-size", "8", "--mtp-layers", "1"], "--block-size and --mtp-layers name two drafts; leave one out"),
        (["--block-fade", "0.9"], "--block-fade=0.9 is not supported; use above 0 to 1, with --block-size"),
        (["--block-size", "8", "--block-fade", "1.1"], "--block-fade=1.1 is not supported"),
        (["--layers", "33"], "--layers=33 is not supported: llama-3.1-8b has 32 layers; use 1 to 32"),
        (["--layers", "0"], "--layers=0 is not supported"),
        (["--model-impl", "transformers", "--weights", "fp8"], "has no quantised weights; leave --weights out"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, says, monkeypatch, capsys):
    monkeypatch.setattr("lab.bench.shaped.require_gpu", lambda what: CPU)
    assert lab(["round", "--shape", "llama-3.1-8b", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_failure_leaves_what_was_measured(monkeypatch, capsys, tmp_path):
    full_rounds = shaped.measure_full_rounds

    def failing(engine, models, cell, num_rounds):
        if not cell.has_draft:
            raise EspalierError("the second cell fails")
        return full_rounds(engine, models, cell, num_rounds)

    monkeypatch.setattr(shaped, "measure_full_rounds", failing)
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: SHAPE)
    monkeypatch.setattr("lab.bench.shaped.require_gpu", lambda what: CPU)
    file = tmp_path / "figures.json"
    flags = ["--shape", "tiny", "--cells", "1x20:4,4,16", "--rounds", "4", "--json", str(file)]
    assert lab(["round", *flags]) == 2
    assert "1x20:4,4,16@16" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["cells"]) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--shape", "llama-3.1-8b", "--batch", "2"], "--batch is not for --shape"),
        (["--shape", "llama-3.1-8b", "--acceptance"], "--acceptance is not for --shape"),
        (["--shape", "llama-3.1-8b", "--steps", "2"], "--steps is not for --shape"),
        (["--shape", "llama-3.1-8b", "--own-size", "--max-batch", "2"], "--max-batch is not for --own-size"),
        (["--shape", "llama-3.1-8b", "--all-buckets"], "--all-buckets is for --own-size"),
        (["--cells", "1x8:plain"], "--cells is for --shape"),
        (["--page-size", "1,64"], "several are for --shape"),
        (["--figures", "none.json"], "give --plot"),
        (["--acceptance", "--plot", "a.txt"], "--plot"),
    ],
)
def test_flags_of_the_other_kind_are_refused(flags, says, capsys):
    assert lab(["round", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert lab(["round", "--shape", "llama-3.1-8b"]) == 2
    assert "on a GPU" in capsys.readouterr().err


def test_a_picture_is_drawn_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "cells.svg"
    plot_bars([Bars("1x1024:plain@64", 4.7, 3.7, 213.0, 213.0), Bars("1x8", 6.8, None, 624.0, None)], "llama", file)
    drawn = file.read_text()
    assert "1x1024:plain@64" in drawn or "<svg" in drawn
    with pytest.raises(EspalierError, match="cannot be written"):
        plot_bars([Bars("1x8", 6.8, None, 624.0, None)], "llama", tmp_path / "none" / "cells.svg")


def test_without_matplotlib_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert lab(["round", "--plot", "cells.svg"]) == 2
    assert "run pip install -e '.[bench]'" in capsys.readouterr().err


def test_a_picture_of_no_known_kind_is_refused(capsys):
    assert lab(["round", "--plot", "cells.txt"]) == 2
    assert ".png, .svg" in capsys.readouterr().err


class Event:
    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


def test_a_gpu_is_idle_from_the_end_of_a_round_to_the_next_ones_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    record = LaunchRecord(())
    record.replays += [(Event(a), Event(b)) for a, b in [(0, 6), (7, 13), (13, 20)]]
    assert record.gpu_times() == (pytest.approx(19 / 3), pytest.approx(1 / 20))


@pytest.mark.gpu
def test_on_a_gpu_graphs_are_timed_and_counted():
    models = SyntheticModels(Recipe(SHAPE, skill=0.9), torch.bfloat16, torch.device("cuda"), 512)
    cells = with_plain_cells(parse_cells(["2x24:4,4,16"], [16]))
    tree, plain = measure_cells(models, cells, CellEngineSizes(models.recipe.draft_config.spec, chunk_size=16), 6, None)
    require_graphs(tree, plain)


@pytest.mark.gpu
def test_on_a_gpu_cells_of_a_tree_share_an_engine_with_a_users_pages_and_graphs():
    device = torch.device("cuda")
    recipe = Recipe(SHAPE, skill=0.9)
    sizes = UserEngineSizes(recipe, {}, device)
    cells = with_plain_cells(parse_cells(["2x24:4,4,16", "5x40:4,4,16"], [16]))
    rows = max(sizes.layout(cell, 6).position_rows for cell in cells)
    models = SyntheticModels(recipe, torch.bfloat16, device, rows)
    small, large, plain, _ = measure_cells(models, cells, sizes, 6, None)
    require_graphs(small, plain)
    assert (
        small.engine is large.engine
        and small.engine.max_batch == DEVICE_DEFAULTS["cuda"].max_batch
        and small.engine.prefix_cache
    )
    assert small.engine.num_pages > 1


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "weights"), [("qwen3-moe", "dense"), ("v2", "fp8"), ("gpt-oss", "mxfp4")])
def test_on_a_gpu_a_mixture_stands_beside_its_floor(name, weights):
    recipe = Recipe(mixture(name, hot=1024), skill=0.9, weights=weights)
    models = SyntheticModels(recipe, torch.bfloat16, torch.device("cuda"), 512)
    cells = with_plain_cells(parse_cells(["2x24:4,4,16"], [16]))
    sizes = CellEngineSizes(recipe.draft_config.spec, chunk_size=16)
    for each in measure_cells(models, cells, sizes, 6, FloorMeter(recipe_sizes(recipe))):
        assert each.rounds.experts_touched >= 4 and each.floor.expert_ms > 0
        assert each.floor.weight_bytes_ms < each.floor.ms


def require_graphs(tree, plain):
    for each in (tree, plain):
        rounds, start = each.rounds, each.engine.start
        assert rounds.replays == 1 and rounds.follows == each.cell.batch
        assert rounds.gpu_ms > 0 and 0 <= rounds.idle_share < 1
        assert start.graphs_bytes > 0
    assert tree.engine.start.kernels > plain.engine.start.kernels > 10


@pytest.mark.full
def test_cells_are_measured_on_several_ranks():
    settings = {**SETTINGS, "tensor_parallel": 2}
    recipe, cells = Recipe(SHAPE, skill=0.9), parse_cells(["1x20:2,2,4", "2x20:plain"], [16])
    models = synthetic_models(recipe, settings, torch.float32, CPU, 512)
    found = list(measure_cells(models, cells, UserEngineSizes(recipe, settings, CPU), 2, None))
    assert [each.rounds.follows for each in found] == [1, 2]
