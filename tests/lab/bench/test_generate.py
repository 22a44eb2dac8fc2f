"""`bench generate`: its slope, by a clock that counts engine steps, through the public API; and its command."""

import json
import re
from dataclasses import replace

import pytest
import torch

from espalier.bench.drive import AS_CONFIGURED, PLAIN_DECODING
from espalier.config import SpeculationConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.layout import TreeShape
from espalier.request import SamplingParams
from espalier.startup.resolve import DEVICE_DEFAULTS
from lab.__main__ import main as lab
from lab.bench import generate
from lab.bench.engines import ShapeEngines, variant_with_tree
from lab.synthetic.checkpoint import Recipe
from tests.lab.synthetic.test_checkpoint import tiny

CPU = torch.device("cpu")
SHAPE = tiny(hot=1024, num_hidden_layers=3, intermediate_size=320)
TREE = SpeculationConfig(steps=3, topk=2, num_draft_tokens=8)
SETTINGS = {"max_batch": 2, "max_context": 256, "chunk_size": 64, "overlap": False, "speculation": TREE}
STEP = 0.01
# The first is deeper than the default.
SEVERAL = ["6,2,8", "4,4,16"]
CHANGED = ["--by-batch", '{"2": {"steps": 0}}']


@pytest.fixture(scope="module")
def engines() -> ShapeEngines:
    return ShapeEngines(Recipe(SHAPE, skill=0.9), SETTINGS, CPU)


@pytest.fixture
def clock(monkeypatch):
    """Each engine step takes STEP seconds, by the clock of the measurement."""
    seconds, step = [0.0], Engine.step

    def counted(engine):
        seconds[0] += STEP
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(generate, "perf_counter", lambda: seconds[0])


@pytest.mark.parametrize(
    ("batch", "context", "passes", "way"),
    [
        (1, 200, 4, AS_CONFIGURED),
        (2, 16, 1, PLAIN_DECODING),
        pytest.param(1, 200, 4, PLAIN_DECODING, marks=pytest.mark.full),
        pytest.param(2, 16, 1, AS_CONFIGURED, marks=pytest.mark.full),
    ],
)
def test_a_round_takes_the_slope_and_the_first_token_every_pass(engines, clock, batch, context, passes, way):
    with engines.open(way) as bench:
        found = generate.measure_prompts(bench.llm, bench.make_prompts([context] * batch), 54, repeats=1)
        assert bench.engine.prefix_tree is not None and bench.engine.observer is None
    assert (found.batch, found.context) == (batch, context)
    # A step is a pass or a round.  Prompts that are cached from an earlier call would take fewer passes.
    assert found.first_token_ms == pytest.approx(1e3 * STEP * passes)
    assert found.round_ms == pytest.approx(1e3 * STEP)
    if way is AS_CONFIGURED:
        assert 1.5 < found.accept_length <= 4
        assert found.tokens_per_second > 1.5 / STEP
    else:
        assert found.accept_length == 1.0
        assert found.tokens_per_second == pytest.approx(batch / STEP)


def test_only_rounds_of_the_whole_batch_count():
    """Not the prefill pass before them, nor the first rounds, nor the shorter rounds of those who are left."""
    clock = generate.RoundClock()
    sizes = [0, 1, 2, 2, 2, *[2] * 10, 1, 1, 2, 2]
    starts = [0.0, 5.0, 9.0, 9.1, 9.2, *(9.3 + 0.5 * k for k in range(10)), 20.0, 20.1, 40.0, 41.0]
    clock.launches = list(zip(starts, sizes, strict=True))
    assert clock.seconds(2) == pytest.approx(0.5)
    with pytest.raises(EspalierError, match="too few rounds ran the whole batch of 3: 0 after"):
        clock.seconds(3)


def test_too_few_tokens_and_too_few_pages_are_refused(engines):
    with engines.open() as bench, pytest.raises(EspalierError, match="and 9 are needed; raise --tokens"):
        generate.measure_prompts(bench.llm, bench.make_prompts([20]), 10, 1)
    with engines.open() as bench, pytest.raises(EspalierError, match=r"too few rounds .*: 0 after .* raise --tokens"):
        generate.measure_prompts(bench.llm, bench.make_prompts([20]), 1, 1)
    few = ShapeEngines(engines.recipe, SETTINGS | {"num_pages": 20}, CPU)
    with few.open() as bench, pytest.raises(EspalierError, match="2x150 with 40 new tokens needs 26 pages"):
        generate.measure_prompts(bench.llm, bench.make_prompts([150] * 2), 40, 1)


def test_a_tree_that_the_models_were_not_made_for_is_refused(engines):
    with (
        pytest.raises(ValueError, match=r"steps=6.* name it in variants"),
        engines.open(variant_with_tree(TreeShape(6, 2, 8))),
    ):
        pass


