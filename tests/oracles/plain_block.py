"""A block draft from its stored tensors, in the plainest words, and its brute-force tree: an oracle of a round.

Nothing of the engine's draft is used.  The form's facts are written here once more: which row proposes depth 1, which
rows see which, and what a window counts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from espalier.models.base import CausalLM
from espalier.models.draft import DraftModel
from espalier.request import Request
from tests.oracles.plain_sampling import draft_scores
from tests.oracles.reference_round import Node, Reference, Scratch

SIZE, EPS = 8, 1e-5
KV = tuple[Tensor, Tensor]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x [n, heads, size], rotated by RoPE at positions [n]."""
    # Frequencies are float32 in every implementation.
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, SIZE, 2).float() / SIZE)
    angles = positions.to(x)[:, None] * frequencies.to(x)
    cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos(), angles.sin()))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


@dataclass
class PlainBlock:
    """config, weights: of the checkpoint; embedding, head: the target's, unless the draft has its own."""

    config: dict
    weights: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    layers: int = field(init=False)

    @classmethod
    def load(cls, target_path: Path, path: Path) -> "PlainBlock":
        target, weights = load_file(target_path / "model.safetensors"), load_file(path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        embedding = weights.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        return cls(config, weights, embedding, weights.get("lm_head.weight", target["lm_head.weight"]))

    def __post_init__(self) -> None:
        layer = self.config.get("transformer_layer_config", self.config)
        self.layers = layer["num_hidden_layers"]
        self.is_speculators = layer is not self.config
        own = self.config.get("dflash_config", {})
        self.mask = own.get("mask_token_id", self.config.get("mask_token_id"))
        self.block_size = own.get("block_size", self.config.get("block_size"))
        self.first = 1 if own else 0
        self.windows = [
            layer["sliding_window"] if kind == "sliding_attention" else None
            for kind in layer.get("layer_types", ["full_attention"] * self.layers)
        ]
        # DFlash 2: its windows count from each row, and no layer is causal.
        self.taps, self.own = own.get("conv_kernel_size"), own
        self.causal = [bool(own.get("causal_head")) or window is not None for window in self.windows]
        if self.taps:
            self.causal = [False] * self.layers

    @property
    def ids(self) -> list[int]:
        """The target token of each draft token."""
        offsets = self.weights.get("d2t")
        count = len(self.head)
        return list(range(count)) if offsets is None else (torch.arange(count) + offsets).tolist()

    def heads(self, x: Tensor, layer: int, name: str, positions: Tensor) -> Tensor:
        """[n, heads, size] of q, k or v."""
        out = (x @ self.weights[f"layers.{layer}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, SIZE))
        if name == "v":
            return out
        return turned(norm(out, self.weights[f"layers.{layer}.self_attn.{name}_norm.weight"]), positions)

    def context(self, features: Tensor) -> list[KV]:
        """K and V of the context rows of tokens 0, 1, ...: features [n, F]."""
        shared = norm(features @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"])
        at = torch.arange(len(features))
        return [(self.heads(shared, i, "k", at), self.heads(shared, i, "v", at)) for i in range(self.layers)]

    def convolved(self, x: Tensor, delta: Tensor, base: Tensor) -> Tensor:
        """x [n, H], the rows of a block; delta [n, taps, groups]; base [taps, H]."""
        total = torch.zeros_like(x)
        for tap in range(self.taps):
            of_channel = delta[tap:, tap].repeat_interleave(x.shape[1] // delta.shape[2], 1)
            total[tap:] += x[: len(x) - tap] * (base[tap] + of_channel)
        return total

    def sublayer(self, name: str, inner: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """run(inner), with the convolutions around it that this sublayer has."""
        if not self.taps:
            return run(inner)
        delta = (inner @ self.weights[f"{name}_conv.kernel_projection.weight"].T).view(len(inner), 2, self.taps, -1)
        base = self.weights[f"{name}_conv.base_kernel"]
        return self.convolved(run(self.convolved(inner, delta[:, 0], base[0])), delta[:, 1], base[1])

    def run(self, root: int, context: Sequence[KV]) -> tuple[Tensor, Tensor]:
        """(logits [depths, draft vocabulary] without edges, the inputs of the head), behind these context rows."""
        behind = len(context[0][0])
        at = behind + torch.arange(self.block_size)
        x = self.embedding[[root] + [self.mask] * (self.block_size - 1)] * self.own.get("input_embedding_scale", 1)
        for i, (k, v) in enumerate(context):
            inner = norm(x, self.weights[f"layers.{i}.input_layernorm.weight"])
            seen = torch.ones(self.block_size, behind + self.block_size, dtype=torch.bool)
            if self.windows[i] is not None and self.taps:
                seen = at[:, None] - torch.arange(behind + self.block_size) < self.windows[i]
            elif self.windows[i] is not None:
                seen[:, : max(behind - self.windows[i], 0)] = False
            if self.causal[i]:
                seen = seen.tril(behind)

            def attention(inner: Tensor, i=i, k=k, v=v, seen=seen) -> Tensor:
                own = [self.heads(inner, i, name, at) for name in "qkv"]
                values = self.attention(own[0], torch.cat((k, own[1])), torch.cat((v, own[2])), seen)
                return values.flatten(1) @ self.weights[f"layers.{i}.self_attn.o_proj.weight"].T

            def mlp(inner: Tensor, i=i) -> Tensor:
                gate, up = (inner @ self.weights[f"layers.{i}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
                return (torch.nn.functional.silu(gate) * up) @ self.weights[f"layers.{i}.mlp.down_proj.weight"].T

            x = x + self.sublayer(f"layers.{i}.attention", inner, attention)
            inner = norm(x, self.weights[f"layers.{i}.post_attention_layernorm.weight"])
            x = x + self.sublayer(f"layers.{i}.mlp", inner, mlp)
        hidden = norm(x, self.weights["norm.weight"])[self.first :]
        logits, cap = (
            hidden @ self.head.T * self.own.get("output_multiplier", 1),
            self.own.get("final_logit_softcapping"),
        )
        return (logits if cap is None else cap * (logits / cap).tanh()), hidden

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        k, v = (value.repeat_interleave(q.shape[1] // value.shape[1], 1) for value in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    def after(self, path: Sequence[int], logits: Tensor, hidden: Tensor) -> Tensor:
        """[draft vocabulary]: the logits of what follows a path of n tokens, the root first.  logits: of depth n,
        without edges; hidden [n, H]: the head's inputs down to there."""
        before = self.weights.get("markov_head.markov_w1.weight")
        if before is not None:
            factor = self.factor(before[list(path)], hidden)
            return logits + self.weights["markov_head.markov_w2.weight"] @ factor
        if not self.taps:
            return logits
        projected = self.weights["candidate_selector.hidden_projection.weight"] @ hidden[-1]
        left, right = (self.weights[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
        best = logits.topk(self.own["selector_top_k"]).indices
        scores = torch.full_like(logits, -torch.inf)
        scores[best] = logits[best] + right[best] @ (left[path[-1]] * projected)
        return scores

    @property
    def reads_paths(self) -> bool:
        """Whether the logits depend on more of a path than its last token."""
        return self.config.get("markov_head_type") == "rnn"

    def factor(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[rank]: what the Markov head makes of a path, embedded [n, rank], and of hidden [n, H]."""
        kind, state = self.config["markov_head_type"], torch.zeros_like(embedded[0])
        if kind == "gated":
            return embedded[-1] * self.projected("gate", hidden[-1], embedded[-1]).sigmoid()
        if kind != "rnn":
            return embedded[-1]
        for token, of_depth in zip(embedded, hidden, strict=True):
            gate, candidate, output = self.projected("joint", state, token, of_depth).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        return output.tanh()

    def projected(self, name: str, *read: Tensor) -> Tensor:
        weight, bias = (self.weights[f"markov_head.{name}_proj.{part}"] for part in ("weight", "bias"))
        return weight @ torch.cat(read) + bias


class BlockReference(Reference):
    """A target and a block draft, asked from scratch."""

    def __init__(self, target: CausalLM, draft: DraftModel, plain: PlainBlock):
        super().__init__(target, draft)
        self.block = plain

    def features(self, read: Tensor) -> Tensor:
        return read

    def committed(self, module: int, root: int) -> tuple[int, int]:
        return 0, root

    def _pass(self, tokens: tuple[int, ...]) -> Scratch:
        scratch = super()._pass(tokens)
        with torch.inference_mode():
            scratch.draft.append(list(self.block.context(scratch.features)))
        return scratch

    @torch.inference_mode()
    def tree(
        self, algorithm: str, request: Request, tokens: Sequence[int], steps: int, topk: int, nodes: int
    ) -> list[Node]:
        scratch, root = self.scratch(tokens), len(tokens) - 1
        logits, hidden = self.block.run(tokens[-1], [(k[:root], v[:root]) for k, v in scratch.draft[0]])

        def logits_after(path: tuple[int, ...]) -> Tensor:
            return self.block.after((tokens[-1], *path), logits[len(path)], hidden[: len(path) + 1])

        return best_paths(logits_after, self.block.ids, request, tokens, steps, topk, nodes, self.block.reads_paths)


def best_paths(
    logits_after: Callable[[tuple[int, ...]], Tensor],
    ids: Sequence[int],
    request: Request,
    tokens: Sequence[int],
    steps: int,
    topk: int,
    nodes: int,
    by_path: bool = False,
) -> list[Node]:
    """The nodes - 1 best of all paths, best first.  A path's parent must be among the topk best tokens of its depth, or
    by_path, among its topk best paths; without edges, only those tokens are candidates.

    logits_after: of a path of drafted tokens, the logits of what follows it; they depend on its length and its last
    token, or by_path, on all of it.  ids: the target token of each draft token.
    """

    def row(path: tuple[int, ...]) -> tuple[int, ...]:
        return path if by_path else path[-1:]

    def continued(path: tuple[int, ...]) -> list[tuple[int, np.float32]]:
        scores = draft_scores(logits_after(path), ids, request, tokens, len(path))
        best = sorted(scores, key=lambda token: (-scores[token], token))[:topk]
        return [(t, min(scores[t], np.float32(0))) for t in best if scores[t] > -np.inf]

    # (path, score): many thousands, so plain pairs.
    paths: list[tuple[tuple[int, ...], np.float32]] = [((), np.float32(0))]
    found: list[tuple[tuple[int, ...], np.float32]] = []
    for _ in range(steps):
        best_of: dict[tuple[int, ...], list[tuple[int, np.float32]]] = {}
        for path, _ in paths:
            if row(path) not in best_of:
                best_of[row(path)] = continued(path)
        children = [((*path, token), above + score) for path, above in paths for token, score in best_of[row(path)]]
        children.sort(key=lambda child: -child[1])
        found += children[: nodes - 1]
        # The children of other paths are not among the nodes - 1 best of their depth, and lead to no row first.
        first: dict[tuple[int, ...], int] = {}
        for i, (path, _) in enumerate(children):
            first.setdefault(row(path), i)
        kept = set(list(first)[:topk])
        paths = [c for i, c in enumerate(children) if row(c[0]) in kept and (i < nodes or first[row(c[0])] == i)]
    best = sorted(found, key=lambda child: (-child[1], len(child[0])))[: nodes - 1]
    return [Node(path, score) for path, score in best]
