"""Block drafts (DFlash: Chen et al. 2026, arXiv:2602.06036; JetSpec; DSpark): one pass proposes every depth.

A block is the root and mask tokens, at the root's position and those after it.  In each layer, the rows of a block
attend to one another and to the context rows, one for each token before the root.  Context rows are K and V of one
vector for each token, norm(fc(features of the target)); each layer has its own K and V projections of it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from espalier.attention.staged import HeadProjections
from espalier.kernels.layers.rope import RopeAndNorm
from espalier.kernels.tree.edge_topk import LowRankEdges
from espalier.models.base import Attend, CausalLM
from espalier.models.block_config import BlockConfig
from espalier.models.draft import Edges
from espalier.models.draft_weights import draft_embedding, draft_head, draft_to_target
from espalier.models.layers.attention import Attention
from espalier.models.layers.decoder import DecoderLayer
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.rope import RopeTables
from espalier.models.loading import load_layer
from espalier.models.weights import Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MarkovEdges:
    """DSpark's Markov head, of low rank.  before: [V, rank]; after: [draft vocabulary, rank]."""

    before: Tensor
    after: Tensor

    def of_block(self, logits: Tensor, hidden: Tensor) -> LowRankEdges:
        return LowRankEdges(logits, self.before, self.after)


class BlockDraft:
    """A loaded block draft: a BlockModel (espalier/models/draft.py).

    context_kv: the K and V projections of each layer: rows of its stacked q, k and v, in the same memory.
    """

    modules = ()
    has_experts = False

    def __init__(
        self,
        config: BlockConfig,
        rope: RopeTables,
        embed: Embedding,
        fc: Linear,
        context_norm: RMSNorm,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        d2t: Tensor | None,
        edges: Edges | None,
    ) -> None:
        self.spec = config.spec
        self.layer_specs = config.spec.layers
        self.mask_token = config.mask_token
        self.first_proposing = config.first_proposing
        self.causal = config.causal
        self.windows_from_root = config.windows_from_root
        self.kv_heads = config.layer.kv_heads
        self.rope = rope
        self.embed = embed
        self.fc = fc
        self.context_norm = context_norm
        self.layers = layers
        q_rows = config.layer.heads * config.layer.head_size
        self.context_kv = [_attention(layer).qkv.rows_from(q_rows) for layer in layers]
        self.norm = norm
        self.head = head
        self.d2t = d2t
        self.edges = edges

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        shape = (tokens.shape[0], tokens.shape[1])
        rows = self.embed(tokens, positions, self.rope)
        rope_and_norm = RopeAndNorm(rows.cos, rows.sin)
        x, delta = rows.x, None
        for i, layer in enumerate(self.layers):
            x, normed = layer.attention_norm.after(delta, x)
            x, delta = layer(x, normed, rope_and_norm, attend, i, shape)
        return self.norm.after(delta, x)[1].unflatten(0, shape)

    def block_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def fuse(self, features: Tensor) -> Tensor:
        return self.context_norm(self.fc(features))

    def context(self, features: Tensor, positions: Tensor) -> Sequence[HeadProjections]:
        context = self.fuse(features)
        at, shape = positions.flatten(), (*positions.shape, 2 * self.kv_heads, -1)
        cos, sin = self.rope.cos[at], self.rope.sin[at]
        return [
            HeadProjections(project(context).view(shape), _rope_and_k_norm(layer, cos, sin))
            for layer, project in zip(self.layers, self.context_kv, strict=True)
        ]


def _attention(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.attention, Attention)
    return layer.attention


def _rope_and_k_norm(layer: DecoderLayer, cos: Tensor, sin: Tensor) -> RopeAndNorm:
    norm = _attention(layer).k_norm
    assert norm is not None
    return RopeAndNorm(cos, sin, norm.weight, norm.weight, norm.eps)


def make_block(
    weights: Weights,
    config: BlockConfig,
    target: CausalLM,
    position_rows: int,
    kind: Callable[..., BlockDraft] = BlockDraft,
) -> BlockDraft:
    """Build the draft from its weights.  Without an embedding or a head of its own, it shares the target's tensor.

    kind: the class.  Arguments that it takes beyond BlockDraft's are already bound.
    Raises EspalierError naming what does not fit, and a weight that is not used.
    """
    layer, eps = config.layer, config.layer.rms_norm_eps
    hidden = layer.hidden_size
    embed = draft_embedding(weights, layer, target)
    draft = kind(
        config=config,
        rope=RopeTables(layer.rope, position_rows, weights.dtype, weights.device),
        embed=embed,
        fc=weights.linear("", ("fc",), (hidden,), len(config.capture) * hidden, bias=False),
        context_norm=weights.norm("hidden_norm", hidden, eps),
        layers=[load_layer(weights, layer, f"layers.{i}.", i) for i in range(layer.num_layers)],
        norm=weights.norm("norm", hidden, eps),
        head=draft_head(weights, layer, config.draft_vocab, target, embed),
        d2t=draft_to_target(weights, layer.vocab_size, config.draft_vocab),
        edges=_edges(weights, config),
    )
    if "confidence_head.proj.weight" in weights:
        # A tree ranks its paths by probability, so no threshold on confidence is needed.
        log.info("draft %s: its confidence head is not used", weights.path)
        weights.ignore_under(("confidence_head.",))
    weights.ignore(["t2d"])
    weights.finish()
    return draft


def _edges(weights: Weights, config: BlockConfig) -> MarkovEdges | None:
    rank = config.edge_rank
    if not rank:
        return None
    before = weights.take("markov_head.markov_w1.weight", config.layer.vocab_size, rank)
    return MarkovEdges(before, weights.take_matrix("markov_head.markov_w2", config.draft_vocab, rank))
