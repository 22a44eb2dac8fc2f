"""The sizes of named shapes with any draft, and the chain's greedy text, for the tests of the laboratory."""

from dataclasses import replace

import torch

from espalier.bench.linears import ModelShape
from espalier.bench.shapes import find_shape
from espalier.kernels.layers.linear_plans import DENSE
from lab.bench.synthetic_models import recipe_sizes
from lab.synthetic.chain import Chain
from lab.synthetic.checkpoint import Recipe


def shape_named(
    name: str, mtp_layers: int = 0, block_size: int = 0, weights: str = DENSE, draft_weights: str = DENSE
) -> ModelShape:
    """The draft is an MTP head of mtp_layers, a block draft of block_size, or an EAGLE-3 head if both are 0."""
    recipe = Recipe(find_shape(name), mtp_layers=mtp_layers, block_size=block_size)
    return recipe_sizes(replace(recipe, weights=weights, draft_weights=draft_weights))


def greedy_continuation(chain: Chain, tokens: list[int], count: int) -> list[int]:
    """The next `count` tokens that greedy decoding emits after `tokens`, by the chain's rule.

    In copy mode the next token is the successor with the same kind as the token `lag` positions before the last
    one, so `tokens` must be longer than the largest lag.
    """
    text = list(tokens)
    for _ in range(count):
        last = text[-1]
        after = chain.successors(torch.tensor(last))
        index = 0
        if chain.mode == "copy" and chain.is_hot[last]:
            far = text[-1 - int(chain.lags[chain.lag_of[last]])]
            index = int((chain.kind[after] == chain.kind[far]).nonzero()[0])
        text.append(int(after[index]))
    return text[len(tokens) :]
