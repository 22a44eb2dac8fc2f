"""The results ring on the device, and how the host reads it.

A launch writes its output to the ring entry that its launch input names, one row for each request.  All values are
int64 (floats as their bits), so one copy brings an entry to the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from espalier.engine.launch_input import DraftTree, LaunchInput, RequestResult, TreeSize
from espalier.kernels.ops.sampling import write_logprobs
from espalier.kernels.ops.state import write_results
from espalier.layout import RoundLayout
from espalier.limits import MAX_LOGPROBS
from espalier.logprobs import row_words
from espalier.sampling.prompt import PromptRows
from espalier.slots import ALL_SOURCES
from espalier.speculate.round import RoundOutput
from espalier.speculate.sources.calibrate import CandidateNodes
from espalier.speculate.tree import VOID, Tree


@dataclass(frozen=True)
class ResultColumns:
    """The columns of a row of the ring: for each value of a request's output, the slice of [0, width) that holds it.

    length: the number of emitted tokens.  num_finite: how many emitted tokens come before the first token with
    non-finite logits.  emitted: the emitted tokens.  path: the indices of the accepted nodes, the root first.
    tokens, parents, depths, scores: of all nodes.  own_text_paths: the paths found in the request's own text.
    candidates: all drafted nodes, packed by `pack_nodes`.  logprobs: for each emitted token a row as in
    espalier/logprobs.py; undefined if the request wants none.  max_top_logprobs: how many likeliest tokens a row of
    `logprobs` has: MAX_LOGPROBS, or fewer with a small vocabulary.  checksum_weights: int64, the factors of tokens and
    parents in RequestResult.tree_checksum."""

    length: slice
    num_finite: slice
    emitted: slice
    path: slice
    tokens: slice
    parents: slice
    depths: slice
    scores: slice
    own_text_paths: slice
    candidates: slice
    logprobs: slice
    width: int
    max_top_logprobs: int
    checksum_weights: np.ndarray = field(compare=False)

    @classmethod
    def for_layout(cls, layout: RoundLayout, vocab_size: int) -> "ResultColumns":
        width, nodes = layout.extend_width, layout.num_draft_tokens
        sizes = {"length": 1, "num_finite": 1, "emitted": width, "path": width}
        sizes |= dict.fromkeys(("tokens", "parents", "depths", "scores"), nodes)
        sizes["own_text_paths"] = layout.num_text_paths * (1 + layout.steps)
        sizes["candidates"] = nodes * layout.calibrates_scores
        # The log-probabilities are last, so that all other fields are one view.
        sizes["logprobs"] = width * row_words(MAX_LOGPROBS)
        ends = np.cumsum(list(sizes.values())).tolist()
        return cls(
            **{name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)},
            width=ends[-1],
            max_top_logprobs=min(MAX_LOGPROBS, vocab_size),
            # Any large odd numbers will do, because the checksum's products and sums wrap around.
            checksum_weights=np.random.default_rng(0).integers(1, 2**62, 2 * nodes) | 1,
        )


class ResultsRing:
    """The results ring.  ring: [entries, max_batch, width] int64 on the device.

    without_logprobs: a view of all columns except log-probabilities.  logprobs: a view of the log-probabilities,
    [entries, max_batch, W, row_words(MAX_LOGPROBS)]."""

    def __init__(self, layout: RoundLayout, vocab_size: int, num_entries: int, device: torch.device):
        self.layout = layout
        self.columns = ResultColumns.for_layout(layout, vocab_size)
        self.ring = torch.zeros(num_entries, layout.max_batch, self.columns.width, dtype=torch.int64, device=device)
        self.without_logprobs = self.ring[..., : self.columns.logprobs.start]
        self.logprobs = self.ring[..., self.columns.logprobs].unflatten(-1, (-1, row_words(MAX_LOGPROBS)))

    def write(self, ring_entry: Tensor, output: RoundOutput) -> None:
        """Writes the output of a launch to ring entry `ring_entry` [1]."""
        path, tree = output.path, output.tree
        columns = {"length": path.length[:, None], "emitted": path.tokens, "num_finite": path.num_finite[:, None]}
        # write_results fills all other columns with VOID (-1).  So a launch without a tree has only void nodes.
        if tree is not None:
            columns |= {"path": path.rows, "tokens": tree.tokens, "parents": tree.parents}
            columns |= {"depths": tree.depths, "scores": tree.scores}
        columns |= {
            name: part
            for name, part in (("own_text_paths", output.own_text_paths), ("candidates", output.candidates))
            if part is not None
        }
        self._write_columns(ring_entry, columns)
        picked = (output.logits, output.logit_rows, path.tokens, path.length)
        write_logprobs(self.logprobs, ring_entry, *picked, output.num_logprobs)

    def write_trees(self, ring_entry: Tensor, tree: Tree) -> None:
        """Writes the trees of a round that is not settled yet to ring entry `ring_entry` [1]."""
        self._write_columns(ring_entry, {"tokens": tree.tokens, "parents": tree.parents})

    def _write_columns(self, ring_entry: Tensor, values_by_name: dict[str, Tensor]) -> None:
        """Writes [B, n] tensors to ring entry `ring_entry` [1].  values_by_name: by the names of ResultColumns."""
        by_column = {getattr(self.columns, name).start: values for name, values in values_by_name.items()}
        write_results(self.without_logprobs, ring_entry, by_column)


def read_results(
    columns: ResultColumns, ring_entry: np.ndarray, prompt_logprobs: Tensor | None, launch_input: LaunchInput
) -> list[RequestResult]:
    """Reads a ring entry [B, width] on the host.  Returns one result for each slot of the launch input.

    prompt_logprobs: [N, words], for the rows of LaunchInput.prompt_rows; None if no request wants them."""
    length, num_finite = ring_entry[:, columns.length][:, 0].tolist(), ring_entry[:, columns.num_finite][:, 0].tolist()
    emitted = ring_entry[:, columns.emitted].tolist()
    is_node = ring_entry[:, columns.tokens] != VOID
    depths = ring_entry[:, columns.depths] * is_node
    checksums = (ring_entry[:, columns.tokens.start : columns.parents.stop] @ columns.checksum_weights).tolist()
    logprobs = _read_logprobs(columns, ring_entry, launch_input.num_logprobs, num_finite)
    candidates, counts_by_source = _read_candidates(columns, ring_entry, is_node)
    prompt_rows = _read_prompt_logprobs(prompt_logprobs, launch_input.prompt_rows, len(length))
    ranks, is_leaf = (
        _sibling_ranks(columns, ring_entry, is_node, length)
        if launch_input.tree and launch_input.tree.steps
        else ([], [True] * len(length))
    )
    return [
        RequestResult(
            emitted[b][: num_finite[b]],
            num_finite[b] == length[b],
            TreeSize(tuple(np.bincount(depths[b])[1:].tolist())),
            _read_tree(columns, ring_entry[b], length[b]) if launch_input.reports_trees and is_node[b].any() else None,
            logprobs[b],
            prompt_rows[b],
            checksums[b],
            ranks[b] if ranks else (),
            is_leaf[b],
            _own_text_paths(ring_entry[b, columns.own_text_paths], columns.emitted.stop - columns.emitted.start),
            candidates[b],
            counts_by_source[b],
        )
        for b in range(len(length))
    ]


def _own_text_paths(row: np.ndarray, width: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns RequestResult.own_text_paths.  row: [P · width], the paths.  width: a path's values, kind included."""
    paths = row.reshape(-1, width).tolist() if row.size else []
    return tuple((kind, tuple(token for token in tokens if token != VOID)) for kind, *tokens in paths if kind > 0)


