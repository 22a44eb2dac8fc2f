"""Converts the metadata of a GGUF file to the content of a config.json.

Every metadata field of the architecture is either applied or refused with an error that names the field.  llama.cpp's
converter omits fields that can be computed from others; this module computes them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from espalier.errors import EspalierError, shown
from espalier.kernels.layers.blocks import BLOCK_TYPES
from espalier.model_files import GGUF, read_gguf
from espalier.models.rope import Json

# GGUF's names of a layer's modules -> the names in Hugging Face checkpoints, for every architecture.
LAYER_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
NORMS_BEFORE_BLOCKS = {"ffn_norm": "post_attention_layernorm"}
NORMS_AROUND_BLOCKS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MODEL_MODULES = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
EMBEDDING_TENSOR, HEAD_TENSOR, FREQUENCY_TENSOR = "token_embd.weight", "output.weight", "rope_freqs.weight"
# GGUF's metadata fields, without the prefix of the architecture's name -> the equivalent fields of config.json.
CONFIG_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
# Fields that a file may omit.  A missing field has GGUF's default, not the default of the family.
OPTIONAL_FIELDS = ("attention.head_count_kv", "attention.key_length", "rope.freq_base")
# Fields that other functions of this file read, or that do not change the computation.
FIELDS_READ_ELSEWHERE = (
    *("attention.value_length", "rope.dimension_count", "vocab_size", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
)
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "expert_count": (0,),
        "expert_used_count": (0,),
        "attention.causal": (True,),
        "attn_logit_softcapping": (0.0,),
        "rope.scaling.attn_factor": (1.0,),
    }
)
# The types of tensors without quantisation, by GGUF's type number.
PLAIN_TYPES = {0: "F32", 1: "F16", 30: "BF16"}
BLOCK_TYPES_BY_NUMBER = {type.gguf_type: type for type in BLOCK_TYPES.values()}


@dataclass(frozen=True)
class GGUFArchitecture:
    """How GGUF files of llama.cpp store the models of one family.

    family, model_type: the values of `architectures` and `model_type` in config.json.  norm_modules: GGUF's names of
    a layer's norms, except `attn_norm` -> the names in Hugging Face checkpoints.
    permutes_q_and_k: whether the two values of each rotated pair are adjacent in the stored rows of q and k.
    norm_offset: a number that the converter added to the weights of norms.
    extra_fields: returns additional fields of config.json.  Its arguments are the file and a function that reads a
    metadata field.
    extra_field_names: the metadata fields that `extra_fields` reads."""

    family: str
    model_type: str
    norm_modules: Mapping[str, str]
    permutes_q_and_k: bool = False
    norm_offset: float = 0.0
    extra_fields: Callable[[GGUF, Callable[[str], Any]], Json] = lambda gguf, field: {}
    extra_field_names: tuple[str, ...] = ()

    def hf_name(self, gguf_name: str) -> str:
        """Returns the name of the tensor `gguf_name` in a Hugging Face checkpoint; an unknown name is not changed."""
        module, _, kind = gguf_name.rpartition(".")
        if module in MODEL_MODULES:
            return f"{MODEL_MODULES[module]}.{kind}"
        block, _, rest = module.partition(".")
        layer, _, part = rest.partition(".")
        modules = {**LAYER_MODULES, **self.norm_modules}
        return f"model.layers.{layer}.{modules[part]}.{kind}" if block == "blk" and part in modules else gguf_name


# Metadata fields of Gemma 2 and 3 -> the equivalent fields of config.json.
GEMMA_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA3_FIELDS = {
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# The number of layers of the family's largest model.  That model does not scale queries by the size of its heads.
LARGEST_NUM_LAYERS = {"gemma2": 46, "gemma3": 62}


def _gemma_fields(gguf: GGUF, read_field: Callable[[str], Any]) -> Json:
    """Returns the fields of Gemma's config.json.  read_field: reads a field of the metadata."""
    heads, hidden = read_field("attention.head_count"), read_field("embedding_length")
    # The file has no field for the scale of queries, so it is derived from the model's size.
    is_largest = read_field("block_count") == LARGEST_NUM_LAYERS[gguf.metadata["general.architecture"]]
    are_valid = type(heads) is int and type(hidden) is int and heads > 0
    scalar = hidden // heads if is_largest and are_valid else read_field("attention.key_length")
    values = {config_name: read_field(gguf_name) for gguf_name, config_name in (GEMMA_FIELDS | GEMMA3_FIELDS).items()}
    return {name: value for name, value in {**values, "query_pre_attn_scalar": scalar}.items() if value is not None}


