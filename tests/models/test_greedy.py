"""Whole engines against transformers: the same greedy tokens and log-probabilities, family by family."""

import pytest
import torch

from espalier.request import SamplingParams
from tests.harness import DTYPE, Setup, directories, prompts, request, run
from tests.models.reference import load_reference
from tests.pairwise import fewer

DENSE = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gemma4", "gemma4_e", "deepseek_v3_dense"),
    *("ministral", "ministral3", "phi3", "granite", "granitemoehybrid", "smollm3", "olmo2", "olmo3", "muse_glimmer"),
    *("qwen3_5", "lfm2", "exaone4"),
)
MIXTURES = (
    *("gemma4_moe", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"),
    *("deepseek_v32", "deepseek_v32_topk4", "deepseek_v32_topk16", "glm_moe_dsa", "glm_moe_dsa_topk16"),
    *("dots1", "mixtral", "granitemoe", "granitemoeshared", "laguna", "qwen3_next", "granite_hybrid", "nemotron_h"),
    "minimax_m2",
)
# Of what layers keep and read, and of how they are scaled, each kind; test_families.py has the logits of every family.
# Engines of the kinds that test_layouts.py has are held there against passes, and passes in test_families.py.
FEW = (
    *("llama", "gemma4_e", "qwen3_5", "lfm2", "exaone4", "deepseek_v32_topk4", "granite_hybrid", "nemotron_h"),
    "gpt_oss",
)
# Both sides compute in float64, and report in float32.
TOLERANCE = 1e-5
MAX_TOKENS = 8
WISH = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0)


@pytest.mark.parametrize("page_sizes", [(3,), pytest.param((1, 2, 16, 64, 256), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("family", fewer([*DENSE, *MIXTURES], lambda family: family in FEW))
def test_tokens_are_those_of_transformers(family, page_sizes):
    given = prompts(7, [3, 11, 30])
    model = load_reference(directories(family)[0], DTYPE)
    for page_size in page_sizes:
        ran = run(
            Setup(page_size=page_size, family=family).engine(), [request(i, p, WISH) for i, p in enumerate(given)]
        )
        for prompt, r in zip(given, ran.requests, strict=True):
            assert len(r.output) == MAX_TOKENS
            # One pass over the text: where each token is the best behind those before it, greedy decoding gives them.
            with torch.no_grad():
                found = model(torch.tensor([[*prompt, *r.output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            assert r.output == found.argmax(-1).tolist(), f"{family} at page size {page_size}"
            expected = found.log_softmax(-1).amax(-1).tolist()
            assert [token.logprob for token in r.logprobs] == pytest.approx(expected, abs=TOLERANCE)
