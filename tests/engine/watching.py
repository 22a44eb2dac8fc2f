"""Engines under a lens: sleeps where threads could race, and the bytes of shared pages before and after."""

import time
from collections.abc import Callable
from random import Random

import torch

from espalier.engine.engine import Engine
from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.request import Request
from tests.engine.traffic import pages_beyond
from tests.pages import check_pages

LONGEST_SLEEP = 0.002


def jitter(engine: Engine, random: Random) -> Callable[[], None]:
    """Sleep at random around every launch on the worker; returns what the host sleeps by."""
    right = engine.executor.run

    def run(launch_input: LaunchInput) -> list[RequestResult]:
        time.sleep(random.random() * LONGEST_SLEEP)
        rows = right(launch_input)
        time.sleep(random.random() * LONGEST_SLEEP)
        return rows

    engine.executor.run = run  # type: ignore[method-assign]
    return lambda: time.sleep(random.random() * LONGEST_SLEEP)


class SharedPages:
    """Bytes of every cached page, all layers, from the step that filed it to the step that evicts it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.nodes: dict[int, object] = {}
        self.content = self.content_of([])
        self.compared = 0

    def check(self) -> None:
        assert self.engine.prefix_tree is not None
        nodes = dict(self.engine.prefix_tree._nodes)
        content = self.content_of(list(nodes))
        before, after = ({page: i for i, page in enumerate(seen)} for seen in (self.nodes, nodes))
        kept = [page for page, node in self.nodes.items() if nodes.get(page) is node]
        was, now = self.content[[before[p] for p in kept]], content[[after[p] for p in kept]]
        changed = (was != now).any(1).tolist()
        assert not any(changed), f"shared pages {[p for p, c in zip(kept, changed, strict=True) if c]} have changed"
        self.compared += len(kept)
        self.nodes, self.content = nodes, content

    def content_of(self, ids: list[int]) -> torch.Tensor:
        """[pages, bytes]"""
        pages = self.engine.executor.runner.pages
        planes = [plane for stack in pages.target_stacks + pages.draft_stacks for plane in stack.planes]
        parts = [plane.unflatten(1, (-1, pages.page_size))[:, ids].transpose(0, 1).flatten(1) for plane in planes]
        return torch.cat(parts, 1).view(torch.uint8)


def run_watched(
    engine: Engine, arrivals: list[tuple[int, Request]], each_step: Callable[[int], None] | None = None
) -> int:
    """Add each request before its step, run to the end, hold pages to account after each; returns the steps taken."""
    pending = sorted(arrivals, key=lambda pair: pair[0])
    shared = SharedPages(engine) if engine.prefix_tree is not None else None
    step = 0
    while pending or engine.has_work:
        while pending and pending[0][0] <= step:
            engine.add(pending.pop(0)[1])
        if each_step is not None:
            each_step(step)
        engine.step()
        check_pages(engine)
        assert all(pages_beyond(engine, r) <= 0 for r in engine.scheduler.running)
        if shared is not None:
            shared.check()
        step += 1
        assert step < 5000, "the engine goes nowhere"
    cached = 0 if engine.prefix_tree is None else len(engine.prefix_tree)
    assert engine.pool.num_free + cached + 1 == engine.pool.num_pages
    engine.close()
    return step
