"""Staged rounds on a GPU: one CUDA graph for each stage, captured when a batch bucket first needs them.

Without a grammar none is captured.  A bucket whose graphs do not fit into memory runs its stages eagerly.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.engine.executor import StagedRound, guide_of
from espalier.engine.launch_buffer import LaunchBuffer
from espalier.engine.masks import GuideRows, RowMasks
from espalier.engine.results import Results
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.sampling.mask import ALL_ALLOWED, DraftGuide, mask_words
from espalier.speculate.round import ModelRunner

log = logging.getLogger(__name__)


@dataclass
class Stages:
    """The stages of one batch size.  A run of all three leaves nothing for the next.

    launch_input: [n] int64, guide, masks [batch, D, words]: on the device, what the stages read.
    """

    launch_input: Tensor
    guide: DraftGuide
    masks: Tensor
    propose: Callable[[], None]
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
        own = np.ascontiguousarray(masks.masks[:, : self.masks.shape[1]])
        rows = torch.tensor(masks.rows).pin_memory().to(self.masks.device, non_blocking=True)
        values = torch.from_numpy(own).pin_memory().to(self.masks.device, non_blocking=True)
        self.masks.index_copy_(0, rows, values)


def stages_of(
    runner: ModelRunner, results: Results, packed: LaunchBuffer, needs: SamplingNeeds, batch: int, device: torch.device
) -> tuple[Stages, StagedRound]:
    """Eager stages of `batch` requests on the current stream, and the round that they run."""
    launch_input = torch.from_numpy(packed.vector).pin_memory().to(device, non_blocking=True)
    words = mask_words(runner.target.config.vocab_size)
    guide = DraftGuide(
        torch.full((batch, runner.layout.steps), -1, device=device),
        torch.full((batch, words), ALL_ALLOWED, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
    )
    nodes = runner.layout.at(batch).num_draft_tokens
    masks = torch.full((batch, nodes, words), ALL_ALLOWED, dtype=torch.int32, device=device)
    staged = StagedRound(runner, results, packed.on(launch_input), needs, guide)
    return Stages(launch_input, guide, masks, staged.propose, staged.verify, lambda: staged.settle(masks)), staged


def capture(stages: Stages, pool: Any, stream: torch.cuda.Stream) -> Stages:
    """The same stages as CUDA graphs, for a launch input of dummies.

    Raises torch.OutOfMemoryError if they do not fit.
    """
    # Run once eagerly: libraries load kernels and allocate workspaces, which is not allowed in a capture.
    with torch.cuda.stream(stream):
        stages.propose()
        stages.verify()
        stages.settle()
        stream.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    for graph, stage in zip(graphs, (stages.propose, stages.verify, stages.settle), strict=True):
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            stage()
    replays = (graph.replay for graph in graphs)
    return Stages(stages.launch_input, stages.guide, stages.masks, *replays)
