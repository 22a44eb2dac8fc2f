"""Held-out prompts for the demonstration: the beginnings of standard library files that are not trained on.

A prompt ends at the end of an indented line of code.  The reference is the text that follows in the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from lab.bundle.corpus import read_documents

# A long module docstring would leave no room for code in the prompt.
MODULE_DOCSTRING = re.compile(r'\A(?:#[^\n]*\n|\n)*r?"""(?:.|\n){400,}?"""\n')

NUM_PROMPTS = 64
PROMPT_TOKENS = (60, 300)
REFERENCE_TOKENS = 200


def prompt_cut_positions(text: str) -> list[int]:
    """The offsets at which a prompt may end: after an indented line of code and before another one."""
    cuts, position, quoted = [], 0, False
    lines = text.split("\n")
    for line, following in pairwise(lines):
        position += len(line) + 1
        quoted ^= (line.count('"""') + line.count("'''")) % 2 == 1
        if not quoted and line.startswith("    ") and following.startswith("    ") and following.strip()[:1].isalpha():
            cuts.append(position)
    return cuts


def make_entry(document: dict[str, str], tokenizer: Tokenizer) -> dict[str, str] | None:
    """The prompt of this file; its length depends on the hash of the path.  None if no line fits."""
    text = MODULE_DOCSTRING.sub("", document["text"], count=1).lstrip("\n")
    low, high = PROMPT_TOKENS
    span = int(hashlib.sha256(document["path"].encode()).hexdigest(), 16) % (high - low)
    ends = [0, *(end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets)]
    suitable = [c for c in prompt_cut_positions(text) if low <= sum(1 for e in ends if e <= c) <= high]
    if not suitable or len(ends) < high + REFERENCE_TOKENS:
        return None
    cut = min(suitable, key=lambda c: abs(sum(1 for e in ends if e <= c) - low - span))
    reference = [e for e in ends if e > cut][:REFERENCE_TOKENS]
    return {
        "source": f"cpython/Lib/{document['path']}",
        "license": "PSF-2.0",
        "prompt": text[:cut],
        "reference": text[cut : reference[-1]],
    }


def write_heldout(corpus: Path, tokenizer: Tokenizer, out: Path) -> int:
    documents = [d for d in read_documents(corpus / "heldout.jsonl") if d["source"] == "python"]
    documents.sort(key=lambda d: ("test" in d["path"], hashlib.sha256(d["path"].encode()).digest()))
    entries = [e for d in documents if (e := make_entry(d, tokenizer))][:NUM_PROMPTS]
    out.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in entries), encoding="utf-8")
    return len(entries)
