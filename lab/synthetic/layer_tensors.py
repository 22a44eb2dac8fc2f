"""The names and shapes of a layer's tensors in a checkpoint, as the publisher of its family stores them."""

from espalier.models.config import LINEAR_LAYER, Experts, ModelConfig
from espalier.models.families.nemotron_h import FAMILY as NEMOTRON_H
from espalier.models.latent_config import LatentConfig
from espalier.models.layer_loading import layer_specs_of
from lab.synthetic.state_tensors import Shapes, delta_net_shapes, gated_attention_shapes, nemotron_shapes

NEMOTRON_ARCHITECTURE = NEMOTRON_H.architecture


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Shapes by name, without the prefix of the layer."""
    experts, hidden = config.experts, config.hidden_size
    if config.architecture == NEMOTRON_ARCHITECTURE:
        return nemotron_shapes(config, layer)
    if LINEAR_LAYER in (config.raw.get("layer_types") or ()):
        return _hybrid_shapes(config, layer)
    if config.family.layer_specs is not None:
        return _gemma4_shapes(config, layer)
    attention = _attention_shapes(config) if config.latent is None else _latent_shapes(config, config.latent, layer)
    if experts is None or layer not in experts.layers:
        mlp = _join_matrices(
            _gated_mlp_shapes("mlp.", config.intermediate_size, hidden), "mlp.", config.family.names.mlp.gate_up
        )
    elif experts.storage == "stacked":
        mlp = _stacked_expert_shapes(experts, hidden)
    else:
        mlp = _expert_shapes(experts, hidden)
    return {**attention, **mlp, "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def embedding_name(config: ModelConfig) -> str:
    return f"model.embed{'dings' if config.architecture == NEMOTRON_ARCHITECTURE else '_tokens'}.weight"


def _hybrid_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Returns the shapes of a layer of Qwen3.5 and later."""
    hidden, has_experts = config.hidden_size, config.experts is not None and layer in config.experts.layers
    mixer = delta_net_shapes(config, layer) or gated_attention_shapes(config)
    mlp = _gated_mlp_shapes("mlp.", config.intermediate_size, hidden)
    if has_experts and config.experts is not None:
        mlp = _expert_shapes(config.experts, hidden)
    return {**mixer, **mlp, "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _gemma4_shapes(c: ModelConfig, layer: int) -> Shapes:
    """Returns the shapes of a layer of Gemma 4, for sizes without per-layer inputs and without shared K/V rows."""
    spec, hidden = layer_specs_of(c)[layer], c.hidden_size
    size, names = spec.cache_spec.k_size, "qk" if spec.v_is_k else "qkv"
    rows = {"q": c.heads * size, "k": spec.cache_spec.kv_heads * size, "v": spec.cache_spec.kv_heads * size}
    norms = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
    shapes: Shapes = {f"self_attn.{name}_proj.weight": (rows[name], hidden) for name in names}
    shapes |= {"self_attn.o_proj.weight": (hidden, rows["q"]), "layer_scalar": (1,)}
    shapes |= {f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
    if c.experts is not None:
        count = c.experts.routing.num_experts
        shapes |= {
            "router.proj.weight": (count, hidden),
            "router.scale": (hidden,),
            "router.per_expert_scale": (count,),
            **_routed_expert_shapes("experts.", c.experts, hidden),
        }
        norms |= {"post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"}
    of_norms = {f"{name}.weight": (hidden,) for name in sorted(norms)}
    return {**shapes, **_gated_mlp_shapes("mlp.", c.intermediate_size, hidden), **of_norms}


def _attention_shapes(c: ModelConfig) -> Shapes:
    queries, channels, hidden = c.heads * c.head_size, c.kv_heads * c.head_size, c.hidden_size
    rows = {"q": queries, "k": channels, "v": channels}
    apart: Shapes = {f"self_attn.{name}_proj.weight": (count, hidden) for name, count in rows.items()}
    shapes = _join_matrices(apart, "self_attn.", c.family.names.qkv)
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if c.attention_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (count,) for name, count in rows.items()}
    if c.out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if c.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (c.head_size,) for name in "qk"}
    if c.family.has_sinks:
        shapes["self_attn.sinks"] = (c.heads,)
    return shapes


