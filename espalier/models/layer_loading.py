"""Builds a layer of a target or a draft from its weights.  Families with their own layers also use these functions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec, RecurrentState
from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import DENSE
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.ops.activation import SILU, Activation
from espalier.kernels.ops.experts import ExpertBiases, ExpertMatrix
from espalier.kernels.ops.recurrence import ShortConv
from espalier.kernels.ops.rope import HeadNorms, LatentFormat
from espalier.kernels.ops.selection import IndexerNorm
from espalier.models.config import FULL_ATTENTION, Experts, ModelConfig
from espalier.models.latent_config import IndexerConfig, LatentConfig
from espalier.models.layers.attention import AllHeadsNorms, Attention
from espalier.models.layers.decoder import DecoderLayer, Mixer
from espalier.models.layers.latent_attention import INDEX_NORM_EPS, LATENT_NORM_EPS, Indexer, LatentAttention
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.mlp import GatedMLP, MixtureMLP
from espalier.models.layers.norm import AnyNorm, NoNorm, RMSNorm
from espalier.models.layers.recurrent import Mamba2
from espalier.models.rope import RopeTables
from espalier.models.stored_names import stored_matrices
from espalier.models.weight_formats import dense_weight
from espalier.models.weight_formats.sharded import GatheredWeight
from espalier.models.weights import Weights
from espalier.shards import RankPart, Shards, as_rank_part, whole_part

# The matrices of a layer's experts: (gate_up, down, biases).
ExpertMatrices = tuple[ExpertMatrix, ExpertMatrix, ExpertBiases | None]


def load_experts(
    weights: Weights, experts: Experts, prefix: str, hidden: int, shared_activation: Activation = SILU
) -> MixtureMLP:
    """Loads the mixture of experts under `prefix`.  hidden: the hidden size.  shared_activation: of shared experts."""
    routing = experts.routing
    # The router is read first, because its shape shows whether the number of experts is right.
    router = weights.load(f"{prefix}{experts.router_name}.weight", routing.num_experts, hidden)
    load_matrices = {"apart": _load_separate_experts, "stacked": _load_stacked_experts, "joined": _load_joined_experts}[
        experts.storage
    ]
    gate_up, down, biases = load_matrices(weights, experts, prefix, hidden)
    scale = bias = shared = shared_gate = None
    if routing.correction_bias or routing.logit_bias:
        name = f"{experts.router_name}.bias" if routing.logit_bias else experts.correction_name
        bias = weights.load_exact(f"{prefix}{name}", routing.num_experts)
    if experts.scale_name is not None:
        scale = weights.load_exact(f"{prefix}{experts.scale_name}", routing.num_experts)
    if experts.shared_size:
        layer_prefix, own_prefix = prefix.removesuffix(experts.prefix), experts.shared_prefix
        shared_prefix = prefix if own_prefix is None else layer_prefix + own_prefix
        sizes, name = (hidden, experts.shared_size), f"{shared_prefix}{experts.shared_name}."
        # MixtureMLP adds the shared and routed experts before it sums over the ranks, so the shared MLP does not sum
        # over the ranks.
        shared = weights.mlp(name, *sizes, experts.shared_has_bias, shared_activation, False, experts.shared_names)
    if experts.shared_gate_name is not None:
        shared_gate = weights.linear(prefix, (experts.shared_gate_name,), (whole_part(1),), hidden, bias=False)
    return MixtureMLP(
        routing,
        router,
        bias,
        gate_up,
        down,
        shared,
        shared_gate,
        biases,
        experts.activation,
        scale,
        weights.shards,
    )


def _load_joined_experts(weights: Weights, experts: Experts, prefix: str, hidden: int) -> ExpertMatrices:
    """Loads experts that are stored as one tensor for gate and up and one for down.  hidden: the hidden size."""
    gate_up, down = (f"{prefix}{name}" for name in experts.joined_names)
    count, size = experts.routing.num_experts, experts.intermediate_size
    if gate_up not in weights:
        return _load_separate_experts(weights, experts, prefix, hidden)
    part = _intermediate_part_of_rank(weights, experts)
    _, halves = stored_matrices([gate_up], (part, part))
    if weights.formats(gate_up).name != DENSE and not weights.has_plain_dtype(gate_up):
        return (
            weights.stacked_matrix(gate_up, "", count, halves, hidden),
            weights.stacked_matrix(down, "", count, [hidden], part),
            None,
        )
    return (
        weights.load_parts(gate_up, (count, 2 * size, hidden), 1, [as_rank_part(half) for half in halves]),
        weights.load_parts(down, (count, hidden, size), 2, [part]),
        None,
    )


def _load_separate_experts(weights: Weights, experts: Experts, prefix: str, hidden: int) -> ExpertMatrices:
    """Loads experts that are stored as matrices of their own.  hidden: the hidden size."""
    if experts.has_biases:
        raise EspalierError("experts that are stored apart are supported only without biases; use another model")
    count, size = experts.routing.num_experts, _intermediate_part_of_rank(weights, experts)
    names = [f"{prefix}experts.{expert}." for expert in range(count)]
    halves = [f"{name}{half}" for name in names for half in experts.names.gate_up]
    gate_up = weights.matrix(halves, [size] * len(halves), hidden)
    down = weights.matrix([f"{name}{experts.names.down}" for name in names], [hidden] * count, size)
    return _unstack_experts(gate_up, count), _unstack_experts(down, count), None


def _unstack_experts(matrix: ExpertMatrix, num_experts: int) -> ExpertMatrix:
    """Converts [num_experts · out, in] to [num_experts, out, in]."""
    return matrix.unflatten(0, (num_experts, -1)) if isinstance(matrix, Tensor) else matrix.experts(num_experts)


def _load_stacked_experts(weights: Weights, experts: Experts, prefix: str, hidden: int) -> ExpertMatrices:
    """Loads experts that are stored in GPT-OSS's layout, [experts, in, out].  hidden: the hidden size."""
    count, part, name = experts.routing.num_experts, _intermediate_part_of_rank(weights, experts), f"{prefix}experts."
    size = part.size
    if weights.formats(f"{prefix}experts").name != DENSE:
        quantised = _load_stacked_quantised(weights, experts, f"{prefix}experts", hidden)
        return *quantised, _load_stacked_biases(weights, experts, name, hidden)
    weights.require_shape(f"{name}gate_up_proj", (count, hidden, 2 * size))
    weights.require_shape(f"{name}down_proj", (count, size, hidden))
    gate_up, down = weights.empty(count, 2 * len(part), hidden), weights.empty(count, hidden, len(part))
    for expert, matrix in enumerate(weights.load_entries(f"{name}gate_up_proj", count, hidden, 2 * size)):
        gate_up[expert].view(2, len(part), hidden).copy_(
            _split_gate_and_up(matrix[:, part.scaled(2).slice]).permute(1, 2, 0)
        )
    for expert, matrix in enumerate(weights.load_entries(f"{name}down_proj", count, size, hidden)):
        down[expert].copy_(matrix[part.slice].T)
    return gate_up, down, _load_stacked_biases(weights, experts, name, hidden)


