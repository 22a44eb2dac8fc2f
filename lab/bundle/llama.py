"""The Llama architecture as a training module.  Its parameters have Hugging Face's names.

It has only what pre-training needs: full causal attention over packed windows, and the loss in the forward pass.
`transformers.LlamaForCausalLM` and the engine load the result.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.models.weight_files import write_weights
from espalier.train.llama import MLP, LlamaShape, RMSNorm, rope_tables, rotate


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class DecoderLayer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaBody(nn.Module):
    def __init__(self, shape: LlamaShape, stream_dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.stream_dtype = stream_dtype
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rope_tables(positions, self.shape.head_dim, self.shape.rope_theta)
        x = self.embed_tokens(tokens).to(self.stream_dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    """A model with tied embeddings.  forward(tokens [B, T], targets [B, T]) -> loss [B, T] in nats, float32.

    stream_dtype: dtype of the residual stream.  A thin model spends most of its time on memory traffic of the residual,
    which bfloat16 halves.
    """

    def __init__(self, shape: LlamaShape, stream_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = LlamaBody(shape, stream_dtype)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                depth = 2 * shape.num_hidden_layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(self.model(tokens), self.model.embed_tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def save_llama(model: Llama, out: Path, eos_token_ids: list[int]) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16)."""
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **vars(model.model.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": eos_token_ids[0],
        "eos_token_id": eos_token_ids,
        "pad_token_id": eos_token_ids[0],
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": eos_token_ids[0], "eos_token_id": eos_token_ids, "pad_token_id": eos_token_ids[0]}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {n: t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in model.state_dict().items()}
    write_weights(out / "model.safetensors", weights)
