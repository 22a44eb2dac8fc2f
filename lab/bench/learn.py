"""`python -m lab learn`: the topic of the traffic shifts, and the draft follows; the bundled model on a CPU.

Prose comes first, then one code base, then a service's logs.  The draft was trained on code like the second topic, and
on nothing like the third.  An engine without a draft must generate the same tokens.  For comparison, an engine whose
draft never changes gets the prompts after the last swap.  On each topic but the first, the first training is killed.
"""

import json
import os
import random
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from espalier.config import EngineConfig
from espalier.learn.folder import LearnConfig
from espalier.learn.learner import TRAINER_COMMAND, Learner
from espalier.llm import LLM, prepare_engine
from espalier.request import Request, SamplingParams
from espalier.stats import SpeculationStats
from espalier.terminal.console import print_table, write_json

ROOT = Path(__file__).parents[2]
LOG_TOPIC = "logs"
TOPIC_FILES = {"prose": "docs/*.md", "code": "espalier/**/*.py", LOG_TOPIC: ""}
PROMPT_CHARACTERS = 2000
# Three engines, and on a GPU the trainer, share the memory.
ENGINE_SETTINGS: dict[str, Any] = {"threads": 1, "num_pages": 1000, "page_size": 16}
GREEDY_PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
# The trainer's process without its low priority, for a machine that others keep busy.
NORMAL_PRIORITY_TRAINER = """
import os, sys
from pathlib import Path
os.nice = lambda n: n
from espalier.learn.trainer import main
sys.exit(main(Path(sys.argv[1])))
"""
# Seconds between requests while the trainer runs.
PAUSE_SECONDS = 8.0


@dataclass
class ComparedTraffic:
    """An engine that learns, driven as in the engine process, and the two engines that it is compared with."""

    llm: LLM
    learner: Learner
    static: LLM
    plain: LLM
    num_equal: int = 0
    num_compared: int = 0

    def answer(self, prompt: str, keep_for_training: bool = True) -> Request:
        tokens = self.llm.inputs.prompt_tokens(prompt)
        [request] = self.llm.new_requests(tokens, self.llm.inputs.resolve(GREEDY_PARAMS), detokenize=False)
        self.llm.engine.add(request)
        while self.llm.engine.has_work:
            self.learner.swap_between_steps(self.llm.engine)
            self.llm.step()
        self.learner.swap_between_steps(self.llm.engine)
        if keep_for_training:
            self.learner.keep_text(request)
        return request

    def compare(self, prompt: str, request: Request) -> None:
        [output] = self.plain.generate(prompt, GREEDY_PARAMS)
        self.num_compared += 1
        self.num_equal += output.token_ids == request.output


@dataclass
class TopicPhase:
    """The figures of one topic.

    before, after: the learning engine's rounds before and after the swap; static: rounds of the engine whose draft
    never changes, on the prompts after the swap.
    """

    topic: str
    before: SpeculationStats = field(default_factory=SpeculationStats)
    after: SpeculationStats = field(default_factory=SpeculationStats)
    static: SpeculationStats = field(default_factory=SpeculationStats)
    num_answers: int = 0
    num_answers_while_down: int = 0
    seconds: float = 0.0


def run(args: Namespace) -> None:
    trainer = (sys.executable, "-c", NORMAL_PRIORITY_TRAINER) if args.busy else TRAINER_COMMAND
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        prepared = prepare_engine(EngineConfig("bundled", draft="bundled", **ENGINE_SETTINGS))
        learner = Learner(LearnConfig(folder, tokens=args.tokens, seconds=args.seconds), prepared, trainer)
        llm = stack.enter_context(LLM.from_prepared(prepared))
        stack.callback(learner.close)
        learner.attach(llm)
        static = stack.enter_context(LLM("bundled", draft="bundled", **ENGINE_SETTINGS))
        plain = stack.enter_context(LLM("bundled", speculation=None, **ENGINE_SETTINGS))
        traffic = ComparedTraffic(llm, learner, static, plain)
        rows = []
        for topic in args.topics:
            rows.append(topic_row(traffic, topic, args.prompts, is_killed=topic != args.topics[0]))
            print(f"{topic}: {rows[-1]}", flush=True)
    print_table([list(rows[0]), *([str(value) for value in each.values()] for each in rows)])
    write_json(args.json, {"learn": rows})


