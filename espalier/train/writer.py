"""Runs the target in the engine, to generate greedy or sampled continuations of many prompts.

At the end of the block `with TargetWriter(...)`, the engine's memory is freed, because the training needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from espalier.errors import EspalierError
from espalier.llm import LLM
from espalier.request import SamplingParams

# A text that repeats this number of earlier tokens is in a loop.
LOOP_TOKENS = 16
# The maximum batch.  Larger batches are not faster on a GPU.
MAX_BATCH = 256


class TargetWriter:
    """Runs the target in the engine.  max_tokens: the most tokens of a prompt with its continuation.  max_prompts: the
    most prompts in a batch."""

    def __init__(self, target: Path, max_tokens: int, max_prompts: int) -> None:
        self.llm = LLM(target, speculation=None, max_batch=min(max_prompts, MAX_BATCH), max_context=max_tokens, seed=0)

    def __enter__(self) -> TargetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()
        del self.llm
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def continuations(
        self, prompts: Sequence[Sequence[int] | np.ndarray], num_tokens: int, temperature: float, seed: int = 0
    ) -> list[np.ndarray]:
        """Returns each prompt with its continuation, up to the end token, or to a repetition (cut_before_loop).
        The model's defaults of penalties, top_k, top_p and min_p do not apply: drafts learn the plain distribution."""
        params = [
            SamplingParams(
                *(temperature, 0, 1.0, 0.0, 1.0), max_tokens=num_tokens, min_tokens=0, seed=seed * len(prompts) + index
            )
            for index in range(len(prompts))
        ]
        outputs = self.llm.generate([[int(token) for token in prompt] for prompt in prompts], params)
        if error := [output.error for output in outputs if output.error]:
            raise EspalierError(f"--target does not continue a prompt ({error[0]}); use another target or other --data")
        texts = [np.array([*p, *o.token_ids], np.int32) for p, o in zip(prompts, outputs, strict=True)]
        return [cut_before_loop(text, len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]


def cut_before_loop(text: np.ndarray, prompt_length: int) -> np.ndarray:
    """Returns the text up to the first token of the continuation that completes a repetition (see find_repeats)."""
    loops = find_repeats(text)
    loops[:prompt_length] = False
    starts = np.flatnonzero(loops)
    return text[: int(starts[0])] if len(starts) else text


def find_repeats(tokens: np.ndarray, num_repeated: int = LOOP_TOKENS) -> np.ndarray:
    """Returns for each position whether the `num_repeated` tokens that end there occur earlier in the sequence."""
    is_repeated, seen_runs, token_list = np.zeros(len(tokens), dtype=bool), set(), tokens.tolist()
    for end in range(num_repeated, len(token_list) + 1):
        run = tuple(token_list[end - num_repeated : end])
        is_repeated[end - 1] = run in seen_runs
        seen_runs.add(run)
    return is_repeated
