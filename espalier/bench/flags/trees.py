"""The type of flags that name a tree."""

from argparse import ArgumentTypeError

from espalier.errors import EspalierError
from espalier.layout import TreeShape


def tree_shape(text: str) -> TreeShape:
    """The type of a flag that takes S,K,D."""
    try:
        steps, topk, num_draft_tokens = map(int, text.split(","))
        return TreeShape(steps, topk, num_draft_tokens)
    except EspalierError as error:
        raise ArgumentTypeError(f"{text!r} is no tree: {error}") from None
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no tree; use steps,topk,num_draft_tokens, such as 5,4,16") from None
