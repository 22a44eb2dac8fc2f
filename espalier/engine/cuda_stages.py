"""Staged rounds on a GPU: CUDA graphs for each stage, captured when a batch bucket first needs them.

The propose stage is split into one graph for each level of the tree, because between two levels the draft may ask the
host which tokens can follow.  Without a grammar nothing is captured here.  A bucket whose graphs do not fit into memory
runs its stages eagerly.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.engine.executor import StagedRound, guide_of
from espalier.engine.launch_buffer import LaunchBuffer
from espalier.engine.masks import AskRows, GuideRows, RowMasks
from espalier.engine.results import Results
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.sampling.mask import ALL_ALLOWED, DraftGuide, mask_words
from espalier.speculate.round import ModelRunner


@dataclass
class Question:
    """What the draft asks at one level, and the answer, on the device.

    packed: [B, E + Q * W] int64, tokens and ancestor bits (sampling.mask.AskHost) side by side, so that one copy brings
    both to the host.  only [B, Q], masks [B, Q, words]: the answer.  answered: the rows that it is about.
    """

    packed: Tensor
    num_tokens: int
    only: Tensor
    masks: Tensor
    answered: tuple[int, ...] = ()

    @classmethod
    def of(cls, packed: Tensor, beams: int, num_tokens: int, num_words: int) -> "Question":
        """No row is answered yet: every token may follow."""
        batch, device = len(packed), packed.device
        masks = torch.full((batch, beams, num_words), ALL_ALLOWED, dtype=torch.int32, device=device)
        return cls(packed, num_tokens, torch.full((batch, beams), -1, device=device), masks)

    def answer(self, ask: AskRows | None) -> None:
        """Wait for the device, and ask the host.  None: every token may follow."""
        told = None
        if ask is not None:
            packed = self.packed.cpu()
            told = ask(
                packed[:, : self.num_tokens], packed[:, self.num_tokens :].unflatten(1, (self.only.shape[1], -1))
            )
        rows = () if told is None else told.rows
        if rows != self.answered:
            self.only.fill_(-1)
            self.masks.fill_(ALL_ALLOWED)
            self.answered = rows
        if told is not None:
            _set_rows(self.only, rows, told.forced)
            _set_rows(self.masks, rows, told.masks)


def packed_question(tokens: Tensor, ancestor_bits: Tensor) -> Tensor:
    return torch.cat((tokens, ancestor_bits.flatten(1)), 1)


class DraftBreaks:
    """Graphs of a propose stage, and what the draft asks between them."""

    def __init__(self, pool: Any, num_words: int):
        self.pool = pool
        self.num_words = num_words
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.questions: list[Question] = []

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self.pool)

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def split(self, tokens: Tensor, ancestor_bits: Tensor) -> tuple[Tensor, Tensor]:
        """End a graph and begin the next, which reads the answer."""
        packed = packed_question(tokens, ancestor_bits)
        self.end()
        question = Question.of(packed, ancestor_bits.shape[1], tokens.shape[1], self.num_words)
        self.questions.append(question)
        self.begin()
        return question.only, question.masks

    def replay(self, ask: AskRows | None) -> None:
        for graph, question in zip(self.graphs, self.questions, strict=False):
            graph.replay()
            question.answer(ask)
        self.graphs[-1].replay()


class DeviceAsk:
    """The `ask` of a guide on a GPU.  host: answers in an eager run; breaks: of the capture that is under way."""

    def __init__(self, num_words: int):
        self.num_words = num_words
        self.host: AskRows | None = None
        self.breaks: DraftBreaks | None = None

    def __call__(self, tokens: Tensor, ancestor_bits: Tensor) -> tuple[Tensor, Tensor]:
        if self.breaks is not None:
            return self.breaks.split(tokens, ancestor_bits)
        packed = packed_question(tokens, ancestor_bits)
        question = Question.of(packed, ancestor_bits.shape[1], tokens.shape[1], self.num_words)
        question.answer(self.host)
        return question.only, question.masks


@dataclass
class Stages:
    """The stages of one batch size.  A run of all three leaves nothing for the next.

    launch_input: [n] int64, guide, masks [batch, D, words]: on the device, what the stages read.
    """

    launch_input: Tensor
    guide: DraftGuide
    masks: Tensor
    propose: Callable[[AskRows | None], None]
    verify: Callable[[], None]
    settle: Callable[[], None]

    def set_guide(self, rows: GuideRows | None) -> None:
        if rows is None:
            self.guide.forced.fill_(-1)
            self.guide.level.zero_()
            return
        on_host = guide_of(rows, len(self.guide.level))
        for name in ("forced", "mask", "level"):
            getattr(self.guide, name).copy_(getattr(on_host, name).pin_memory(), non_blocking=True)

    def set_masks(self, masks: RowMasks) -> None:
        """Rows without a grammar allow all tokens.  masks has a row for each node of the largest tree."""
        self.masks.fill_(ALL_ALLOWED)
        _set_rows(self.masks, masks.rows, np.ascontiguousarray(masks.masks[:, : self.masks.shape[1]]))


class EagerStages:
    """The stages of `batch` requests on the current stream, for a launch input."""

    def __init__(
        self,
        runner: ModelRunner,
        results: Results,
        packed: LaunchBuffer,
        needs: SamplingNeeds,
        batch: int,
        device: torch.device,
    ):
        launch_input = torch.from_numpy(packed.vector).pin_memory().to(device, non_blocking=True)
        words = mask_words(runner.target.config.vocab_size)
        self.ask = DeviceAsk(words)
        guide = DraftGuide(
            torch.full((batch, runner.layout.steps), -1, device=device),
            torch.full((batch, words), ALL_ALLOWED, dtype=torch.int32, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            self.ask,
        )
        nodes = runner.layout.at(batch).num_draft_tokens
        masks = torch.full((batch, nodes, words), ALL_ALLOWED, dtype=torch.int32, device=device)
        self.staged = StagedRound(runner, results, packed.on(launch_input), needs, guide)
        settle = lambda: self.staged.settle(masks)  # noqa: E731
        self.stages = Stages(launch_input, guide, masks, self._propose, self.staged.verify, settle)

    def _propose(self, ask: AskRows | None) -> None:
        self.ask.host = ask
        self.staged.propose()

    def run(self) -> None:
        """Run all three for dummies."""
        self.stages.propose(None)
        self.stages.verify()
        self.stages.settle()

    def captured(self, pool: Any, stream: torch.cuda.Stream) -> Stages:
        """The same stages as CUDA graphs.  The launch input must be of dummies.

        Raises torch.OutOfMemoryError if they do not fit.
        """
        with torch.cuda.stream(stream):
            # Run once eagerly: libraries load kernels and allocate workspaces, which is not allowed in a capture.
            self.run()
            breaks = self._captured_propose(pool)
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        for graph, stage in zip(graphs, (self.stages.verify, self.stages.settle), strict=True):
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                stage()
        replays = (graph.replay for graph in graphs)
        return Stages(self.stages.launch_input, self.stages.guide, self.stages.masks, breaks.replay, *replays)

    def _captured_propose(self, pool: Any) -> DraftBreaks:
        torch.cuda.synchronize()
        gc.collect()
        self.ask.breaks = breaks = DraftBreaks(pool, self.ask.num_words)
        breaks.begin()
        try:
            self.staged.propose()
        except BaseException:
            with suppress(RuntimeError):
                breaks.end()
            raise
        finally:
            self.ask.breaks = None
        breaks.end()
        return breaks


def _set_rows(values: Tensor, rows: tuple[int, ...], own: np.ndarray) -> None:
    """Copy `own` from the host to the given rows, on the current stream."""
    index = torch.tensor(rows).pin_memory().to(values.device, non_blocking=True)
    values.index_copy_(0, index, torch.from_numpy(own).pin_memory().to(values.device, non_blocking=True))
