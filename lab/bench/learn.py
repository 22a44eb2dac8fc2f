"""`python -m lab learn`: a shift of topic in the traffic of a server that learns, on the bundled model and a CPU.

The same prompts go to an engine without a draft, which must say the same tokens, and to one whose draft stays as it is.
Prose comes first, then one code base.  Once, the training process is killed.
"""

import os
import signal
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from espalier.config import EngineConfig
from espalier.learn.folder import LearnConfig
from espalier.learn.learner import Learner
from espalier.llm import LLM, prepare
from espalier.request import Request, SamplingParams
from espalier.stats import SpeculationStats
from espalier.terminal.console import print_table, write_json

ROOT = Path(__file__).parents[2]
TEXTS = {"prose": "docs/*.md", "one code base": "espalier/**/*.py"}
CHARACTERS, STRIDE = 400, 250
AT_ONCE, COMPARED = 4, 32
HALF_LIFE = 0.5


@dataclass
class Phase:
    """What one topic's traffic came to.  live: accept lengths before the swap and after it, and of the draft that stays
    as it is, on the prompts after it."""

    topic: str
    answers: int = 0
    equal: int = 0
    minutes: float = 0.0
    swaps: int = 0
    killed: int = 0
    live: dict[str, SpeculationStats] = field(default_factory=dict)
    held_back: tuple[float, float] = (0.0, 0.0)

    def row(self) -> dict[str, Any]:
        lengths = {name: round(stats.accept_length, 2) for name, stats in self.live.items()}
        before, after = (round(length, 2) for length in self.held_back)
        return {
            "traffic": self.topic,
            "answers": self.answers,
            "before the swap": lengths["before"],
            "after it": lengths.get("after", "-"),
            "static draft": lengths.get("static", "-"),
            "held back: before": before,
            "after": after,
            "minutes": round(self.minutes, 1),
            "swaps": self.swaps,
            "trainers killed": self.killed,
            "tokens equal": f"{self.equal} of {self.answers}",
        }