def _load_stacked_biases(weights: Weights, experts: Experts, prefix: str, hidden: int) -> ExpertBiases | None:
    """Returns the experts' biases, whose names begin with `prefix`; None without biases.  hidden: the hidden size."""
    if not experts.has_biases:
        return None
    count, part = experts.routing.num_experts, _intermediate_part_of_rank(weights, experts)
    interleaved_bias = weights.load(f"{prefix}gate_up_proj_bias", count, 2 * part.size)
    gate_up_bias = _split_gate_and_up(interleaved_bias[:, part.scaled(2).slice]).flatten(1)
    down_bias = weights.bias_on_first_rank(weights.load(f"{prefix}down_proj_bias", count, hidden))
    assert down_bias is not None
    return ExpertBiases(gate_up_bias, down_bias)


def _load_stacked_quantised(
    weights: Weights, experts: Experts, module: str, hidden: int
) -> tuple[QuantisedMatrix, QuantisedMatrix]:
    """Loads the quantised matrices (gate_up, down) of the stacked experts in `module`.
    In the checkpoint, rows of gate and rows of up alternate.  In the result, all rows of gate come first."""
    count, part = experts.routing.num_experts, _intermediate_part_of_rank(weights, experts)
    gate_up = weights.stacked_matrix(module, ".gate_up_proj", count, [part.scaled(2)], hidden)
    down = weights.stacked_matrix(module, ".down_proj", count, [hidden], part)
    return gate_up.permute_rows_in_place(torch.arange(2 * len(part)).view(-1, 2).T.flatten()), down


def _intermediate_part_of_rank(weights: Weights, experts: Experts) -> RankPart:
    """Returns this rank's part of the intermediate size of each expert."""
    return weights.shards.part(experts.intermediate_size, "intermediate size of experts")


