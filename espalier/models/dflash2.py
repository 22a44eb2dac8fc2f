"""DFlash 2 drafts: DFlash (block.py) with convolutions within the block, and a selector among candidate tokens.

The normed input and the output of each sublayer are convolved over the rows of the block
(kernels/layers/block_conv.py).  Context rows are not.  The selector scores the best tokens of each depth, given the
token before: logit(v) + sum over r of before[u, r] · project(hidden)[r] · after[v, r] for token v after u.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.kernels.ops.block_conv import block_conv, block_conv_norm
from espalier.kernels.ops.rope import RopeAndNorm
from espalier.kernels.tree.edges import LowRankEdges
from espalier.models.base import Attend, CausalLM
from espalier.models.block import BlockDraft, block_parts
from espalier.models.dflash2_config import DFlash2Config
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.weights import Weights


@dataclass(frozen=True)
class BlockConv:
    """The two convolutions of a sublayer.

    base: [2, T, H], coefficients by channel; weight: [2 · T · G, H], which makes those of each row.  The input's come
    first.
    """

    base: Tensor
    weight: Tensor

    def of_input(self, normed: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """normed [N, H], in blocks of `width` rows -> (the sublayer's input, the coefficients of its output)."""
        return block_conv(normed, self.weight, self.base[0], width)

    def of_output(
        self, output: Tensor, coefficients: Tensor, x: Tensor, norm: RMSNorm, width: int
    ) -> tuple[Tensor, Tensor]:
        """(x + the convolved output, norm of that sum).  output: as RMSNorm.after takes it."""
        return block_conv_norm(output, coefficients, self.base[1], x, norm.weight, norm.eps, width)


class LayerConvs(NamedTuple):
    attention: BlockConv
    mlp: BlockConv


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
    """A loaded DFlash 2 draft: a BlockModel (espalier/models/draft.py).  convs: of each layer."""

    config: DFlash2Config
    convs: Sequence[LayerConvs]

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        shape = (tokens.shape[0], tokens.shape[1])
        rows, width = self.embed(tokens, positions, self.rope), tokens.shape[1]
        rope_and_norm = RopeAndNorm(rows.cos, rows.sin)
        x = rows.x if self.config.embedding_scale == 1 else rows.x * self.config.embedding_scale
        normed = self.layers[0].attention_norm(x)
        next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        for i, (layer, conv, next_norm) in enumerate(zip(self.layers, self.convs, next_norms, strict=True)):
            given, coefficients = conv.attention.of_input(normed, width)
            output = layer.attention(given, rope_and_norm, attend, i, shape)
            x, normed = conv.attention.of_output(output, coefficients, x, layer.mlp_norm, width)
            given, coefficients = conv.mlp.of_input(normed, width)
            x, normed = conv.mlp.of_output(layer.mlp(given), coefficients, x, next_norm, width)
        return normed.unflatten(0, shape)

    def block_logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().block_logits(hidden), self.config.logit_cap
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        return logits if cap is None else torch.tanh(logits / cap) * cap


def make_dflash2(weights: Weights, config: DFlash2Config, target: CausalLM, position_rows: int) -> DFlash2Draft:
    """As make_block."""
    hidden, vocab, rank = config.layer.hidden_size, config.layer.vocab_size, config.selector_rank
    rows = 2 * config.conv_taps * config.conv_groups

    def conv(prefix: str) -> BlockConv:
        base = weights.take(f"{prefix}.base_kernel", 2, config.conv_taps, hidden)
        return BlockConv(base, weights.take_matrix(f"{prefix}.kernel_projection", rows, hidden))

    prefixes = [f"layers.{i}." for i in range(config.layer.num_layers)]
    convs = [LayerConvs(conv(f"{prefix}attention_conv"), conv(f"{prefix}mlp_conv")) for prefix in prefixes]
    before, after = (
        weights.take(f"candidate_selector.{name}_codebook", vocab, rank) for name in ("predecessor", "successor")
    )
    project = weights.linear("", ("candidate_selector.hidden_projection",), (rank,), hidden, bias=False)
    selector = Selector(before, after, project, config.selector_topk)
    draft = DFlash2Draft(**block_parts(weights, config, target, position_rows), edges=selector, convs=convs)
    weights.finish()
    return draft
