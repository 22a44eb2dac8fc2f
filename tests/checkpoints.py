"""Checkpoints in directories: a target and its draft are loaded, its files are changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.models import CausalLM, DraftModel, load_target, read_config
from espalier.speculate.drafters.registry import load_draft, read_draft


def load_pair(target: Path, draft: Path, model_impl: str = "auto", **loading: Any) -> tuple[CausalLM, DraftModel]:
    """The target captures the layers that the draft reads."""
    captured = read_draft(draft, read_config(target, model_impl=model_impl)).spec.captured_layers
    model = load_target(target, captured_layers=captured, model_impl=model_impl, **loading)
    return model, load_draft(draft, model, **loading)


def edit_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


def replace_weights(path: Path, **tensors: Tensor | None) -> None:
    """Removes those that are None."""
    weights = {**load_file(path / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path / "model.safetensors")
