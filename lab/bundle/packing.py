"""Turn documents into one flat stream of token ids.

Every document begins with the end-of-text token.  Some files' documented functions are also used as chat documents, so
that the model learns the tokens of the chat template.
"""

from __future__ import annotations

import ast
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lab.bundle.corpus import read_documents
from lab.bundle.tokenizer import ASSISTANT, END, SPECIAL_TOKENS, USER

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


def encode_documents(tokenizer: Tokenizer, texts: list[str], chunk_documents: int = 1000) -> np.ndarray:
    """The token ids of all documents, concatenated, uint16.  Each begins with the end-of-text token."""
    parts = []
    for start in range(0, len(texts), chunk_documents):
        encodings = tokenizer.encode_batch_fast(texts[start : start + chunk_documents])
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
    np.save(out / "train.npy", encode_documents(tokenizer, texts))
    heldout = plain_texts(corpus / "heldout.jsonl")
    rng.shuffle(heldout)
    np.save(out / "heldout.npy", encode_documents(tokenizer, heldout))
    (out / "heldout_bytes.txt").write_text(str(sum(len(t.encode()) for t in heldout)))
