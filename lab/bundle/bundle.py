"""Make the bundled model from scratch: corpus, tokenizer, target, draft, held-out prompts, model card.

Each stage writes its results, and a later run skips it.  Under torchrun the `base` stage uses all ranks' GPUs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from espalier.errors import EspalierError
from espalier.train.data import UserText
from espalier.train.kinds import evaluate, train
from espalier.train.llama import LlamaShape
from espalier.train.settings import Eagle3Config
from lab.bundle.base import PretrainConfig, pretrain
from lab.bundle.card import write_card
from lab.bundle.corpus import build_corpus, read_documents
from lab.bundle.heldout import write_heldout
from lab.bundle.ngram import ngram_bits_per_byte
from lab.bundle.packing import pack
from lab.bundle.tokenizer import END, END_OF_TEXT, SPECIAL_TOKENS, save_tokenizer, train_tokenizer

BUNDLED_SHAPE = LlamaShape(
    vocab_size=6144,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
PRETRAIN_CONFIG = PretrainConfig(num_tokens=2.1e9)
DRAFT_CONFIG = Eagle3Config(num_tokens=2.763e8, generate_batch=2048, draft_vocab=4096)
# Files that the tokenizer is trained on: enough for the merges of a small vocabulary.
TOKENIZER_FILES = 5000
# Tokens of the corpus that the draft is trained on, besides the target's own text.
DRAFT_TOKENS = 35_000_000


@dataclass(frozen=True)
class BundleFolders:
    """The folders of a bundled model.  out: the model; work: corpus, packed tokens and unfinished runs."""

    out: Path
    work: Path
    site_packages: list[Path]

    @property
    def target(self) -> Path:
        return self.out / "target"

    @property
    def draft(self) -> Path:
        return self.out / "draft"

    @property
    def corpus(self) -> Path:
        return self.work / "corpus"

    @property
    def packed(self) -> Path:
        return self.work / "packed"

    def tokenizer(self) -> Tokenizer:
        # Not from_file, whose error of a missing file does not name it.
        return Tokenizer.from_str((self.target / "tokenizer.json").read_text(encoding="utf-8"))

    def results(self) -> dict[str, Any]:
        path = self.work / "results.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def add_results(self, **figures: Any) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.results() | figures, indent=1, default=vars)
        (self.work / "results.json").write_text(text + "\n")


def make_corpus(folders: BundleFolders) -> None:
    sites = folders.site_packages or [Path(p) for p in sys.path if p.endswith("site-packages")]
    build_corpus(folders.corpus, sites)


def make_tokenizer(folders: BundleFolders) -> None:
    documents = read_documents(folders.corpus / "train.jsonl")
    order = np.random.default_rng(0).permutation(len(documents))[:TOKENIZER_FILES]
    tokenizer = train_tokenizer(documents[i]["text"] for i in order)
    save_tokenizer(tokenizer, folders.target, BUNDLED_SHAPE.max_position_embeddings)
    write_heldout(folders.corpus, tokenizer, folders.out / "heldout.jsonl")


def pack_corpus(folders: BundleFolders) -> None:
    pack(folders.corpus, folders.tokenizer(), folders.packed, seed=0)


def make_base(folders: BundleFolders) -> None:
    begun = time.perf_counter()
    ends = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(END)]
    bits = pretrain(folders.packed, folders.target, folders.work, ends, PRETRAIN_CONFIG, BUNDLED_SHAPE)
    if not dist.is_initialized() or dist.get_rank() == 0:
        folders.add_results(base_bits=bits, base_seconds=time.perf_counter() - begun, base_device=device_name())


def make_ngram(folders: BundleFolders) -> None:
    train, heldout = np.load(folders.packed / "train.npy"), np.load(folders.packed / "heldout.npy")
    num_bytes = int((folders.packed / "heldout_bytes.txt").read_text())
    bits = ngram_bits_per_byte(train, heldout, num_bytes, BUNDLED_SHAPE.vocab_size)
    print(f"order-5 n-gram: {bits:.4f} bits/byte")
    folders.add_results(ngram_bits=bits, train_tokens=len(train), heldout_bytes=num_bytes)


def make_draft(folders: BundleFolders) -> None:
    stream, begun = np.load(folders.packed / "train.npy")[:DRAFT_TOKENS], time.perf_counter()
    figures = train("eagle3", folders.target, UserText(stream), folders.draft, folders.work, DRAFT_CONFIG)
    folders.add_results(draft=figures, draft_seconds=time.perf_counter() - begun, draft_device=device_name())


def measure_draft(folders: BundleFolders) -> None:
    tokenizer = folders.tokenizer()
    prompts = [tokenizer.encode(d["prompt"]).ids for d in read_documents(folders.out / "heldout.jsonl")]
    accept = evaluate("eagle3", folders.draft, folders.target, prompts, num_tokens=200)
    folders.add_results(accept=accept, num_prompts=len(prompts), accept_device=device_name())


def make_card(folders: BundleFolders) -> None:
    sources = json.loads((folders.corpus / "sources.json").read_text())
    write_card(folders.out / "CARD.md", folders.results(), sources, PRETRAIN_CONFIG, DRAFT_CONFIG)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


@dataclass(frozen=True)
class Stage:
    """make: runs the stage; done: whether its results exist."""

    make: Callable[[BundleFolders], None]
    done: Callable[[BundleFolders], bool]


STAGES: dict[str, Stage] = {
    "corpus": Stage(make_corpus, lambda f: (f.corpus / "sources.json").exists()),
    "tokenizer": Stage(make_tokenizer, lambda f: (f.out / "heldout.jsonl").exists()),
    "pack": Stage(pack_corpus, lambda f: (f.packed / "heldout_bytes.txt").exists()),
    "base": Stage(make_base, lambda f: "base_bits" in f.results()),
    "ngram": Stage(make_ngram, lambda f: "ngram_bits" in f.results()),
    "draft": Stage(make_draft, lambda f: "draft" in f.results()),
    "measure": Stage(measure_draft, lambda f: "accept" in f.results()),
    "card": Stage(make_card, lambda f: False),
}


def make_bundle(folders: BundleFolders, only: str | None = None) -> None:
    for name, stage in STAGES.items():
        if only in (None, name):
            print(f"{name}: {'kept' if stage.done(folders) else 'making'}", flush=True)
            if not stage.done(folders):
                _run_stage(name, stage, folders)


def _run_stage(name: str, stage: Stage, folders: BundleFolders) -> None:
    try:
        stage.make(folders)
    except FileNotFoundError as error:
        raise EspalierError(
            f"the stage {name} needs {error.filename}, which a stage before it makes; leave --only out, or run that one"
        ) from None