def topic_row(traffic: ComparedTraffic, topic: str, num_compared: int, is_killed: bool) -> dict[str, Any]:
    figures = traffic.learner.figures
    swaps = figures.swaps
    phase = learn_topic(traffic, topic, num_compared, is_killed)
    num_swaps = figures.swaps - swaps
    return {
        "traffic": topic,
        "answers": phase.num_answers,
        "before": round(phase.before.accept_length, 2),
        "after": round(phase.after.accept_length, 2),
        "static draft": round(phase.static.accept_length, 2),
        "gain": f"{phase.after.accept_length / phase.static.accept_length:.2f} x" if num_swaps else "-",
        "held back": f"{figures.served_accept_length:.2f} to {figures.trained_accept_length:.2f}",
        "swaps": num_swaps,
        "minutes": round(phase.seconds / 60, 1),
        "answers while the trainer was down": phase.num_answers_while_down,
        "tokens equal": f"{traffic.num_equal} of {traffic.num_compared}",
    }


def learn_topic(traffic: ComparedTraffic, topic: str, num_compared: int, is_killed: bool) -> TopicPhase:
    phase, prompts, learner = TopicPhase(topic), prompts_of(topic), traffic.learner
    begun, trainings, failures = perf_counter(), learner.figures.trainings, learner.figures.failures
    while learner.figures.trainings == trainings or learner.is_swapping:
        prompt = next(prompts)
        request = traffic.answer(prompt)
        phase.num_answers += 1
        phase.before.merge(request.stats)
        if learner.training_pid is not None:
            if is_killed:
                os.kill(learner.training_pid, signal.SIGKILL)
                is_killed = False
            traffic.compare(prompt, request)
            sleep(PAUSE_SECONDS)
        elif learner.figures.failures > failures:
            phase.num_answers_while_down += 1
            traffic.compare(prompt, request)
    phase.seconds = perf_counter() - begun
    for prompt, _ in zip(prompts, range(num_compared), strict=False):
        request = traffic.answer(prompt, keep_for_training=False)
        phase.num_answers += 1
        phase.after.merge(request.stats)
        phase.static.merge(traffic.static.generate(prompt, GREEDY_PARAMS)[0].speculation)
        traffic.compare(prompt, request)
    return phase


def prompts_of(topic: str) -> Iterator[str]:
    if topic == LOG_TOPIC:
        return log_lines()
    texts: Sequence[str] = [path.read_text() for path in sorted(ROOT.glob(TOPIC_FILES[topic]))]
    size = PROMPT_CHARACTERS
    pieces = [text[i : i + size] for text in texts for i in range(0, len(text) - size, size // 2)]
    random.Random(0).shuffle(pieces)
    return iter(pieces)


def log_lines() -> Iterator[str]:
    """Lines of JSON as services write them, with names of their own."""
    rng = random.Random(0)
    services, levels = ("ledger-api", "quarry", "tollgate", "mirabel-worker"), ("INFO", "INFO", "INFO", "WARN", "ERROR")
    events = ("order.accepted", "order.rejected", "cache.miss", "cache.hit", "payment.settled", "session.expired")
    while True:
        at = 1764000000 + rng.randrange(10**6)
        lines = [
            {
                "ts": (at := at + rng.randrange(9)),
                "level": rng.choice(levels),
                "service": rng.choice(services),
                "event": rng.choice(events),
                "tenant": f"acme-{rng.randrange(40):03}",
                "duration_ms": rng.randrange(900),
                "request_id": f"{rng.getrandbits(32):08x}",
            }
            for _ in range(3)
        ]
        yield "\n".join(map(json.dumps, lines)) + "\n"
