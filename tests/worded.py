"""A tiny random model that reads and writes words, by the bundled model's tokenizer: what its server does takes a
tenth of the bundled model's time."""

import shutil
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from espalier.startup.checkpoints import BUNDLED_FILES
from tests.builders import make_eagle3, make_target
from tests.folders import new_folder

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# What it mostly writes, each a token; so few that a random draft, which knows no other, is accepted often.
WORDS = ("return", " self", "\n", "def", " x", "import", " in", " =", " not", ".append", "(", " is")
# Of their logits: the likeliest of them outweighs all other tokens.
GAIN = 4.0
EOS = (0, 3)


@lru_cache
def worded() -> tuple[Path, Path]:
    """The directories of (target, draft)."""
    root = new_folder("worded-")
    given = BUNDLED_FILES / "target"
    tokenizer = Tokenizer.from_file(str(given / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()
    ids = torch.tensor([tokenizer.encode(word, add_special_tokens=False).ids for word in WORDS]).flatten().sort().values
    target = make_target(root / "target", seed=5, vocab=vocab, eos_token_id=list(EOS))
    for name in FILES:
        shutil.copy(given / name, target)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"][ids] *= GAIN
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    draft = make_eagle3(root / "draft", target, seed=1, draft_vocab=len(ids))
    weights = load_file(draft / "model.safetensors")
    weights |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(vocab), ids)}
    save_file(weights, draft / "model.safetensors")
    return target, draft
