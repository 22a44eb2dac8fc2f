"""Measurements of tiny models measure little: what is searched, foretold and waited for has no other use there."""

from functools import cache, partial

import pytest

from lab.bench import choose, prefill
from lab.synthetic import checkpoint
from lab.synthetic.chain import predicted_accept_length
from lab.synthetic.checkpoint import Recipe

SAMPLES = 64

_search = Recipe.with_accept_length
_recipes: dict[str, Recipe] = {}


@cache
def _skill(recipe: str, *tree: float) -> Recipe:
    return _search(_recipes[recipe], *tree)


def _with_accept_length(recipe: Recipe, wanted: float, steps: int, topk: int, num_draft_tokens: int) -> Recipe:
    # A shape's fields have no hash.
    _recipes[repr(recipe)] = recipe
    return _skill(repr(recipe), wanted, steps, topk, num_draft_tokens)


@pytest.fixture(autouse=True, scope="module")
def skills_are_searched_once():
    """Once a process, and with fewer samples.  The search for a skill takes longer than the measurement of a tiny
    shape; tests/lab/synthetic checks it, with all samples."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint, choose):
            patch.setattr(module, "predicted_accept_length", partial(predicted_accept_length, samples=SAMPLES))
        patch.setattr(Recipe, "with_accept_length", _with_accept_length)
        patch.setattr(prefill, "ROUNDS_BEFORE_PROMPT", 6)
        yield
