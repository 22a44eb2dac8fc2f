"""Traffic under which properties of every kind of draft are watched: prefix hits, chunks, preemption, smaller trees.

watched: makes the Watch of a setup.  setup: a small one, whose fields that a scenario needs are replaced.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

from espalier.layout import TARGET_ONLY, TreeShape
from espalier.request import Request, SamplingParams
from tests.harness import Setup, prompts, request
from tests.properties.watch import INCREMENTAL, PROPOSAL, Watch, run_watched

Some = TypeVar("Some", bound=Setup)
Watched = Callable[[Some], Watch]
# (request, cached tokens, new tokens).
CUT = ((0, 0, 34), (1, 20, 30), (2, 23, 18), (3, 26, 48))


def asked(index: int, prompt: list[int], **style: Any) -> Request:
    return request(index, prompt, SamplingParams(**{"temperature": 3.0, "max_tokens": 8, **style}))


def hit_every_length(watched: Watched[Some], setup: Some) -> None:
    """Prompts that share 0, 1, 2, ... tokens with the first."""
    watch = watched(setup)
    trunk = prompts(29, [11])[0]
    branches = [[*trunk[:kept], (trunk[kept] + 1) % 16, *trunk[kept + 1 :]] for kept in range(len(trunk))]
    ends = [trunk, *branches, trunk, trunk[:4], trunk[:2]]
    requests = [asked(i, prompt, max_tokens=4) for i, prompt in enumerate(ends)]
    run_watched(watch, requests[:1], last=False)
    run_watched(watch, requests[1:])
    assert sum(r.cached_tokens for r in requests) >= 9


def cut_behind_hits(watched: Watched[Some], setup: Some, chunk_size: int) -> None:
    """Passes of sixteen rows cut prompts into chunks.  Wider ones run several pieces of a prompt, one after another."""
    watch = watched(replace(setup, page_size=1, max_batch=2, max_context=96, chunk_size=chunk_size))
    trunk = prompts(37, [40])[0]
    requests = [asked(i, [*trunk[:kept], *prompts(i, [new])[0]], max_tokens=4) for i, kept, new in CUT]
    run_watched(watch, [asked(9, trunk, max_tokens=2)], last=False)
    executor = watch.engine.executor
    with patch.object(executor, "launch", wraps=executor.launch) as launch:
        run_watched(watch, requests)
    assert any(call.args[0].pieces for call in launch.call_args_list) is (chunk_size == 64)


def ask_of_cached_prompts(watched: Watched[Some], setup: Some, length: int = 25) -> None:
    """Log-probabilities of prompts that are cached.  length: of the longest."""
    watch = watched(replace(setup, page_size=1))
    trunk = prompts(43, [length])[0]
    run_watched(watch, [asked(0, trunk)], last=False)
    # Until it is past them, a slot's shared pages hold rows that it has not decided again.
    watch.properties -= {INCREMENTAL}
    run_watched(watch, [asked(1, [*trunk[:-3], 3, 5], prompt_logprobs=1), asked(2, trunk, prompt_logprobs=0)])


def opt_out(watched: Watched[Some], setup: Some) -> None:
    """Prompts that share pages, of requests of which some never speculate: alone, then beside others, in turns.

    Pages whose draft rows nobody wrote hold NaN."""
    watch = watched(setup)
    trunk = prompts(29, [11])[0]
    for turn, wants in enumerate(((False,), (True, False), (False, False), (True, True, False))):
        ends = [[*trunk, *([turn, place] if place else [])] for place in range(len(wants))]
        asking = [asked(10 * turn + i, end, speculation=wants[i]) for i, end in enumerate(ends)]
        run_watched(watch, asking, last=turn == 3)
        # The first prompt is the trunk.  Only a request that speculates cannot share what the first turn left.
        assert (asking[0].cached_tokens > 0) == (turn > 1)
    assert watch.engine.scheduler.round_trees.num_rounds[TARGET_ONLY] > 0


def preempt(watched: Watched[Some], setup: Some) -> None:
    """Too few pages for four requests with penalties."""
    watch = watched(replace(setup, num_pages=26, max_context=40, overlap=True))
    style = {"max_tokens": 20, "presence_penalty": 0.6}
    run_watched(watch, [asked(i, prompt, **style) for i, prompt in enumerate(prompts(31, [5, 19, 7, 12]))])
    assert watch.engine.scheduler.num_preempted > 0


def tree_a_batch(watched: Watched[Some], setup: Some, of_two: TreeShape) -> None:
    """One request has the whole tree, two have this one, and three decode plainly."""
    trees = ((2, of_two), (3, TreeShape(0, 1, 1)))
    watch = watched(replace(setup, steps=5, num_draft_tokens=14, trees=trees))
    # The brute-force tree knows one shape; what is proposed in the others, the tokens and the rows show.
    watch.properties -= {PROPOSAL}
    run_watched(watch, [asked(i, p, max_tokens=6 + 5 * i) for i, p in enumerate(prompts(5, [4, 1, 5]))])
