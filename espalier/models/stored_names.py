"""Declarations of the names under which a checkpoint stores weights: a layer's matrices, experts and norms.

A multimodal checkpoint has other name prefixes than a text model (StoredNames).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from espalier.kernels.ops.activation import SILU, Activation
from espalier.kernels.ops.experts import Routing
from espalier.models.weight_formats import FormatLookup, WeightFormat
from espalier.shards import RankPart, SizeOrPart, as_rank_part, whole_part


@dataclass(frozen=True)
class MLPNames:
    """Names of the matrices of an MLP.
    gate_up: the names of gate and up; one name if both are stored as one matrix (gate first) or if there is no gate."""

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


GATE_UP_DOWN, UP_DOWN = MLPNames(), MLPNames(("up_proj",))


@dataclass(frozen=True)
class LayerNames:
    """Names of a layer's weights.
    qkv: the names of q, k and v; one name if they are stored as one matrix, in this order.  out: the output projection.
    head_norms: the names of the norms of q heads and of k heads.
    mlp_prefix: the prefix of the MLP's weights.  mlp: the names of the MLP's weights."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    mlp_prefix: str = "mlp."
    mlp: MLPNames = GATE_UP_DOWN


DEFAULT_LAYER_NAMES = LayerNames()


@dataclass(frozen=True)
class LayerNorms:
    """Names of a layer's RMS norms of the inputs (before_) and outputs (after_) of its blocks.  None: no such norm."""

    before_attention: str | None = "input_layernorm"
    before_mlp: str | None = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None


