"""A round in plain Python: the oracle for what the pages, the slots and the proposals of a real one hold.

Nothing of the engine's machinery is used: a model is called on whole sequences, or on one path behind the from-scratch
K/V of its prefix; there are no slots, pages, staging, beams or ancestor words, only lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from espalier.cache.layer_spec import LayerSpec
from espalier.models.base import CausalLM
from espalier.models.draft import DraftModel, DraftModule
from espalier.request import Request
from tests.oracles.dense import DensePass
from tests.oracles.fp8_cache import LayerScales
from tests.oracles.plain_sampling import draft_scores, plain_pick

MAX_NGRAM = 4


@dataclass(frozen=True)
class Scratch:
    """What one plain pass over `tokens` (n + 1 of them) makes of target and draft.

    target: planes a layer, row i under token i; logits [n + 1, V]; features [n + 1, H], the target's, as the draft
    reads them.  For each module k of the draft, from 1: draft, planes a layer, row i under token i + k, and outs
    [n + 1 - k, H], the same.  Without a draft these are empty."""

    tokens: tuple[int, ...]
    target: list[tuple[Tensor, ...]]
    logits: Tensor
    features: Tensor
    draft: list[list[tuple[Tensor, ...]]]
    outs: list[Tensor]

    def out(self, module: int, token: int) -> Tensor:
        """[H], what a module hands on at a token; module 0 is the target."""
        return self.features[token] if module == 0 else self.outs[module - 1][token - module]


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
    """A candidate that was run.  out [H]: what the module that proposes its children handed on."""

    node: Node
    out: Tensor


class Reference:
    """Target and draft (None: n-gram or nothing), asked from scratch.  Passes over one token list are kept, as they are
    pure."""

    def __init__(
        self,
        target: CausalLM,
        draft: DraftModel | None = None,
        modules: Sequence[DraftModule] | None = None,
        scales: Sequence[LayerScales] | None = None,
        draft_scales: Sequence[LayerScales] | None = None,
        propose: Callable[[Request, Sequence[int], int, int], list[Node]] | None = None,
    ):
        """modules: of the draft, written apart from it (tests/oracles/plain_mtp.py); by default its own.

        scales, draft_scales: of layers whose rows are in FP8.  propose: the candidates of a drafter that is not known
        here, by (request, tokens, steps, topk).
        """
        self.propose = propose
        self.target = target
        self.draft = draft
        self.scales, self.draft_scales = scales, draft_scales
        self.modules = modules or ([] if draft is None else draft.modules)
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
        p = DensePass(row, self.target.layer_specs, scales=self.scales)
        out = self.target(p)
        layers = [tuple(plane[0] for plane in p.planes.get(i, ())) for i in p.layers]
        logits = self.target.logits(out.hidden)[0]
        if self.draft is None:
            return Scratch(tokens, layers, logits, torch.empty(0), [], [])
        read = {"captured": out.captured, "hidden": out.hidden}[self.draft.spec.target_output]
        scratch = Scratch(tokens, layers, logits, self.features(read)[0], [], [])
        for module in range(1, len(self.modules) + 1):
            self._module_pass(scratch, module)
        return scratch

    def features(self, read: Tensor) -> Tensor:
        """What the draft makes of what it reads of the target, [1, n, F]."""
        assert self.draft is not None
        return self.draft.fuse(read)

    def committed(self, module: int, root: int) -> tuple[int, int]:
        """The first row of a module, from 1, that is committed when the root is token `root`, and the one after the
        last."""
        return module, max(root + 1, module)

    def _module_pass(self, scratch: Scratch, module: int) -> None:
        """One plain pass of a module over all tokens that it has a row of, added to `scratch`."""
        specs, tokens = self.specs_of(module), range(module, len(scratch.tokens))
        kept: list[tuple[Tensor, ...]] = [(torch.empty(0),)] * len(specs)
        handed_on = scratch.features[:0]
        if tokens:
            fed = torch.stack([self.fed(scratch, module, token) for token in tokens])
            p = DensePass(torch.tensor([scratch.tokens[module:]]), specs, scales=self.scales_of(module))
            handed_on = self.modules[module - 1](p, fed[None]).hidden[0]
            kept = [tuple(plane[0] for plane in p.planes[i]) for i in p.layers]
        scratch.draft.append(kept)
        scratch.outs.append(handed_on)

    def fed(self, scratch: Scratch, module: int, token: int) -> Tensor:
        """[H]: the hidden state that a module reads at a decided token, or at the one after the last."""
        assert self.draft is not None
        if self.draft.spec.hidden_source == "target":
            return scratch.out(0, token - module)
        return scratch.out(module - 1, token - 1)

    def specs_of(self, module: int) -> tuple[LayerSpec, ...]:
        assert self.draft is not None
        count = len(self.draft.layer_specs) // len(self.modules)
        return self.draft.layer_specs[(module - 1) * count : module * count]

    def scales_of(self, module: int) -> Sequence[LayerScales] | None:
        count = len(self.specs_of(module))
        return None if self.draft_scales is None else self.draft_scales[(module - 1) * count : module * count]

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
        out = self.target(DensePass(torch.tensor([list(tokens)]), self.target.layer_specs, scales=self.scales))
        return plain_pick(self.target.logits(out.hidden)[0, -1], request, tokens)

    # The brute-force tree

    def tree(
        self, algorithm: str, request: Request, tokens: Sequence[int], steps: int, topk: int, nodes: int
    ) -> list[Node]:
        """The tree under the root tokens[-1], root left out: the best nodes - 1 candidates, in the order they came up.

        Sort key (score, level, place in the level), written out: a list is sorted, nothing is assumed of ties.
        """
        without_files = {"ngram": self.ngram_candidates, "none": lambda *_: []}
        propose = self.propose or without_files.get(algorithm, self.draft_candidates)
        pool = [c for c in propose(request, tokens, steps, topk) if c.score > -np.inf]
        best = sorted(range(len(pool)), key=lambda i: (-pool[i].score, pool[i].depth, i))[: nodes - 1]
        return [pool[i] for i in sorted(best)]

    @torch.inference_mode()
    def draft_candidates(self, request: Request, tokens: Sequence[int], steps: int, topk: int) -> list[Node]:
        """Every candidate of every level: each beam's topk children, the topk best of a level being the next beams."""
        root = self.scratch(tokens).out(1, len(tokens) - 1)
        beams = [Beam(Node((), np.float32(0)), root)]
        pool: list[Node] = []
        path = Path(self, tokens)
        for level in range(1, steps + 1):
            module = min(level, len(self.modules))
            candidates = [(n, beam) for beam in beams for n in self._children(request, tokens, beam, module, topk)]
            pool += [node for node, _ in candidates]
            order = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0].score, i))[:topk]
            chosen = [candidates[i][0] for i in order if candidates[i][0].score > -np.inf]
            if level < steps:
                outs = path.outs(min(level + 1, len(self.modules)), [node.path for node in chosen])
                beams = [Beam(node, out[-1]) for node, out in zip(chosen, outs, strict=True)]
        return pool

    def _children(self, request: Request, tokens: Sequence[int], beam: Beam, module: int, topk: int) -> list[Node]:
        assert self.draft is not None
        ids = range(self.draft.spec.vocab_size) if self.draft.d2t is None else self.draft.d2t.tolist()
        path, proposes = beam.node.path, self.modules[module - 1]
        logits = proposes.logits(proposes.output_from_hidden(beam.out[None, None]))[0, 0]
        scores = draft_scores(logits, ids, request, (*tokens, *path))
        best = sorted(scores, key=lambda token: (-scores[token], token))[:topk]
        return [Node((*path, token), beam.node.score + min(scores[token], np.float32(0))) for token in best]

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


