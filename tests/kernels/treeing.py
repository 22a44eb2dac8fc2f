"""Random drafts for the tree kernels: pools whose scores are mostly tied, and the trees that come of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from espalier.kernels.tree.select_beams import select_beams_reference

# Few values, so that most are tied; sums of them are exact.
VALUES = torch.tensor([0.0, -0.0, -0.25, -0.5, -1.0, -1.5, -7.0, -torch.inf, torch.nan])


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_scores(shape: tuple[int, ...], generator: torch.Generator, missing: bool = True) -> Tensor:
    """missing: with -inf and NaN among them."""
    return VALUES[torch.randint(0, len(VALUES) if missing else 7, shape, generator=generator)]


def random_pool(batch: int, topk: int, steps: int, seed: int, vocab: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [B, n], scores [B, n], beams [B, (steps - 1) topk], as a draft of random scores grows them."""
    generator = random(seed)
    missing = seed % 3 > 0
    tokens, scores, beams = [], [], []
    above = torch.zeros(batch, 1)
    for level in range(1, steps + 1):
        shape = (batch, above.shape[1], topk)
        ids = torch.rand((*shape[:2], max(vocab, topk)), generator=generator).argsort(-1)[..., :topk]
        path = above[..., None] + drawn_scores(shape, generator, missing)
        tokens.append(ids.flatten(1))
        scores.append(path.flatten(1))
        if level < steps:
            grown = select_beams_reference(ids, path, None, torch.empty(batch, topk).long(), 0, 1 + topk // 64)
            above = grown.scores
            beams.append(grown.places)
    return torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(beams or [torch.zeros(batch, 0).long()], 1)


def same(got, expected) -> None:
    """Every field of two tuples of tensors, dtype and all."""
    for field, wanted in expected._asdict().items():
        value = getattr(got, field).cpu()
        assert value.dtype == wanted.dtype, field
        assert torch.equal(value, wanted), field


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated meanwhile holds NaN, or the largest integer, until it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
