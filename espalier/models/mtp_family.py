"""How a family stores its multi-token prediction layers (MTP), and what they read and hand on.

Where engines disagree, a trainer's code decides.  In Megatron-LM, MTP layers read the target's last hidden state after
its final norm, and hand on their output after their own last norm (`transformer_block.py` and
`multi_token_prediction.py`).  vLLM hands on GLM's output before that norm, and gives MiMo-7B's layers the hidden state
before the target's.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MTPFamily:
    """Names of the weights of layer i, counted from 0, and options.

    prefix: of the decoder layer's weights and of the names below; "{}" is i, or the number of the target's layers + i.
    shared: of the names below, where all layers share these weights; None: that of the layer.
    after_target: whether "{}" counts from the number of the target's layers.
    embed_norm, hidden_norm, project, norm: norms of the two inputs, the matrix that joins them, and the last norm.
    embed, head: of the layer's own embedding and head, whole names; such weights may be missing.
    hidden_first: whether the first columns of `project` take the hidden state; by default the embedding.
    layer_type: the layers' entry in `layer_types`; None: that of the target's last layer.
    """

    prefix: str
    embed_norm: str
    hidden_norm: str
    project: str
    norm: str
    embed: str
    head: str
    shared: str | None = None
    layer_type: str | None = None
    after_target: bool = False
    hidden_first: bool = False

    def index(self, layer: int, num_layers: int) -> int:
        """The number of MTP layer `layer` in names.  num_layers: layers of the target."""
        return num_layers + layer if self.after_target else layer

    def prefix_of(self, layer: int, num_layers: int) -> str:
        return self.prefix.format(self.index(layer, num_layers))

    def owned(self, layer: int, num_layers: int) -> str:
        """The prefix of the names of all of an MTP layer's weights, but for its embedding and head."""
        return self.prefix_of(layer, num_layers) if self.shared is None else self.shared


# DeepSeek-V3 and GLM.
NEXTN = MTPFamily(
    prefix="model.layers.{}.",
    embed_norm="enorm",
    hidden_norm="hnorm",
    project="eh_proj",
    norm="shared_head.norm",
    embed="model.layers.{}.embed_tokens",
    head="model.layers.{}.shared_head.head",
    after_target=True,
)
# vLLM's speculators 0.9.0, `mtp`, in which espalier.train writes its heads.
SPECULATORS = MTPFamily(
    prefix="mtp_layers.{}.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    project="input_proj",
    norm="final_layernorm",
    embed="embed_tokens",
    head="lm_head",
)