def _split_gate_and_up(columns: Tensor) -> Tensor:
    """Converts [N, 2·I], in which columns of gate and up alternate, to [N, 2, I], gate first."""
    return columns.unflatten(1, (-1, 2)).transpose(1, 2)


def specs_by_type(config: ModelConfig, other_specs: Mapping[str, LayerSpec]) -> tuple[LayerSpec, ...]:
    """Returns the LayerSpec of each layer, chosen by the layer's entry in `layer_types`.
    Layers with full attention store K and V heads.  other_specs: the LayerSpec of every other layer type."""
    cache_spec = KVHeads(config.kv_heads, config.head_size, config.head_size)
    specs = {FULL_ATTENTION: LayerSpec(config.heads, cache_spec, scale=config.softmax_scale), **other_specs}
    return tuple(specs[kind] for kind in config.raw["layer_types"])


def layer_specs_of(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Returns what each layer stores in the cache: the family's own specs, K and V heads, or latent rows."""
    if config.family.layer_specs is not None:
        return config.family.layer_specs(config)
    size, latent = config.head_size, config.latent
    if latent is None:
        cache_spec = KVHeads(config.kv_heads, size, size)
        scale, cap = config.softmax_scale, config.softcap
        return tuple(LayerSpec(config.heads, cache_spec, window, scale, cap) for window in config.windows)
    scale = config.rope.latent_mscale**2 * size**-0.5
    latent_kv, indexer = LatentKV(latent.cache_row_size, latent.kv_rank), latent.indexer
    if indexer is None:
        return tuple(LayerSpec(config.heads, latent_kv, window, scale) for window in config.windows)
    cache_specs = (
        replace(latent_kv, index_size=indexer.size) if indexer.has_own_indexer(layer) else latent_kv
        for layer in range(config.num_layers)
    )
    return tuple(LayerSpec(config.heads, cache_spec, scale=scale, topk=indexer.topk) for cache_spec in cache_specs)


def load_embedding(weights: Weights, config: ModelConfig, embedding_scale: float) -> Embedding:
    """Loads this rank's rows of the token embedding.  embedding_scale: the factor of every embedding."""
    part = weights.shards.vocab_part(config.vocab_size)
    table = weights.embedding_table("model.embed_tokens", part, config.hidden_size)
    return Embedding(table, embedding_scale, None, config.vocab_size, weights.shards)


def load_head(weights: Weights, name: str, vocab_size: int, hidden_size: int) -> Linear:
    """Loads the lm_head `name`.  Each rank holds a part of the rows.  A product gathers the logits of all ranks."""
    part = weights.shards.vocab_part(vocab_size)
    head = weights.linear("", (name,), (part,), hidden_size, bias=False)
    return head if part.is_whole else Linear(GatheredWeight(head.weight, weights.shards, vocab_size))


def tied_head(embed: Embedding, shards: Shards) -> Linear:
    """Returns an lm_head whose weight is the embedding's tensor (in the same memory)."""
    vocab_size, _ = embed.shape
    if shards.count == 1:
        return Linear(dense_weight(embed.weight))
    part = embed.weight if embed.shards.count > 1 else embed.weight[shards.vocab_part(vocab_size).slice]
    return Linear(GatheredWeight(dense_weight(part), shards, vocab_size))


def load_attention(
    weights: Weights, config: ModelConfig, prefix: str, columns: int, rope: RopeTables, layer: int = 0
) -> Attention | LatentAttention:
    """Loads the attention block under `prefix`: latent attention, or attention with K and V heads.
    columns: the input size of q, k and v: the hidden size, or twice the hidden size for a draft that concatenates
    embedding and hidden state.  layer: the layer's number, which decides whether it has an indexer."""
    if config.latent is not None:
        return _load_latent_attention(weights, config, config.latent, prefix, columns, rope, layer)
    size, shards, names = config.head_size, weights.shards, config.family.names
    heads, kv_heads = shards.heads_part(config.heads), shards.kv_heads_part(config.kv_heads)
    q_rows, kv_rows = heads.scaled(size), kv_heads.scaled(size)
    names_and_rows = stored_matrices(names.qkv, (q_rows, kv_rows, kv_rows))
    qkv = weights.linear(prefix, *names_and_rows, columns, config.attention_bias)
    out = weights.linear(prefix, (names.out,), (config.hidden_size,), q_rows, config.out_bias)
    norms = all_heads_norms = sink = None
    if config.qk_norm and config.family.qk_norm_over_all_heads:
        all_heads_norms = _load_all_heads_norms(weights, config, prefix, q_rows, kv_rows)
    elif config.qk_norm:
        norms = load_head_norms(weights, config, prefix)
    if config.family.has_sinks:
        sink = weights.load_exact(f"{prefix}sinks", config.heads)[heads.slice]
    return Attention(qkv, out, len(heads) + 2 * len(kv_heads), rope, norms, sink, all_heads_norms)


def _load_all_heads_norms(
    weights: Weights, config: ModelConfig, prefix: str, q_rows: RankPart, kv_rows: RankPart
) -> AllHeadsNorms:
    """Loads the norms of q and of k over all heads.  Each rank loads the part of the weights for its heads."""
    q, k = (
        RMSNorm(weights.load_parts(f"{prefix}{name}_norm.weight", (rows.size,), 0, [rows]), config.rms_norm_eps)
        for name, rows in (("q", q_rows), ("k", kv_rows))
    )
    return AllHeadsNorms(q, k, weights.shards)


def load_head_norms(weights: Weights, config: ModelConfig, prefix: str) -> HeadNorms:
    """Loads the norms of each head of q and k under `prefix`."""
    names, offset = config.family.names.head_norms, config.family.norm_offset
    q, k = (weights.norm_weight(f"{prefix}{name}.weight", config.head_size, offset) for name in names)
    return HeadNorms(q, k, config.rms_norm_eps)


def _load_latent_attention(
    weights: Weights,
    config: ModelConfig,
    latent: LatentConfig,
    prefix: str,
    columns: int,
    rope: RopeTables,
    layer: int,
) -> LatentAttention:
    """Loads the latent attention block under `prefix`.  columns, layer: see load_attention."""
    hidden, heads, q_rank = config.hidden_size, weights.shards.heads_part(config.heads), latent.q_rank
    q_rows, bias = heads.scaled(latent.head_size), config.attention_bias
    rows = q_rows if q_rank is None else whole_part(q_rank)
    names, row_size = ("q_proj" if q_rank is None else "q_a_proj", "kv_a_proj_with_mqa"), latent.cache_row_size
    down = weights.linear(prefix, names, (rows, row_size), columns, bias=bias and q_rank is not None)
    q_norm = q = None
    if q_rank is not None:
        q_norm = weights.norm(f"{prefix}q_a_layernorm", q_rank, LATENT_NORM_EPS)
        q = weights.linear(prefix, ("q_b_proj",), (q_rows,), q_rank, bias=False)
    elif bias:
        # Only the projection of the latent row has a bias, so the bias of the queries is zero.
        down.bias = torch.cat((weights.empty(len(q_rows)).zero_(), weights.load(f"{prefix}{names[1]}.bias", row_size)))
    kv_rows = heads.scaled(latent.nope_size + latent.v_size)
    kv_up = weights.load_dense_matrix(f"{prefix}kv_b_proj", kv_rows, latent.kv_rank)
    k_up, v_up = kv_up.unflatten(0, (len(heads), -1)).split((latent.nope_size, latent.v_size), 1)
    return LatentAttention(
        down=down,
        q_norm=q_norm,
        q=q,
        latent_format=LatentFormat(
            weights.load(f"{prefix}kv_a_layernorm.weight", latent.kv_rank), LATENT_NORM_EPS, latent.interleaved
        ),
        k_up=k_up,
        v_up=v_up,
        out=weights.linear(prefix, ("o_proj",), (hidden,), heads.scaled(latent.v_size), config.out_bias),
        cache_row_size=row_size,
        rope=rope,
        indexer=_load_indexer(weights, latent.indexer, prefix, q_rank, columns, layer),
    )


def _load_indexer(
    weights: Weights, config: IndexerConfig | None, prefix: str, q_rank: int | None, columns: int, layer: int
) -> Indexer | None:
    """Loads the indexer of a layer, the whole indexer on every rank; None for a layer without one.  q_rank: the size of
    the queries' latent.  columns: the input size."""
    if config is None or q_rank is None:
        return None
    indexer_prefix = f"{prefix}indexer."
    if not config.has_own_indexer(layer):
        # If a model override makes this layer share an earlier layer's indexer, the layer's own stored indexer is not
        # used.
        weights.allow_unused_prefixes((indexer_prefix,))
        return None
    return Indexer(
        q=weights.linear(indexer_prefix, ("wq_b",), (whole_part(config.heads * config.size),), q_rank, bias=False),
        k=weights.linear(indexer_prefix, ("wk",), (whole_part(config.size),), columns, bias=False),
        norm=IndexerNorm(
            weights.load(f"{indexer_prefix}k_norm.weight", config.size),
            weights.load(f"{indexer_prefix}k_norm.bias", config.size),
            INDEX_NORM_EPS,
        ),
        score_weights=weights.load_dense_matrix(f"{indexer_prefix}weights_proj", whole_part(config.heads), columns),
        interleaved=config.interleaved,
    )


def load_layer(
    weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables, index: int | None = None
) -> DecoderLayer:
    """Loads the layer under `prefix`: norms, mixer (attention or a recurrent block) and MLP.
    layer: the layer's number in the checkpoint, which decides whether the layer has experts.
    index: the layer's index among the layers of a pass; by default `layer`."""
    experts = config.experts if config.experts is not None and layer in config.experts.layers else None
    hidden, norms = config.hidden_size, config.family.layer_norms

    def optional_norm(name: str | None) -> AnyNorm:
        return NoNorm() if name is None else norm(name)

    def norm(name: str) -> RMSNorm:
        return weights.norm(f"{prefix}{name}", hidden, config.rms_norm_eps, config.family.norm_offset)

    return DecoderLayer(
        index=layer if index is None else index,
        attention_norm=optional_norm(norms.before_attention),
        attention=load_mixer(weights, config, prefix, layer, rope),
        mlp_norm=optional_norm(norms.before_mlp),
        mlp=(
            load_mlp(weights, config, prefix)
            if experts is None
            else load_experts(weights, experts, f"{prefix}{experts.prefix}", hidden, config.activation)
        ),
        post_attention_norm=norm(norms.after_attention) if norms.after_attention else None,
        post_mlp_norm=norm(norms.after_mlp) if norms.after_mlp else None,
        residual_scale=config.residual_scale,
    )


def load_mixer(weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables) -> Mixer:
    """Loads the first block of the layer under `prefix`: the family's own block, or attention."""
    if config.family.load_mixer is None:
        return load_attention(weights, config, f"{prefix}self_attn.", config.hidden_size, rope, layer)
    mixer: Mixer = config.family.load_mixer(weights, config, prefix, layer, rope)
    return mixer


def load_mlp(weights: Weights, config: ModelConfig, prefix: str) -> GatedMLP:
    """Loads the dense MLP of the layer under `prefix`."""
    sizes, names = (config.hidden_size, config.intermediate_size), config.family.names
    return weights.mlp(f"{prefix}{names.mlp_prefix}", *sizes, config.mlp_bias, config.activation, names=names.mlp)


def load_mamba2(
    weights: Weights,
    prefix: str,
    state_spec: RecurrentState,
    hidden: int,
    eps: float,
    *,
    bias: bool,
    conv_bias: bool,
    dt_limits: Sequence[float],
) -> Mamba2:
    """Loads the Mamba 2 block under `prefix`.
    bias, conv_bias: whether the projections and the convolution have a bias.  dt_limits: the smallest and largest dt,
    the time step of the recurrence."""
    inner, shared = state_spec.heads * state_spec.v_size, state_spec.k_heads * state_spec.k_size
    channels = state_spec.channels
    conv = weights.load(f"{prefix}conv1d.weight", channels, 1, state_spec.taps)[:, 0]
    # Checkpoints store the channels in the order x, B, C.  Mamba2 needs the order C, B, x.
    x, b, c = torch.arange(channels, device=conv.device).split((inner, shared, shared))
    order = torch.cat((c, b, x))
    bias_of_channels = weights.load(f"{prefix}conv1d.bias", channels)[order] if conv_bias else None
    low, high = dt_limits
    return Mamba2(
        state_spec,
        weights.linear(prefix, ("in_proj",), (inner + channels + state_spec.heads,), hidden, bias),
        ShortConv(conv[order].contiguous(), bias_of_channels),
        weights.load_exact(f"{prefix}A_log", state_spec.heads),
        weights.load_exact(f"{prefix}dt_bias", state_spec.heads),
        weights.load_exact(f"{prefix}D", state_spec.heads),
        (float(low), float(high)),
        weights.norm(f"{prefix}norm", inner, eps),
        weights.linear(prefix, ("out_proj",), (hidden,), inner, bias),
    )
