"""The frozen target of a draft: what the draft reads of it, its logits and its own continuations of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from espalier.errors import EspalierError, one_line
from espalier.train.configs import MIN_CAPTURED_LAYERS, captured_layers, read_target

# Text that repeats this many tokens of itself is taken for a loop.
LOOP = 16


def training_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class FrozenTarget:
    """A draft reads its last hidden state, after the final norm."""

    def __init__(self, directory: Path, device: torch.device, min_layers: int = 1) -> None:
        self.config = read_target(directory, min_layers)
        self.device = device
        self.model = _load(directory, device).eval().requires_grad_(False)
        given = self.model.generation_config
        eos = given.eos_token_id
        # Only the end tokens of generation_config.json are kept: with its penalties and cuts, greedy text would not be
        # the most likely tokens, which drafts learn and are measured on.
        self.model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=given.pad_token_id)
        self.eos_token_ids = [eos] if isinstance(eos, int) else list(eos or [])

    @property
    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def final_norm(self) -> Tensor:
        return self.model.get_decoder().norm.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, T] -> (what the draft reads [B, T, F], logits [B, T, vocab])."""
        hidden = self.model.get_decoder()(tokens, use_cache=False).last_hidden_state
        return hidden, self.model.get_output_embeddings()(hidden)

    @torch.no_grad()
    def continuations(self, prompts: Tensor, num_tokens: int, temperature: float) -> list[np.ndarray]:
        """Each prompt [B, P] with its continuation by the target, up to the end token or to the start of a loop."""
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        out = self.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_tokens, **sampled
        )
        return [self.trimmed(row, prompts.shape[1]) for row in out.cpu().numpy()]

    def trimmed(self, row: np.ndarray, prompt_length: int) -> np.ndarray:
        ends = np.flatnonzero(np.isin(row[prompt_length:], self.eos_token_ids))
        end = prompt_length + int(ends[0]) + 1 if len(ends) else len(row)
        loops = repeated(row[:end])
        loops[:prompt_length] = False
        starts = np.flatnonzero(loops)
        return row[: int(starts[0])] if len(starts) else row[:end]


class Eagle3Target(FrozenTarget):
    """A draft reads the concatenated inputs of layers 2, L / 2 and L - 3, which is EAGLE-3's default."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        super().__init__(directory, device, MIN_CAPTURED_LAYERS)
        self.captured = captured_layers(self.config)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(tokens, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[layer] for layer in self.captured], dim=-1), out.logits


def _load(directory: Path, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, output_loading_info=True, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a missing or damaged file, a missing package: each has another class
        raise EspalierError(
            f"--target {directory} cannot be loaded ({one_line(error)}); give a directory whose weights are whole"
        ) from None
    if missing := [*loaded["missing_keys"], *loaded["mismatched_keys"]]:
        raise EspalierError(
            f"--target {directory} has no weight {missing[0]} of the right size; give a directory whose weights are "
            "whole"
        )
    return model.to(device)


def repeated(tokens: np.ndarray, length: int = LOOP) -> np.ndarray:
    """For every position, whether the `length` tokens that end there occur earlier in the sequence."""
    flags, seen, row = np.zeros(len(tokens), dtype=bool), set(), tokens.tolist()
    for end in range(length, len(row) + 1):
        gram = tuple(row[end - length : end])
        flags[end - 1] = gram in seen
        seen.add(gram)
    return flags
