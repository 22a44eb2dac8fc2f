"""Transformers as the oracle, made to compute in float64 where it casts to float32 on its own."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

DIVISIONS = (Tensor.__truediv__, Tensor.div, torch.div)
# Their attention has sinks or soft-caps, which transformers' call of SDPA lacks.
EAGER = ("gpt_oss", "gemma2")


class _InFloat64(TorchFunctionMode):
    """Casts to float32 are casts to float64, and quotients of integers are float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func in DIVISIONS and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            args = (args[0].double(), *args[1:])
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def load_reference(path: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it.  In float64 all of it is computed in float64."""
    # Eager: transformers' grouped product does not take float64.
    config = json.loads((path / "config.json").read_text())
    eager = config["model_type"] in EAGER
    how = {"attn_implementation": "eager" if eager else "sdpa", "experts_implementation": "eager"}
    # Transformers keeps some routers' weights in float32, whatever the dtype.
    kind: Any = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=dtype, **how).to(dtype).eval()
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            # Its own forward would compute them in float64.
            length = module.config.rope_parameters["original_max_position_embeddings"] + 1
            module.long_inv_freq = ROPE_INIT_FUNCTIONS["longrope"](module.config, "cpu", seq_len=length)[0]
    if dtype == torch.float64:
        model.forward = in_float64(model.forward)
    return model


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _InFloat64():
            return function(*args, **kwargs)

    return run


def reference_logits(model: nn.Module, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, Q, V] and what enters each layer, [B, Q, H] each."""
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True, use_cache=False)
    return out.logits, list(out.hidden_states)
