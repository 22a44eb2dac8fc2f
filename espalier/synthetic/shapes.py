"""The shapes of synthetic checkpoints, as their publishers' config.json files give them.

One difference: an lm_head that is tied to the embedding cannot hold the chain, so every head is stored apart.  A pass
costs the same, since a tied head reads the whole embedding too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from espalier.errors import EspalierError
from espalier.models.config import ModelConfig, parse
from espalier.models.draft import DraftConfig
from espalier.models.loading import FAMILIES
from espalier.speculate.drafters import DraftFormat, format_of

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}


@dataclass(frozen=True, eq=False)
class Shape:
    """A production model's sizes.

    source: the model whose config.json this is; fields: of that config.json; num_plain: ids from here on are special
    and never emitted; draft_vocab: number of tokens that the draft knows; the target emits only these.
    """

    name: str
    source: str
    num_plain: int
    draft_vocab: int
    fields: Mapping[str, Any]

    @property
    def config_json(self) -> dict[str, Any]:
        common = {"hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True}
        return {**common, **self.fields}

    @property
    def target(self) -> ModelConfig:
        family = FAMILIES[self.fields["architectures"][0]]
        return parse(self.config_json, family, Path(self.name))

    @property
    def draft_json(self) -> dict[str, Any]:
        """An EAGLE-3 head in SafeAILab's form: one layer of the target's shape."""
        config = self.target
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "draft_vocab_size": self.draft_vocab,
            "target_hidden_size": config.hidden_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": self.fields["rope_theta"],
            "rope_scaling": None,
            "max_position_embeddings": self.fields["max_position_embeddings"],
            "tie_word_embeddings": False,
        }

    @property
    def draft_format(self) -> DraftFormat:
        return format_of(self.draft_json, Path(f"{self.name} draft"))

    @property
    def draft_config(self) -> DraftConfig:
        return self.draft_format.read(Path(f"{self.name} draft"), self.draft_json, self.target)


def _llama(hidden: int, inner: int, layers: int, head: int, factor: float) -> dict[str, Any]:
    return {
        **LLAMA,
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": head,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA3},
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


QWEN3_8B = {
    **QWEN3,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Shape("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 128000, 32000, _llama(4096, 14336, 32, 128, 8.0)),
            Shape("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 128000, 32000, _llama(2048, 8192, 16, 64, 32.0)),
            Shape("qwen3-8b", "Qwen/Qwen3-8B", 151643, 32000, QWEN3_8B),
        )
    }
)


def find_shape(name: str) -> Shape:
    """A shape of SHAPES.  Raises EspalierError for an unknown name."""
    if name not in SHAPES:
        raise EspalierError(f"shape {name!r} is not known; use one of {', '.join(SHAPES)}")
    return SHAPES[name]
