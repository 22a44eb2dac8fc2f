"""What a round costs and brings: plain decoding, the tree and, if asked, transformers take turns in one run."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from espalier.bench.drive import Driven, contexts, drive, full_steps, time_forwards
from espalier.llm import LLM
from espalier.request import SamplingParams


@dataclass(frozen=True)
class Cell:
    """One batch size and context.

    ratio: a round in units of a plain token; speedup: tree over plain tokens/s; outside_forwards: share of a round that
    is not spent in models, None on a GPU, where a round is one launch; identical: requests whose tokens were the same
    by tree as plain.
    """

    batch: int
    context: int
    round_ms: float
    plain_token_ms: float
    ratio: float
    accept_length: float
    plain_tokens_per_second: float
    tree_tokens_per_second: float
    transformers_tokens_per_second: float | None
    speedup: float
    outside_forwards: float | None
    identical: int


class RoundBench:
    """Both engines, loaded once for all cells."""

    def __init__(self, settings: dict[str, Any], compare: bool):
        self.tree = LLM(**settings)
        self.plain = LLM(**{**settings, "speculation": None})
        self.timers = time_forwards(self.tree.engine) if self.tree.config.device == "cpu" else []
        self.transformers = _transformers(self.tree) if compare else None

    def measure(self, batch: int, context: int, num_tokens: int, repeats: int) -> Cell:
        """Medians over repeats, the ways taking turns, after one turn of each to warm up."""
        prompts = contexts(self.tree, batch, context)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        plain: list[Driven] = []
        tree: list[Driven] = []
        others: list[float] = []
        for _ in range(repeats + 1):
            for runs, llm, timers in ((plain, self.plain, []), (tree, self.tree, self.timers)):
                runs.append(self._fresh(llm, prompts, params, timers))
            if self.transformers is not None:
                others.append(self.transformers(prompts, num_tokens))
        return _cell(batch, context, plain[1:], tree[1:], others[1:], batch * num_tokens)

    @staticmethod
    def _fresh(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, timers: Sequence[Any]) -> Driven:
        """A run that finds nothing in the prefix cache."""
        if llm.engine.prefixes is not None:
            llm.engine.prefixes.evict(llm.engine.pool.num_pages)
        return drive(llm.engine, prompts, params, timers)

    def close(self) -> None:
        self.tree.close()
        self.plain.close()


def _cell(
    batch: int, context: int, plain: list[Driven], tree: list[Driven], others: list[float], num_tokens: int
) -> Cell:
    round_ms, token_ms = (1000 * median(full_steps(runs)) for runs in (tree, plain))
    plain_speed, tree_speed = (median(run.num_tokens / run.seconds for run in runs) for runs in (plain, tree))
    forwards = sum(run.forward_seconds for run in tree) / sum(sum(run.full_steps) for run in tree)
    is_timed = any(run.forward_seconds for run in tree)
    same = sum(a == b for a, b in zip(plain[0].tokens, tree[0].tokens, strict=True))
    return Cell(
        batch=batch,
        context=context,
        round_ms=round_ms,
        plain_token_ms=token_ms,
        ratio=round_ms / token_ms,
        accept_length=tree[0].stats.accept_length,
        plain_tokens_per_second=plain_speed,
        tree_tokens_per_second=tree_speed,
        transformers_tokens_per_second=num_tokens / median(others) if others else None,
        speedup=tree_speed / plain_speed,
        outside_forwards=1 - forwards if is_timed else None,
        identical=same,
    )


def _transformers(llm: LLM) -> Callable[[Sequence[Sequence[int]], int], float]:
    """Seconds that transformers' own generate takes for a batch of prompts of one length."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(llm.config.model, dtype=getattr(torch, llm.config.dtype))
    model = model.to(llm.config.device).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        tokens = torch.tensor(prompts, device=llm.config.device)
        begun = perf_counter()
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == tokens.shape[1] + num_tokens
        return perf_counter() - begun

    return generate


def as_dicts(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [asdict(cell) for cell in cells]
