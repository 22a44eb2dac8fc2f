"""The sizes of a recipe's models, for its floor."""

from dataclasses import replace

from espalier.bench.linears import ModelShape, model_sizes, with_draft
from lab.synthetic.checkpoint import Recipe


def recipe_sizes(recipe: Recipe) -> ModelShape:
    target = replace(model_sizes(recipe.shape.target), weight_format=recipe.weights)
    return with_draft(target, recipe.draft_config, recipe.draft_weights)
