"""A real chat model in float32 against transformers, and against itself with every draft.

ESPALIER_CHAT_MODEL names its directory; ESPALIER_CHAT_DRAFTS, if it is set, one with the drafts eagle3, mtp and block.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier import LLM, SamplingParams, SpeculationConfig
from lab.chat.words import HELDOUT_CHAT, HELDOUT_PROSE, QUESTION_FORMS, TOPICS

MODEL, DRAFTS = os.environ.get("ESPALIER_CHAT_MODEL", ""), os.environ.get("ESPALIER_CHAT_DRAFTS", "")
pytestmark = [pytest.mark.full, pytest.mark.skipif(not MODEL, reason="ESPALIER_CHAT_MODEL names no model")]
ASKED = [*HELDOUT_CHAT, *HELDOUT_PROSE, *(form.format(TOPICS[i]) for i, form in enumerate(QUESTION_FORMS * 4))][:100]
TOKENS = 24
# Logits this close may be ordered either way by another order of sums.
NEAR_TIE = 1e-3
SETTINGS = {"device": "cpu", "dtype": "float32", "max_batch": 8, "max_context": 512}
TREES = {
    "eagle3": [(5, 1, 6), (5, 4, 16), (6, 8, 64)],
    "mtp": [(3, 1, 4), (5, 8, 64)],
    "block": [(8, 1, 9), (8, 8, 64)],
}
TREES["ngram"] = [(5, 1, 6)]


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_greedy_text_and_chat_ids_are_those_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    hf = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with LLM(MODEL, speculation=None, **SETTINGS) as llm:
        prompts = [llm.chat_prompt(messages(text)) for text in ASKED]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS, repetition_penalty=1.0))
    ties = []
    for text, prompt, output in zip(ASKED, prompts, outputs, strict=True):
        theirs = hf.apply_chat_template(messages(text), add_generation_prompt=True, return_dict=False)
        assert prompt == theirs, text
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for at, token in enumerate(output.token_ids):
            if token != int(logits[at].argmax()):
                assert float(best[at, 0] - logits[at, token]) < NEAR_TIE, (text, at)
                ties.append((text, at))
    with capsys.disabled():
        print(f"{len(ASKED)} prompts, {len(ties)} near-ties: {ties}")
    assert len(ties) <= 5


@pytest.mark.parametrize(
    ("name", "tree"), [(name, tree) for name, trees in TREES.items() for tree in trees if DRAFTS or name == "ngram"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_with_a_draft_is_text_without(name: str, tree: tuple[int, int, int], temperature: float) -> None:
    steps, topk, nodes = tree
    draft = None if name == "ngram" else Path(DRAFTS) / name
    tree_of = SpeculationConfig(name, steps=steps, topk=topk, num_draft_tokens=nodes, by_batch={})
    params, texts = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=3), []
    for speculation in (None, tree_of):
        with LLM(MODEL, draft=draft if speculation else None, speculation=speculation, **SETTINGS) as llm:
            prompts = [llm.chat_prompt(messages(text)) for text in ASKED[:8]]
            texts.append([output.token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
