"""Every equality over a drafter without files that this repository does not know: one call in a test.

Its class stands in espalier/speculate/drafters/registry.py:WITHOUT_FILES, and its proposal is written a second time, in
plain Python over a list of tokens."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np

from espalier.layout import TreeShape
from espalier.request import Request, SamplingParams
from espalier.speculate.drafters.registry import drafter_without_files
from tests.harness import Setup, prompts, request, run
from tests.oracles.reference_round import Node, Reference
from tests.pairwise import pairwise
from tests.properties.layouts import Cell, refused
from tests.properties.scenarios import cut_behind_hits, hit_every_length, preempt, tree_a_batch
from tests.properties.watch import Watch, run_watched

# (tokens, of which the last is the root, steps, topk) -> each candidate's tokens behind the root, and its score, the
# log-probability of this path.  Level by level, and in a level in the order in which the drafter's pool has them.
Propose = Callable[[Sequence[int], int, int], Iterable[tuple[Sequence[int], float]]]
SIZES = {
    "page_size": (1, 3),
    "topk": (1, 3),
    "steps": (1, 4),
    "nodes": ("2", "bound"),
    "batch": (1, 3),
    "overlap": (False, True),
}
SMALL = Setup(steps=3, topk=2, num_draft_tokens=9, page_size=2, max_batch=3, max_context=64, chunk_size=16)


def check_drafter(algorithm: str, propose: Propose) -> float:
    """Hold all properties of tests/properties/watch.py, and the tokens of plain decoding, over layouts and traffic.

    Raises AssertionError for what does not hold.  Returns the mean accept length of text that repeats itself.
    """
    assert drafter_without_files(algorithm), f"register {algorithm!r} first"

    def candidates(_: Request, tokens: Sequence[int], steps: int, topk: int) -> list[Node]:
        return [Node(tuple(path), np.float32(score)) for path, score in propose(tokens, steps, topk)]

    @cache
    def reference(family: str) -> Reference:
        return Reference(Setup(algorithm=algorithm, family=family).models()[0], propose=candidates)

    def watched(setup: Setup) -> Watch:
        return Watch(setup.engine(), algorithm, reference(setup.family))

    for row in pairwise(SIZES, refused):
        cell = Cell(**row, algorithm=algorithm)
        run_watched(watched(cell.setup), cell.traffic)
    small = Setup(**{**vars(SMALL), "algorithm": algorithm})
    hit_every_length(watched, small)
    cut_behind_hits(watched, small, 16)
    preempt(watched, small)
    tree_a_batch(watched, small, TreeShape(2, 2, 5))
    # One likely token: the text is a repetition, which speculation must follow to the same tokens.
    repeating = SamplingParams(temperature=1.0, logit_bias={3: 20.0}, max_tokens=24)
    drafted, plain = ([request(i, p, repeating) for i, p in enumerate(prompts(3, [5, 9]))] for _ in range(2))
    ran = run(small.engine(), drafted)
    assert ran.tokens == run(small.plain().engine(), plain).tokens
    return ran.stats.accept_length
