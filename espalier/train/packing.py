"""Turn documents into one flat stream of token ids, and the stream into fixed windows.

Every document begins with the end-of-text token.  Some files' documented functions are also used as chat documents, so
that the model learns the tokens of the chat template.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from espalier.errors import EspalierError
from espalier.train.corpus import read_documents
from espalier.train.tokenizer import ASSISTANT, END, SPECIAL_TOKENS, USER

CHAT_FILES = 2000
CHAT_MAX_SOURCE = 24_000
CHAT_MAX_FUNCTION = 1500


def chat_documents(texts: list[str], rng: random.Random, num_files: int = CHAT_FILES) -> list[str]:
    """`<|user|>Write a function ...<|assistant|>def ...<|end|>` from functions that have a docstring."""
    short = [t for t in texts if len(t) <= CHAT_MAX_SOURCE and '"""' in t]
    documents = []
    for text in rng.sample(short, min(num_files, len(short))):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not (request := ast.get_docstring(node)):
                continue
            source = ast.get_source_segment(text, node)
            if source and len(source) <= CHAT_MAX_FUNCTION:
                task = f"Write a Python function `{node.name}`: {request.splitlines()[0]}"
                documents.append(f"{USER}{task}{ASSISTANT}{source}{END}")
    return documents


def encode(tokenizer: Tokenizer, texts: list[str], chunk: int = 1000) -> np.ndarray:
    """The token ids of all documents, concatenated, uint16.  Each begins with the end-of-text token."""
    parts = []
    for start in range(0, len(texts), chunk):
        encodings = tokenizer.encode_batch_fast(texts[start : start + chunk])
        parts += [np.array(e.ids, dtype=np.uint16) for e in encodings]
    return np.concatenate(parts)


def plain_texts(path: Path) -> list[str]:
    """A file's documents, without those whose text contains a special token."""
    texts = [d["text"] for d in read_documents(path)]
    return [t for t in texts if not any(token in t for token in SPECIAL_TOKENS)]


def pack(corpus: Path, tokenizer: Tokenizer, out: Path, seed: int) -> None:
    """Write train.npy, heldout.npy, and heldout_bytes.txt, the number of bytes of the held-out text."""
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    texts = plain_texts(corpus / "train.jsonl")
    texts += chat_documents(texts, rng)
    rng.shuffle(texts)
    np.save(out / "train.npy", encode(tokenizer, texts))
    heldout = plain_texts(corpus / "heldout.jsonl")
    rng.shuffle(heldout)
    np.save(out / "heldout.npy", encode(tokenizer, heldout))
    (out / "heldout_bytes.txt").write_text(str(sum(len(t.encode()) for t in heldout)))


def num_windows(num_tokens: int, length: int) -> int:
    """Windows of `length + 1` tokens at every offset below `length`."""
    return max(0, (num_tokens - 1) // length - 1)


def require_windows(what: str, num_tokens: int, length: int, size: int, remedy: str) -> None:
    """Refuse a text that does not fill a batch of `size` windows.  what: the text, with its length.

    Raises EspalierError.
    """
    if (found := num_windows(num_tokens, length)) < size:
        raise EspalierError(f"{what}: {found} rows of {length} tokens, and a batch takes {size} of them; {remedy}")


class Windows:
    """Windows of `length + 1` tokens of a stream on the device, with a new offset and order in every epoch."""

    def __init__(self, stream: np.ndarray, length: int, device: torch.device, seed: int) -> None:
        self.stream = torch.from_numpy(stream.astype(np.int32)).to(device)
        self.length = length
        self.seed = seed
        self.num_windows = num_windows(len(stream), length)

    def epoch(self, number: int) -> tuple[Tensor, int]:
        """(order of the windows, offset of the first)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(self.num_windows, generator=generator)
        return order, int(torch.randint(self.length, (1,), generator=generator))

    def batches(self, size: int, first: int = 0) -> Iterator[Tensor]:
        """Endless batches [size, length + 1] int64.  first: number of batches to skip, for a resumed run."""
        require_windows(
            f"the text has {len(self.stream)} tokens", len(self.stream), self.length, size, "give more text"
        )
        per_epoch = self.num_windows // size
        reach = torch.arange(self.length + 1, device=self.stream.device)
        number = first // per_epoch
        skip = first % per_epoch
        while True:
            order, offset = self.epoch(number)
            for step in range(skip, per_epoch):
                starts = order[step * size : (step + 1) * size] * self.length + offset
                yield self.stream[starts.to(reach.device)[:, None] + reach].long()
            number, skip = number + 1, 0
