"""The hooks of measurements: they record what ran, and an engine that is measured gives the same tokens."""

import subprocess
import sys
from dataclasses import replace

import pytest

from espalier.bench.drive import drive, rebuilt_engine
from espalier.engine.launch_input import dummy_launch
from espalier.request import SamplingParams
from lab.bench.forward_timer import engine_with_timers
from lab.bench.instrument import record_launches
from tests.harness import Setup, prompts

SETUP = Setup(max_batch=3)
PROMPTS = prompts(0, (9, 14, 21))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_launch_is_recorded_and_waited_for(overlap):
    setup = replace(SETUP, overlap=overlap)
    expected = drive(setup.engine(), PROMPTS, GREEDY)
    engine = setup.engine()
    record = record_launches(engine)
    driven = drive(engine, PROMPTS, GREEDY)
    assert driven.tokens == expected.tokens
    rounds = sum(len(traces) for traces in driven.traces.values())
    # With overlap a round may be launched for requests that the round before it ended.
    assert sum(record.rounds) == rounds if not overlap else sum(record.rounds) >= rounds
    assert sum(batch for batch, _ in record.prefills) >= len(PROMPTS)
    assert (record.waited_seconds > 0) is True
    record.reset()
    assert (record.waited_seconds, record.prefills, record.rounds) == (0.0, [], [])


def test_a_pass_is_recorded_with_its_padding():
    engine = replace(SETUP, chunk_size=96).engine()
    engine.executor.captured_passes = engine.layout.captured_passes
    record = record_launches(engine)
    pieces = tuple((0, at) for at in range(0, 70, 16))
    for launch_input in (
        dummy_launch(1, 16),
        replace(dummy_launch(1, 16), lengths=(70,), pieces=pieces),
        dummy_launch(2, 17),
    ):
        record.on_launch(launch_input)
    assert record.prefills == [(1, 16), (6, 16), (2, 17)]


@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_models_that_are_timed_give_the_same_tokens(algorithm):
    setup = replace(SETUP, algorithm=algorithm)
    expected = drive(setup.engine(), PROMPTS, GREEDY)
    engine, timers = engine_with_timers(setup.engine())
    driven = drive(engine, PROMPTS, GREEDY, timers)
    assert driven.tokens == expected.tokens
    # Target, draft, and the draft's only module.
    assert len(timers) == (3 if algorithm == "eagle3" else 1) and all(timer.seconds > 0 for timer in timers)
    assert 0 < driven.forward_seconds < driven.seconds


def test_scores_without_noise_change_what_is_drafted_and_no_token():
    sampled = SamplingParams(temperature=1.0, max_tokens=24, top_k=0, top_p=1.0)
    coupled = drive(SETUP.engine(), PROMPTS, sampled)
    uncoupled = drive(rebuilt_engine(SETUP.engine(), 0, shares_noise=False), PROMPTS, sampled)
    assert uncoupled.tokens == coupled.tokens
    trees = [[trace.tree.tokens for trace in driven.traces["0"]] for driven in (coupled, uncoupled)]
    assert trees[0] != trees[1]
    assert coupled.stats.accept_length > uncoupled.stats.accept_length


def test_no_flag_waits_for_pytorch():
    code = """
import sys
from espalier.cli import main
from lab import __main__ as lab
ours = ([], *([name] for name in main.COMMANDS), *(["bench", name] for name in main.BENCH_COMMANDS))
for parser, commands in ((main.make_parser, ours), (lab.make_parser, [[name] for name in lab.COMMANDS])):
  for command in commands:
    for flag in ("--help", "--hepl"):
        try:
            parser().parse([*command, flag])
        except SystemExit:
            pass
        assert "torch" not in sys.modules, (command, flag)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-400:]