def _read_candidates(
    columns: ResultColumns, ring_entry: np.ndarray, is_node: np.ndarray
) -> tuple[Sequence[np.ndarray | None], Sequence[np.ndarray | None]]:
    """Returns RequestResult.candidates and RequestResult.counts_by_source of each request."""
    # The values are copied, because the next launch with this ring entry overwrites the entry's buffer.
    candidates = ring_entry[:, columns.candidates].copy()
    if not candidates.size or (candidates == VOID).all():
        return ((None,) * len(ring_entry),) * 2
    request, node = np.nonzero(is_node & (candidates != VOID))
    predicted = np.exp(ring_entry[:, columns.scores].astype(np.int32).view(np.float32)[request, node])
    step, path = np.arange(columns.path.stop - columns.path.start), ring_entry[:, columns.path]
    is_accepted = np.zeros(candidates.shape, dtype=bool)
    rows, depths = np.nonzero((step > 0) & (step < ring_entry[:, columns.length]))
    is_accepted[rows, path[rows, depths]] = True
    counts = np.zeros((len(ring_entry), len(ALL_SOURCES), 3))
    node_counts = np.stack((np.ones_like(predicted), predicted, is_accepted[request, node]), 1)
    np.add.at(counts, (request, CandidateNodes.unpack(candidates[request, node]).sources), node_counts)
    return list(candidates), list(counts)


