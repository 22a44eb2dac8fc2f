"""`python -m lab round --memory`: pages that running requests hold.

They are compared with what RoundLayout.tokens_ahead allows, and with an engine whose branches have pages of their own.
"""

from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.text import Text

from espalier.bench.drive import drive
from espalier.config import SpeculationConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.llm import LLM
from espalier.request import SamplingParams
from espalier.terminal.console import stdout, write_json

SETTINGS = {"page_size": 256, "speculation": SpeculationConfig(steps=5, topk=8, num_draft_tokens=64)}
NUM_REQUESTS = 50
MAX_TOKENS = 48


@dataclass(frozen=True)
class Memory:
    """Pages, unless the name says otherwise.

    most_held: the most pages of any request; largest_excess: the most that any running request held above what
    tokens_ahead allows; per_branch_tokens: what a request reserves ahead if every branch has its own pages
    (docs/design.md, section 2).
    """

    requests: int
    steps_seen: int
    most_held: int
    largest_excess: int
    tokens_ahead: int
    per_branch_tokens: int
    per_branch_pages: int


def run(args: Namespace, settings: dict[str, Any]) -> None:
    figures = asdict(measure(settings))
    write_json(args.json, {"memory": figures})
    for name, value in figures.items():
        stdout().print(Text(f"  {name.replace('_', ' '):<20} {value}"))


def measure(settings: dict[str, Any]) -> Memory:
    """Run NUM_REQUESTS requests of mixed lengths.  settings: of LLM, over SETTINGS.  Raises EspalierError."""
    with LLM(**{**SETTINGS, **settings}) as llm:
        longest = llm.config.layout.max_context - MAX_TOKENS - 1
        if longest < 2:
            raise EspalierError(
                f"max_context={llm.config.layout.max_context} is too small for --memory; use {MAX_TOKENS + 3} or more"
            )
        monitor = PageMonitor(llm.engine)
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, longest, (NUM_REQUESTS,), generator=generator).tolist()
        vocab = llm.model_config.vocab_size
        prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        drive(llm.engine, prompts, params, after_step=monitor.look)
        layout = llm.engine.layout
        per_branch = per_branch_tokens(layout)
        return Memory(
            requests=NUM_REQUESTS,
            steps_seen=monitor.steps,
            most_held=monitor.most_held,
            largest_excess=monitor.largest_excess,
            tokens_ahead=layout.tokens_ahead(monitor.rounds),
            per_branch_tokens=per_branch,
            per_branch_pages=layout.pages_for(per_branch),
        )


class PageMonitor:
    """Looks at the pages of every running request after every step."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.rounds = engine.scheduler.rounds_in_flight
        self.steps = 0
        self.most_held = 0
        self.largest_excess = 0

    def look(self) -> None:
        self.steps += 1
        layout = self.engine.layout
        for request in self.engine.scheduler.running:
            allowed = layout.pages_for(request.num_known + layout.tokens_ahead(self.rounds))
            self.most_held = max(self.most_held, len(request.pages))
            self.largest_excess = max(self.largest_excess, len(request.pages) - allowed)


def per_branch_tokens(layout: RoundLayout) -> int:
    """Tokens that a request reserves if each branch is its own sequence: twice a partial page and `steps` a branch."""
    page = layout.page_size
    branch = layout.pages_for(page - 1 + layout.steps) * page
    return 2 * max(branch * layout.topk, layout.num_draft_tokens)
