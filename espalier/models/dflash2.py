"""DFlash 2 drafts: DFlash (block.py) with convolutions within the block, and a selector among candidate tokens.

The normed input and the output of each sublayer are convolved over the rows of the block
(kernels/layers/block_conv.py).  Context rows are not.  The selector scores the best tokens of each depth, given the
token before: logit(v) + sum over r of before[u, r] · project(hidden)[r] · after[v, r] for token v after u.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.ops.block_conv import block_conv, block_conv_norm
from espalier.kernels.tree.edges import LowRankEdges
from espalier.models.base import CausalLM
from espalier.models.block import BlockDraft, block_parts
from espalier.models.dflash2_config import DFlash2Config
from espalier.models.layers.attention import Attention
from espalier.models.layers.decoder import DecoderLayer, capped
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.norm import AnyNorm, Delta, RMSNorm
from espalier.models.layers.stream import Stream
from espalier.models.weight_formats.sharded import over_ranks
from espalier.models.weights import Weights


@dataclass(frozen=True)
class BlockConv:
    """The two convolutions of a sublayer.

    base: [2, T, H], coefficients by channel; weight: [2 · T · G, H], which makes the coefficients of each row.  The
    input's come first.
    """

    base: Tensor
    weight: Tensor

    def of_input(self, normed: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """normed [N, H], in blocks of `width` rows -> (the sublayer's input, the coefficients of its output)."""
        return block_conv(normed, self.weight, self.base[0], width)


class Convolved(NamedTuple):
    """A sublayer's output (as RMSNorm.after takes it), which is convolved and added to the stream in one launch."""

    output: Tensor
    coefficients: Tensor
    base: Tensor
    width: int

    def after(self, norm: AnyNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """As espalier/models/layers/stream.py:Pending."""
        assert isinstance(norm, RMSNorm)
        return block_conv_norm(self.output, self.coefficients, self.base, x, norm.weight, norm.eps, self.width)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions around its sublayers."""

    __slots__ = ("attention_conv", "mlp_conv")

    attention: Attention
    mlp: GatedMLP

    def __init__(self, layer: DecoderLayer, attention_conv: BlockConv, mlp_conv: BlockConv) -> None:
        super().__init__(layer.index, layer.attention_norm, layer.attention, layer.mlp_norm, layer.mlp)
        self.attention_conv = attention_conv
        self.mlp_conv = mlp_conv

    def __call__(self, s: Stream, p: Pass) -> None:
        width = p.tokens.shape[1]
        given, coefficients = self.attention_conv.of_input(s.normed(self.attention_norm, Unrounded), width)
        q = self.attention.write(self.index, given, p)
        output = self.attention.project(p.attend(self.index, q, self.attention.sink))
        s.add(Convolved(over_ranks(output), coefficients, self.attention_conv.base[1], width))
        given, coefficients = self.mlp_conv.of_input(s.normed(self.mlp_norm, Unrounded), width)
        s.add(Convolved(over_ranks(self.mlp(given)), coefficients, self.mlp_conv.base[1], width))


class Unrounded:
    """A Reader of the norm as a tensor."""

    @staticmethod
    def read(norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Tensor]:
        return norm.after(delta, x)


@dataclass(frozen=True)
class Selector:
    """The candidate selector.  before, after: the codebooks [V, rank]; topk: tokens of a depth that it scores."""

    before: Tensor
    after: Tensor
    project: Linear
    topk: int

    def of_block(self, logits: Tensor, hidden: Tensor) -> LowRankEdges:
        # Any choice among ties: it decides only what is drafted.
        ids = logits.topk(self.topk, -1).indices.sort(-1).values
        after = self.after[ids] * self.project(hidden)[:, :, None]
        return LowRankEdges(logits.gather(2, ids), self.before, after, ids)


@dataclass(eq=False)
class DFlash2Draft(BlockDraft):
    """A loaded DFlash 2 draft: a BlockModel (espalier/models/draft.py)."""

    config: DFlash2Config

    def block_logits(self, hidden: Tensor) -> Tensor:
        return capped(super().block_logits(hidden), self.config.logit_cap, self.config.logit_scale)


def make_dflash2(weights: Weights, config: DFlash2Config, target: CausalLM, position_rows: int) -> DFlash2Draft:
    """As make_block."""
    hidden, vocab, rank = config.layer.hidden_size, config.layer.vocab_size, config.selector_rank
    rows = 2 * config.conv_taps * config.conv_groups

    def conv(prefix: str) -> BlockConv:
        base = weights.take(f"{prefix}.base_kernel", 2, config.conv_taps, hidden)
        return BlockConv(base, weights.take_matrix(f"{prefix}.kernel_projection", rows, hidden))

    before, after = (
        weights.take(f"candidate_selector.{name}_codebook", vocab, rank) for name in ("predecessor", "successor")
    )
    project = weights.linear("", ("candidate_selector.hidden_projection",), (rank,), hidden, bias=False)
    selector = Selector(before, after, project, config.selector_topk)
    parts = block_parts(weights, config, target, position_rows)
    parts["embed"] = Embedding(parts["embed"].weight, config.embedding_scale)
    parts["layers"] = [
        ConvolvedLayer(layer, *(conv(f"layers.{layer.index}.{name}_conv") for name in ("attention", "mlp")))
        for layer in parts["layers"]
    ]
    draft = DFlash2Draft(**parts, edges=selector)
    weights.finish()
    return draft
