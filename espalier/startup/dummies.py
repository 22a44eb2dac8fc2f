"""Prefill passes of the dummy slot: the fullest, for measurements, and those whose kernels are compiled at the start.

Which kernels a pass needs follows from its width, its pieces, its requests, the rows whose log-probabilities are asked
for, and whether a grammar masks tokens.  These passes together need every kernel that a pass can need, so that nothing
compiles while requests wait (tests/startup/test_dummies.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from espalier.engine.launch_input import LaunchInput, of_dummies
from espalier.layout import RoundLayout
from espalier.limits import MAX_LOGPROBS
from espalier.sampling.mask import mask_words
from espalier.sampling.prompt import PromptRows


def fullest_pass(layout: RoundLayout, width: int) -> LaunchInput:
    """As many pieces of this width as a pass holds, of as many requests as possible, with all log-probabilities."""
    num_pieces = layout.max_pieces(width)
    return dummy_pass(width, num_pieces, min(layout.max_batch, num_pieces), num_pieces * width)


def smaller_passes(layout: RoundLayout, vocab_size: int) -> Iterator[LaunchInput]:
    """The passes that need kernels which no fullest pass needs.

    Launchers choose blocks and plans by the rows, most of them rounded up to a power of two.  So the narrowest width
    runs with powers of two and with one piece more.  Triton compiles other code for one row, and for a number of rows
    that 16 divides.
    """
    narrowest, *wider = layout.chunk_widths
    most = layout.max_pieces(narrowest)
    powers = [1 << i for i in range(most.bit_length())]
    for num_pieces in powers:
        requests = min(num_pieces, layout.max_batch)
        masks = np.zeros((requests, 1, mask_words(vocab_size)), np.int32)
        yield replace(dummy_pass(narrowest, num_pieces, requests, num_pieces * narrowest), masks=masks)
    for num_pieces in (1, *(power + 1 for power in powers)):
        if num_pieces <= most:
            requests = min(max(num_pieces // 2, 1), layout.max_batch)
            yield dummy_pass(narrowest, num_pieces, requests, (num_pieces - 1) * narrowest + 1)
    yield from passes_of_last_rows(layout, powers)
    # Attention chooses by the width, and by whether few pieces fill the GPU.
    for width in wider:
        for num_pieces in range(1, min(2, layout.max_pieces(width)) + 1):
            yield dummy_pass(width, num_pieces, 1, 0)


def passes_of_last_rows(layout: RoundLayout, powers: Sequence[int]) -> Iterator[LaunchInput]:
    """Passes whose last layer computes a row of each piece: without log-probabilities.

    powers: of two, up to the most pieces of a pass.  Rounds cover those up to max_batch.
    """
    narrowest, *wider = layout.chunk_widths
    most = layout.max_pieces(narrowest)
    above = [power for power in powers if power > layout.max_batch]
    wanted = {most - 1, *above, *(power * 3 // 2 + 1 for power in above), *(power + 1 for power in powers)}
    for num_pieces in sorted(wanted):
        if 0 < num_pieces <= most:
            yield dummy_pass(narrowest, num_pieces, min(num_pieces, layout.max_batch), 0)
    for width in wider[:1]:
        yield dummy_pass(width, layout.max_pieces(width), 1, 0)


def dummy_pass(width: int, num_pieces: int, requests: int, reported: int) -> LaunchInput:
    """A pass whose pieces are spread over the requests.  reported: rows, from the first, with log-probabilities."""
    dummies = of_dummies(requests, width, num_pieces if num_pieces > requests else 0)
    rows = None
    if reported:
        others = requests - 1
        rows = PromptRows(((0, reported), *((0, 0),) * others), (MAX_LOGPROBS, *(0,) * others))
    return replace(dummies, prompt_rows=rows)
