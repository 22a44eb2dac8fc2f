"""What the commands of a named shape compute at their start is computed once a process."""

from functools import cache, partial

import pytest

from espalier.synthetic import checkpoint
from espalier.synthetic.chain import predicted_accept_length
from espalier.synthetic.checkpoint import Recipe


@pytest.fixture(autouse=True, scope="package")
def skills_are_searched_once():
    """And of fewer samples.  The search for a skill takes longer than the measurement of a tiny shape; tests/synthetic
    checks it."""
    search, recipes = Recipe.with_accept_length, {}

    @cache
    def skill(recipe: str, *tree: float) -> Recipe:
        return search(recipes[recipe], *tree)

    def with_accept_length(recipe: Recipe, wanted: float, steps: int, topk: int, num_draft_tokens: int) -> Recipe:
        # A shape's fields have no hash.
        recipes[repr(recipe)] = recipe
        return skill(repr(recipe), wanted, steps, topk, num_draft_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "predicted_accept_length", partial(predicted_accept_length, samples=256))
        patch.setattr(Recipe, "with_accept_length", with_accept_length)
        yield
