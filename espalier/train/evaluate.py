"""Measures accept lengths of an EAGLE-3 draft on known text, for the trainer, without the engine.

The text is the target's greedy output, so a round accepts the longest path of its tree that agrees with the text.  The
trees of all positions are computed together.  Then `make_report` goes from root to root, like the rounds of decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.terminal.console import print_table
from espalier.train.draft import Eagle3Draft
from espalier.train.target import FrozenTarget
from espalier.train.writer import TargetWriter, find_repeats


@dataclass
class Beams:
    """The draft rows of one depth of N trees, K rows a tree.  All tensors are [N, K, ...].  scores: the sum of the
    log-probabilities of the path to the row.  on_path: whether the text agrees with this path.  features: before
    run_beams, the draft's output for the row's parent; after it, for the row.  chain: (keys, values) of the ancestors
    from depth 1 on."""

    tokens: Tensor
    scores: Tensor
    on_path: Tensor
    features: Tensor
    chain: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def select(self, index: Tensor, candidates: tuple[Tensor, Tensor, Tensor], parents: Tensor) -> Beams:
        """Returns the rows of the next depth.  index: [N, K], the best of M candidates.  candidates: (tokens,
        scores, on_path) of all candidates, [N, M] each.  parents: [N, K], the row of this depth that each best
        candidate continues."""
        tokens, scores, on_path = (v.gather(1, index) for v in candidates)
        return Beams(tokens, scores, on_path, select_rows(self.features, parents), self.chain)


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Selects rows of each batch entry.  x: [N, K, ...]; index: [N, M].  Returns [N, M, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


@torch.no_grad()
def accept_lengths(
    draft: Eagle3Draft,
    target: FrozenTarget,
    tokens: Tensor,
    first_root: int,
    steps: int,
    topk: int,
    num_draft_tokens: int,
) -> Tensor:
    """Returns the accept length of a round with its root at position n, for first_root <= n < T - steps.  tokens: [T],
    greedy text of the target.  steps, topk, num_draft_tokens: sizes of the tree."""
    dtype = draft.fc.weight.dtype
    features, embeds = target(tokens[None])[0][0, :-1].to(dtype), target.embed(tokens[1:]).to(dtype)
    roots = torch.arange(first_root, len(tokens) - steps, device=tokens.device)
    outputs, keys, values = causal_rows(draft, embeds, features)
    root_columns = roots[:, None]
    no_scores = torch.zeros_like(root_columns, dtype=dtype)
    beams = Beams(root_columns, no_scores, root_columns > 0, outputs[root_columns - 1])
    pool_scores, pool_depths, pool_paths = [], [], []
    for depth in range(1, steps + 1):
        if depth > 1:
            embedded = target.embed(beams.tokens).to(dtype)
            beams.features = run_beams(draft, embedded, beams, roots + depth - 2, keys, values, roots)
        log_probs = draft.logits(beams.features).log_softmax(-1)
        best_scores, ids = log_probs.topk(min(topk, log_probs.shape[-1]), dim=-1)
        children = draft.target_ids[ids].flatten(1)
        scores = (beams.scores[..., None] + best_scores).flatten(1)
        parents = torch.arange(beams.tokens.shape[1], device=tokens.device).repeat_interleave(best_scores.shape[-1])
        on_path = beams.on_path[:, parents] & (children == tokens[roots + depth][:, None])
        pool_scores.append(scores)
        pool_paths.append(on_path)
        pool_depths.append(torch.full_like(children, depth))
        index = scores.topk(min(topk, scores.shape[1]), dim=1).indices
        beams.chain = [(select_rows(k, parents[index]), select_rows(v, parents[index])) for k, v in beams.chain]
        beams = beams.select(index, (children, scores, on_path), parents[index])
    all_scores = torch.cat(pool_scores, 1)
    tree_nodes = all_scores.topk(min(num_draft_tokens - 1, all_scores.shape[1]), dim=1).indices
    depths = torch.cat(pool_depths, 1) * torch.cat(pool_paths, 1)
    return 1 + depths.gather(1, tree_nodes).amax(1)


def causal_rows(draft: Eagle3Draft, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the draft on all rows of the text, with the target's features.  Returns (outputs [R, H], keys and
    values, [heads, R, head_dim] each).  embeds: [R, H].  features: [R, F]."""
    feature = draft.fc(features)
    cos, sin = draft.rope(torch.arange(len(features), device=features.device))
    q, k, v = draft.midlayer.self_attn.project_qkv(draft.midlayer.join(embeds, feature), cos, sin)
    attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    return draft.midlayer.finish_layer(feature, attended), k, v


