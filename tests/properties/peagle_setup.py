"""Engines whose draft is a P-EAGLE head, and their oracle."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from espalier.layout import RoundLayout
from espalier.models import CausalLM, DraftModel
from espalier.models.draft import DraftOutput
from espalier.models.eagle3 import PEagleDraft
from espalier.request import Request
from tests.checkpoints import load_pair
from tests.harness import CPU, DTYPE, MAX_POSITIONS, Setup
from tests.oracles.dense import DensePass
from tests.oracles.plain_block import best_paths
from tests.oracles.reference_round import Node, Reference
from tests.peagle import peagle_directories


@dataclass(frozen=True)
class PEagleSetup(Setup):
    algorithm: str = "peagle"

    @property
    def layout(self) -> RoundLayout:
        return replace(super().layout, block_rows=15 if self.algorithm == "peagle" else 0)

    def models(self, position_rows: int = MAX_POSITIONS) -> tuple[CausalLM, DraftModel | None]:
        target, draft = peagle_models(self.family, position_rows)
        return target, draft if self.algorithm == "peagle" else None


@lru_cache
def peagle_models(family: str, position_rows: int) -> tuple[CausalLM, DraftModel]:
    target_path, draft_path = peagle_directories(family)
    how: dict[str, Any] = {"dtype": DTYPE, "device": CPU, "position_rows": position_rows}
    return load_pair(target_path, draft_path, **how)


class PEagleReference(Reference):
    """A target and a P-EAGLE head, asked from scratch: one pass over mask rows behind the rows of decided tokens."""

    draft: PEagleDraft

    @torch.inference_mode()
    def tree(
        self, algorithm: str, request: Request, tokens: Sequence[int], steps: int, topk: int, nodes: int
    ) -> list[Node]:
        scratch, root = self.scratch(tokens), len(tokens) - 1
        out = self.draft.output_from_hidden(scratch.out(1, root)[None, None])
        # The root's row is at position root - 1.
        positions = root + torch.arange(max(steps - 1, 1))[None]
        past = [[plane[:root] for plane in layer] for layer in scratch.draft[0]] if root else None
        mask_tokens = torch.full_like(positions, self.draft.spec.mask_token_id)
        masks = self.draft.run_mask_rows(DensePass(mask_tokens, self.draft.layer_specs, positions, past=past))
        normed = torch.cat((out.normed, masks.normed), 1)
        logits = self.draft.logits(DraftOutput(normed, normed))[0]
        ids = range(len(logits[0])) if self.draft.d2t is None else self.draft.d2t.tolist()
        return best_paths(lambda path: logits[len(path)], ids, request, tokens, steps, topk, nodes)


@lru_cache
def _reference(family: str) -> PEagleReference:
    return PEagleReference(*peagle_models(family, MAX_POSITIONS))


def peagle_reference_of(setup: PEagleSetup) -> PEagleReference:
    return _reference(setup.family)
