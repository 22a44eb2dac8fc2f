"""`python -m lab linears` without a GPU: what it multiplies, and how bytes become a share of the bandwidth."""

import pytest
import torch

from espalier.bench.linears import ExpertSizes, ModelShape
from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.kernels.layers.experts_plan import ExpertsShape
from espalier.kernels.layers.quantised import dequantise
from espalier.kernels.ops.experts import grouped_experts
from espalier.models.quantisers import QUANTISERS
from lab.bench import linear_times
from lab.bench.cases import time_cases, timing_table

SHAPE = ModelShape(128, (LayerSpec(2, KVHeads(1, 64, 64)),) * 2, intermediate_size=256, vocab_size=64)
CPU = torch.device("cpu")


class Timer:
    """Runs each body once, and says that it took 1 ms."""

    def median_ms(self, bodies, turns, seconds):
        for body in bodies:
            body()
        return [1.0 for _ in bodies]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(linear_times, "CHAIN_BYTES", 0)
    monkeypatch.setattr(linear_times, "DTYPE", torch.float32)
    monkeypatch.setattr(linear_times, "_plan_note", lambda weight, x: "a plan")


@pytest.mark.parametrize("weights", ["dense", "fp8", "int4", "mxfp4"])
def test_shares_are_of_the_stored_bytes(small, weights):
    times = [*time_cases(linear_times.layer_cases(SHAPE, weights, [1, 3], CPU), Timer(), 1e9)]
    assert [(time.case.names[0], time.case.names[-1]) for time in times] == [
        (name, rows) for name in ("qkv", "o", "gate_up", "down") for rows in ("1", "3")
    ]
    # 512 x 128; 1 ms at 1e9 bytes/s are 1e6 bytes.  Scales: float32 for 1 row, 128 and 32 columns (padded to 8).
    scales = {"dense": 0, "fp8": 512 * 4, "int4": 512 * 4, "mxfp4": 512 * 8}
    codes = 512 * 128 * {"dense": 4, "fp8": 1, "int4": 0.5, "mxfp4": 0.5}[weights]
    assert times[4].case.names[1] == "512 x 128" and times[4].bandwidth_share == (codes + scales[weights]) / 1e6
    assert len(timing_table(linear_times.COLUMN_NAMES, times)) == 9
    assert (
        times[4].tflops == pytest.approx(2 * 512 * 128 / 1e-3 / 1e12) and times[5].case.flops == 3 * times[4].case.flops
    )


def test_only_experts_that_are_touched_count(small, monkeypatch):
    monkeypatch.setattr(grouped_experts, "triton", grouped_experts.reference)
    sizes = ExpertsShape(num_experts=4, top_k=1, hidden_size=64, inner_size=32)
    shape = ModelShape(64, (LayerSpec(1, KVHeads(1, 64, 64)),), 64, 64, experts=ExpertSizes(1, sizes))
    [time] = time_cases(linear_times.expert_cases(shape, "mxfp4", [1], CPU), Timer(), 1e9)
    # gate_up [64, 64] and down [64, 32] of one expert, with 8 exponents a row.
    read = 64 * (32 + 8) + 64 * (16 + 8)
    assert time.case.note == "1.0 of them touched"
    assert time.bandwidth_share == pytest.approx(read / (time.us * 1e-6) / 1e9)
    for sizes, weights in ((SHAPE, "mxfp4"), (shape, "int4")):
        assert not [*linear_times.expert_cases(sizes, weights, [1], CPU)]


@pytest.mark.parametrize("weights", ["int4", "mxfp4"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_product_is_the_layers(weights, gated):
    weight = QUANTISERS[weights].quantise_matrix(torch.randn(32, 128))
    x = torch.randn(3, 128)
    expected = x @ dequantise(weight, torch.float32).T
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(linear_times.engine_product(x, weight, gated), expected)