DEFAULT_LAYER_NORMS = LayerNorms()
# The norms of Gemma's layers.
NORMS_AROUND_BLOCKS = LayerNorms(
    before_mlp="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers of a model.

    layers: the indices of layers with experts; other layers have a dense MLP.  intermediate_size: an expert's size.
    shared_size: the intermediate size of the shared expert; 0 if there is no shared expert.
    shared_name: the name of the shared expert.  shared_has_bias: whether the shared expert has biases.
    shared_gate_name: the name of the weight [1, H] that gates the shared expert; None if there is no gate.
    router_name: the name of the router's weight, and of its bias if routing.logit_bias is set.
    scale_name: the name of a tensor [E experts] by which routing weights are multiplied; None for no such factor.
    storage: "apart": each matrix of each expert is a tensor.  "joined": one tensor [E, out, in] for gate and up (gate
    first), and one for down.  "stacked": two tensors [E, in, out]; columns of gate and up alternate in the first.
    has_biases: whether gate, up and down have biases.  prefix: the prefix of the block's weights in a layer.
    names: the names of an expert's matrices, if stored apart.  joined_names: the names of the two joined tensors.
    shared_prefix: the prefix of shared_name in a layer; by default `prefix`.  shared_names: the names of the shared
    expert's matrices.
    correction_name: the name of the router's bias if routing.correction_bias is set.  activation: the experts'.
    """

    layers: frozenset[int]
    routing: Routing
    intermediate_size: int
    shared_size: int = 0
    shared_name: str = ""
    shared_gate_name: str | None = None
    shared_has_bias: bool = False
    router_name: str = "gate"
    scale_name: str | None = None
    storage: Literal["apart", "stacked", "joined"] = "apart"
    has_biases: bool = False
    activation: Activation = SILU
    prefix: str = "mlp."
    names: MLPNames = GATE_UP_DOWN
    joined_names: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    shared_prefix: str | None = None
    shared_names: MLPNames = GATE_UP_DOWN
    correction_name: str = "gate.e_score_correction_bias"


def stored_matrices(names: Sequence[str], rows: Sequence[SizeOrPart]) -> tuple[Sequence[str], Sequence[SizeOrPart]]:
    """Returns the stored matrices to read for a stack of matrices: their names, and the rows to read from each.
    rows: the rows of each matrix in the stack.  names: a name for each matrix, or one name if the checkpoint stores the
    stack.  If ranks divide a stored stack, the result has its name once for each matrix, with rows counted in the
    stack."""
    if len(names) == len(rows):
        return names, rows
    parts = [as_rank_part(size) for size in rows]
    total, begins = sum(part.size for part in parts), accumulate((part.size for part in parts), initial=0)
    if all(part.is_whole for part in parts):
        return names, (whole_part(total),)
    shifted = [
        RankPart(begin + part.begin, begin + part.end, total) for begin, part in zip(begins, parts, strict=False)
    ]
    return tuple(names) * len(parts), shifted


@dataclass(frozen=True)
class StoredNames:
    """The mapping from stored names to own names.  An *own name* is a weight's name in a text model's checkpoint.
    prefixes: pairs (prefix of a stored name, prefix of the own name).
    has_other_parts: whether names with other prefixes belong to parts such as vision or audio, which are not loaded."""

    prefixes: tuple[tuple[str, str], ...] = ()
    has_other_parts: bool = False

    def own_name(self, stored_name: str) -> str | None:
        """Returns the own name of a stored name; None for a weight of another part."""
        for prefix, own in self.prefixes:
            if stored_name.startswith(prefix):
                return own + stored_name.removeprefix(prefix)
        return None if self.has_other_parts else stored_name

    def formats_by_own_name(self, formats: FormatLookup, names: Iterable[str]) -> FormatLookup:
        """Converts `formats`, a function of stored names, to a function of own names.  names: all stored names."""
        prefixes = {own: prefix for prefix, own in self.prefixes if any(name.startswith(prefix) for name in names)}
        if not prefixes:
            return formats

        def format_of(matrix_name: str) -> WeightFormat:
            own = next((own for own in prefixes if f"{matrix_name}.".startswith(own)), "")
            return formats((prefixes.get(own, "") + f"{matrix_name}.".removeprefix(own)).removesuffix("."))

        return format_of


SAME_NAMES = StoredNames()
# Published checkpoints have the first two prefixes.  Checkpoints saved by transformers 5 have the next two.  The names
# of MTP layers begin with `mtp.`.
TEXT_PART_NAMES = StoredNames(
    (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        ("lm_head.", "lm_head."),
        ("mtp.", "mtp."),
    ),
    has_other_parts=True,
)


@dataclass(frozen=True)
class MTPFamily:
    """The weight names and options of a family's MTP layers.  i is the number of an MTP layer, counted from 0.

    prefix: the name prefix of the decoder layer's weights; "{}" stands for i, or for i plus the number of target
    layers.
    outer_prefix: the name prefix of embed_norm, hidden_norm, project and norm, if all MTP layers share these weights;
    by default `prefix`.
    numbered_after_target: whether "{}" includes the number of target layers.
    embed_norm, hidden_norm: the names of the norms of the two inputs.  project: the name of the projection of both
    inputs.  norm: the name of the last norm.
    embed, head: the full names of the layer's own embedding and head; these weights may be missing.
    hidden_before_embedding: whether the first columns of `project` read the hidden state; by default they read the
    embedding.
    layer_type: the layers' entry in `layer_types`; by default the entry of the target's last layer.
    """

    prefix: str
    embed_norm: str
    hidden_norm: str
    project: str
    norm: str
    embed: str
    head: str
    outer_prefix: str | None = None
    layer_type: str | None = None
    numbered_after_target: bool = False
    hidden_before_embedding: bool = False

    def stored_index(self, layer: int, num_target_layers: int) -> int:
        """Returns the number that MTP layer `layer` (counted from 0) has in weight names."""
        return num_target_layers + layer if self.numbered_after_target else layer

    def layer_prefix(self, layer: int, num_target_layers: int) -> str:
        """Returns the name prefix of the decoder layer's weights in an MTP layer."""
        return self.prefix.format(self.stored_index(layer, num_target_layers))

    def weights_prefix(self, layer: int, num_target_layers: int) -> str:
        """Returns the name prefix of all weights of an MTP layer, except its embedding and head."""
        return self.layer_prefix(layer, num_target_layers) if self.outer_prefix is None else self.outer_prefix


# The weight names of the MTP layers of DeepSeek-V3 and GLM.
NEXTN_LAYERS = MTPFamily(
    prefix="model.layers.{}.",
    embed_norm="enorm",
    hidden_norm="hnorm",
    project="eh_proj",
    norm="shared_head.norm",
    embed="model.layers.{}.embed_tokens",
    head="model.layers.{}.shared_head.head",
    numbered_after_target=True,
)
# The weight names of the format `mtp` of vLLM's speculators 0.9.0, in which espalier.train saves MTP heads.
SPECULATORS = MTPFamily(
    prefix="mtp_layers.{}.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    project="input_proj",
    norm="final_layernorm",
    embed="embed_tokens",
    head="lm_head",
)
