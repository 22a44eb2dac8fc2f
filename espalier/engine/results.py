"""The results ring on the device, and how the host reads it.

A launch writes its output to the ring entry that its launch input names, one row for each request.  All values are
int64 (float scores as their bits), so one copy brings an entry to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.engine.launch_input import DraftTree, LaunchInput, RequestResult, TreeSize
from espalier.kernels.sampling.logprobs import LogprobRing, write_logprobs
from espalier.kernels.state.write_results import write_results
from espalier.layout import RoundLayout
from espalier.limits import MAX_LOGPROBS
from espalier.request import TokenLogprob
from espalier.sampling.pick import Logprobs
from espalier.speculate.round import RoundOutput
from espalier.speculate.tree import VOID, Tree


@dataclass(frozen=True)
class Fields:
    """The columns of a row: a slice of [0, width) for each field."""

    length: slice
    num_finite: slice
    emitted: slice
    path: slice
    tokens: slice
    parents: slice
    depths: slice
    scores: slice
    width: int

    @classmethod
    def of(cls, layout: RoundLayout) -> "Fields":
        width, nodes = layout.extend_width, layout.num_draft_tokens
        sizes = {"length": 1, "num_finite": 1, "emitted": width, "path": width}
        sizes |= dict.fromkeys(("tokens", "parents", "depths", "scores"), nodes)
        ends = np.cumsum(list(sizes.values())).tolist()
        return cls(
            **{name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)},
            width=ends[-1],
        )


class Results:
    """ring: [entries, max_batch, width] int64 on the device; logprobs: a second ring for the emitted tokens'
    log-probabilities, which are floats."""

    def __init__(self, layout: RoundLayout, entries: int, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.fields = Fields.of(layout)
        self.ring = torch.zeros(entries, layout.max_batch, self.fields.width, dtype=torch.int64, device=device)
        sizes = (entries, layout.max_batch, layout.extend_width, MAX_LOGPROBS)
        self.logprobs = LogprobRing.zeros(*sizes, dtype, device)

    def write(self, entry: Tensor, output: RoundOutput) -> None:
        """Write the output of a launch to ring entry `entry` [1]."""
        path, tree = output.path, output.tree
        parts = {"length": path.length[:, None], "emitted": path.tokens, "num_finite": path.num_finite[:, None]}
        # write_results fills all other columns with the void token.  So a launch without a tree reads as void nodes.
        if tree is not None:
            parts |= {"path": path.rows, "tokens": tree.tokens, "parents": tree.parents}
            parts |= {"depths": tree.depths, "scores": tree.scores}
        write_results(self.ring, entry, {getattr(self.fields, name).start: part for name, part in parts.items()})
        picked = (output.logits, path.rows, path.tokens, path.length)
        write_logprobs(self.logprobs, entry, *picked, output.num_logprobs)

    def write_trees(self, entry: Tensor, tree: Tree) -> None:
        """Write the trees of a round that is not settled yet to ring entry `entry` [1]."""
        parts = {"tokens": tree.tokens, "parents": tree.parents}
        write_results(self.ring, entry, {getattr(self.fields, name).start: part for name, part in parts.items()})


class Reported(NamedTuple):
    """Log-probabilities of a launch; None where no request asked for them.

    emitted: the parts of a LogprobRing entry, [B, W, ...], for the emitted tokens; prompt: [N], for prompt tokens.
    """

    emitted: tuple[Tensor, ...] | None = None
    prompt: Logprobs | None = None


def read(fields: Fields, entry: np.ndarray, reported: Reported, launch_input: LaunchInput) -> list[RequestResult]:
    """Read a ring entry [B, width] on the host: one row for each slot of the launch input."""
    length, num_finite = entry[:, fields.length][:, 0].tolist(), entry[:, fields.num_finite][:, 0].tolist()
    emitted = entry[:, fields.emitted].tolist()
    is_node = entry[:, fields.tokens] != VOID
    drafted = np.maximum(is_node.sum(1) - 1, 0).tolist()
    depth = (entry[:, fields.depths] * is_node).max(1).tolist()
    logprobs = _by_request(
        reported.emitted, [tokens[:count] for tokens, count in zip(emitted, num_finite, strict=True)]
    )
    prompt_logprobs = _by_span(reported.prompt, launch_input, len(length))
    return [
        RequestResult(
            emitted[b][: num_finite[b]],
            num_finite[b] == length[b],
            TreeSize(drafted[b], depth[b]),
            _tree(fields, entry[b], length[b]) if launch_input.traced and is_node[b].any() else None,
            logprobs[b],
            prompt_logprobs[b],
        )
        for b in range(len(length))
    ]


def _tree(fields: Fields, row: np.ndarray, length: int) -> DraftTree:
    tokens, parents, depths = (row[part].tolist() for part in (fields.tokens, fields.parents, fields.depths))
    scores = row[fields.scores].astype(np.int32).view(np.float32)
    # The ring has columns for the largest tree.  Columns past this tree hold no score bits, so void nodes get -inf.
    scores = np.where(row[fields.tokens] == VOID, -np.inf, scores).tolist()
    return DraftTree(tokens, parents, depths, scores, row[fields.path][:length].tolist())


def read_trees(fields: Fields, entry: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """(tokens, parents) of each request's tree, from an entry [B, width] that `write_trees` wrote."""
    return list(zip(entry[:, fields.tokens].tolist(), entry[:, fields.parents].tolist(), strict=True))


def _by_request(logprobs: tuple[Tensor, ...] | None, emitted: list[list[int]]) -> list[list[TokenLogprob]]:
    if logprobs is None:
        return [[] for _ in emitted]
    rows = zip(emitted, zip(*(part.tolist() for part in logprobs), strict=True), strict=True)
    return [_entries((tokens, *(part[: len(tokens)] for part in parts))) for tokens, parts in rows]


def _by_span(logprobs: Logprobs | None, launch_input: LaunchInput, batch: int) -> list[list[TokenLogprob]]:
    """Prompt log-probabilities, split by request."""
    if logprobs is None or launch_input.prompt_rows is None:
        return [[] for _ in range(batch)]
    entries = _entries([part.tolist() for part in logprobs])
    sizes = launch_input.prompt_rows.sizes
    return [entries[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _entries(parts: Sequence[Sequence[Any]]) -> list[TokenLogprob]:
    """TokenLogprob objects from the parts of Logprobs, given as lists."""
    return [
        TokenLogprob(token, chosen, list(zip(ids, values, strict=True)), rank)
        for token, chosen, rank, ids, values in zip(*parts, strict=True)
    ]
