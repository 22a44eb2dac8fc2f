"""Staged rounds on a GPU: CUDA graphs for each stage, captured at startup for every batch bucket.

The propose stage is split into one graph for each level of the tree, because between two levels the draft may ask the
host which tokens may follow.  If the graphs of a batch bucket do not fit into memory, its stages run eagerly.

Masks and forced tokens of grammars are copied to the device.  Adjacent requests with a grammar need only one copy
(`GrammarRows`).

Only one round is between its begin and its settle stage at any time.  So the stages of all batch sizes share the memory
of their CUDA graphs and of their GrammarRows (`StageMemory`).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.engine.executor import StagedRound
from espalier.engine.launch_buffer import LaunchBuffer
from espalier.engine.masks import AskBeamMasks, DraftGuideRows, NodeMasks
from espalier.engine.results import ResultsRing
from espalier.sampling.logit_processors import SamplingFeatures
from espalier.sampling.mask import ALL_ALLOWED, DraftGuide, mask_words
from espalier.speculate.round import ModelRunner

# With this mode, CUDA calls of other threads do not end a capture.  NCCL's threads query events all the time.
CAPTURE_ERROR_MODE = "thread_local"


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects garbage now, and disables garbage collection inside the block.

    Garbage may hold graphs, streams and pinned memory of an earlier engine.  Freeing these objects calls CUDA, and such
    a call ends a capture with an error."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(eq=False)
class GrammarRowMemory:
    """The memory that GrammarRows of all batch sizes share.

    values: [n] on the device.  pinned: [n] on the host.  current_rows: the GrammarRows whose values the memory holds
    now.
    """

    values: Tensor
    pinned: Tensor
    current_rows: "GrammarRows | None" = None


class GrammarRows:
    """A tensor on the device with one row for each request of a batch, such as the request's token mask.

    values: [B, ...], the tensor.  rows: the row numbers of requests with a grammar, ascending.
    unmasked_row: the content of all other rows, which allows all tokens: a row, or one number for all cells of a row.

    The pinned buffer is reused, because getting a new buffer takes longer than filling it.  NumPy fills the buffer,
    because PyTorch would use several threads, which wait for one another on a busy host."""

    def __init__(self, memory: GrammarRowMemory, shape: tuple[int, ...], unmasked_row: Tensor | int):
        self.memory = memory
        self.values, self.pinned_values = (flat[: prod(shape)].view(shape) for flat in (memory.values, memory.pinned))
        self.unmasked_row = unmasked_row
        self.rows: tuple[int, ...] = ()
        self._clear()

    def _clear(self) -> None:
        self.memory.current_rows = self
        if isinstance(self.unmasked_row, int):
            self.values.fill_(self.unmasked_row)
        else:
            self.values.copy_(self.unmasked_row.expand_as(self.values))

    def set_rows(self, rows: tuple[int, ...], row_values: np.ndarray | None) -> None:
        """Sets these rows to `row_values` and all others to `unmasked_row`, on the current stream.

        row_values: [len(rows), ...]; None without rows.

        This overwrites the pinned buffer, so the copies that the previous call started must have ended.  They have
        ended if the host has read the trees or the results of that round."""
        if rows != self.rows or self.memory.current_rows is not self:
            self._clear()
            self.rows = rows
        if row_values is None or not rows:
            return
        self.pinned_values.numpy()[: len(rows)] = row_values
        for begin, end in runs_of_rows(rows):
            first = rows[begin]
            self.values[first : first + end - begin].copy_(self.pinned_values[begin:end], non_blocking=True)


class StageMemory:
    """Makes the GrammarRows of all stages.  GrammarRows with the same name share memory, such as the masks of all batch
    sizes.  `make_rows` should be called for the largest batch first, because smaller batches then use its memory."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory_by_name: dict[str, GrammarRowMemory] = {}

    def make_rows(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, unmasked_row: Tensor | int
    ) -> GrammarRows:
        """Returns new rows.  name: rows with the same name share memory.  unmasked_row: see GrammarRows."""
        memory, count = self.memory_by_name.get(name), prod(shape)
        if memory is None or len(memory.values) < count:
            pinned = torch.empty(count, dtype=dtype, pin_memory=self.device.type == "cuda")
            memory = self.memory_by_name[name] = GrammarRowMemory(
                torch.empty(count, dtype=dtype, device=self.device), pinned
            )
        return GrammarRows(memory, shape, unmasked_row)


