"""Kernels launched with PDL see their predecessors' writes, and do not overwrite what predecessors still read.

Each kernel has a predecessor that runs for tens of microseconds, much longer than the launch latency that PDL hides.
All kernels are in one CUDA graph, whose buffers still hold the values of the last replay: a missing wait reads those.
"""

from collections.abc import Callable

import pytest
import torch

import espalier.kernels.runtime.pdl as pdl
from espalier.attention import GroupedBackend, ModelCache, Nodes, Prefix
from espalier.attention.triton import TritonBackend
from espalier.cache.kv import PagedKV, StagedKV
from espalier.cache.layer_spec import LatentKV, LayerSpec
from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.layers.linear_plans import TritonPlan
from espalier.kernels.ops.attention import AttentionInputs, count_contiguous_blocks, tree_attention
from espalier.kernels.ops.experts import Routing
from espalier.kernels.ops.linear import linear_gated, linear_partial_sums
from espalier.kernels.ops.norm import add_rms_norm, rms_norm
from espalier.kernels.ops.rope import LatentFormat, Rotation, rotate_and_store
from espalier.kernels.ops.selection import KVSplitPolicy, kv_splits
from espalier.layout import RoundLayout
from espalier.models.layers.decoder import DecoderLayer
from espalier.models.layers.latent_attention import LatentAttention
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP, MixtureMLP
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.residual import Residual
from espalier.models.rope import RopeConfig, RopeTables
from espalier.models.weight_formats.dense import dense_weight

pytestmark = pytest.mark.gpu
HIDDEN, HEADS, KV_HEADS, SIZE = 4096, 32, 8, 128
SLOW = TritonPlan(block_out=64, block_in=64, splits=1, warps=4, stages=2)
SPLIT = TritonPlan(block_out=64, block_in=64, splits=3, warps=4, stages=2)


