"""Block drafts (DFlash: Chen et al. 2026, arXiv:2602.06036; JetSpec; DSpark): one pass proposes every depth.

A block is the root and mask tokens, at the root's position and those after it.  In each layer, the rows of a block
attend to one another and to the context rows, one for each token before the root.  Context rows are K and V of one
vector for each token, norm(fc(features of the target)); each layer has its own K and V projections of it.
"""

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.tree.edges import FactorProjection, LowRankEdges, split_columns
from espalier.models.base import CausalLM
from espalier.models.block_config import EDGE_PARTS, BlockConfig
from espalier.models.draft import Edges
from espalier.models.draft_parts import draft_embedding, draft_head, draft_to_target
from espalier.models.layer_loading import load_layer
from espalier.models.layers.attention import Attention
from espalier.models.layers.decoder import DecoderLayer
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.dense import dense_weight
from espalier.models.weights import Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MarkovEdges:
    """DSpark's Markov head, of low rank.  before: [V, rank]; after: [draft vocabulary, rank].

    of_hidden, of_rows: the columns of its gate or of its recurrent projection that read the block's hidden states, and
    the others (FactorProjection.weight); None for a head that reads the token before alone.
    """

    before: Tensor
    after: Tensor
    of_hidden: Linear | None = None
    of_rows: Tensor | None = None
    is_recurrent: bool = False

    def of_block(self, logits: Tensor, hidden: Tensor) -> LowRankEdges:
        projection = None
        if self.of_hidden is not None and self.of_rows is not None:
            projection = FactorProjection(self.of_hidden(hidden), self.of_rows, self.is_recurrent)
        return LowRankEdges(logits, self.before, self.after, projection=projection)


@dataclass(eq=False)
class BlockDraft:
    """A loaded block draft: a BlockModel (espalier/models/draft.py).

    context_kv: the K and V projections of each layer: rows of its stacked q, k and v, in the same memory.
    """

    modules = ()
    has_experts = False

    config: BlockConfig
    rope: RopeTables
    embed: Embedding
    fc: Linear
    context_norm: RMSNorm
    layers: list[DecoderLayer]
    norm: RMSNorm
    head: Linear
    d2t: Tensor | None
    edges: Edges | None

    def __post_init__(self) -> None:
        self.spec = self.config.spec
        self.layer_specs = self.spec.layers
        q_rows = self.config.layer.heads * self.config.layer.head_size
        self.context_kv = [_attention(layer).qkv.rows_from(q_rows) for layer in self.layers]

    def __call__(self, p: Pass) -> Tensor:
        s = self.embed(p, self.rope)
        for layer in self.layers:
            layer(s, p)
        return s.end(self.norm, p.out_shape)[1]

    def block_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def fuse(self, features: Tensor) -> Tensor:
        return self.context_norm(self.fc(features))

    def write_context(self, features: Tensor, p: Pass) -> None:
        context, sizes = self.fuse(features).flatten(0, 1), self.config.layer
        for layer, project in zip(self.layers, self.context_kv, strict=True):
            heads = project(context).view(-1, 2 * sizes.kv_heads, sizes.head_size)
            p.write(layer.index, heads, p.rotation(self.rope), _attention(layer).norms)


def _attention(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.attention, Attention)
    return layer.attention


def make_block(weights: Weights, config: BlockConfig, target: CausalLM, position_rows: int) -> BlockDraft:
    """Build the draft from its weights.  Without an embedding or a head of its own, it shares the target's tensor.

    Raises EspalierError naming what does not fit, and a weight that is not used.
    """
    draft = BlockDraft(**block_parts(weights, config, target, position_rows), edges=_edges(weights, config))
    weights.finish()
    return draft


def block_parts(weights: Weights, config: BlockConfig, target: CausalLM, position_rows: int) -> dict[str, Any]:
    """The fields of a BlockDraft without edges."""
    layer, spec, eps = config.layer, config.spec, config.layer.rms_norm_eps
    hidden = layer.hidden_size
    embed = draft_embedding(weights, (layer.vocab_size, hidden), target)
    if weights.has_matrix("confidence_head.proj"):
        # A tree ranks its paths by probability, so no threshold on confidence is needed.
        log.info("draft %s: its confidence head is not used", weights.path)
        weights.ignore_under(("confidence_head.",))
    weights.ignore(["t2d"])
    rope = RopeTables(layer.rope, position_rows, weights.dtype, weights.device)
    return {
        "config": config,
        "rope": rope,
        "embed": embed,
        "fc": weights.linear("", ("fc",), (hidden,), len(spec.capture) * hidden, bias=False),
        "context_norm": weights.norm("hidden_norm", hidden, eps),
        "layers": [load_layer(weights, layer, f"layers.{i}.", i, rope) for i in range(layer.num_layers)],
        "norm": weights.norm("norm", hidden, eps),
        "head": draft_head(weights, layer, spec.vocab_size, target, embed),
        "d2t": draft_to_target(weights, layer.vocab_size, spec.vocab_size),
    }


def _edges(weights: Weights, config: BlockConfig) -> MarkovEdges | None:
    rank, hidden, kind = config.edge_rank, config.layer.hidden_size, config.edge_kind
    if not rank:
        return None
    before = weights.take("markov_head.markov_w1.weight", config.layer.vocab_size, rank)
    after = weights.take_matrix("markov_head.markov_w2", config.spec.vocab_size, rank)
    if kind == "vanilla":
        return MarkovEdges(before, after)
    is_recurrent = kind == "rnn"
    name = "markov_head.joint_proj" if is_recurrent else "markov_head.gate_proj"
    parts, read = EDGE_PARTS[kind]
    whole = weights.take_matrix(name, parts * rank, hidden + read * rank)
    bias = weights.take(f"{name}.bias", parts * rank)
    of_hidden, of_rows = split_columns(whole, hidden, is_recurrent)
    return MarkovEdges(
        *(before, after, Linear(dense_weight(of_hidden.contiguous()), bias), of_rows.contiguous(), is_recurrent)
    )
