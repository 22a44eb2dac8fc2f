"""`python -m lab sharing`: a simulation of sharing out a batch's verify rows to the likeliest nodes of all requests.

Pools of scored candidates are recorded at every token of a text, so that a replay can continue from any token.  The
replay shares out R rows per round over the running requests by several policies, and counts the tokens per round.
"""

import sysconfig
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from espalier.bench.drive import drive, heldout_texts
from espalier.config import SpeculationConfig
from espalier.engine.launch_input import RoundTrace
from espalier.errors import require_number
from espalier.llm import LLM
from espalier.request import SamplingParams
from espalier.speculate import round as rounds
from espalier.terminal.console import print_table, progress, write_json

TREE_STEPS, TREE_TOPK, TREE_NODES = 7, 4, 64
BATCH_SIZES = (4, 8, 16, 32, 64)
# Rows a request, with the root.
ROWS_PER_REQUEST = (4, 8, 16)
PROMPT_CHARACTERS = 600
CHAT_FORMS = (
    "User: How do I {}?\nAssistant:",
    "User: Write a short note to a friend who wants to {}.\nAssistant:",
    "User: Explain in two sentences why people {}.\nAssistant:",
)
CHAT_ACTIVITIES = (
    "read a file",
    "bake bread",
    "sort a list",
    "learn to sail",
    "write a test",
    "keep bees",
    "open a socket",
)
# How likely the draft of a synthetic request is right at a depth; requests take these skills in turn.
DRAFT_SKILLS = {
    "all 0.8": (0.8,),
    "half 0.95, half 0.3": (0.95, 0.3),
    "a tenth noise": (0.8,) * 9 + (0.02,),
}
POLICIES = ("even", "raw", "pooled", "shared", "oracle")


@dataclass(frozen=True)
class CandidatePools:
    """The pools of one request, [T, N] each: N candidates at each of T tokens, a parent before its children.

    parents: -1 for the root; depths: from 1; ranks: among siblings, from 0; logp: given the parent, -inf without a
    candidate; on_path: whether the text continues over the candidate."""

    parents: np.ndarray
    depths: np.ndarray
    ranks: np.ndarray
    logp: np.ndarray
    on_path: np.ndarray

    def __len__(self) -> int:
        return len(self.parents)


def run(args: Namespace) -> None:
    """Raises EspalierError for fewer requests than the largest batch."""
    least = BATCH_SIZES[-1]
    require_number("--requests", args.requests, lambda count: count >= least, f"{least} or more")
    recorded = {"bundled model": record_pools(args.requests, args.tokens)}
    rng = np.random.default_rng(0)
    for name, skills in DRAFT_SKILLS.items():
        for knows in (True, False):
            label = f"{name}, draft {'knows' if knows else 'does not know'} its skill"
            made = [synthetic_pools(rng, skills[i % len(skills)], knows) for i in range(args.requests)]
            recorded[label] = made
    rows = []
    with progress("replaying", len(recorded) * len(BATCH_SIZES) * len(ROWS_PER_REQUEST)) as advance:
        for name, pools in recorded.items():
            for batch in BATCH_SIZES:
                for width in ROWS_PER_REQUEST:
                    cell = {policy: replay_batches(pools, batch, width, policy) for policy in POLICIES}
                    rows.append({"requests": name, "batch": batch, "rows": width, **cell})
                    advance()
    write_json(args.json, {"sharing": rows})
    print_table(_sharing_table(rows))


def _sharing_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    names = ["draft's scores", "calibrated", "and by request", "oracle"]
    made = [["requests", "batch", "rows a request", "even: tokens a round and request", *names]]
    for row in rows:
        gains = [f"{row[policy] / row['even']:.3f}" for policy in POLICIES[1:]]
        made.append([row["requests"], str(row["batch"]), str(row["rows"]), f"{row['even']:.3f}", *gains])
    return made


# Recording


def record_pools(num_requests: int, num_tokens: int) -> list[CandidatePools]:
    """Record pools of the bundled model's greedy text, after prompts of code, prose and chats."""
    tree = SpeculationConfig(steps=TREE_STEPS, topk=TREE_TOPK, num_draft_tokens=TREE_NODES, by_batch={})
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with (
        LLM("bundled", speculation=tree, overlap=False, prefix_cache=False) as llm,
        patch.object(rounds, "accept", accept_nothing(rounds.accept)),
    ):
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.encode(text) for text in mixed_prompts(num_requests)]
        found: list[CandidatePools] = []
        for first in range(0, len(prompts), 16):
            driven = drive(llm.engine, prompts[first : first + 16], params)
            found += [pools_of(driven.traces[r.id]) for r in driven.requests]
    return found


