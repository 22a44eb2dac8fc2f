"""Multi-token prediction layers as a draft: module k predicts the token k + 1 places ahead.

A module: x = project(cat(norm(embedding of token q), norm(hidden state that feeds it))), then one decoder layer, then a
norm, whose output goes to the head and to the rows that follow (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

Every row reads its token's embedding, as in the paper.  vLLM sets the embedding to zero at RoPE position 0, "as not
needed by MTP": in the unshifted order that is token 0, which has no row here.  There the position is the one of the row
of token 1, whose embedding every trainer reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import of_rank
from espalier.kernels.ops.embedding import DraftHidden
from espalier.models.base import CausalLM, Layer
from espalier.models.draft import DraftOutput
from espalier.models.draft_weights import draft_embedding, is_borrowed
from espalier.models.layer_loading import load_layer
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.stream import Stream
from espalier.models.mtp_config import MTPConfig
from espalier.models.mtp_family import SPECULATORS, MTPFamily
from espalier.models.rope import RopeTables
from espalier.models.weight_formats import dense_weight
from espalier.models.weights import Weights
from espalier.shards import WHOLE, Shards, on_every_rank


@dataclass(frozen=True)
class MTPModule:
    """One MTP layer: a DraftModule (espalier/models/draft.py).

    hands_on_normed: whether rows that follow read the output after `norm`, or before it; has_experts: of `layer`.
    """

    embed: Embedding
    rope: RopeTables
    embed_norm: RMSNorm
    hidden_norm: RMSNorm
    project: Linear
    layer: Layer
    norm: RMSNorm
    head: Linear
    hands_on_normed: bool
    has_experts: bool

    def __call__(self, p: Pass, hidden: Tensor, parents: Tensor | None = None) -> DraftOutput:
        norms = (self.embed_norm.weight, self.embed_norm.eps, self.hidden_norm.weight, self.hidden_norm.eps)
        joined = self.embed(p, self.rope, DraftHidden(hidden, parents, *norms, normed_residual=False))
        assert joined.given is not None
        s = Stream(self.project(joined.given), joined.live)
        self.layer(s, p)
        return handed_on(self, *s.end(self.norm, p.out_shape))

    def output_of(self, hidden: Tensor) -> DraftOutput:
        return DraftOutput(hidden, hidden if self.hands_on_normed else self.norm(hidden))

    def logits(self, out: DraftOutput) -> Tensor:
        return self.head(out.normed)


def handed_on(module: MTPModule, x: Tensor, normed: Tensor) -> DraftOutput:
    """The output of a module, from its last residual stream before and after the norm, [B, Q, H] each."""
    return DraftOutput(normed if module.hands_on_normed else x, normed)


class MTPDraft:
    """Loaded MTP layers: a DraftModel (espalier/models/draft.py).  Its vocabulary is the target's."""

    d2t: Tensor | None = None

    def __init__(self, config: MTPConfig, modules: tuple[MTPModule, ...], shards: Shards = WHOLE) -> None:
        self.spec = config.spec
        self.layer_specs = of_rank(config.spec.layers, shards)
        self.modules = modules
        self.has_experts = any(module.has_experts for module in modules)

    @property
    def fuse(self) -> Callable[[Tensor], Tensor]:
        return lambda features: features


def make_mtp(weights: Weights, config: MTPConfig, target: CausalLM, position_rows: int) -> MTPDraft:
    """Build the draft from the weights of its layers.  Other weights of the directory are the target's.

    Raises EspalierError naming a weight that is missing, misshapen or, under the names of a layer, not used.
    """
    rope = RopeTables(config.layer.rope, position_rows, weights.dtype, weights.device)
    # By name: modules may have one embedding and one head together, which are loaded once.
    embed_of = cache(partial(draft_embedding, weights, target.embed.shape, target))
    head_of = cache(partial(_head, weights, target))
    modules = tuple(
        _load_module(weights, config, rope, embed_of, head_of, module) for module in range(config.spec.modules)
    )
    if config.family is not SPECULATORS:
        weights.ignore_outside(tuple(config.owned(module) for module in range(config.spec.modules)))
    weights.finish()
    return MTPDraft(config, modules, weights.shards)


def _load_module(
    weights: Weights,
    config: MTPConfig,
    rope: RopeTables,
    embed_of: Callable[[str], Embedding],
    head_of: Callable[[str], Linear],
    module: int,
) -> MTPModule:
    """embed_of, head_of: by name.  module: from 0."""
    layer, family, prefix = config.layer, config.family, config.owned(module)
    hidden, index, own = layer.hidden_size, config.num_layers + module, family.index(module, config.num_layers)
    eps_and_offset = layer.rms_norm_eps, layer.family.norm_offset
    load = layer.family.load_layer or load_layer
    return MTPModule(
        embed=embed_of(family.embed.format(own)),
        rope=rope,
        embed_norm=weights.norm(f"{prefix}{family.embed_norm}", hidden, *eps_and_offset),
        hidden_norm=weights.norm(f"{prefix}{family.hidden_norm}", hidden, *eps_and_offset),
        project=_projection(weights, f"{prefix}{family.project}", family, hidden),
        layer=load(weights, layer, config.prefix(module), index, rope, 0),
        norm=weights.norm(f"{prefix}{family.norm}", hidden, *eps_and_offset),
        head=head_of(family.head.format(own)),
        hands_on_normed=family.hands_on_normed,
        has_experts=layer.experts is not None and index in layer.experts.layers,
    )


def _projection(weights: Weights, name: str, family: MTPFamily, hidden: int) -> Linear:
    """The matrix [H, 2·H] that joins embedding and hidden state, with the embedding's columns first."""
    if not family.hidden_first:
        return weights.linear("", (name,), (on_every_rank(hidden),), 2 * hidden, bias=False)
    matrix = weights.take_matrix(name, on_every_rank(hidden), 2 * hidden)
    return Linear(dense_weight(matrix.roll(hidden, 1).contiguous()))


def _head(weights: Weights, target: CausalLM, name: str) -> Linear:
    """The head of this name, as it is stored, or the target's."""
    if is_borrowed(weights, name, "lm_head", target.head.shape, target.head.shape):
        return target.head
    rows, columns = target.head.shape
    return weights.linear("", (name,), (on_every_rank(rows),), columns, bias=False)
