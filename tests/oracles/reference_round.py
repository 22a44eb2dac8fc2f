"""A round in plain Python: the oracle for what the pages, the slots and the proposals of a real one hold.

Nothing of the engine's machinery is used: a model is called on whole sequences, or on one path behind the from-scratch
K/V of its prefix; there are no slots, pages, staging, beams or ancestor words, only lists."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from espalier.attention.staged import LatentProjections, Projections
from espalier.cache.layer_spec import LayerSpec
from espalier.models.base import CausalLM
from espalier.models.draft import DraftModel
from espalier.request import Request
from tests.oracles.dense import DenseAttend, attended, keys_and_values, softmax_of
from tests.oracles.plain_sampling import draft_scores, plain_pick

MAX_NGRAM = 4


@dataclass(frozen=True)
class Scratch:
    """What one plain pass over `tokens` (n + 1 of them) makes of target and draft.

    target: planes a layer, row i under token i; logits [n + 1, V]; draft: planes a layer, row i under token i + 1, and
    out [n, H], the same; both empty without a draft."""

    tokens: tuple[int, ...]
    target: list[tuple[Tensor, ...]]
    logits: Tensor
    draft: list[tuple[Tensor, ...]]
    out: Tensor


@dataclass(frozen=True)
class Node:
    """A candidate, and once selected a node of the tree.  path: drafted tokens from depth 1 down to its own."""

    path: tuple[int, ...]
    score: np.float32

    @property
    def depth(self) -> int:
        return len(self.path)


@dataclass(frozen=True)
class Beam:
    """A candidate that was run.  outs [depth + 1, H]: what the draft handed on at the root and along the path; children
    read the last."""

    node: Node
    outs: Tensor


class Reference:
    """Target and draft (None: n-gram or nothing), asked from scratch.  Passes over one token list are kept, as they are
    pure."""

    def __init__(self, target: CausalLM, draft: DraftModel | None = None):
        self.target = target
        self.draft = draft
        self._scratch: list[Scratch] = []
        self._plain: dict[object, Plain] = {}

    # What one plain pass makes

    def scratch(self, tokens: Sequence[int]) -> Scratch:
        """The pass over these tokens, or over a longer list that begins with them: both models are causal."""
        wanted = tuple(tokens)
        for kept in self._scratch:
            if kept.tokens[: len(wanted)] == wanted:
                return kept
        self._scratch = [self._pass(wanted), *self._scratch[:15]]
        return self._scratch[0]

    @torch.inference_mode()
    def _pass(self, tokens: tuple[int, ...]) -> Scratch:
        row = torch.tensor([tokens])
        attend = DenseAttend(self.target.layer_specs)
        out = self.target(row, torch.arange(len(tokens))[None], attend)
        layers = [tuple(plane[0] for plane in attend.kept[i]) for i in range(len(self.target.layer_specs))]
        logits = self.target.logits(out.hidden)[0]
        if self.draft is None:
            return Scratch(tokens, layers, logits, [], torch.empty(0))
        read = {"captured": out.captured, "hidden": out.hidden}[self.draft.spec.reads]
        behind = DenseAttend(self.draft.layer_specs)
        positions = torch.arange(len(tokens) - 1)[None]
        handed_on = self.draft(row[:, 1:], self.draft.fuse(read[:, :-1]), positions, behind).hidden
        drafted = [tuple(plane[0] for plane in behind.kept[i]) for i in range(len(self.draft.layer_specs))]
        return Scratch(tokens, layers, logits, drafted, handed_on[0])

    def prepare(self, request: Request, max_context: int) -> None:
        """Make the pass over all that plain decoding says, which serves every prefix of it."""
        self.scratch([*request.prompt, *self.plain(request).output(max_context)])

    def plain(self, request: Request) -> "Plain":
        """Plain decoding of a request, kept by what decides its tokens."""
        key = (tuple(request.prompt), repr(request.params), request.seed, request.stop_ids)
        return self._plain.setdefault(key, Plain(self, request))

    @torch.inference_mode()
    def next_token(self, request: Request, tokens: Sequence[int]) -> int:
        """The token after `tokens` (prompt and output), by re-forwarding all of them."""
        attend = DenseAttend(self.target.layer_specs)
        out = self.target(torch.tensor([list(tokens)]), torch.arange(len(tokens))[None], attend)
        return plain_pick(self.target.logits(out.hidden)[0, -1], request, tokens)

    # The brute-force tree

    def tree(
        self, algorithm: str, request: Request, tokens: Sequence[int], steps: int, topk: int, nodes: int
    ) -> list[Node]:
        """The tree under the root tokens[-1], root left out: the best nodes - 1 candidates, in the order they came up.

        Sort key (score, level, place in the level), written out: a list is sorted, nothing is assumed of ties.
        """
        without_files = {"ngram": self.ngram_candidates, "none": lambda *_: []}
        propose = without_files.get(algorithm, self.draft_candidates)
        pool = [c for c in propose(request, tokens, steps, topk) if c.score > -np.inf]
        best = sorted(range(len(pool)), key=lambda i: (-pool[i].score, pool[i].depth, i))[: nodes - 1]
        return [pool[i] for i in sorted(best)]

    @torch.inference_mode()
    def draft_candidates(self, request: Request, tokens: Sequence[int], steps: int, topk: int) -> list[Node]:
        """Every candidate of every level: each beam's topk children, the topk best of a level being the next beams."""
        assert self.draft is not None
        root = self.scratch(tokens).out[len(tokens) - 2]
        beams = [Beam(Node((), np.float32(0)), root[None])]
        pool: list[Node] = []
        for level in range(1, steps + 1):
            candidates = [(node, beam) for beam in beams for node in self._children(request, tokens, beam, topk)]
            pool += [node for node, _ in candidates]
            order = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0].score, i))[:topk]
            if level < steps:
                beams = [self._run(tokens, *candidates[i]) for i in order if candidates[i][0].score > -np.inf]
        return pool

    def _children(self, request: Request, tokens: Sequence[int], beam: Beam, topk: int) -> list[Node]:
        assert self.draft is not None
        ids = range(self.draft.spec.vocab_size) if self.draft.d2t is None else self.draft.d2t.tolist()
        path = beam.node.path
        scores = draft_scores(self.draft.logits(self.draft.output_of(beam.outs[-1])), ids, request, (*tokens, *path))
        best = sorted(scores, key=lambda token: (-scores[token], token))[:topk]
        return [Node((*path, token), beam.node.score + min(scores[token], np.float32(0))) for token in best]

    def _run(self, tokens: Sequence[int], node: Node, parent: Beam) -> Beam:
        """A plain draft pass along the node's own path, each row reading what the row before it handed on."""
        assert self.draft is not None
        n = len(tokens) - 1
        attend = BehindPrefix(
            self.draft.layer_specs, [[plane[:n] for plane in planes] for planes in self.scratch(tokens).draft]
        )
        positions = torch.arange(n, n + node.depth)[None]
        out = self.draft(torch.tensor([node.path]), parent.outs[None], positions, attend).hidden
        return Beam(node, torch.cat((parent.outs, out[0, -1:])))

    @staticmethod
    def ngram_candidates(request: Request, tokens: Sequence[int], steps: int, topk: int) -> list[Node]:
        """What followed earlier occurrences of the last tokens: the longest match, then the latest, for each next
        token."""
        root = len(tokens) - 1
        by_next: dict[int, tuple[int, int]] = {}
        for end in range(root):
            length = matched(tokens, end)
            if length:
                by_next[tokens[end + 1]] = max(by_next.get(tokens[end + 1], (0, 0)), (length, end))
        branches = sorted(by_next.values(), reverse=True)[:topk]
        pool = []
        for level in range(1, steps + 1):
            for length, end in branches:
                followed = [tokens[end + 1 + i % (root - end)] for i in range(level)]
                pool.append(Node(tuple(followed), np.float32(level * np.log(length / (length + 1)))))
        return pool