ARCHITECTURES: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        # Files of Mistral's models also have the architecture "llama".
        "llama": GGUFArchitecture(
            *("LlamaForCausalLM", "llama", NORMS_BEFORE_BLOCKS),
            permutes_q_and_k=True,
            extra_fields=lambda gguf, field: {"attention_bias": "blk.0.attn_q.bias" in gguf.tensors},
        ),
        "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", NORMS_BEFORE_BLOCKS),
        "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", NORMS_BEFORE_BLOCKS),
        "gemma2": GGUFArchitecture(
            *("Gemma2ForCausalLM", "gemma2", NORMS_AROUND_BLOCKS),
            norm_offset=1.0,
            extra_fields=_gemma_fields,
            extra_field_names=tuple(GEMMA_FIELDS),
        ),
        "gemma3": GGUFArchitecture(
            *("Gemma3ForCausalLM", "gemma3_text", NORMS_AROUND_BLOCKS),
            norm_offset=1.0,
            extra_fields=_gemma_fields,
            extra_field_names=(*GEMMA_FIELDS, *GEMMA3_FIELDS),
        ),
    }
)


def architecture_of_gguf(gguf: GGUF) -> GGUFArchitecture:
    """Returns the GGUFArchitecture of a file.  Raises EspalierError for an architecture that is not supported."""
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise EspalierError(
            f"{gguf.path}: architecture {shown(name)} is not supported in GGUF files, only {', '.join(ARCHITECTURES)}; "
            "give the Hugging Face directory of the model"
        )
    return ARCHITECTURES[name]


def gguf_config(path: Path) -> Json:
    """Returns a config.json that is equivalent to the file's metadata.
    Raises EspalierError naming a field that is not supported."""
    gguf = read_gguf(path)
    architecture, name = architecture_of_gguf(gguf), gguf.metadata["general.architecture"]
    prefix = f"{name}."
    metadata = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    _check_metadata_fields(metadata, architecture, path, name)
    config: Json = {
        "architectures": [architecture.family],
        "model_type": architecture.model_type,
        **_default_fields(metadata),
        **{field: metadata[gguf_field] for gguf_field, field in CONFIG_FIELDS.items() if gguf_field in metadata},
        **_size_fields(gguf, metadata),
        **_rope_fields(gguf, metadata),
        **_special_token_fields(gguf.metadata),
        "dtype": _model_dtype(gguf),
        **architecture.extra_fields(gguf, metadata.get),
        "quantization_config": {"quant_method": "gguf", "types": _block_types(gguf, architecture)},
    }
    # A quantised embedding is not tied to the head: the embedding is dequantised to a table, and the head keeps the
    # quantised blocks.
    config["tie_word_embeddings"] = (
        HEAD_TENSOR not in gguf.tensors and gguf.tensors[EMBEDDING_TENSOR].type in PLAIN_TYPES
    )
    return config


def _default_fields(metadata: Json) -> Json:
    """Returns the fields of config.json that a GGUF file may omit, derived from `metadata`."""
    heads, hidden = metadata["attention.head_count"], metadata["embedding_length"]
    size = hidden // heads if type(heads) is type(hidden) is int and heads > 0 else None
    return {"num_key_value_heads": heads, "head_dim": size, "rope_theta": 10000.0}


def _check_metadata_fields(metadata: Json, architecture: GGUFArchitecture, path: Path, name: str) -> None:
    """Raises EspalierError if a field of `metadata` is missing, or if an unknown field may change the output.
    name: the name of the architecture in the file."""
    if missing := next(
        (field for field in CONFIG_FIELDS if field not in metadata and field not in OPTIONAL_FIELDS), None
    ):
        raise EspalierError(f"{path} has no field {f'{name}.{missing}'!r}; download the file again")
    known = (*CONFIG_FIELDS, *FIELDS_READ_ELSEWHERE, *architecture.extra_field_names)
    for field, value in metadata.items():
        if field not in known and value not in NEUTRAL_VALUES.get(field, ()):
            raise EspalierError(
                f"{path}: field {shown(f'{name}.{field}')} = {shown(value)} is not supported; give the Hugging Face "
                "directory of the model"
            )


