"""A draft that agrees with its target: the real drafter, its logits replaced by the oracle's for the target."""

from typing import Any

import torch
from torch import Tensor

from espalier.engine.engine import Engine
from espalier.models.draft import DraftOutput
from espalier.sampling.logit_processors import DraftedAncestors
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
    begin, forward = drafter.begin, drafter._forward
    under: list[list[int]] = []

    def answer(above: DraftedAncestors | None) -> None:
        draft.answer = torch.stack([target_logits(reference, known, b, above) for b, known in enumerate(under)])

    def beginning(slots):
        under[:] = [
            slots.table.history[i, : n + 1].tolist() for i, n in zip(slots.index, slots.prefix_len, strict=True)
        ]
        answer(None)
        return begin(slots)

    def agreeing(out, rows, level):
        answer(
            DraftedAncestors(
                rows.tokens[:, : drafter.layout.draft_rows_above(level)], rows.beam_levels[-1].ancestor_bits
            )
        )
        return forward(out, rows, level)

    drafter.draft = draft  # type: ignore[assignment]
    drafter.begin = beginning  # type: ignore[method-assign]
    drafter._forward = agreeing  # type: ignore[method-assign]


def target_logits(reference: Reference, known: list[int], b: int, above: DraftedAncestors | None) -> Tensor:
    """[rows, V] after `known` and each beam's own path; `above` is None at the root."""
    paths = [[]] if above is None else [above.tokens[b][path].tolist() for path in above.mask()[b]]
    tokens = [[*known, *path] for path in paths]
    return torch.stack([reference.scratch(row).logits[len(row) - 1] for row in tokens])
