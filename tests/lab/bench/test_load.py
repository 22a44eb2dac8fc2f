"""`bench prefill` and `load`: what is counted, on tiny synthetic models, and what is refused."""

import json

import pytest
import torch

from espalier.bench import load
from espalier.bench.drive import AS_CONFIGURED, PLAIN_DECODING
from espalier.bench.load import Arrivals, Load, Timeline, percentiles, random_load, serve_random
from espalier.config import SpeculationConfig
from lab.__main__ import main as lab
from lab.bench.engines import ShapeEngines
from lab.bench.instrument import record_launches
from lab.bench.prefill import ATTENTION_PEAK, bound_ms, measure_pause, measure_prefill, token_gaps
from lab.synthetic.checkpoint import Recipe
from tests.lab.shapes import shape_named
from tests.lab.synthetic.test_checkpoint import tiny

CPU = torch.device("cpu")
SHAPE = tiny(hot=1024, num_hidden_layers=3, intermediate_size=320)
SETTINGS = {
    "max_batch": 4,
    "max_context": 256,
    "chunk_size": 16,
    "prefix_cache": False,
    "speculation": SpeculationConfig(steps=3, topk=2, num_draft_tokens=8),
}
LOAD = Load((20, 9, 33, 16, 12), (10, 24, 5, 1, 8))


@pytest.fixture(scope="module")
def engines() -> ShapeEngines:
    return ShapeEngines(Recipe(SHAPE, skill=0.9), SETTINGS, CPU)


@pytest.mark.parametrize("way", [AS_CONFIGURED, PLAIN_DECODING], ids=["tree", "plain"])
@pytest.mark.parametrize("arrivals", [Arrivals(), Arrivals(concurrency=2), Arrivals(rate=50.0)], ids=str)
def test_every_request_is_served_to_its_length(engines, way, arrivals):
    with engines.open(way) as bench:
        prompts, launches = bench.make_prompts(LOAD.input_lengths), record_launches(bench.engine)
        served = serve_random(bench.engine, prompts, LOAD, arrivals)
        most = max(launches.rounds)
    assert [len(request.output) for request in served.requests] == list(LOAD.output_lengths)
    assert all(engines.models.follows(request.prompt, request.output) for request in served.requests)
    assert [sum(count for _, count in each.chunks) for each in served.timelines] == list(LOAD.output_lengths)
    assert all(each.ttft_s > 0 and min(each.chunk_gaps, default=1) > 0 for each in served.timelines)
    assert most <= (arrivals.concurrency or 4)
    figures = served.figures()
    assert (figures["tokens_in"], figures["tokens_out"]) == (90, 48)
    assert (figures["accept_length"] > 1.5) is (way is AS_CONFIGURED)
    assert figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p99"] <= 1e3 * served.seconds


@pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])
def test_the_time_of_a_launch_and_its_rows_are_counted_by_kind(engines, overlap):
    load_of_two = Load((20, 9), (6, 1))
    plain = ShapeEngines(engines.models.recipe, {**SETTINGS, "overlap": overlap, "speculation": None}, CPU)
    with plain.open() as bench:
        launches = record_launches(bench.engine)
        served = serve_random(bench.engine, bench.make_prompts(load_of_two.input_lengths), load_of_two, Arrivals())
    assert (
        set(served.launch_times.seconds_by_kind) == {"prefill", "rounds", "idle"}
        and served.launch_times.seconds_by_kind["idle"] == 0
    )
    assert sum(served.launch_times.seconds_by_kind.values()) == pytest.approx(served.seconds, rel=0.1)
    assert min(served.launch_times.seconds_by_kind["prefill"], served.launch_times.seconds_by_kind["rounds"]) > 0
    assert sum(served.figures()["time_shares"].values()) == pytest.approx(1)
    rows = sum(pieces * width for pieces, width in launches.prefills) + sum(launches.rounds)
    assert served.launch_times.num_target_rows == rows >= 29 + 5
    assert served.figures()["wasted_rows"] == pytest.approx(1 - (29 + 7) / rows) or rows <= 36


