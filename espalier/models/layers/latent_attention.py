"""The attention block of layers that store a latent row for each token (MLA).  Queries multiply the latents directly.

The key of a head is k_up · latent, so q · key = (k_upᵀ · q) · latent.  Each query is multiplied by k_upᵀ once, and keys
are never computed.  In the same way, a head's output is v_up · (the weighted sum of latents).  So all heads read the
same row of the cache (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2).
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import InputRows, InputScales
from espalier.kernels.layers.scaled_product import max_kernel_rows
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.ops.norm import can_round_norm
from espalier.kernels.ops.rope import LatentFormat, Rotation, head_product
from espalier.kernels.ops.selection import IndexerInputs, IndexerNorm
from espalier.kernels.runtime.launch import chip
from espalier.models.layers.attention import AttentionBlock
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import router_logits
from espalier.models.layers.norm import AnyNorm, BlockOutput, RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.sharded import UnsummedOutput

# The eps of the norm of index keys, a constant in the publishers' code.
INDEX_NORM_EPS = 1e-6


class IndexerLayerInput(NamedTuple):
    """The input of a layer with an indexer.
    normed_rows: [N, hidden].  projection_rows: the same rows in the form that the layer's projections take."""

    normed_rows: Tensor
    projection_rows: InputRows


def norm_for_indexer(
    down: Linear, indexer: "Indexer", norm: AnyNorm, delta: BlockOutput, x: Tensor
) -> tuple[Tensor, IndexerLayerInput]:
    """Returns (x + delta, the norm of that sum in the form that `down` and the indexer take)."""
    rounding = common_input_scales(down.rounding, indexer.k.rounding) if x.is_cuda else None
    if rounding is not None and (
        len(x) > max_kernel_rows(rounding, chip(x)) or not can_round_norm(x.shape[1], rounding)
    ):
        rounding = None
    total, normed, rounded = norm.add_norm_and_round(delta, x, rounding)
    return total, IndexerLayerInput(normed, rounded)


def common_input_scales(first: InputScales | None, second: InputScales | None) -> InputScales | None:
    """Returns how a norm quantises the input of two products, which need `first` and `second`; None if these differ."""
    if first is None or second is None:
        return None
    are_equal = first.static_scale is second.static_scale is None and first.group_size == second.group_size
    return first if are_equal else None


@dataclass(frozen=True)
class Indexer:
    """Computes the index queries and index keys, whose products choose the rows to attend to
    (kernels/ops/selection.py).
    q: maps the queries' latent to [heads · size].  k: maps the hidden state to [size].  norm: the norm of index keys.
    score_weights: [heads, hidden].  interleaved: whether the two values of a rotated pair are adjacent."""

    q: Linear
    k: Linear
    norm: IndexerNorm
    score_weights: Tensor
    interleaved: bool

    def __call__(self, rows: IndexerLayerInput, q_latent: Tensor, rotation: Rotation) -> IndexerInputs:
        """Returns the index queries and keys of new rows.  q_latent: [N, q_rank]."""
        partial_sums = router_logits(rows.normed_rows, self.score_weights)
        # The paper's constant factor of scores is left out, because it does not change which rows are chosen.
        weights = add_partial_sums(partial_sums, partial_sums.dtype)
        q = self.q(q_latent).unflatten(1, (len(self.score_weights), self.k.shape[0]))
        return IndexerInputs(q, self.k(rows.projection_rows), weights, self.norm, rotation, self.interleaved)


# The eps of the norms of the queries' latent and of the latent row, a constant in the publishers' code.  All other
# norms have config.json's rms_norm_eps.
LATENT_NORM_EPS = 1e-6


@dataclass(eq=False, slots=True)
class LatentAttention(AttentionBlock):
    """The latent attention block.
    down: maps the hidden state to the queries' latent [q_rank] and to the latent row [kv_rank + rope], in one product.
    q_norm, q: map the queries' latent to [heads · (nope + rope)]; None if `down` returns the queries.
    latent_format: the format of the latent row.  k_up: [heads, nope, kv_rank].  v_up: [heads, v_size, kv_rank].
    cache_row_size: kv_rank + rope.
    indexer: chooses the rows that queries attend to; None for all rows, or for an earlier layer's choice."""

    down: Linear
    q_norm: RMSNorm | None
    q: Linear | None
    latent_format: LatentFormat
    k_up: Tensor
    v_up: Tensor
    out: Linear
    cache_row_size: int
    rope: RopeTables
    indexer: Indexer | None = None

    def norm_input(
        self, norm: AnyNorm, delta: BlockOutput, residual: Tensor
    ) -> tuple[Tensor, InputRows | IndexerLayerInput]:
        """Returns (residual + delta, the norm of that sum, also for the indexer).  delta: the output of a block."""
        if self.indexer is None:
            return self.down.norm_input(norm, delta, residual)
        return norm_for_indexer(self.down, self.indexer, norm, delta, residual)

    def write_kv(self, layer: int, rows: InputRows | IndexerLayerInput, p: Pass) -> Tensor:
        """Writes the latents of rows to the cache of layer number `layer`.  Returns the queries."""
        down = self.down(rows.projection_rows if isinstance(rows, IndexerLayerInput) else rows)
        q, latent = down[:, : -self.cache_row_size], down[:, -self.cache_row_size :].unsqueeze(1)
        q_latent = q if self.q_norm is None else self.q_norm(q)
        q = q_latent if self.q is None else self.q(q_latent)
        q, rotation = q.unflatten(1, (self.k_up.shape[0], -1)), p.rotation(self.rope)
        values = q, latent, rotation, self.latent_format, self.k_up
        if self.indexer is None or not isinstance(rows, IndexerLayerInput):
            return p.write(layer, *values)
        return p.write(layer, *values, index=self.indexer(rows, q_latent, rotation))

    def project(self, attention_output: Tensor) -> Tensor | UnsummedOutput:
        """Returns the block's output; see AttentionBlock.project.  attention_output: the weighted sums of latents."""
        latents = attention_output.flatten(0, 1)
        values = latents.new_empty(*latents.shape[:2], self.v_up.shape[1])
        head_product(latents, self.v_up.transpose(1, 2), values)
        return self.out.residual_delta(values.flatten(1))
