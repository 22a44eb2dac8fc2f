"""Reads and writes MTP heads in the `mtp` format of vLLM's speculators, for any number of layers.

model.safetensors has, for each layer i from 0, `mtp_layers.{i}.` and

- `token_layernorm.weight`, `hidden_layernorm.weight`, `final_layernorm.weight` [H], `input_proj.weight` [H, 2H]: the
embedding's half comes first;
- a Llama decoder layer: `input_layernorm.weight`, `post_attention_layernorm.weight` [H],
`self_attn.{q,k,v,o}_proj.weight`, `mlp.{gate,up,down}_proj.weight`.

The file contains no other tensors: the embedding and the lm_head are the target's.  mtp_head.py has the computation.

config.json has `speculators_model_type` "mtp", `speculators_config` with the target's path, `num_nextn_predict_layers`
N, and `transformer_layer_config`, a Llama config with the sizes of one layer.  The field `mtp_form`, "chain" or
"target" (mtp_head.py), is Espalier's extension, because heads of speculators have one layer.  The default is "chain".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from espalier.train.checkpoint import read_shape, write_checkpoint
from espalier.train.configs import read_config
from espalier.train.llama import LlamaShape
from espalier.train.mtp_head import MtpHead

# The release of speculators that defines this format.
SPECULATORS_VERSION = "0.9.0"


def mtp_config(
    layer_config: dict[str, Any], num_layers: int, hidden_form: str, target: Path, architectures: list[str]
) -> dict[str, Any]:
    """Returns the config.json of a head.  layer_config: the sizes of a layer, named as in a Llama config.  hidden_form:
    "chain" or "target" (mtp_head.py).  architectures: the target's."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_layers, "verifier_accept_k": 1}
    return {
        "architectures": ["MTPDraftModel"],
        "dtype": "bfloat16",
        "mtp_form": hidden_form,
        "num_nextn_predict_layers": num_layers,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"architectures": architectures, "name_or_path": str(target)},
        },
        "speculators_model_type": "mtp",
        "speculators_version": SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": {"model_type": "llama", **layer_config},
    }


def save_mtp(head: MtpHead, target: Path, out: Path) -> None:
    """Writes a head's files to `out`.  target: the directory of the head's target."""
    sizes = dict(vars(head.shape))
    theta = sizes.pop("rope_theta")
    layer = {
        **sizes,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    architectures = read_config(target)["architectures"]
    write_checkpoint(mtp_config(layer, head.shape.num_hidden_layers, head.form, target, architectures), head, out)


def load_mtp(directory: Path) -> MtpHead:
    """Loads a head that `save_mtp` wrote."""
    config = read_config(directory)
    head = MtpHead(read_shape(config["transformer_layer_config"], LlamaShape), config.get("mtp_form", "chain"))
    head.load_state_dict(load_file(directory / "model.safetensors"))
    return head
