"""The target of a training, whose weights do not change: computes the features that drafts read, and its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from espalier.errors import EspalierError, one_line
from espalier.train.configs import MIN_CAPTURED_LAYERS, captured_layers, read_target


def training_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class FrozenTarget:
    """A target for MTP heads, which read its last hidden state, after the final norm, as the feature."""

    min_layers = 1

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.config = read_target(directory, self.min_layers)
        self.device = device
        self.model = _load_model(directory, device).eval().requires_grad_(False)

    @property
    def lm_head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def final_norm(self) -> Tensor:
        return self.model.get_decoder().norm.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [..., H] of token ids [...]."""
        return self.model.get_input_embeddings()(tokens)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the target on tokens [B, T].  Returns (features for the draft [B, T, F], logits [B, T, vocab])."""
        hidden = self.model.get_decoder()(tokens, use_cache=False).last_hidden_state
        return hidden, self.model.get_output_embeddings()(hidden)


class Eagle3Target(FrozenTarget):
    """A target for EAGLE-3 and block drafts, whose feature joins the inputs of its layers 2, L / 2 and L - 3 (of L)."""

    min_layers = MIN_CAPTURED_LAYERS

    def __init__(self, directory: Path, device: torch.device) -> None:
        super().__init__(directory, device)
        self.captured_layers = captured_layers(self.config)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the target on tokens [B, T].  Returns (features [B, T, 3H], logits [B, T, vocab])."""
        out = self.model(tokens, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[layer] for layer in self.captured_layers], dim=-1), out.logits


def _load_model(directory: Path, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    disable_progress_bar()
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, output_loading_info=True, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a missing or damaged file and a missing package raise many types
        raise EspalierError(
            f"--target {directory} cannot be loaded ({one_line(error)}); give a directory whose weights are whole"
        ) from None
    if missing := [*loaded["missing_keys"], *loaded["mismatched_keys"]]:
        raise EspalierError(
            f"--target {directory} has no weight {missing[0]} of the right size; give a directory whose weights are "
            "whole"
        )
    return model.to(device)
