"""Chat prompts of five kinds, made of topics, of Python's standard library and of descriptions of installed packages.

Held-out prompts come from files and topics of their own.  Each line says its licence.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from espalier.train.command import non_empty_path
from lab.bundle.corpus import installed_sources, is_permissive, license_of
from lab.chat import words

OWN_LICENSE = "Apache-2.0"
# Characters of a piece of code and of a paragraph.
CODE_SIZES, TEXT_SIZES = (150, 1200), (300, 1200)
HELDOUT_SHARE = 24  # of 256


class SourcePiece(NamedTuple):
    """A function or a paragraph.  source: decides whether it is held out."""

    text: str
    source: str
    license: str

    @property
    def is_held_out(self) -> bool:
        return hashlib.sha256(self.source.encode()).digest()[0] < HELDOUT_SHARE


class PromptLine(NamedTuple):
    kind: str
    prompt: str
    license: str
    source: str

    def record(self) -> str:
        messages = [{"role": "user", "content": self.prompt}]
        return json.dumps({"kind": self.kind, "messages": messages, "license": self.license, "source": self.source})


def documented_functions(text: str) -> Iterator[str]:
    """The source of each function that has a docstring."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            code = ast.get_source_segment(text, node)
            if code and CODE_SIZES[0] <= len(code) <= CODE_SIZES[1]:
                yield re.sub(f"(?m)^{' ' * node.col_offset}", "", code)


def code_pieces() -> list[SourcePiece]:
    [stdlib] = [source for source in installed_sources([]) if source.name == "python"]
    found = []
    for path in stdlib.paths:
        name = path.relative_to(stdlib.root).as_posix()
        if "test" not in name and "idlelib" not in name:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [SourcePiece(code, f"cpython/Lib/{name}", "PSF-2.0") for code in documented_functions(text)]
    return found


def text_pieces() -> list[SourcePiece]:
    """Paragraphs of prose: of descriptions of packages with a permissive licence, and of docstrings of modules."""
    found = []
    for package in metadata.distributions():
        stated = license_of(package)
        if is_permissive(stated):
            body = str(package.metadata.json.get("description", ""))
            found += [SourcePiece(each, package.metadata["Name"], stated) for each in prose_paragraphs(body)]
    [stdlib] = [source for source in installed_sources([]) if source.name == "python"]
    for path in stdlib.paths:
        name = path.relative_to(stdlib.root).as_posix()
        try:
            about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8", errors="replace"))) or ""
        except SyntaxError:
            continue
        if "test" not in name:
            found += [SourcePiece(each, f"cpython/Lib/{name}", "PSF-2.0") for each in prose_paragraphs(about)]
    for topic, about in topics.items():  # the language reference
        found += [SourcePiece(each, f"cpython/Doc/{topic}", "PSF-2.0") for each in prose_paragraphs(about)]
    return list({piece.text: piece for piece in found}.values())


def prose_paragraphs(text: str) -> Iterator[str]:
    """Runs of prose: paragraphs of sentences, joined up to the largest size."""
    run = ""
    for part in [*re.split(r"\n\s*\n", text.replace("\r", "")), ""]:
        part = " ".join(part.split())
        is_prose = part.count(" ") > 8 and not re.search(r"^[|#>*`=\-\[.<!]|https?://|::|&lt;", part)
        if not is_prose or len(run) + len(part) > TEXT_SIZES[1]:
            if TEXT_SIZES[0] <= len(run):
                yield run
            run = ""
        run = f"{run}\n\n{part}".strip() if is_prose and len(part) <= TEXT_SIZES[1] else run


def code_prompt(piece: SourcePiece, template: str) -> str:
    lines = piece.text.split("\n")
    doc = ast.parse(piece.text).body[0].body[0]  # type: ignore[attr-defined]
    name = re.search(r"def (\w+)", piece.text)
    half = "\n".join(lines[: max(doc.end_lineno, len(lines) // 2)])
    head = "\n".join(lines[: doc.end_lineno])
    return template.format(name=name and name[1], head=head, code=piece.text, half=half)


def make_prompts(held_out: bool, max_per_kind: int, seed: int) -> list[PromptLine]:
    """At most `max_per_kind` prompts of every kind, in random order."""
    rng = random.Random(seed)
    codes = [piece for piece in code_pieces() if piece.is_held_out == held_out]
    texts = [piece for piece in text_pieces() if piece.is_held_out == held_out]
    subjects = [t for t in words.TOPICS if SourcePiece("", t, "").is_held_out == held_out]
    lines = [PromptLine("code", code_prompt(p, form), p.license, p.source) for p in codes for form in words.CODE_FORMS]
    lines += [
        PromptLine("summary", form.format(p.text), p.license, p.source) for p in texts for form in words.SUMMARY_FORMS
    ]
    for piece in texts:
        for form in words.JSON_EXTRACTION_FORMS:
            prompt = form.format(", ".join(rng.sample(words.JSON_FIELDS, 3)), piece.text)
            lines.append(PromptLine("json", prompt, piece.license, piece.source))
        half = piece.text[: len(piece.text) // 2].rpartition(" ")[0]
        lines.append(PromptLine("prose", f"Continue this text:\n\n{half}", piece.license, piece.source))
    for topic in subjects:
        for form in words.JSON_OBJECT_FORMS:
            for _ in range(1 if held_out else 6):
                prompt = form.format(topic, ", ".join(rng.sample(words.JSON_FIELDS, 4)))
                lines.append(PromptLine("json", prompt, OWN_LICENSE, topic))
        if not held_out:
            for asked in (topic, *(f"{topic} and {other}" for other in rng.sample(subjects, 2))):
                lines += [PromptLine("chat", form.format(asked), OWN_LICENSE, topic) for form in words.QUESTION_FORMS]
                lines += [PromptLine("prose", form.format(asked), OWN_LICENSE, topic) for form in words.PROSE_FORMS]
    if held_out:
        lines += [PromptLine("chat", prompt, OWN_LICENSE, "lab/chat/words.py") for prompt in words.HELDOUT_CHAT]
        lines = [line for line in lines if line.kind != "prose"]
        lines += [PromptLine("prose", prompt, OWN_LICENSE, "lab/chat/words.py") for prompt in words.HELDOUT_PROSE]
    rng.shuffle(lines)
    kinds = sorted({line.kind for line in lines})
    kept = [line for kind in kinds for line in [each for each in lines if each.kind == kind][:max_per_kind]]
    rng.shuffle(kept)
    return kept


def main() -> None:
    parser = ArgumentParser(prog="python -m lab.chat.prompts", description=__doc__)
    parser.add_argument("--out", type=non_empty_path, required=True, help="a folder for train.jsonl and heldout.jsonl")
    parser.add_argument("--each", type=int, default=5000, metavar="N", help="prompts of a kind at most (5000)")
    parser.add_argument("--held-out", type=int, default=12, metavar="N", help="held-out prompts of a kind (12)")
    arguments = parser.parse_args()
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    for name, held_out, each in (("train", False, arguments.each), ("heldout", True, arguments.held_out)):
        lines = make_prompts(held_out, each, seed=1)
        text = "".join(line.record() + "\n" for line in lines)
        (arguments.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        counts = {kind: sum(line.kind == kind for line in lines) for kind in sorted({line.kind for line in lines})}
        print(f"{name}: {counts}, {len(text) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