def _latent_shapes(c: ModelConfig, latent: LatentConfig, layer: int) -> Shapes:
    queries, hidden = c.heads * latent.head_size, c.hidden_size
    if latent.q_rank is None:
        shapes: Shapes = {"q_proj.weight": (queries, hidden)}
    else:
        shapes = {
            "q_a_proj.weight": (latent.q_rank, hidden),
            "q_a_layernorm.weight": (latent.q_rank,),
            "q_b_proj.weight": (queries, latent.q_rank),
        }
    index = latent.indexer
    if index is not None and index.has_own_indexer(layer) and latent.q_rank is not None:
        shapes |= {
            "indexer.wq_b.weight": (index.heads * index.size, latent.q_rank),
            "indexer.wk.weight": (index.size, hidden),
            "indexer.k_norm.weight": (index.size,),
            "indexer.k_norm.bias": (index.size,),
            "indexer.weights_proj.weight": (index.heads, hidden),
        }
    shapes |= {
        "kv_a_proj_with_mqa.weight": (latent.cache_row_size, hidden),
        "kv_a_layernorm.weight": (latent.kv_rank,),
        "kv_b_proj.weight": (c.heads * (latent.nope_size + latent.v_size), latent.kv_rank),
        "o_proj.weight": (hidden, c.heads * latent.v_size),
    }
    return {f"self_attn.{name}": size for name, size in shapes.items()}


def _gated_mlp_shapes(prefix: str, inner: int, hidden: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _join_matrices(shapes: Shapes, prefix: str, names: tuple[str, ...]) -> Shapes:
    """Join the layer's first matrices to one if `names`, the names of its first products, has only one name."""
    if len(names) > 1:
        return shapes
    parts = {"qkv_proj": 3, "gate_up_proj": 2}[names[0]]
    sizes = list(shapes.items())
    rows = sum(size[0] for _, size in sizes[:parts])
    return {f"{prefix}{names[0]}.weight": (rows, sizes[0][1][1]), **dict(sizes[parts:])}


def _expert_shapes(experts: Experts, hidden: int) -> Shapes:
    count = experts.routing.num_experts
    shapes: Shapes = {f"mlp.{experts.router_name}.weight": (count, hidden)}
    if experts.routing.correction_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (count,)
    shapes |= _routed_expert_shapes("mlp.experts.", experts, hidden)
    if experts.shared_size:
        shapes |= _gated_mlp_shapes(f"mlp.{experts.shared_name}.", experts.shared_size, hidden)
    if experts.shared_gate_name is not None:
        shapes[f"mlp.{experts.shared_gate_name}.weight"] = (1, hidden)
    return shapes


def _routed_expert_shapes(prefix: str, experts: Experts, hidden: int) -> Shapes:
    """Returns the matrices of routed experts, in one tensor or one for each expert."""
    count, size = experts.routing.num_experts, experts.intermediate_size
    if experts.storage == "joined":
        return {f"{prefix}gate_up_proj": (count, 2 * size, hidden), f"{prefix}down_proj": (count, hidden, size)}
    return {
        name: shape
        for expert in range(count)
        for name, shape in _gated_mlp_shapes(f"{prefix}{expert}.", size, hidden).items()
    }


def _stacked_expert_shapes(experts: Experts, hidden: int) -> Shapes:
    count, size = experts.routing.num_experts, experts.intermediate_size
    shapes: Shapes = {
        f"mlp.{experts.router_name}.weight": (count, hidden),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * size),
        "mlp.experts.down_proj": (count, size, hidden),
    }
    if experts.routing.logit_bias:
        shapes[f"mlp.{experts.router_name}.bias"] = (count,)
    if experts.has_biases:
        shapes |= {"mlp.experts.gate_up_proj_bias": (count, 2 * size), "mlp.experts.down_proj_bias": (count, hidden)}
    return shapes
