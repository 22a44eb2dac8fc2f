"""The config.json of a synthetic MTP head and of a block draft."""

from typing import Any

from espalier.bench.shapes import Shape

# Layers and target features of a block draft, and the rank of its edges: DFlash and DSpark for targets of 8B.
BLOCK_LAYERS, EDGE_RANK = 5, 256


def mtp_json(shape: Shape, num_layers: int, form: str) -> dict[str, Any]:
    """An MTP head in the form of speculators (`espalier/train/mtp_checkpoint.py` describes it)."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_layers}
    layer = {name: value for name, value in shape.draft_layer_fields.items() if not name.startswith("rope_")}
    # Gemma 4 has a RoPE for each type of layer.  The head's own may have any base.
    layer["rope_parameters"] = {"rope_theta": shape.config_fields.get("rope_theta", 10_000.0), "rope_type": "default"}
    return {
        "architectures": ["MTPDraftModel"],
        "mtp_form": form,
        "num_nextn_predict_layers": num_layers,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": list(shape.config_fields["architectures"]), "name_or_path": None},
        },
        "speculators_model_type": "mtp",
        "tie_word_embeddings": False,
        "transformer_layer_config": {**layer, "num_hidden_layers": num_layers},
    }


def block_json(shape: Shape, block_size: int) -> dict[str, Any]:
    """A block draft in DeepSpec's form of DSpark, which proposes block_size tokens a pass."""
    last = max(shape.target.num_layers - 3, 1)
    ids = {round(1 + i * (last - 1) / (BLOCK_LAYERS - 1)) for i in range(BLOCK_LAYERS)}
    return {
        **shape.draft_layer_fields,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": BLOCK_LAYERS,
        "block_size": block_size,
        "mask_token_id": shape.target.vocab_size - 1,
        "target_layer_ids": sorted(ids),
        "markov_rank": EDGE_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }
