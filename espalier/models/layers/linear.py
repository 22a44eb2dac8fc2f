"""Linear layers with a weight of any storage format, and the token embedding."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import InputRows, InputScales, RoundedRows
from espalier.kernels.ops.activation import SILU, Activation
from espalier.kernels.ops.drafts import DraftHidden, EmbeddingTables, embed_rows
from espalier.models.layers.norm import AnyNorm, BlockOutput, RMSNorm
from espalier.models.layers.residual import Residual
from espalier.models.rope import RopeTables
from espalier.models.weight_formats import Weight
from espalier.models.weight_formats.sharded import UnsummedOutput
from espalier.shards import SINGLE_RANK, Shards


@dataclass(eq=False, slots=True)
class Linear:
    """y = x · weightᵀ + bias.  The weight may stack several projections of one input."""

    weight: Weight
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    def rows_from(self, first_row: int) -> "Linear":
        """Returns a layer for the outputs from `first_row` on, whose weight is in the same memory."""
        return Linear(self.weight.rows_from(first_row), None if self.bias is None else self.bias[first_row:])

    @property
    def rounding(self) -> InputScales | None:
        """How a norm must quantise this layer's input (RoundedRows); None if the layer takes only plain tensors."""
        return self.weight.rounding

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, InputRows]:
        """Returns (residual + delta, the norm of that sum in the form the weight takes).  delta: a block's output."""
        rounding = self.weight.rounding
        return norm.add_and_norm(delta, residual) if rounding is None else norm.add_and_round(delta, residual, rounding)

    def __call__(self, x: InputRows) -> Tensor:
        """Multiplies x [..., in].  Returns a new tensor [..., out]."""
        if isinstance(x, RoundedRows) or x.ndim == 2:
            return self.weight.apply(x, self.bias)
        return self.weight.apply(x.reshape(-1, x.shape[-1]), self.bias).view(*x.shape[:-1], self.shape[0])

    def residual_delta(self, x: InputRows) -> Tensor | UnsummedOutput:
        """Returns the product of x [rows, in] in a form that the next norm can add to the residual: partial_sums(x), or
        an UnsummedOutput if ranks divide the columns of the weight."""
        product: Tensor | UnsummedOutput = self.weight.residual_delta(x, self.bias)
        return product

    def partial_sums(self, x: InputRows) -> Tensor:
        """Multiplies x [rows, in].  Returns [rows, out], or float32 partial sums [parts, rows, out], which
        RMSNorm.add_and_norm adds."""
        return self.weight.partial_sums(x, self.bias)

    def write_partial_sums(self, x: InputRows, out: Tensor) -> None:
        """Multiplies x [rows, in].  Writes partial sums to out [num_partial_sums, rows, out], float32 or float64."""
        self.weight.write_partial_sums(x, self.bias, out)

    def activated_product(
        self, x: InputRows, activation: Activation = SILU, rounding: InputScales | None = None
    ) -> InputRows:
        """Multiplies x [rows, in] and applies the activation.  Returns [rows, inner].
        The weight stacks gate and up, [2·inner, in].  If the activation has no gate, the weight is up, [inner, in].
        rounding: how the next layer quantises its input.  The result is RoundedRows if the kernel can quantise it."""
        rows: InputRows = self.weight.activated_product(x, self.bias, activation, rounding)
        return rows


@dataclass(eq=False, slots=True)
class Embedding:
    """The token embedding.  weight: [vocab, hidden].
    scale: the factor of every embedding.  In a target, the factor is rounded to the model's dtype.
    row_norm: the norm of every embedding, applied before the factor; None if there is no norm.
    vocab_size, shards: set if there are several ranks.  `weight` then holds the rank's part of the vocabulary
    (Shards.vocab_part)."""

    weight: Tensor
    scale: float = 1.0
    row_norm: RMSNorm | None = None
    vocab_size: int | None = None
    shards: Shards = SINGLE_RANK

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [vocab, hidden] of the whole embedding, over all ranks."""
        return len(self.weight) if self.vocab_size is None else self.vocab_size, self.weight.shape[1]

    def __call__(self, p: Pass, rope: RopeTables, draft_hidden: DraftHidden | None = None) -> Residual:
        """Returns the residual stream of the pass's B · Q rows.  rope: the RoPE that most layers use.
        draft_hidden: for a draft, the hidden states that are concatenated to the embeddings.  The residual stream then
        starts with these hidden states, and `first_input` is cat(normed embedding, normed hidden state)."""
        tokens, table = (p.tokens, self.weight) if self.shards.count == 1 else self._gather_over_ranks(p.tokens)
        tables = EmbeddingTables(table, rope.cos, rope.sin)
        x, residual, rotation, live = embed_rows(tokens, p.positions, tables, draft_hidden)
        p.store_rotation(rope, rotation)
        if draft_hidden is not None:
            return Residual(residual, live, x)
        x = x if self.row_norm is None else self.row_norm(x)
        return Residual(x if self.scale == 1 else x * self.scale, live)

    def _gather_over_ranks(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers the embeddings of tokens from all ranks.  Returns (the row of each token in a table, the table)."""
        part = self.shards.vocab_part(self.shape[0])
        places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        rows = self.weight.new_zeros(tokens.numel(), self.shape[1])
        if len(part):
            local = tokens.flatten() - part.begin
            is_local = (local >= 0) & (local < len(part))
            rows = F.embedding(local.clamp(0, len(part) - 1), self.weight).masked_fill_(~is_local[:, None], 0)
        return places.masked_fill_(tokens < 0, -1), self.shards.all_reduce(rows)

    def gather_all_rows(self) -> None:
        """Gathers all rows of the embedding on every rank.
        A draft needs all rows, because each of its passes reads embeddings without communication between ranks."""
        vocab_size, _ = self.shape
        if self.shards.count > 1:
            padding = self.shards.max_tokens_per_rank(vocab_size) - len(self.weight)
            self.weight = self.shards.all_gather(F.pad(self.weight, (0, 0, 0, padding))).flatten(0, 1)[:vocab_size]
            self.shards = SINGLE_RANK