class Path:
    """Plain passes of the modules along drafted paths behind `tokens`, kept by module and path."""

    def __init__(self, reference: Reference, tokens: Sequence[int]):
        self.reference = reference
        self.scratch = reference.scratch(tokens)
        self.n = len(tokens) - 1
        self._outs: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def outs(self, module: int, paths: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """For each of some paths of one length, [rows, H]: what a module hands on along it, at the tokens that it has
        a row of.  Paths are rows of a batch: none attends to another."""
        missing = [path for path in paths if (module, path) not in self._outs]
        if missing:
            self._outs |= {(module, path): out for path, out in zip(missing, self._run(module, missing), strict=True)}
        return [self._outs[module, path] for path in paths]

    def _run(self, module: int, paths: Sequence[tuple[int, ...]]) -> Tensor:
        n, reference = self.n, self.reference
        depths = range(max(1, module - n), len(paths[0]) + 1)
        fed = torch.stack([torch.stack([self._fed(module, path, depth) for depth in depths]) for path in paths])
        planes = self.scratch.draft[module - 1]
        behind = max(0, n + 1 - module)
        tokens = torch.tensor([path[depths.start - 1 :] for path in paths])
        positions = torch.tensor([[n + depth - module for depth in depths]]).expand(len(paths), -1)
        past = [[plane[:behind] for plane in layer] for layer in planes] if behind else None
        specs, scales = reference.specs_of(module), reference.scales_of(module)
        return reference.modules[module - 1](DensePass(tokens, specs, positions, scales=scales, past=past), fed).hidden

    def _fed(self, module: int, path: tuple[int, ...], depth: int) -> Tensor:
        """The hidden state that feeds the row of path[depth - 1].  From depth N on, module N reads its own output."""
        above = path[: depth - 1]
        if module == len(self.reference.modules) and depth >= module:
            return self.outs(module, [above])[0][-1] if above else self.scratch.out(module, self.n)
        if depth == 1 or self.reference.draft.spec.hidden_source == "target":
            return self.reference.fed(self.scratch, module, self.n + depth)
        return self.outs(module - 1, [above])[0][-1]


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
        for count in range(prompt + 1, self.request.max_num_tokens(max_context) + 1):
            if self.upto(count)[-1] in self.request.stop_ids:
                break
        return self.upto(count)[prompt:]
