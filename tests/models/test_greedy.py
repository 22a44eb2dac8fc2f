"""Whole engines against transformers: the same greedy tokens, family by family, whatever the page size."""

import pytest
import torch

from tests.harness import DTYPE, Setup, directories, prompts, request, run
from tests.models.reference import load_reference

PAGES = (1, 2, 3, 16, 64, 256)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen2_moe", "qwen3_moe"])
def test_tokens_are_those_of_transformers(family):
    given = prompts(7, [3, 11, 30])
    model = load_reference(directories(family)[0], DTYPE)
    wanted = []
    for prompt in given:
        generated = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        wanted.append(generated[0, len(prompt) :].tolist())
    for page_size in PAGES:
        ran = run(Setup(page_size=page_size, family=family).engine(), [request(i, p) for i, p in enumerate(given)])
        assert ran.tokens == wanted, f"{family} at page size {page_size}"
