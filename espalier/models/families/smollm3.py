"""SmolLM3: Llama, with layers without RoPE; these may have a sliding window."""

from dataclasses import replace

from espalier.errors import EspalierError, shown
from espalier.models.config import Raw, Windows, windows_if_used
from espalier.models.config_values import require_counts
from espalier.models.families.llama import FAMILY as LLAMA


def _with_rope(full: Raw) -> list[bool]:
    """Whether each layer has RoPE.  In `no_rope_layers` 1 means that it has."""
    layers, given = full["num_hidden_layers"], full["no_rope_layers"]
    if given is None:
        require_counts(full, ("no_rope_layer_interval",))
        return [layer % full["no_rope_layer_interval"] != 0 for layer in range(1, layers + 1)]
    if not isinstance(given, list) or len(given) < layers or not set(map(repr, given)) <= {"0", "1"}:
        raise EspalierError(
            f"no_rope_layers = {shown(given)}; 0 or 1 is needed for each of {layers} layers; correct it"
        )
    return [bool(value) for value in given[:layers]]


def _windows(full: Raw) -> Windows:
    with_rope = _with_rope(full)
    return windows_if_used(full, lambda layer: not with_rope[layer])


FAMILY = replace(
    LLAMA,
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "rope_theta": 2e6,
    },
    windows=_windows,
    ropes=lambda full: [{} if rope else None for rope in _with_rope(full)],
    honours=("no_rope_layers",),
    in_drafts=False,
)
