"""Refuses a number of ranks into which a model cannot be divided, by its config.json, before weights are read."""

from collections.abc import Iterator

from espalier.cache.layer_spec import of_rank
from espalier.errors import EspalierError
from espalier.kernels.layers.tuning_table import DENSE
from espalier.models.config import Experts, ModelConfig
from espalier.models.layer_declaration import GATE_UP_DOWN, MLPNames
from espalier.models.layer_loading import HEADS, layer_specs_of
from espalier.models.weight_formats import StoredTensor, quantisation_of
from espalier.shards import Part, Shards, Size, part_of

# The architectures whose layers are divided: those that tests/properties/test_ranks.py compares with one process.
DIVIDED = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM"),
    *("MinistralForCausalLM", "Ministral3ForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM"),
    "MixtralForCausalLM",
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"),
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
    *("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Dots1ForCausalLM"),
)
# (name, rows, columns) of a matrix; one of the two is a part.
Matrix = tuple[str, Size, Size]


def require_shards(config: ModelConfig, count: int) -> None:
    """Raises EspalierError if `count` ranks cannot divide this model, naming what they cannot divide."""
    if count == 1:
        return
    if config.probed is not None:
        raise EspalierError(
            f"tensor_parallel={count} is not supported for models that transformers runs; use 1, or model_impl='native'"
        )
    is_one = len(config.family.names.qkv) == 1 or len(config.family.names.mlp.gate_up) == 1
    if config.architecture not in DIVIDED or config.family.wide_qk_norm or is_one:
        raise EspalierError(
            f"tensor_parallel={count} is not supported for {config.architecture}, whose layers have no parts; use 1, "
            f"or one of {', '.join(DIVIDED)}"
        )
    if any(described.get("desc_act") for described in quantisation_of(config.raw).values()):
        raise EspalierError(
            f"tensor_parallel={count} is not supported with desc_act, which puts a group's columns anywhere; use 1, or "
            "a checkpoint without it"
        )
    # Parts are equal: if the first can be cut out, all can.
    shards = Shards(0, count)
    of_rank(layer_specs_of(config), shards)
    for name, rows, columns in _matrices(config, shards):
        try:
            for stored in _stored(config, name, part_of(rows), part_of(columns)):
                stored.cut(part_of(rows), part_of(columns))
        except EspalierError as error:
            raise EspalierError(f"tensor_parallel={count}, {name!r}: {error}") from None


def _stored(config: ModelConfig, name: str, rows: Part, columns: Part) -> tuple[StoredTensor, ...]:
    format = config.formats(name)
    if not format.has_shards:
        raise EspalierError(f"format {format.name} cannot be divided among ranks; use tensor_parallel=1")
    if name.endswith("experts") and format.name != DENSE:
        assert config.experts is not None
        return format.expert_tensors(config.experts.routing.num_experts, rows.size, columns.size)
    return format.tensors(rows.size, columns.size)


def _matrices(config: ModelConfig, shards: Shards) -> Iterator[Matrix]:
    """Those that ranks hold parts of."""
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield from _of_attention(config, shards, f"{prefix}self_attn.")
        if config.experts is not None and layer in config.experts.layers:
            yield from _of_experts(config, config.experts, shards, f"{prefix}{config.experts.under}")
        else:
            yield from _of_mlp(f"{prefix}mlp.", config.hidden_size, shards, config.intermediate_size)
    if not config.tie_word_embeddings:
        yield "lm_head", shards.tokens(config.vocab_size), config.hidden_size


def _of_attention(config: ModelConfig, shards: Shards, prefix: str) -> Iterator[Matrix]:
    heads, latent, hidden = shards.part(config.heads, HEADS), config.latent, config.hidden_size
    if latent is None:
        kv_heads = shards.kv_heads(config.kv_heads)
        for name, of_heads in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}{name}_proj", of_heads.times(config.head_size), hidden
        yield f"{prefix}o_proj", hidden, heads.times(config.head_size)
        return
    name, columns = ("q_proj", hidden) if latent.q_rank is None else ("q_b_proj", latent.q_rank)
    yield f"{prefix}{name}", heads.times(latent.head_size), columns
    yield f"{prefix}kv_b_proj", heads.times(latent.nope_size + latent.v_size), latent.kv_rank
    yield f"{prefix}o_proj", hidden, heads.times(latent.v_size)


def _of_mlp(
    prefix: str,
    hidden: int,
    shards: Shards,
    size: int,
    what: str = "intermediate size",
    names: MLPNames = GATE_UP_DOWN,
) -> Iterator[Matrix]:
    own = shards.part(size, what)
    for name in names.gate_up:
        yield f"{prefix}{name}", own, hidden
    yield f"{prefix}{names.down}", hidden, own


def _of_experts(config: ModelConfig, experts: Experts, shards: Shards, prefix: str) -> Iterator[Matrix]:
    hidden, what = config.hidden_size, "intermediate size of experts"
    if experts.stored == "apart":
        yield from _of_mlp(f"{prefix}experts.0.", hidden, shards, experts.size, what, experts.names)
    else:
        own = shards.part(experts.size, what)
        yield from ((f"{prefix}experts", own.times(2), hidden), (f"{prefix}experts", hidden, own))
    if experts.shared_size:
        yield from _of_mlp(f"{prefix}{experts.shared_name}.", hidden, shards, experts.shared_size, f"shared {what}")
