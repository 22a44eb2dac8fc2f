"""How many pages running requests hold, against what `tokens_ahead` asks and what branches with pages would reserve."""

from dataclasses import dataclass
from typing import Any

import torch

from espalier.bench.drive import drive
from espalier.config import SpeculationConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.llm import LLM
from espalier.request import SamplingParams

SETTINGS = {"page_size": 256, "speculation": SpeculationConfig(steps=5, topk=8, num_draft_tokens=64)}
NUM_REQUESTS = 50
MAX_TOKENS = 48


@dataclass(frozen=True)
class Memory:
    """In pages where not said otherwise.

    largest_excess: the most that any running request ever held above what tokens_ahead asks; per_branch_tokens: what a
    request reserves ahead where every branch has pages of its own (design, section 2).
    """

    requests: int
    steps_seen: int
    most_held: int
    largest_excess: int
    tokens_ahead: int
    per_branch_tokens: int
    per_branch_pages: int


def measure(settings: dict[str, Any]) -> Memory:
    """50 requests of mixed lengths; settings override SETTINGS."""
    with LLM(**{**SETTINGS, **settings}) as llm:
        longest = llm.config.max_context - MAX_TOKENS - 1
        if longest < 2:
            raise EspalierError(
                f"max_context={llm.config.max_context} is too small for --memory; use {MAX_TOKENS + 3} or more"
            )
        watch = Watch(llm.engine)
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, longest, (NUM_REQUESTS,), generator=generator).tolist()
        vocab = llm.model_config.vocab_size
        prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
        drive(llm.engine, prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), after_step=watch.look)
        layout = llm.engine.layout
        per_branch = per_branch_tokens(layout)
        return Memory(
            requests=NUM_REQUESTS,
            steps_seen=watch.steps,
            most_held=watch.most_held,
            largest_excess=watch.largest_excess,
            tokens_ahead=layout.tokens_ahead(watch.rounds),
            per_branch_tokens=per_branch,
            per_branch_pages=layout.pages_for(per_branch),
        )


class Watch:
    """Looks at every running request after every step."""

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
            asked = layout.pages_for(request.num_known + layout.tokens_ahead(self.rounds))
            self.most_held = max(self.most_held, len(request.pages))
            self.largest_excess = max(self.largest_excess, len(request.pages) - asked)


def per_branch_tokens(layout: RoundLayout) -> int:
    """Tokens a request reserves where a branch is a sequence: twice a partial page and `steps`, for each branch."""
    page = layout.page_size
    branch = layout.pages_for(page - 1 + layout.steps) * page
    return 2 * max(branch * layout.topk, layout.num_draft_tokens)
