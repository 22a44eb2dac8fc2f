"""The trainer: makes the bundled model, and trains EAGLE-3, MTP and block drafts for Llama, Qwen and Mistral targets.

It needs torch, transformers, tokenizers and safetensors.  It does not run the engine.
"""

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def start(arguments: Sequence[str] | None = None) -> int:
    """`python -m espalier.train`.  Ctrl-C during the imports, which take seconds, also gives one line."""
    try:
        from espalier.train.command import main
    except KeyboardInterrupt:
        return interrupted()
    return main(arguments)


def interrupted() -> int:
    print("espalier.train: interrupted", file=sys.stderr)
    return INTERRUPTED
