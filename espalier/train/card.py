"""Writes the model card of a trained draft: a README.md with the draft's training data and measurements."""

from __future__ import annotations

import platform
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from espalier import __version__
from espalier.terminal.flags import flag_of
from espalier.train.data import UserText
from espalier.train.settings import TrainConfig
from espalier.train.work import replace_file

CARD_TEMPLATE = """# A draft of the kind {kind}

Made by `espalier train` {version} (PyTorch {torch}, {device}) for the target {target}. Use it with

    espalier serve {target} --draft {out}

A draft does not change what the target says; it changes how fast.

| made from | |
| --- | --- |
| data | {data} |
| licences of the data | {licenses} |
| command | `{command}` |
| settings | `{settings}` |

| measured | |
| --- | --- |
{figures}

`accept_length_*` is the mean number of tokens of a round, after every position of the target's greedy text on
held-out prompts; `agreement_n` the share of the draft's likeliest tokens at depth n that are the target's, in training.
"""


def write_card(
    out: Path, kind: str, target: Path, data: UserText, figures: Mapping[str, float], config: TrainConfig
) -> None:
    """Writes the README.md of a draft of kind `kind`.  figures: the results of its training, by name."""
    num_conversations = Counter(conversation.kind or "conversations" for conversation in data.conversations)
    sources = [f"{count} {name}" for name, count in num_conversations.items()]
    sources += [f"{len(data.stream)} tokens of documents"] if len(data.stream) else []
    text = CARD_TEMPLATE.format(
        kind=kind,
        version=__version__,
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        target=target,
        out=out,
        data=", ".join(sources),
        licenses=", ".join(data.licenses) or "the data do not say",
        command=shlex.join(["espalier", *sys.argv[1:]]),
        settings=" ".join(f"{flag_of(name)} {value}" for name, value in asdict(config).items() if value is not None),
        figures="\n".join(f"| {name} | {value:.4g} |" for name, value in figures.items()),
    )
    with replace_file(out / "README.md", "free some space there, or give another --out") as unfinished:
        unfinished.write_text(text)