def run_beams(
    draft: Eagle3Draft, embeds: Tensor, beams: Beams, positions: Tensor, keys: Tensor, values: Tensor, roots: Tensor
) -> Tensor:
    """Returns the outputs of one draft pass over [N, K] beams.  Appends the beams' keys and values to `beams.chain`.
    embeds: the embeddings of the beams' tokens.  positions: [N], the RoPE position of each tree's rows.  keys, values:
    see causal_rows; beams attend to the rows before the root.  roots: [N], positions in the text."""
    layer = draft.midlayer
    cos, sin = (t[:, None, None, None, :] for t in draft.rope(positions))
    joined = layer.join(embeds, beams.features)[..., None, :]
    q, k, v = (t.squeeze(-2) for t in layer.self_attn.project_qkv(joined, cos, sin))
    beams.chain.append((k, v))
    prefix_scores = torch.einsum("nkhd,hrd->nkhr", q, keys)
    is_later = torch.arange(keys.shape[1], device=q.device) >= roots[:, None]
    prefix_scores = prefix_scores.masked_fill(is_later[:, None, None, :], float("-inf"))
    chain_scores = torch.stack([(q * k).sum(-1) for k, _ in beams.chain], dim=-1)
    weights = (torch.cat((prefix_scores, chain_scores), dim=-1) * q.shape[-1] ** -0.5).softmax(-1)
    attended = torch.einsum("nkhr,hrd->nkhd", weights[..., : keys.shape[1]], values)
    for index, (_, v) in enumerate(beams.chain):
        attended = attended + weights[..., keys.shape[1] + index, None] * v
    return layer.finish_layer(beams.features[..., None, :], attended[..., None, :]).squeeze(-2)


@dataclass
class AcceptReport:
    """Mean accept lengths.  fresh, repeated: over the rounds that decoding would run, in new text and in repeated text
    (find_repeats).  every_root: over a round from every position.  repeated_share: share of rounds in repeated text."""

    fresh: float
    repeated: float
    every_root: float
    repeated_share: float


def make_report(lengths: list[Tensor], texts: list[np.ndarray], output_starts: list[int]) -> AcceptReport:
    """Returns the report.  lengths: for each text, the accept length of a round at each position of the output."""
    fresh_lengths: list[float] = []
    repeated_lengths: list[float] = []
    all_lengths: list[float] = []
    for accepted, text, first in zip(lengths, texts, output_starts, strict=True):
        is_repeated, root, values = find_repeats(text), first, accepted.tolist()
        all_lengths += values
        while root - first < len(values):
            length = values[root - first]
            (repeated_lengths if is_repeated[root] else fresh_lengths).append(length)
            root += length
    means = [float(np.mean(x)) if x else float("nan") for x in (fresh_lengths, repeated_lengths, all_lengths)]
    num_repeated, num_rounds = len(repeated_lengths), len(repeated_lengths) + len(fresh_lengths)
    return AcceptReport(means[0], means[1], means[2], num_repeated / max(1, num_rounds))


# Continuations with at most this number of tokens are not measured.
MIN_MEASURED_TOKENS = 8
MEASURED_TREES = {"tree": (5, 4, 16), "chain": (5, 1, 6), "wide tree": (6, 8, 64)}  # (steps, topk, num_draft_tokens)


def require_measurable(num_tokens: int, steps: int) -> None:
    """Raises EspalierError if continuations of num_tokens tokens are too short for a tree of `steps` depths."""
    if num_tokens <= (shortest := max(MIN_MEASURED_TOKENS, steps)):
        raise EspalierError(
            f"--max-tokens={num_tokens} is too few to measure a tree of {steps} steps; use at least {shortest + 1}"
        )


def continue_prompts(
    target: Path, prompts: list[list[int]], num_tokens: int, steps: int
) -> tuple[list[np.ndarray], list[int]]:
    """Generates greedy continuations.  Returns (texts, index where each continuation begins).  Continuations of at most
    max(MIN_MEASURED_TOKENS, steps) tokens are left out, with a message.  Raises EspalierError if all are left out."""
    shortest = max(MIN_MEASURED_TOKENS, steps)
    with TargetWriter(target, max(map(len, prompts)) + num_tokens, len(prompts)) as writer:
        texts = writer.continuations(prompts, num_tokens, 0.0)
    long_enough = [i for i, text in enumerate(texts) if len(text) - len(prompts[i]) > shortest]
    if not long_enough:
        raise EspalierError(
            f"the target ends all {len(prompts)} prompts of --data within {shortest} tokens, so there is nothing to "
            "measure; give prompts that it continues"
        )
    if left_out := len(prompts) - len(long_enough):
        print(f"{left_out} of {len(prompts)} prompts are left out: the target ends them within {shortest} tokens")
    return [texts[i] for i in long_enough], [len(prompts[i]) for i in long_enough]


def print_reports(reports: Sequence[tuple[str, int, int, int, AcceptReport]]) -> None:
    """Prints a table with a line for each (name, steps, topk, num_draft_tokens, report)."""
    rows = [["", "steps", "topk", "nodes", "new text", "repeated text", "every position", "rounds in repeated text"]]
    for name, steps, topk, nodes, report in reports:
        numbers = (str(number) for number in (steps, topk, nodes))
        lengths = (report.fresh, report.repeated, report.every_root)
        means = ("-" if math.isnan(length) else f"{length:.2f}" for length in lengths)
        rows.append([name, *numbers, *means, f"{report.repeated_share:.0%}"])
    print("Mean accept length over the target's greedy text: of the rounds that decoding has, in new and in repeated")
    print("text, and of a round after every position.  -: no such round.")
    print_table(rows)
