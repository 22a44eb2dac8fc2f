"""Helpers for tests of the tree kernels: random candidate pools with many tied scores, and exact comparison."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from espalier.kernels.ops.tree import select_beams

# Few values, so that most scores are tied.  Their sums are exact in float32.
VALUES = torch.tensor([0.0, -0.0, -0.25, -0.5, -1.0, -1.5, -7.0, -torch.inf, torch.nan])


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_scores(shape: tuple[int, ...], generator: torch.Generator, missing: bool = True) -> Tensor:
    """missing: whether -inf and NaN are among the scores."""
    return VALUES[torch.randint(0, len(VALUES) if missing else 7, shape, generator=generator)]


def random_pool(batch: int, topk: int, steps: int, seed: int, vocab: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [B, n], scores [B, n] and beams [B, (steps - 1) · topk] of a draft with random scores."""
    generator = random(seed)
    missing = seed % 3 > 0
    tokens, scores, beams = [], [], []
    parent_scores = torch.zeros(batch, 1)
    for level in range(1, steps + 1):
        shape = (batch, parent_scores.shape[1], topk)
        ids = torch.rand((*shape[:2], max(vocab, topk)), generator=generator).argsort(-1)[..., :topk]
        path_scores = parent_scores[..., None] + drawn_scores(shape, generator, missing)
        tokens.append(ids.flatten(1))
        scores.append(path_scores.flatten(1))
        if level < steps:
            selected = select_beams.reference(
                ids, path_scores, None, torch.empty(batch, topk).long(), 0, 1 + topk // 64
            )
            parent_scores = selected.scores
            beams.append(selected.candidate_indices)
    return torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(beams or [torch.zeros(batch, 0).long()], 1)


def same(got, expected) -> None:
    """Asserts that two named tuples of tensors and None are equal in values and dtypes."""
    for field, expected_value in expected._asdict().items():
        value = getattr(got, field)
        if expected_value is None or value is None:
            assert value is expected_value, field
            continue
        value = value.cpu()
        assert value.dtype == expected_value.dtype, field
        assert torch.equal(value, expected_value), field


@contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised memory allocated inside is filled with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