def matched(tokens: Sequence[int], end: int) -> int:
    """How many of the last tokens, up to MAX_NGRAM, also stand just before and at `end`."""
    root = len(tokens) - 1
    length = 0
    while length < min(MAX_NGRAM, end + 1) and tokens[end - length] == tokens[root - length]:
        length += 1
    return length


class Plain:
    """Plain decoding of one request, by re-forwarding its whole sequence for every token; grown as far as it is asked
    for."""

    def __init__(self, reference: Reference, request: Request):
        self.reference = reference
        self.request = request
        self.tokens = list(request.prompt)

    def upto(self, count: int) -> list[int]:
        """The first `count` tokens, prompt included.  What would end the request is no end here."""
        while len(self.tokens) < count:
            self.tokens.append(self.reference.next_token(self.request, self.tokens))
        return self.tokens[:count]

    def output(self, max_context: int) -> list[int]:
        """What the user should get: up to a stop token, max_tokens or the context's end."""
        prompt = len(self.request.prompt)
        for count in range(prompt + 1, self.request.end(max_context) + 1):
            if self.upto(count)[-1] in self.request.stop_ids:
                break
        return self.upto(count)[prompt:]


class BehindPrefix:
    """An `attend` for one path [1, Q] behind planes [n, heads, size] of its prefix: dense and causal, by one mask."""

    def __init__(self, layer_specs: tuple[LayerSpec, ...], past: list[list[Tensor]]):
        self.layer_specs = layer_specs
        self.past = past

    def __call__(self, layer: int, projections: Projections) -> Tensor:
        own = attended(projections, self.layer_specs[layer])
        q, planes = own.q, zip(self.past[layer], own.kept, strict=True)
        held = [torch.cat((past[None], new), 1) for past, new in planes]
        k, v = keys_and_values(projections, held[0]) if isinstance(projections, LatentProjections) else held
        behind, new = k.shape[1] - q.shape[1], q.shape[1]
        g = self.layer_specs[layer]
        k, v = (value.repeat_interleave(g.heads // value.shape[2], 2) for value in (k, v))
        distance = torch.arange(behind, behind + new)[:, None] - torch.arange(behind + new)
        seen = (distance >= 0) & (distance < (g.window or behind + new))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * g.softmax_scale
        weights = softmax_of(scores.masked_fill(~seen, -torch.inf), projections.sink)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)
