"""A tiny target with EAGLE-3 drafts of the trainer, and engines that learn."""

import json
from functools import cache
from pathlib import Path

import torch

from espalier.config import EngineConfig, SpeculationConfig
from espalier.llm import LLM, PreparedEngine, prepare_engine
from espalier.train.checkpoint import make_draft_shape, save_draft
from espalier.train.draft import Eagle3Draft
from espalier.train.llama import LlamaShape
from lab.bundle.llama import Llama, save_llama
from tests.folders import new_folder

SHAPE = LlamaShape(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
)
# float64: then tokens do not depend on who drafts, to the last bit.
SETTINGS = {"dtype": "float64", "max_batch": 4, "max_context": 128, "page_size": 4, "num_pages": 200, "seed": 0}
# Random drafts are accepted now and then.
TREE = SpeculationConfig(steps=3, topk=4, num_draft_tokens=12)


@cache
def target() -> Path:
    torch.manual_seed(0)
    model = Llama(SHAPE)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    save_llama(model, folder := new_folder("learn-") / "target", [0])
    return folder


@cache
def draft(seed: int, vocab: int = 16) -> Path:
    torch.manual_seed(seed)
    made = Eagle3Draft(make_draft_shape(json.loads((target() / "config.json").read_text()), vocab, 24))
    made.set_vocabulary(torch.arange(vocab), torch.randn(16, 16))
    save_draft(made, folder := new_folder("learn-") / f"draft-{seed}")
    return folder


def prepared(seed: int = 1, **settings: object) -> PreparedEngine:
    models = {"model": target(), "draft": draft(seed), "speculation": TREE}
    return prepare_engine(EngineConfig(**{**models, **SETTINGS, **settings}))


def engine(seed: int = 1, **settings: object) -> LLM:
    return LLM.from_prepared(prepared(seed, **settings))
