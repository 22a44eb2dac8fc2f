"""The names and shapes of the tensors in layers of hybrid models.  layer_tensors.py has those of other families."""

from espalier.cache.layer_spec import NO_MIXING, RecurrentState
from espalier.models.config import ModelConfig
from espalier.models.layer_loading import layer_specs_of

Shapes = dict[str, tuple[int, ...]]

# The values of the vectors with these names.  They give decays of about 0.98 per token.
CONSTANT_VECTORS = {"A_log": 0.0, "dt_bias": -4.0, "D": 1.0}
# Norms of these names store their weights as they are, in families whose other norms store them less 1.
NORMS_WITHOUT_OFFSET = ("linear_attn.norm.weight",)


def delta_net_shapes(config: ModelConfig, layer: int) -> Shapes | None:
    """Returns the shapes of a DeltaNet of Qwen3.5 and later, under `linear_attn.`; None for an attention layer."""
    keeps, hidden = layer_specs_of(config)[layer].cache_spec, config.hidden_size
    if not isinstance(keeps, RecurrentState):
        return None
    inner = keeps.heads * keeps.v_size
    shapes: Shapes = {
        "in_proj_qkv.weight": (keeps.channels, hidden),
        "in_proj_z.weight": (inner, hidden),
        "in_proj_b.weight": (keeps.heads, hidden),
        "in_proj_a.weight": (keeps.heads, hidden),
        "conv1d.weight": (keeps.channels, 1, keeps.taps),
        "A_log": (keeps.heads,),
        "dt_bias": (keeps.heads,),
        "norm.weight": (keeps.v_size,),
        "out_proj.weight": (hidden, inner),
    }
    return {f"linear_attn.{name}": size for name, size in shapes.items()}


def gated_attention_shapes(config: ModelConfig) -> Shapes:
    hidden, size = config.hidden_size, config.head_size
    rows = {"q": 2 * config.heads * size, "k": config.kv_heads * size, "v": config.kv_heads * size}
    shapes: Shapes = {f"self_attn.{name}_proj.weight": (count, hidden) for name, count in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, config.heads * size)
    return {**shapes, **{f"self_attn.{name}_norm.weight": (size,) for name in "qk"}}


def nemotron_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Returns the shapes of a layer of Nemotron-H.  A layer is one block, under `mixer.`."""
    spec, hidden = layer_specs_of(config)[layer], config.hidden_size
    keeps, experts, shapes = spec.cache_spec, config.experts, Shapes()
    if experts is not None and layer in experts.layers:
        count, size, shared = experts.routing.num_experts, experts.intermediate_size, experts.shared_size
        shapes = {"gate.weight": (count, hidden), "gate.e_score_correction_bias": (count,)}
        sizes = [(f"experts.{expert}", size) for expert in range(count)] + [("shared_experts", shared)]
        for name, inner in sizes:
            shapes |= {f"{name}.up_proj.weight": (inner, hidden), f"{name}.down_proj.weight": (hidden, inner)}
    elif isinstance(keeps, RecurrentState) and keeps != NO_MIXING:
        inner = keeps.heads * keeps.v_size
        shapes = {
            "in_proj.weight": (inner + keeps.channels + keeps.heads, hidden),
            "conv1d.weight": (keeps.channels, 1, keeps.taps),
            "conv1d.bias": (keeps.channels,),
            **dict.fromkeys(CONSTANT_VECTORS, (keeps.heads,)),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        }
    elif keeps == NO_MIXING:
        inner = config.intermediate_size
        shapes = {"up_proj.weight": (inner, hidden), "down_proj.weight": (hidden, inner)}
    else:
        queries, channels = spec.heads * keeps.k_size, keeps.kv_heads * keeps.k_size
        rows = {"q_proj": queries, "k_proj": channels, "v_proj": channels}
        shapes = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
        shapes["o_proj.weight"] = (hidden, queries)
    return {"norm.weight": (hidden,), **{f"mixer.{name}": size for name, size in shapes.items()}}