class Chain:
    """Two decoder layers without attention, for `rows` rows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        def random_normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.x = random_normal(rows, HIDDEN)
        self.norm = random_normal(HIDDEN)
        sizes = {"qkv": (HEADS + 2 * KV_HEADS) * SIZE, "out": HIDDEN, "gate_up": 8 * HIDDEN}
        self.weight = {name: random_normal(out, HIDDEN, scale=HIDDEN**-0.5) for name, out in sizes.items()}
        self.weight["down"] = random_normal(HIDDEN, 4 * HIDDEN, scale=HIDDEN**-0.5 / 2)
        self.rotation = Rotation(*torch.randn(2, rows, SIZE, device=device))
        self.rows = torch.arange(rows, device=device).flip(0)
        self.kv = torch.zeros(2, rows, KV_HEADS, SIZE, device=device, dtype=torch.bfloat16)

    def __call__(self) -> list[torch.Tensor]:
        x, normed = self.x, rms_norm.triton(self.x, self.norm, 1e-5)
        for out, down in ((SPLIT, SLOW), (SLOW, SPLIT)):
            # The first layer continues with the stored K and V rows, the second one with the rotated q.
            qkv = linear_partial_sums.triton(normed, self.weight["qkv"], None, out).unflatten(-1, (-1, SIZE))
            q = rotate_and_store.triton(qkv, self.rotation, None, self.rows, *self.kv)
            heads = self.kv.transpose(0, 1).flatten(1).repeat(1, 2) if out is SPLIT else q.flatten(1)
            attended = linear_partial_sums.triton(heads, self.weight["out"], None, out)
            x, normed = add_rms_norm.triton(attended, x, self.norm, 1e-5)
            gated = linear_gated(normed, self.weight["gate_up"], None, down)
            x, normed = add_rms_norm.triton(
                linear_partial_sums.triton(gated, self.weight["down"], None, down), x, self.norm, 1e-5
            )
        return [x, normed, self.kv.clone()]


class Attended:
    """QKV projection, RoPE, and attention over the rows just stored: the staged rows and the first committed ones.

    Pages of 64 rows have contiguous blocks of rows; for smaller pages a kernel counts the contiguous blocks.
    """

    page_size = 64

    def __init__(self, rows: int, device: torch.device) -> None:
        def random_normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.x = random_normal(rows, HIDDEN)
        self.weight = random_normal(2, (HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, scale=HIDDEN**-0.5)
        self.rotation = Rotation(*torch.randn(2, rows, SIZE, device=device))
        self.rows = torch.arange(rows, device=device)
        self.kv = torch.zeros(2, rows, KV_HEADS, SIZE, device=device, dtype=torch.bfloat16)
        length = torch.tensor([700], device=device)
        pages = -(-700 // self.page_size)
        table = 1 + torch.arange(pages, device=device, dtype=torch.int32)[None]
        pool = random_normal(2, (1 + pages) * self.page_size, KV_HEADS, SIZE)
        self.pages, self.prefix = (pool[0], pool[1]), Prefix(table, length)
        # With 64 rows, enough work for two groups of warps.
        self.splits = kv_splits.triton(length, 0, KVSplitPolicy(8, 8))
        positions = 700 + self.rows[None]
        mask = torch.ones(1, rows, rows, dtype=torch.bool, device=device).tril()
        self.nodes = Nodes(positions, positions, pack_bits(mask))

    def __call__(self) -> list[torch.Tensor]:
        q = self._stored(0, self.rows, *self.kv)
        contiguous = None
        if self.page_size % 64:
            contiguous = count_contiguous_blocks.triton(self.splits, self.prefix.page_table, self.page_size, 0, 64)
        self._stored(1, self.page_size + self.rows, *self.pages)
        rows = (self.pages, self.page_size, self.prefix, self.nodes, self.splits)
        inputs = AttentionInputs(q[None], *rows, SIZE**-0.5, (self.kv[0][None], self.kv[1][None]))
        return list(tree_attention.triton(inputs, num_contiguous_blocks=contiguous))

    def _stored(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        qkv = linear_partial_sums.triton(self.x, self.weight[layer], None, SLOW).unflatten(-1, (-1, SIZE))
        return rotate_and_store.triton(qkv, self.rotation, None, rows, k, v)


class AttendedOnSmallPages(Attended):
    page_size = 16


class Mixture:
    """Two mixture-of-experts blocks: norm and router, routing, expert product, the norm that adds the parts."""

    num_shared = 0

    def __init__(self, rows: int, device: torch.device) -> None:
        def random_normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.x, self.norm = random_normal(rows, 2048), RMSNorm(random_normal(2048), 1e-5)
        self.blocks = [
            MixtureMLP(
                Routing(64, 6, norm_topk_prob=True),
                random_normal(64, 2048, scale=2048**-0.5),
                None,
                random_normal(64, 2 * 1408, 2048, scale=2048**-0.5),
                random_normal(64, 2048, 1408, scale=1408**-0.5),
                self._shared(random_normal) if self.num_shared else None,
            )
            for _ in range(2)
        ]

    def _shared(self, random_normal: Callable[..., torch.Tensor]) -> GatedMLP:
        wide = self.num_shared * 1408
        gate_up, down = random_normal(2 * wide, 2048, scale=2048**-0.5), random_normal(2048, wide, scale=wide**-0.5)
        return GatedMLP(Linear(dense_weight(gate_up)), Linear(dense_weight(down)))

    def __call__(self) -> list[torch.Tensor]:
        x, delta = self.x, self.norm(self.x)
        for block in self.blocks:
            x, routed = block.norm_input(self.norm, delta, x)
            delta = block(routed)
        return list(self.norm.add_and_norm(delta, x))


class MixtureWithShared(Mixture):
    num_shared = 2


class LatentLayers(MixtureWithShared):
    """Two layers with latent attention: a lone request's splits leave most of its programs without work.

    Each replay has another length, and so other splits, which the first layer computes.
    """

    heads, nope, rope, rank, context = 16, 128, 64, 512, 1000

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(rows, device)

        def random_weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5

        rope = RopeTables(RopeConfig(self.rope, 10000.0), self.context + rows, torch.bfloat16, device)

        def attention() -> LatentAttention:
            down = Linear(dense_weight(random_weight(self.heads * (self.nope + self.rope) + row.size, 2048)))
            up = random_weight(self.heads, 2 * self.nope, self.rank).split(self.nope, 1)
            out = Linear(dense_weight(random_weight(2048, self.heads * self.nope)))
            form = LatentFormat(torch.ones_like(up[0][0, 0]), 1e-6, True)
            return LatentAttention(down, None, None, form, *up, out, row.size, rope)

        row = LatentKV(self.rank + self.rope, self.rank)
        self.specs = [LayerSpec(self.heads, row)] * 2
        self.layers = [DecoderLayer(i, self.norm, attention(), self.norm, block) for i, block in enumerate(self.blocks)]
        layout = RoundLayout(1, 0, 1, 1, 64, 32768, 0, max(rows, 16))
        pages = -(-self.context // 64)
        self.pages = PagedKV(layout, 1 + pages, self.specs, 2, torch.bfloat16, device)
        for stack in self.pages.target_stacks:
            stack.planes[0].normal_()
        self.staging = StagedKV(self.specs, range(2), max(rows, 16), torch.bfloat16, device)
        self.page_table = torch.zeros(1, layout.table_width, dtype=torch.int32, device=device)
        self.page_table[0, :pages] = 1 + torch.arange(pages, device=device)
        self.length = torch.tensor([self.context], device=device)
        self.nodes = Nodes.chain(self.context + torch.arange(rows, device=device)[None])
        backend = GroupedBackend([((0, 1), TritonBackend())])
        self.cache = ModelCache(self.specs, range(2), self.pages, self.staging, backend)

    def __call__(self) -> list[torch.Tensor]:
        tokens = torch.zeros_like(self.nodes.positions)
        p = self.cache.begin_pass(Prefix(self.page_table, self.length), self.nodes, tokens)
        s = Residual(self.x)
        for layer in self.layers:
            layer(s, p)
        return list(s.final_norm(self.norm, p.out_shape))


@pytest.mark.parametrize("layers", [Chain, Attended, AttendedOnSmallPages, Mixture, MixtureWithShared, LatentLayers])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_replay_equals_launches_without_pdl(layers, rows, kernel_device, monkeypatch):
    torch.manual_seed(rows)
    chain = layers(rows, kernel_device)
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    # Turns PDL off: from here each kernel starts after its predecessor has ended.
    monkeypatch.setattr(pdl, "HOPPER", (1000, 0))
    for replay in range(20):
        chain.x.normal_()
        if isinstance(chain, LatentLayers):
            chain.length.random_(1, chain.context + 1)
        graph.replay()
        torch.cuda.synchronize()
        for out, expected in zip(replayed, chain(), strict=True):
            assert torch.equal(out, expected), replay