def test_turns_say_all_that_was_said_and_beginnings_are_shared(engines):
    talk = Load((5, 3, 4, 6), (2, 3, 4, 1), num_turns=2, num_prefixes=1, prefix_tokens=32)
    with engines.open({"prefix_cache": True, "page_size": 16}) as bench:
        prompts = bench.make_prompts(talk.prompt_lengths)
        served = serve_random(bench.engine, prompts, talk, Arrivals(concurrency=1))
    assert talk.max_tokens == 32 + max(5 + 2 + 3 + 3, 4 + 4 + 6 + 1)
    first, second = ([each for each in served.requests if each.arrival_index // 2 == i] for i in range(2))
    for begin, (one, two), text in zip((5, 4), (first, second), prompts[1:], strict=True):
        assert one.prompt == prompts[0] + text[:begin]
        assert two.prompt == one.prompt + one.output + text[begin:]
    assert [len(each.output) for each in (*first, *second)] == [2, 3, 4, 1]
    assert second[0].cached_tokens == 32


def test_arrivals_at_a_rate_are_so_many_a_second():
    due = Arrivals(rate=4.0).arrival_times(4000)
    assert due == sorted(due) and due[-1] == pytest.approx(1000, rel=0.05)
    assert Arrivals().arrival_times(2) == [0.0, 0.0]


def test_the_time_before_the_first_arrival_does_not_count(engines, monkeypatch):
    now = [0.0]

    def clock():
        now[0] += 1e-3
        return now[0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(load, "perf_counter", clock)
    monkeypatch.setattr(load, "sleep", sleep)
    with engines.open() as bench:
        served = serve_random(bench.engine, bench.make_prompts([5]), Load((5,), (3,)), Arrivals(rate=1e-3))
    assert now[0] > 100 and served.seconds < 1


def test_times_of_a_request_are_between_its_pieces():
    timeline = Timeline(1.0, [(1.5, 1), (1.75, 3), (2.25, 1)])
    assert (timeline.ttft_s, timeline.chunk_gaps, timeline.tpot_s) == (0.5, [0.25, 0.5], 0.1875)
    assert Timeline(0.0, [(1.0, 1)]).tpot_s is None
    assert percentiles([0.003, 0.001, 0.002]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) is None
    # The nearest rank: at most 1 of 100 values is above p99, so none of 64.
    assert percentiles(range(64)) == {"p50": 31e3, "p90": 57e3, "p99": 63e3}
    assert percentiles(range(8))["p90"] == 7e3


def test_mixed_lengths_lie_between_their_bounds():
    drawn = random_load(500, (3, 5), (7, 7))
    assert set(drawn.input_lengths) == {3, 4, 5} and set(drawn.output_lengths) == {7} and drawn.max_tokens == 12
    assert drawn == random_load(500, (3, 5), (7, 7))


def test_the_bound_of_prompts_counts_each_product_and_each_pair_of_query_and_row():
    shape, peak = shape_named("llama-3.1-8b"), 1e15
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    # Two requests of 2,048 tokens; the head computes one row of each.
    linear = 2 * (4096 * 32 * layer + 2 * 4096 * 128256)
    attention = 2 * 4 * 4096 * 32 * 2048 * 2049 // 2
    found = bound_ms(shape, 2, 2048, False, peak)
    assert found == pytest.approx(1e3 * (linear / peak + attention / ATTENTION_PEAK))
    assert found < bound_ms(shape, 2, 2048, True, peak)
    block = shape_named("llama-3.1-8b", block_size=16)
    context = sum(run.flops for run in block.extend_passes(4096))
    of_draft = bound_ms(block, 2, 2048, True, peak) - found
    assert of_draft == pytest.approx(1e3 * context / peak), "it attends to no prompt"
    assert bound_ms(shape_named("qwen3-30b-a3b"), 2, 2048, False, peak) is None
    quantised = shape_named("llama-3.1-8b", draft_weights="fp8")
    assert bound_ms(quantised, 2, 2048, True, peak) is None and bound_ms(quantised, 2, 2048, False, peak) == found


def test_prefill_counts_its_passes_and_who_waits(engines):
    with engines.open() as bench:
        one = measure_prefill(bench, 1, 100, None)
        many = measure_prefill(bench, 4, 8, None)
        waited = measure_pause(bench, 2, 12, 120)
    assert (one.passes, one.rounds, one.linear_ms) == (7, 0, None)
    assert one.tokens_per_second == pytest.approx(100 / one.ms * 1e3)
    assert many.passes == 4  # a pass of 16 rows holds one chunk of the narrowest width
    # Rounds and passes take turns, so somebody waits for a pass and a round.
    assert waited.longest_during_ms > waited.median_before_ms > 0


def test_a_wait_lasts_from_the_last_token_before_to_the_first_after():
    assert token_gaps([[1, 2], [1, 3]], [[5], []], [[9, 20], [4, 20]]) == [3, 4, 1]


def test_without_a_tree_plain_decoding_is_measured_alone(monkeypatch, capsys):
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: SHAPE)
    monkeypatch.setattr("lab.bench.engines.require_gpu", lambda what: CPU)
    sizes = ["--requests", "1", "--input", "4,4", "--output", "1,1"]
    assert lab(["load", "--shape", "llama-3.1-8b", "--steps", "0", *sizes]) == 0
    shown = capsys.readouterr().out
    assert "plain" in shown and "tree" not in shown


@pytest.mark.parametrize("command", ["prefill", "load"])
def test_a_named_shape_is_measured_by_command(command, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: SHAPE)
    monkeypatch.setattr("lab.bench.engines.require_gpu", lambda what: CPU)
    monkeypatch.setattr("lab.bench.prefill.FloorMeter", lambda shape: None)
    file = tmp_path / "figures.json"
    sizes = ["--requests", "3", "--input", "4,9", "--output", "3,6"]
    more = ["--prompts", "1x40", "2x9", "--running", "2"] if command == "prefill" else sizes
    assert lab([command, "--shape", "llama-3.1-8b", "--json", str(file), *more]) == 0
    figures = json.loads(file.read_text())
    assert figures["config"]["steps"] == 5
    if command == "prefill":
        assert [each["length"] for each in figures["prefill"]] == [40, 9] and figures["pause"]["running"] == 2
        shown = capsys.readouterr().out
        assert "during the prefill of 40 tokens" in shown and "bound" not in shown, "nothing of what was not measured"
    else:
        [cell] = figures["cells"]
        assert cell["tree"]["requests"] == cell["plain"]["requests"] == 3
        assert cell["tree"]["outputs_hash"] == cell["plain"]["outputs_hash"] and cell["tree"]["cached_share"] == 0
        assert "plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["prefill", "--prompts", "8k"], "'8k' is not a group"),
        (["prefill", "--running", "0"], "--running=0"),
        (["load", "--requests", "0"], "--requests=0"),
        (["load", "--input", "9,4"], "use a pair of whole numbers, the smaller first"),
        (["load", "--rate", "0"], "--rate=0"),
        (["load", "--rate", "2", "--concurrency", "2"], "not allowed with"),
        (["load", "--accept-length", "3"], "--accept-length is for a named shape"),
        (["load", "--shape", "llama-3.1-8b", "--draft", "bundled"], "--draft is not for --shape"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, says, capsys):
    try:
        code = lab(flags)
    except SystemExit as left:
        code = left.code
    assert code == 2 and says in capsys.readouterr().err