def test_an_llm_around_an_engine_serves_token_ids(engines):
    with engines.open() as bench:
        prompts = bench.make_prompts([20, 30])
        outputs = bench.llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24))
        follows = [engines.models.follows(p, o.token_ids) for p, o in zip(prompts, outputs, strict=True)]
        assert follows == [True, True] and [len(o.token_ids) for o in outputs] == [24, 24]
        with pytest.raises(
            EspalierError,
            match=r"a text prompt needs a tokenizer, and tiny has none; add its tokenizer\.json, or give token ids",
        ):
            bench.llm.generate("text")
        assert bench.config.num_pages == bench.engine.pool.num_pages


@pytest.mark.parametrize(
    ("flags", "batches"),
    [
        (["--tree", "plain"], [1, 2]),
        (CHANGED, [1, 2]),
        pytest.param(["--tree", *SEVERAL], [1, 2], marks=pytest.mark.full),
        pytest.param(["--tree", "4,4,16"], [1], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_command_measures_tree_and_plain(flags, batches, clock, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: SHAPE)
    monkeypatch.setattr("lab.bench.engines.require_gpu", lambda what: CPU)
    file = tmp_path / "figures.json"
    sizes = [
        "--prompts",
        *(f"{batch}x12" for batch in batches),
        "--tokens",
        "48",
        "--repeats",
        "1",
        "--max-context",
        "64",
    ]
    assert lab(["generate", "--shape", "tiny", "--json", str(file), *sizes, *flags]) == 0
    figures, out = json.loads(file.read_text()), capsys.readouterr().out
    trees = len(SEVERAL) if flags[1:] == SEVERAL else 1
    cells = [(batch, 12) for batch in batches for _ in range(trees)]
    assert [(cell["batch"], cell["context"]) for cell in figures["cells"]] == cells
    steps_of_first = {"--tree 4,4,16": 4, "--tree plain": 0, f"--tree {' '.join(SEVERAL)}": 6}
    assert figures["config"]["steps"] == steps_of_first.get(" ".join(flags), 5)
    if trees > 1:
        assert [cell["tree"]["tree"]["num_draft_tokens"] for cell in figures["cells"]] == [8, 16] * 2
        assert [re.findall(f"{batch}x12 (tree|plain)", out) for batch in batches] == [["tree", "tree", "plain"]] * 2
    assert figures["config"]["max_batch"] == 8 and figures["config"]["prefix_cache"]
    if flags is CHANGED:
        assert [cell["tree"]["tree"]["steps"] for cell in figures["cells"]] == [5, 0]
        assert re.search("1x12 tree +5, 4, 16 ", out) and re.search("2x12 tree +0, 1, 1 ", out)
    for cell in figures["cells"]:
        assert cell["plain"]["accept_length"] == 1.0 and f"{cell['batch']}x12 plain" in out
        if flags == ["--tree", "plain"]:
            assert "tree" not in cell
        else:
            rates = [cell[way]["tokens_per_second"] for way in ("tree", "plain")]
            assert cell["tree_over_plain"] == pytest.approx(rates[0] / rates[1])


def test_the_floor_and_the_bytes_of_the_weights_stand_beside_a_round():
    one = generate.PromptFigures(8, 1024, 20.0, 5.0, 1.0, 1600.0, TreeShape(0, 1, 1))
    timed = replace(one, floor_ms=4.0, weight_bytes_ms=3.125)
    heads, row, other = generate._table([[timed, one]])
    assert (row[heads.index("of floor")], row[heads.index("bytes ms")]) == ("1.25", "3.12")
    assert (other[heads.index("of floor")], other[heads.index("bytes ms")]) == ("", "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tokens", "0"], "--tokens=0"),
        (["--prompts", "0x3"], "write such as 1x8192"),
        (["--tree", "3,2"], "or plain"),
        (["--tree", "3,2,8", "3,2,8"], "topk 2, num_draft_tokens 8 twice"),
        (["--tree", "3,2,8", "plain"], "names plain decoding twice (plain decoding is measured beside every tree)"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, says, capsys):
    try:
        code = lab(["generate", *flags])
    except SystemExit as left:
        code = left.code
    assert code == 2 and says in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_a_users_engine_is_measured():
    made = ShapeEngines(Recipe(SHAPE, skill=0.9), {}, torch.device("cuda"))
    for way in (AS_CONFIGURED, PLAIN_DECODING):
        with made.open(way) as bench:
            found = generate.measure_prompts(bench.llm, bench.make_prompts([24] * 2), 160, 3)
            assert bench.config.layout.max_batch == DEVICE_DEFAULTS["cuda"].max_batch and bench.engine.executor.graphs
        assert (found.accept_length > 1.5) is (way is AS_CONFIGURED) and found.first_token_ms > 0