def accept_nothing(accept: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an `accept` that accepts no draft token, so that each round emits one token."""
    return lambda tree, picks, finite, deepest, *rest: accept(tree, picks, finite, deepest.clamp(max=0), *rest)


def mixed_prompts(count: int) -> list[str]:
    """Returns `count` prompts of held-out code, other code, prose and chats."""
    held_out = [entry["prompt"] for entry in heldout_texts()]
    library = Path(sysconfig.get_path("stdlib"))
    code = [path.read_text(errors="ignore")[2000 : 2000 + PROMPT_CHARACTERS] for path in sorted(library.glob("*.py"))]
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    texts = [path.read_text() for path in pages]
    cuts = [(text, i) for text in texts for i in range(1000, len(text) - PROMPT_CHARACTERS, 6 * PROMPT_CHARACTERS)]
    prose = [text[first : first + PROMPT_CHARACTERS] for text, first in cuts]
    chats = [form.format(doing) for doing in CHAT_ACTIVITIES for form in CHAT_FORMS]
    kinds = [held_out, [text for text in code if len(text) == PROMPT_CHARACTERS], prose, chats]
    shares = (0.3, 0.3, 0.3, 0.1)
    return [
        kind[i * len(kind) // size]
        for kind, share in zip(kinds, shares, strict=True)
        for size in [min(len(kind), round(share * count))]
        for i in range(size)
    ]


def pools_of(traces: Sequence[RoundTrace]) -> CandidatePools:
    """Returns the pools of one request.  traces: the request's rounds, each of which emitted one token."""
    text = [trace.emitted[0] for trace in traces]
    return _stack_pools(
        [_pool_of_trace(trace, text[at:]) for at, trace in enumerate(traces[: len(traces) - TREE_STEPS])]
    )


def _pool_of_trace(trace: RoundTrace, text: Sequence[int]) -> CandidatePools:
    tree = trace.tree
    parents = np.array(tree.parents[1:]) - 1
    depths, scores = np.array(tree.depths[1:]), np.array(tree.scores)
    # A pool keeps siblings best first.
    ranks = np.array([int((parents[:at] == parent).sum()) for at, parent in enumerate(parents)])
    on_path = np.zeros(len(parents), dtype=bool)
    for at, (token, parent, depth) in enumerate(zip(tree.tokens[1:], parents, depths, strict=True)):
        on_path[at] = token == text[depth - 1] and (parent < 0 or on_path[parent])
    logp = np.where(np.isinf(scores[1:]), -np.inf, np.minimum(scores[1:] - scores[parents + 1], 0))
    return CandidatePools(parents, depths, ranks, logp, on_path)


def _stack_pools(pools: Sequence[CandidatePools]) -> CandidatePools:
    return CandidatePools(*(np.stack([vars(pool)[name] for pool in pools]) for name in vars(pools[0])))


def synthetic_pools(rng: np.random.Generator, skill: float, knows_skill: bool, tokens: int = 64) -> CandidatePools:
    """A request whose draft's best token is right with a probability of mean `skill`, which varies by place.

    knows_skill: whether the draft's scores are these probabilities; else every draft is as sure as one of skill 0.7."""
    parents, depths, ranks = _full_tree()
    size = (tokens, TREE_STEPS)
    sure = rng.beta(4 * skill, 4 * (1 - skill), size)
    right = np.where(rng.random(size) < sure, 0, 1 + rng.integers(0, 2 * TREE_TOPK, size))
    said = sure if knows_skill else rng.beta(2.8, 1.2, size)
    # The rest of the probability falls by half from rank to rank.
    share = np.concatenate([said[..., None], (1 - said)[..., None] * 0.5 ** np.arange(1, TREE_TOPK)], -1)
    logp = np.log(np.clip(share, 1e-6, 1))[:, depths - 1, ranks]
    is_right = ranks == right[:, depths - 1]
    on_path = np.zeros_like(is_right)
    for at, parent in enumerate(parents):
        on_path[:, at] = is_right[:, at] & (on_path[:, parent] if parent >= 0 else True)
    shape = logp.shape
    parents, depths, ranks = (np.broadcast_to(value, shape) for value in (parents, depths, ranks))
    return CandidatePools(parents, depths, ranks, logp, on_path)


def _full_tree() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tree of the synthetic pools: all ranks below the two best nodes of each depth."""
    parents: list[int] = []
    depths: list[int] = []
    ranks: list[int] = []
    above = [-1]
    for depth in range(1, TREE_STEPS + 1):
        made = []
        for parent in above:
            for rank in range(TREE_TOPK):
                made.append((len(parents), rank))
                parents.append(parent)
                depths.append(depth)
                ranks.append(rank)
        above = [node for node, rank in made[:TREE_TOPK] if rank < 2]
    return np.array(parents), np.array(depths), np.array(ranks)


# Replaying


class AcceptanceRates:
    """Calibrates the draft's probabilities by depth and rank, and by request.

    predicted, accepted: decayed sums over the nodes whose parent was accepted: the draft's probabilities, and how many
    of these nodes were accepted."""

    PRIOR, DECAY, OWN_DECAY = 8.0, 0.999, 0.9

    def __init__(self, batch: int):
        self.predicted = np.full((TREE_STEPS + 1, TREE_TOPK), self.PRIOR)
        self.accepted = self.predicted.copy()
        self.own_predicted = np.full(batch, self.PRIOR / 4)
        self.own_accepted = self.own_predicted.copy()

    def of(self, pools: CandidatePools, by_request: bool) -> np.ndarray:
        """[B, N]: log-probability of each node, given its parent."""
        factor = self.accepted[pools.depths, pools.ranks] / self.predicted[pools.depths, pools.ranks]
        if by_request:
            factor = factor * (self.own_accepted / self.own_predicted)[:, None]
        return np.minimum(pools.logp + np.log(np.maximum(factor, 1e-6)), 0)

    def count_round(self, pools: CandidatePools, selected: np.ndarray) -> None:
        """Count a round.  selected: [B, N], the nodes that were verified."""
        above = np.take_along_axis(pools.on_path, np.maximum(pools.parents, 0), 1) | (pools.parents < 0)
        seen = selected & above & np.isfinite(pools.logp)
        said = np.exp(self.of(pools, False))
        at = pools.depths[seen], pools.ranks[seen]
        self.predicted = self.PRIOR + (self.predicted - self.PRIOR) * self.DECAY
        self.accepted = self.PRIOR + (self.accepted - self.PRIOR) * self.DECAY
        np.add.at(self.predicted, at, np.exp(pools.logp)[seen])
        np.add.at(self.accepted, at, pools.on_path[seen])
        prior = self.PRIOR / 4
        self.own_predicted = prior + (self.own_predicted - prior) * self.OWN_DECAY + (said * seen).sum(1)
        self.own_accepted = prior + (self.own_accepted - prior) * self.OWN_DECAY + (pools.on_path & seen).sum(1)

    def reset_request(self, row: int) -> None:
        self.own_predicted[row] = self.own_accepted[row] = self.PRIOR / 4


def replay_batches(recorded_pools: Sequence[CandidatePools], batch: int, rows_per_request: int, policy: str) -> float:
    """Returns the tokens per round and request while the batch is full.  rows_per_request: its root included."""
    waiting = list(np.random.default_rng(1).permutation(len(recorded_pools)))
    running = [(recorded_pools[waiting.pop()], 0) for _ in range(min(batch, len(waiting)))]
    survival, tokens, count = AcceptanceRates(batch), 0, 0
    while len(running) == batch:
        at = _stack_pools(
            [CandidatePools(*(value[place] for value in vars(pools).values())) for pools, place in running]
        )
        selected = select_nodes(at, batch * (rows_per_request - 1), policy, survival)
        survival.count_round(at, selected)
        accepted = (selected & at.on_path).sum(1)
        tokens, count = tokens + int(accepted.sum()) + batch, count + batch
        running = [(pools, place + 1 + got) for (pools, place), got in zip(running, accepted.tolist(), strict=True)]
        for row, (pools, place) in enumerate(running):
            if place >= len(pools):
                if not waiting:
                    return tokens / count
                running[row] = recorded_pools[waiting.pop()], 0
                survival.reset_request(row)
    return tokens / max(count, 1)


def select_nodes(pools: CandidatePools, rows: int, policy: str, survival: AcceptanceRates) -> np.ndarray:
    """Returns [B, N]: whether a node is verified.  rows: how many nodes of the batch are verified."""
    given = survival.of(pools, policy == "shared") if policy in ("pooled", "shared") else pools.logp
    if policy == "oracle":
        given = np.where(pools.on_path, 0.0, -1.0)
    scores = path_scores(pools, given)
    selected = np.zeros_like(pools.on_path)
    if policy == "even":
        best = np.argsort(-scores, axis=1, kind="stable")[:, : rows // len(scores)]
        np.put_along_axis(selected, best, True, 1)
    else:
        selected.flat[np.argsort(-scores, axis=None, kind="stable")[:rows]] = True
    return selected & np.isfinite(scores)


def path_scores(pools: CandidatePools, node_logp: np.ndarray) -> np.ndarray:
    scores = node_logp.copy()
    for depth in range(2, TREE_STEPS + 1):
        above = np.take_along_axis(scores, np.maximum(pools.parents, 0), 1)
        scores = np.where(pools.depths == depth, node_logp + above, scores)
    return scores
