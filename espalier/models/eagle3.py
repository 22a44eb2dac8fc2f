"""The EAGLE-3 draft head (arXiv:2503.01840), in the formats of SafeAILab and of vLLM's speculators.

It is one decoder layer over cat(norm(embedding of token q), norm(hidden state at q-1)).  The hidden state is the fused
feature of the target, or, inside a tree, the draft's own output.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.errors import EspalierError
from espalier.kernels.ops.drafts import DraftHidden
from espalier.models.base import CausalLM
from espalier.models.draft import DraftOutput
from espalier.models.draft_parts import draft_embedding, draft_head, draft_to_target
from espalier.models.eagle3_config import Eagle3Config, looks_like_eagle3
from espalier.models.layer_loading import load_attention, load_layer
from espalier.models.layers.decoder import DecoderLayer
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.weights import Weights

LEGACY_FC_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


@dataclass(eq=False)
class Eagle3Draft:
    """A loaded EAGLE-3 head: a DraftModel, and its only module (espalier/models/draft.py).

    layers: the first reads embedding and hidden state, which the embedding norms.
    """

    has_experts = False

    config: Eagle3Config
    rope: RopeTables
    embed: Embedding
    fuse: "Fuser"
    embed_norm: RMSNorm
    hidden_norm: RMSNorm
    layers: list[DecoderLayer]
    norm: RMSNorm
    head: Linear
    d2t: Tensor | None

    def __post_init__(self) -> None:
        self.spec = self.config.spec
        self.layer_specs = self.spec.layers

    @property
    def modules(self) -> tuple["Eagle3Draft"]:
        return (self,)

    def __call__(self, p: Pass, hidden: Tensor, parents: Tensor | None = None) -> DraftOutput:
        norms = (self.embed_norm.weight, self.embed_norm.eps, self.hidden_norm.weight, self.hidden_norm.eps)
        s = self.embed(p, self.rope, DraftHidden(hidden, parents, *norms, self.config.norm_before_residual))
        for layer in self.layers:
            layer(s, p)
        x, normed = s.end(self.norm, p.out_shape)
        return DraftOutput(normed if self.config.norm_output else x, normed)

    def output_of(self, hidden: Tensor) -> DraftOutput:
        return DraftOutput(hidden, hidden if self.config.norm_output else self.norm(hidden))

    def logits(self, out: DraftOutput) -> Tensor:
        return self.head(out.normed)


@dataclass(frozen=True)
class Fuser:
    """captured [..., n·H_target] -> feature [..., H]: one norm over all, one for each part, or none; then fc."""

    fc: Linear
    whole: RMSNorm | None
    parts: list[RMSNorm]

    def __call__(self, captured: Tensor) -> Tensor:
        if self.whole is not None:
            captured = self.whole(captured)
        if self.parts:
            chunks = captured.chunk(len(self.parts), dim=-1)
            captured = torch.cat([norm(chunk) for norm, chunk in zip(self.parts, chunks, strict=True)], dim=-1)
        return self.fc(captured)


def make_eagle3(weights: Weights, config: Eagle3Config, target: CausalLM, position_rows: int) -> Eagle3Draft:
    """Build the draft from its weights.  If they lack an embedding or a head, the target's tensor is used, not copied.

    Raises EspalierError naming what does not fit, and a weight that is not used.
    """
    draft = Eagle3Draft(**head_parts(weights, config, target, position_rows))
    weights.finish()
    return draft


def head_parts(weights: Weights, config: Eagle3Config, target: CausalLM, position_rows: int) -> dict[str, Any]:
    """The fields of an Eagle3Draft."""
    _refuse_other_heads(weights, config)
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in weights else "layers.0."
    spec, hidden, eps = config.spec, config.layer.hidden_size, config.layer.rms_norm_eps
    layer = replace(config.layer, qk_norm=f"{prefix}self_attn.q_norm.weight" in weights)
    embed = draft_embedding(weights, (layer.vocab_size, hidden), target)
    weights.ignore(["t2d"])
    rope = RopeTables(layer.rope, position_rows, weights.dtype, weights.device)
    first = DecoderLayer(
        index=0,
        attention_norm=None,
        attention=load_attention(weights, layer, f"{prefix}self_attn.", 2 * hidden, rope),
        mlp_norm=weights.norm(f"{prefix}post_attention_layernorm", hidden, eps),
        mlp=weights.mlp(f"{prefix}mlp.", layer.hidden_size, layer.intermediate_size, layer.mlp_bias),
    )
    rest = [load_layer(weights, layer, f"layers.{i}.", i, rope) for i in range(1, layer.num_layers)]
    return {
        "config": config,
        "rope": rope,
        "embed": embed,
        "fuse": _fuser(weights, config, target.config.num_layers),
        "embed_norm": weights.norm(f"{prefix}input_layernorm", hidden, eps),
        "hidden_norm": weights.norm(f"{prefix}hidden_norm", hidden, eps),
        "layers": [first, *rest],
        "norm": weights.norm("norm", hidden, eps),
        "head": draft_head(weights, config.layer, spec.vocab_size, target, embed),
        "d2t": draft_to_target(weights, config.layer.vocab_size, spec.vocab_size),
    }


def _refuse_other_heads(weights: Weights, config: Eagle3Config) -> None:
    """Raises EspalierError for an EAGLE-1/2 head that is declared as EAGLE-3."""
    if looks_like_eagle3(weights):
        return
    hidden = config.layer.hidden_size
    if weights.has_matrix_of("fc", hidden, 2 * hidden):
        raise EspalierError(
            f"{weights.path} is declared as EAGLE-3 but fc [{hidden}, {2 * hidden}] without hidden_norm is an "
            "EAGLE-1/2 head, not supported yet; use an EAGLE-3 head"
        )


def _fuser(weights: Weights, config: Eagle3Config, target_layers: int) -> Fuser:
    hidden, eps, count = config.layer.hidden_size, config.layer.rms_norm_eps, len(config.spec.capture)
    wide = count * config.target_hidden
    _refuse_wrong_count(weights, config, target_layers)
    fc = weights.linear("", ("fc",), (hidden,), wide, config.fc_bias)
    whole = weights.norm("input_norm", wide, eps) if config.norm_before_fc else None
    legacy = f"{LEGACY_FC_NORMS[0]}.weight" in weights
    names = LEGACY_FC_NORMS if legacy else [f"fc_norm.{i}" for i in range(count)]
    parts = [weights.norm(name, config.target_hidden, eps) for name in names] if config.fc_norm or legacy else []
    return Fuser(fc, whole, parts)


def _refuse_wrong_count(weights: Weights, config: Eagle3Config, target_layers: int) -> None:
    """Check the number of captured layers against the width of fc.  Raises EspalierError."""
    # The inputs of all layers and that of the final norm can be captured.
    counts = (len(config.spec.capture), *range(1, target_layers + 2))
    hidden, size = config.layer.hidden_size, config.target_hidden
    fused = next((count for count in counts if weights.has_matrix_of("fc", hidden, count * size)), None)
    if fused not in (None, len(config.spec.capture)):
        raise EspalierError(
            f"{weights.path}: fc fuses {fused} layers, {len(config.spec.capture)} are captured "
            f"{config.spec.capture}; correct eagle_aux_hidden_state_layer_ids"
        )
