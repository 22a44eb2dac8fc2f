"""The drafts that ship with the bundled model: plain decoding's tokens, in fewer rounds."""

import pytest

from espalier import LLM, SamplingParams, SpeculationConfig
from espalier.startup.checkpoints import BUNDLED_DRAFTS

PROMPT = "def mean(xs):"
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with LLM("bundled", speculation=None) as llm:
        return llm.generate(PROMPT, GREEDY)[0].token_ids


@pytest.mark.parametrize("algorithm", BUNDLED_DRAFTS)
def test_every_draft_gives_the_plain_tokens(algorithm: str, plain: list[int]) -> None:
    with LLM("bundled", speculation=SpeculationConfig(algorithm=algorithm)) as llm:
        [result] = llm.generate(PROMPT, GREEDY)
    assert result.token_ids == plain
    assert result.speculation.rounds < len(plain) / 2
