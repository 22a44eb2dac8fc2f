"""Packed masks, and rounds that the host stops to mask: a tree says what plain decoding says under the same
masks."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from espalier.grammar.token_masker import ForcedTokens
from espalier.kernels.sampling.pick import sample_triton
from espalier.request import SamplingParams
from espalier.sampling.mask import DraftGuide, apply_mask, mask_words, unpack_mask
from tests.harness import VOCAB, Setup, prompts, request, run
from tests.kernels.sampled import ASKED, kernel_rows, random_logits, slots_of, table_of
from tests.masks import pack_mask
from tests.pairwise import in_turn_params


class Turns:
    """A toy grammar: after token t only tokens of its own kind, (t + pushed) % 3, may follow, and 0."""

    def __init__(self, last: int) -> None:
        self.pushed, self.last = 0, last

    def push(self, token_id: int) -> None:
        self.pushed, self.last = self.pushed + 1, token_id

    def allowed(self, token: int, depth: int) -> torch.Tensor:
        ids = torch.arange(VOCAB)
        return (ids % 3 == (token + self.pushed + depth) % 3) | (ids == 0)

    def root_mask(self) -> np.ndarray:
        return pack_mask(self.allowed(self.last, 0)).numpy()

    def node_masks(self, tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> None:
        depths: list[int] = []
        for i, parent in enumerate(parents):
            depths.append(depths[parent] + 1 if i else 0)
            out[i] = pack_mask(self.allowed(tokens[i], depths[i])).numpy()

    def forced_tokens(self, most: int) -> ForcedTokens:
        return ForcedTokens([], self.root_mask())

    def mask_after(self, path: Sequence[int]) -> np.ndarray:
        return pack_mask(self.allowed(path[-1], len(path))).numpy()

    is_stuck = False


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_packing(vocab):
    allowed = torch.rand(3, 2, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.5
    mask = pack_mask(allowed)
    assert mask.dtype == torch.int32 and mask.shape[-1] == mask_words(vocab)
    assert torch.equal(unpack_mask(mask, vocab), allowed)
    assert torch.equal(apply_mask(torch.ones(3, 2, vocab), mask).isfinite(), allowed)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)], ids=str)
def test_the_kernel_picks_as_from_logits_without_them(dtype, kernel_device):
    vocab, queries, asked = 70, 2, ASKED[::3]
    slots = slots_of(table_of(asked, vocab, kernel_device), range(1, len(asked) + 1))
    logits = random_logits(1, len(asked), queries, vocab, dtype=dtype).to(kernel_device)
    allowed = torch.rand(*logits.shape, generator=torch.Generator().manual_seed(2)) < 0.3
    allowed[..., 5] = True
    mask = pack_mask(allowed).to(kernel_device)
    first = torch.full((len(asked),), 9, device=kernel_device)
    offsets = torch.arange(queries, device=kernel_device).expand(len(asked), -1).contiguous()
    ours, finite = sample_triton(logits, kernel_rows(slots), first, offsets, mask=mask)
    expected, _ = sample_triton(apply_mask(logits, mask), kernel_rows(slots), first, offsets)
    assert finite.all() and torch.equal(ours, expected)
    assert allowed.to(kernel_device).gather(2, ours[..., None]).all()


@pytest.mark.parametrize(("overlap", "algorithm"), in_turn_params([False, True], ["eagle3", "ngram"]))
def test_a_tree_says_what_plain_decoding_says(algorithm, overlap):
    setup = Setup(algorithm=algorithm, steps=3, topk=3, num_draft_tokens=9, page_size=2, overlap=overlap)

    def say(setup: Setup) -> list[list[int]]:
        asked = [
            request(i, prompt, SamplingParams(max_tokens=14, temperature=0.0 if i % 2 else 1.3))
            for i, prompt in enumerate(prompts(5, (3, 9, 17, 5)))
        ]
        for one in asked[:3]:
            one.masker = Turns(one.prompt[-1])
        return run(setup.engine(), asked).tokens

    tree, plain = say(setup), say(setup.plain())
    assert tree == plain
    first = request(0, prompts(5, (3,))[0], SamplingParams(max_tokens=14, temperature=1.3))
    free = run(setup.engine(), [first]).tokens
    assert free[0] != tree[0], "the masks change what is said"
    for prompt, said in zip(prompts(5, (3, 9, 17)), tree[:3], strict=True):
        grammar = Turns(prompt[-1])
        for before, token in zip([prompt[-1], *said], said, strict=False):
            assert grammar.allowed(before, 0)[token]
            grammar.push(token)


def test_rows_of_several_levels_are_guided_as_those_of_each_level():
    """A block draft has one row for each level, an autoregressive draft one pass."""
    forced = torch.tensor([[3, 5, -1, -1], [-1, -1, -1, -1], [2, 2, 2, -1]])
    guide = DraftGuide(forced, torch.tensor([[6], [9], [1]], dtype=torch.int32), torch.tensor([3, 1, 0]))
    only, masks = guide.allowed_at_levels(1, 4)
    for level in range(1, 5):
        only_there, mask_there = guide.allowed_children(level, None, None)
        assert torch.equal(only[:, level - 1, None], only_there)
        assert torch.equal(masks[:, level - 1, None], mask_there)
