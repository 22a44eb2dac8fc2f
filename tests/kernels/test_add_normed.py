"""Norms behind blocks in one launch: the bits of the launches one after another, in the kernel and in every family."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.ops.norm import NormWeight, add_normed, rms_norm
from espalier.models import load_target
from espalier.models.layers import norm as layer
from tests.harness import directories
from tests.kernels.treeing import poisoned
from tests.oracles.dense import DensePass
from tests.pairwise import pairwise

FACTORS = {
    # Of each output, the number of its parts; 0: in the dtype of the residual.
    "parts": [(0,), (1,), (3,), (0, 0), (2, 0), (0, 4), (3, 2)],
    "shape": [(1, 8), (3, 33), (5, 128)],
    "norms": [0, 1, 2, 3],
    "behind": [True, False],
    "scale": [1.0, 0.7],
    "dtype": [torch.float16, torch.float64, torch.float32],
    "wide": [True, False],
}
CASES = pairwise(FACTORS, lambda _: False)
LARGE = {"parts": (4, 3), "norms": 3, "behind": True, "scale": 0.7, "dtype": torch.bfloat16, "wide": False}


def drawn(parts, shape, norms, behind, scale, dtype, wide, device):
    """wide: rows are parts of longer ones, and weights have more digits than rows."""
    generator = torch.Generator().manual_seed(sum(parts) + shape[1])
    exact = torch.promote_types(dtype, torch.float32)

    def normal(*size, of=dtype):
        made = torch.randn(*size[:-1], size[-1] + 16 * wide, generator=generator, dtype=torch.float64)
        return made.to(device, of)[..., : size[-1]]

    def weight(place):
        return NormWeight(1 + normal(shape[1], of=exact if wide else dtype) / 5, 10.0 ** -(place + 2))

    outputs = tuple((normal(*((n,) if n else ()), *shape, of=exact if n else dtype), weight(n)) for n in parts)
    return outputs, weight(1) if behind else None, normal(*shape), scale, tuple(weight(n) for n in range(norms))


def one_after_another(outputs, norm, residual, scale, norms):
    added = None
    for output, own in outputs:
        normed = rms_norm.triton(add_partial_sums.reference(output, residual.dtype), *own)
        added = normed if added is None else added + normed
    added = added if norm is None else rms_norm.triton(added, *norm)
    total = residual * scale + added
    return total, tuple(rms_norm.triton(total, *each) for each in norms)


def assert_equal(given, expected, is_exact):
    torch.testing.assert_close(given[0], expected[0], **({"rtol": 0, "atol": 0} if is_exact else {}))
    assert len(given[1]) == len(expected[1])
    for one, other in zip(given[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if is_exact else {}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_it_equals_the_launches_one_after_another(case, kernel_device):
    inputs = drawn(**case, device=kernel_device)
    before = inputs[2].clone()
    with poisoned():
        given = add_normed.triton(*inputs)
    assert torch.equal(inputs[2], before)
    # A GPU multiplies and adds at once where nothing is rounded between.
    is_exact = kernel_device.type == "cpu" or case["dtype"] == torch.float16
    assert_equal(given, one_after_another(*inputs), is_exact)
    assert_equal(given, add_normed.reference(*inputs), is_exact=False)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 2816), (8, 2816), (64, 5376), (300, 3840)], ids=str)
def test_it_equals_them_in_the_sizes_of_models(shape, kernel_device):
    inputs = drawn(**LARGE, shape=shape, device=kernel_device)
    assert_equal(add_normed.triton(*inputs), one_after_another(*inputs), is_exact=True)


def test_no_rows_and_what_is_refused(kernel_device):
    case = {**CASES[0], "parts": (2,), "shape": (3, 8), "norms": 1, "behind": True, "dtype": torch.float16}
    outputs, norm, residual, scale, norms = drawn(**case, device=kernel_device)
    total, [normed] = add_normed.triton(((outputs[0][0][:, :0], outputs[0][1]),), norm, residual[:0], scale, norms)
    assert total.shape == normed.shape == (0, 8)
    [(parts, own)] = outputs
    for wrong in (
        (outputs * 3, norm, residual, scale, norms),
        (outputs, norm, residual, scale, norms * 4),
        (((parts[:, 1:], own),), norm, residual, scale, norms),
        (((parts.half(), own),), norm, residual, scale, norms),
        (((parts[0], own),), norm, residual, scale, norms),
        (outputs, norm, residual, scale, (NormWeight(own.weight[1:], 1e-5),)),
    ):
        with pytest.raises(EspalierError, match="add_normed"):
            add_normed.triton(*wrong)


FAMILIES = ("gemma2", "gemma3", "gemma4", "gemma4_moe", "gemma4_e", "olmo2", "exaone4", "muse_glimmer")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_norms_behind_blocks_launches_it_once_a_block(family, monkeypatch):
    """Its own inputs of layers are a third block of Gemma 4's E sizes.  The bits do not change."""
    model = load_target(directories(family)[0], dtype=torch.float32, device="cpu", position_rows=64)
    tokens = torch.randint(0, 16, (2, 7), generator=torch.Generator().manual_seed(1))
    expected = model(DensePass(tokens, model.layer_specs)).hidden
    launches = []
    monkeypatch.setattr(layer, "has_fused_add_norm", lambda x: True)
    monkeypatch.setattr(layer, "add_normed", lambda *given: launches.append(given) or add_normed(*given))
    assert torch.equal(model(DensePass(tokens, model.layer_specs)).hidden, expected)
    assert len(launches) == len(model.layer_specs) * (3 if family == "gemma4_e" else 2)
