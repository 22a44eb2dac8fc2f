"""The tool that times shared experts: every variant is the same sum, and the last change is taken back."""

import torch

from espalier.kernels.layers import experts
from espalier.models.layers.norm import RMSNorm
from scripts.shared_experts import APART, NONE, VARIANTS, Sizes, block, chain, draw

SIZES = Sizes(num_experts=4, top_k=2, hidden=16, inner=8, shared=2)


def test_every_variant_gives_the_same_sum():
    torch.manual_seed(0)
    drawn = [draw(SIZES, torch.float64, torch.device("cpu")) for _ in range(2)]
    norm, x = RMSNorm(torch.ones(16, dtype=torch.float64), 1e-6), torch.randn(3, 16, dtype=torch.float64)
    before = experts.choose_experts_plan, experts.PREFETCHED_STEPS
    sums = {each: chain([block(SIZES, each, one) for one in drawn], each, norm, x)().sum(0) for each in VARIANTS}
    for variant, total in sums.items():
        assert torch.allclose(total, sums[APART]) == (variant is not NONE), variant.name
    assert (experts.choose_experts_plan, experts.PREFETCHED_STEPS) == before


def test_a_variant_changes_what_the_engine_takes():
    for variant in VARIANTS:
        with variant.chosen():
            assert variant.steps == experts.PREFETCHED_STEPS
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