def _sibling_ranks(
    columns: ResultColumns, ring_entry: np.ndarray, is_node: np.ndarray, path_lengths: list[int]
) -> tuple[list[tuple[int, ...]], list[bool]]:
    """Returns AcceptanceSample.sibling_ranks and AcceptanceSample.is_leaf of each request.

    path_lengths: how many nodes each accepted path has, including the root.  The nodes of a tree are in the order of
    their scores, so a node's rank is the number of its siblings with lower indices."""
    parents = np.where(is_node, ring_entry[:, columns.parents], VOID)
    parents[:, 0] = VOID  # the root is its own parent
    paths, ranks, is_leaf = ring_entry[:, columns.path].tolist(), [], []
    # Lists are faster than arrays here, because paths are short.
    for nodes, path, length in zip(parents.tolist(), paths, path_lengths, strict=True):
        ranks.append(tuple(nodes[:node].count(nodes[node]) for node in path[1:length]))
        is_leaf.append(path[max(length - 1, 0)] not in nodes)
    return ranks, is_leaf


def _read_tree(columns: ResultColumns, row: np.ndarray, path_length: int) -> DraftTree:
    """row: [width], a request's row of a ring entry.  path_length: the number of accepted nodes, with the root."""
    tokens, parents, depths = (row[part].tolist() for part in (columns.tokens, columns.parents, columns.depths))
    scores = row[columns.scores].astype(np.int32).view(np.float32)
    # The ring has columns for the largest tree.  Columns past this tree hold no score bits, so void nodes get -inf.
    scores = np.where(row[columns.tokens] == VOID, -np.inf, scores).tolist()
    return DraftTree(tokens, parents, depths, scores, row[columns.path][:path_length].tolist())


def read_trees(columns: ResultColumns, ring_entry: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """Returns (tokens, parents) of each request's tree, from an entry [B, width] that `write_trees` wrote."""
    return list(zip(ring_entry[:, columns.tokens].tolist(), ring_entry[:, columns.parents].tolist(), strict=True))


# The functions below copy rows, because a view would keep the rows of the whole batch in memory, and because the next
# launch with this ring entry overwrites the entry's buffer.


def _read_logprobs(
    columns: ResultColumns, ring_entry: np.ndarray, num_wanted: tuple[int | None, ...], num_emitted: list[int]
) -> Sequence[np.ndarray | None]:
    """Returns the log-probability rows of each request's emitted tokens, with as many likeliest tokens as the request
    wants; None for a request that wants no log-probabilities."""
    if num_wanted.count(None) == len(num_wanted):
        return (None,) * len(num_emitted)
    rows = ring_entry[:, columns.logprobs].reshape(len(ring_entry), -1, row_words(MAX_LOGPROBS))
    return [
        None if most is None else rows[b, :emitted, : row_words(min(most, columns.max_top_logprobs))].copy()
        for b, (most, emitted) in enumerate(zip(num_wanted, num_emitted, strict=True))
    ]


def _read_prompt_logprobs(
    rows: Tensor | None, prompt_rows: PromptRows | None, batch: int
) -> Sequence[np.ndarray | None]:
    """Returns RequestResult.prompt_logprobs of each request.  rows: [N, words], for the rows of `prompt_rows`."""
    if rows is None or prompt_rows is None:
        return (None,) * batch
    all_rows, sizes = rows.numpy(), prompt_rows.num_rows_by_request
    return [
        all_rows[end - size : end, : row_words(count)].copy() if size else None
        for size, end, count in zip(sizes, accumulate(sizes), prompt_rows.num_top_logprobs, strict=True)
    ]