def _size_fields(gguf: GGUF, metadata: Json) -> Json:
    """Returns the fields for the vocabulary size, the head size and the rotated part of a head."""
    if EMBEDDING_TENSOR not in gguf.tensors:
        raise EspalierError(f"{gguf.path} has no tensor {EMBEDDING_TENSOR!r}; download the file again")
    sizes: Json = {"vocab_size": gguf.tensors[EMBEDDING_TENSOR].shape[0]}
    key, value, rotated = (
        metadata.get(f) for f in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    )
    if value not in (None, key):
        raise EspalierError(
            f"{gguf.path}: keys of {shown(key)} values and values of {shown(value)} are not supported, only of one size"
        )
    if key is None and rotated is not None:
        sizes["head_dim"] = rotated
    elif isinstance(key, int) and isinstance(rotated, int) and rotated != key and key > 0:
        sizes["partial_rotary_factor"] = rotated / key
    return sizes


def _rope_fields(gguf: GGUF, metadata: Json) -> Json:
    """Returns the field rope_scaling, from the file's RoPE scaling type or from its tensor of frequency divisors."""
    kind, factor = metadata.get("rope.scaling.type", "none"), metadata.get("rope.scaling.factor")
    scaling: Json | None = None
    if kind in ("linear", "yarn"):
        original = metadata.get("rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn" and original is not None:
            scaling["original_max_position_embeddings"] = original
    elif kind != "none":
        raise EspalierError(f"{gguf.path}: rope.scaling.type = {shown(kind)} is not supported, only linear and yarn")
    if FREQUENCY_TENSOR in gguf.tensors:
        if scaling is not None:
            raise EspalierError(f"{gguf.path} has both {FREQUENCY_TENSOR!r} and rope.scaling.type = {shown(kind)}")
        divisors = _frequency_divisors(gguf)
        scaling = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
    return {} if scaling is None else {"rope_scaling": scaling}


def _model_dtype(gguf: GGUF) -> str:
    """Returns the model's dtype: float32 or float16 if all matrices are stored in that dtype, else bfloat16."""
    types = {info.type for info in gguf.tensors.values() if len(info.shape) > 1}
    return {frozenset({0}): "float32", frozenset({1}): "float16"}.get(frozenset(types), "bfloat16")


def _frequency_divisors(gguf: GGUF) -> list[float]:
    info = gguf.tensors[FREQUENCY_TENSOR]
    if info.type != 0 or len(info.shape) != 1:
        raise EspalierError(f"{gguf.path}: {FREQUENCY_TENSOR!r} is no list of float32; download the file again")
    with info.file.open("rb") as file:
        file.seek(info.begin)
        content = file.read(4 * info.shape[0])
    if len(content) != 4 * info.shape[0]:
        raise EspalierError(f"{gguf.path} is cut short in {FREQUENCY_TENSOR!r}; download the file again")
    return np.frombuffer(content, "<f4").tolist()


def _special_token_fields(metadata: Mapping[str, Any]) -> Json:
    """Returns the fields for special tokens.  Generation stops at the end of texts and of chat messages, as in
    llama.cpp."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    fields: Json = {"eos_token_id": [end for end in ends if end is not None]}
    for name, field in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if (token := metadata.get(f"tokenizer.ggml.{field}")) is not None:
            fields[name] = token
    return fields


def _block_types(gguf: GGUF, architecture: GGUFArchitecture) -> dict[str, str]:
    """Returns the block format of each quantised matrix, by the matrix's name."""
    types = {}
    for name, info in gguf.tensors.items():
        if info.type in PLAIN_TYPES:
            continue
        type = BLOCK_TYPES_BY_NUMBER.get(info.type)
        if type is None:
            supported = ", ".join((*PLAIN_TYPES.values(), *BLOCK_TYPES))
            raise EspalierError(
                f"{gguf.path}: tensor {shown(name)} is of block type {info.type}, which is not supported; supported "
                f"are {supported}: use another quantisation of the model"
            )
        if info.shape[-1] % type.block_values:
            raise EspalierError(
                f"{gguf.path}: tensor {shown(name)} has rows of {info.shape[-1]} values, which blocks of "
                f"{type.block_values} ({type.name}) do not divide; download the file again"
            )
        types[architecture.hf_name(name).removesuffix(".weight")] = type.name
    if HEAD_TENSOR not in gguf.tensors and "model.embed_tokens" in types:
        types["lm_head"] = types["model.embed_tokens"]
    return types