def runs_of_rows(rows: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns (begin, end), indices in `rows`, for each run of consecutive numbers.  rows: ascending."""
    cuts = [place for place in range(1, len(rows)) if rows[place] != rows[place - 1] + 1]
    return list(pairwise([0, *cuts, len(rows)])) if rows else []


def packed_row_length(num_mask_words: int) -> int:
    """Returns the number of int64 values that hold `num_mask_words` int32 words."""
    return -(-num_mask_words // 2)


def pack_side_by_side(values: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns int64 values [..., n] and int32 words [..., w] side by side, for `unpack_side_by_side`."""
    packed = np.full((*values.shape[:-1], values.shape[-1] + packed_row_length(words.shape[-1])), ALL_ALLOWED, np.int64)
    packed[..., : values.shape[-1]] = values
    packed[..., values.shape[-1] :].view(np.int32)[..., : words.shape[-1]] = words
    return packed


def unpack_side_by_side(packed: Tensor, num_values: int, num_mask_words: int) -> tuple[Tensor, Tensor]:
    """Returns views of the values and the words in `packed`, which `pack_side_by_side` put side by side."""
    return packed[..., :num_values], packed[..., num_values:].view(torch.int32)[..., :num_mask_words]


@dataclass
class BeamMaskQuery:
    """The draft's question at one tree level (which tokens may follow each beam?) and the host's answer, on the device.

    packed: [B, E + Q * W] int64, the question: E drafted tokens, then W words of ancestor bits for each of Q beams
    (sampling.mask.AskAllowedTokens).  One copy brings the whole question to the host.
    answer: [B, Q, 1 + packed_row_length(words)] int64, each beam's forced token and mask (`pack_side_by_side`)."""

    packed: Tensor
    num_tokens: int
    num_mask_words: int
    answer: GrammarRows

    @classmethod
    def new(
        cls, packed: Tensor, num_beams: int, num_tokens: int, num_mask_words: int, memory: StageMemory
    ) -> "BeamMaskQuery":
        """Returns a question; until the host answers, every token may follow every beam.  packed: see pack_query."""
        # -1 (ALL_ALLOWED) as a forced token means that several tokens may follow; as a mask word, that all are allowed.
        shape = (len(packed), num_beams, 1 + packed_row_length(num_mask_words))
        # The questions of different tree levels have different numbers of tokens, so this number can name the memory.
        answer = memory.make_rows(f"answer to {num_tokens} tokens", shape, packed.dtype, ALL_ALLOWED)
        return cls(packed, num_tokens, num_mask_words, answer)

    @property
    def answer_tensors(self) -> tuple[Tensor, Tensor]:
        """The answer in the form of AskAllowedTokens: forced tokens [B, Q] and masks [B, Q, words]."""
        forced, masks = unpack_side_by_side(self.answer.values, 1, self.num_mask_words)
        return forced[..., 0], masks

    def ask_host(self, ask_beam_masks: AskBeamMasks | None) -> None:
        """Waits for the device, asks the host, and writes the answer to the device.  ask_beam_masks: if None, the host
        is not asked, and the answer is that every token may follow."""
        if ask_beam_masks is None:
            self.answer.set_rows((), None)
            return
        tokens, bits = self.packed.cpu().split((self.num_tokens, self.packed.shape[1] - self.num_tokens), 1)
        answer = ask_beam_masks(tokens, bits.unflatten(1, (self.answer.values.shape[1], -1)))
        self.answer.set_rows(answer.rows, pack_side_by_side(answer.forced[..., None], answer.masks))


def pack_query(tokens: Tensor, ancestor_bits: Tensor) -> Tensor:
    """Returns BeamMaskQuery.packed from the drafted tokens [B, E] and the beams' ancestor bits [B, beams, W]."""
    return torch.cat((tokens, ancestor_bits.flatten(1)), 1)


class ProposeGraphs:
    """The CUDA graphs of a propose stage, with a question to the host after each graph except the last."""

    def __init__(self, graph_pool: Any, num_mask_words: int, memory: StageMemory):
        """graph_pool: the memory pool of the CUDA graphs.  num_mask_words: the int32 words of a token mask."""
        self.graph_pool = graph_pool
        self.num_mask_words = num_mask_words
        self.memory = memory
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.queries: list[BeamMaskQuery] = []

    def begin_graph(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self.graph_pool, capture_error_mode=CAPTURE_ERROR_MODE)

    def end_graph(self) -> None:
        self.graphs[-1].capture_end()

    def split_graph(self, tokens: Tensor, ancestor_bits: Tensor) -> tuple[Tensor, Tensor]:
        """Ends this graph and begins the next one, which reads the answer.  See sampling.mask.AskAllowedTokens."""
        packed = pack_query(tokens, ancestor_bits)
        self.end_graph()
        query = BeamMaskQuery.new(packed, ancestor_bits.shape[1], tokens.shape[1], self.num_mask_words, self.memory)
        self.queries.append(query)
        self.begin_graph()
        return query.answer_tensors

    def replay(self, ask_beam_masks: AskBeamMasks | None) -> None:
        """Runs the graphs.  ask_beam_masks: answers the questions between them (BeamMaskQuery.ask_host)."""
        for graph, query in zip(self.graphs, self.queries, strict=False):
            graph.replay()
            query.ask_host(ask_beam_masks)
        self.graphs[-1].replay()


class BeamMaskQueryRunner:
    """Serves as the function DraftGuide.ask_allowed_tokens on a GPU.

    ask_beam_masks: called for the answer in an eager run; None: the host is not asked.
    graphs: the graphs of the capture that is running; None in an eager run."""

    def __init__(self, num_mask_words: int, memory: StageMemory):
        self.num_mask_words = num_mask_words
        self.memory = memory
        self.ask_beam_masks: AskBeamMasks | None = None
        self.graphs: ProposeGraphs | None = None

    def __call__(self, tokens: Tensor, ancestor_bits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the forced tokens and masks of the beams (answer_tensors).  Arguments: see MaskBuilder.beam_masks."""
        if self.graphs is not None:
            return self.graphs.split_graph(tokens, ancestor_bits)
        packed = pack_query(tokens, ancestor_bits)
        query = BeamMaskQuery.new(packed, ancestor_bits.shape[1], tokens.shape[1], self.num_mask_words, self.memory)
        query.ask_host(self.ask_beam_masks)
        return query.answer_tensors


@dataclass
class RoundStages:
    """The functions that run the four stages of a round of one batch size, and the tensors that the stages read.

    This object keeps no data from one round to the next.  The tensors are on the device:
    vector: [n] int64, the packed launch.
    guide: [batch, S + 1 + packed_row_length(words)] int64, the forced tokens, the tree level and the mask of a
    DraftGuide, packed by `pack_side_by_side`.
    masks: [batch, D, words] int32, the tokens that may follow each node."""

    vector: Tensor
    guide: GrammarRows
    masks: GrammarRows
    begin: Callable[[], None]
    propose: Callable[[AskBeamMasks | None], None]
    verify: Callable[[], None]
    settle: Callable[[], None]

    def set_guide(self, guide_rows: DraftGuideRows | None) -> None:
        """Copies the forced tokens and masks that grammars give to the draft to `guide`; None without grammars."""
        if guide_rows is None:
            self.guide.set_rows((), None)
        else:
            self.guide.set_rows(
                guide_rows.rows,
                pack_side_by_side(np.column_stack((guide_rows.forced, guide_rows.levels)), guide_rows.masks),
            )

    def set_masks(self, masks: NodeMasks) -> None:
        """Sets the masks of the nodes.  Requests without a grammar allow all tokens.

        masks: a mask for each node of the largest tree.  A smaller tree uses only the first masks."""
        self.masks.set_rows(masks.rows, masks.masks[:, : self.masks.values.shape[1]])


class EagerStages:
    """The stages of a round of `batch` requests, run without CUDA graphs on the current stream.  packed: the packed
    launch input of the round."""

    def __init__(
        self,
        runner: ModelRunner,
        results: ResultsRing,
        packed: LaunchBuffer,
        sampling_features: SamplingFeatures,
        batch: int,
        memory: StageMemory,
    ):
        device = memory.device
        self.vector = torch.from_numpy(packed.vector).pin_memory().to(device, non_blocking=True)
        words, steps = mask_words(runner.target.config.vocab_size), runner.layout.steps
        self.beam_query = BeamMaskQueryRunner(words, memory)
        unmasked = torch.full((steps + 1 + packed_row_length(words),), ALL_ALLOWED, dtype=torch.int64)
        # Level 0 means that the mask holds for no tree level.
        unmasked[steps] = 0
        unmasked_row = unmasked.pin_memory().to(device, non_blocking=True)
        self.guide_rows = memory.make_rows("guide", (batch, len(unmasked)), unmasked.dtype, unmasked_row)
        forced_and_level, mask = unpack_side_by_side(self.guide_rows.values, steps + 1, words)
        self.guide = DraftGuide(forced_and_level[:, :steps], mask, forced_and_level[:, steps], self.beam_query)
        nodes = runner.layout.for_batch(batch).num_draft_tokens
        self.masks = memory.make_rows("masks", (batch, nodes, words), torch.int32, ALL_ALLOWED)
        self.staged = StagedRound(runner, results, packed.with_vector(self.vector), sampling_features)

    @property
    def stages(self) -> RoundStages:
        """The stages of this round, in a new RoundStages.  A stored RoundStages would form a reference cycle with this
        object, so the tensors of a round would stay in memory until garbage is collected."""
        buffers = self.vector, self.guide_rows, self.masks
        return RoundStages(*buffers, self.staged.begin, self._propose, self.staged.verify, self._settle)

    def _propose(self, ask_beam_masks: AskBeamMasks | None) -> None:
        self.beam_query.ask_beam_masks = ask_beam_masks
        self.staged.propose(self.guide)

    def _settle(self) -> None:
        self.staged.settle(self.masks.values)

    def run(self) -> None:
        """Runs all four stages.  The launch must be a launch of dummy slots."""
        stages = self.stages
        stages.begin()
        stages.propose(None)
        stages.verify()
        stages.settle()

    def capture_stages(self, graph_pool: Any, stream: torch.cuda.Stream) -> RoundStages:
        """Captures the stages as CUDA graphs and returns them.  The launch must be a launch of dummy slots.

        Raises torch.OutOfMemoryError if the graphs do not fit into memory."""
        with torch.cuda.stream(stream):
            # Run once eagerly: libraries load kernels and allocate workspaces, which is not allowed in a capture.
            self.run()
        stages = self.stages
        begin = _capture_stage(stages.begin, graph_pool, stream)
        with torch.cuda.stream(stream):
            propose = self._captured_propose(graph_pool).replay
        verify, settle = (_capture_stage(stage, graph_pool, stream) for stage in (stages.verify, stages.settle))
        return replace(stages, begin=begin, propose=propose, verify=verify, settle=settle)

    def _captured_propose(self, graph_pool: Any) -> ProposeGraphs:
        """Captures the propose stage.  graph_pool: the memory pool of the CUDA graphs."""
        torch.cuda.synchronize()
        self.beam_query.graphs = graphs = ProposeGraphs(
            graph_pool, self.beam_query.num_mask_words, self.beam_query.memory
        )
        graphs.begin_graph()
        try:
            self.staged.propose(self.guide)
        except BaseException:
            with suppress(RuntimeError):
                graphs.end_graph()
            raise
        finally:
            self.beam_query.graphs = None
        graphs.end_graph()
        return graphs


def _capture_stage(stage: Callable[[], None], graph_pool: Any, stream: torch.cuda.Stream) -> Callable[[], None]:
    """Captures a stage on `stream` as a CUDA graph.  Returns the function that replays the graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=graph_pool, stream=stream, capture_error_mode=CAPTURE_ERROR_MODE):
        stage()
    return graph.replay
