"""A draft that agrees with its target: the real drafter, its logits replaced by the oracle's for the target."""

from typing import Any

import torch
from torch import Tensor

from espalier.engine.engine import Engine
from espalier.models.draft import DraftOutput
from espalier.speculate.drafters.autoregressive import AutoregressiveDrafter
from tests.oracles.reference_round import Reference


class AgreeingDraft:
    """What a draft is to its drafter, but for the logits: those are set before each ask."""

    def __init__(self, draft: Any):
        self.draft = draft
        self.answer: Tensor | None = None
        self.modules = (self,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)

    def __call__(self, *args: Any) -> DraftOutput:
        return self.draft(*args)

    def logits(self, out: DraftOutput) -> Tensor:
        assert self.answer is not None
        return self.answer


def agree(engine: Engine, reference: Reference) -> None:
    """From now on the engine's draft scores children by the target's own logits along their path."""
    drafter = engine.executor.runner.drafter
    assert isinstance(drafter, AutoregressiveDrafter)
    draft = AgreeingDraft(drafter.draft)
    begin, next_beams = drafter.begin, drafter._next_beams
    under: list[list[int]] = []

    def answer(rows: int, beams: Any) -> None:
        draft.answer = torch.stack([target_logits(reference, known, b, rows, beams) for b, known in enumerate(under)])

    def beginning(slots):
        under[:] = [
            slots.table.history[i, : n + 1].tolist() for i, n in zip(slots.index, slots.prefix_len, strict=True)
        ]
        answer(1, None)
        return begin(slots)

    def agreeing(*args):
        places, beams = next_beams(*args)
        answer(beams.scores.shape[1], beams)
        return places, beams

    drafter.draft = draft  # type: ignore[assignment]
    drafter.begin = beginning  # type: ignore[method-assign]
    drafter._next_beams = agreeing  # type: ignore[method-assign]


def target_logits(reference: Reference, known: list[int], b: int, rows: int, beams: Any) -> Tensor:
    """[rows, V] after `known` and each beam's own path."""
    if beams is None:
        paths: list[list[int]] = [[]]
    else:
        paths = [beams.above.tokens[b][beams.above.mask()[b, beam]].tolist() for beam in range(rows)]
    tokens = [[*known, *path] for path in paths]
    return torch.stack([reference.scratch(row).logits[len(row) - 1] for row in tokens])
