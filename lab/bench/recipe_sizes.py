"""The sizes of a recipe's models, for its floor."""

from dataclasses import replace

from espalier.bench.linears import ModelShape, model_sizes, with_draft
from espalier.bench.shapes import find_shape
from espalier.kernels.layers.linear_plans import DENSE
from lab.synthetic.checkpoint import Recipe


def recipe_sizes(recipe: Recipe) -> ModelShape:
    target = replace(model_sizes(recipe.shape.target), weights=recipe.weights)
    return with_draft(target, recipe.draft_config, recipe.draft_weights)


def shape_named(
    name: str, mtp_layers: int = 0, block_size: int = 0, weights: str = DENSE, draft_weights: str = DENSE
) -> ModelShape:
    """Returns the sizes of a named shape with a draft.

    mtp_layers: of an MTP head; block_size: of a block draft; both 0: an EAGLE-3 head.  weights, draft_weights: formats.
    Raises EspalierError for an unknown name.
    """
    recipe = Recipe(find_shape(name), mtp_layers=mtp_layers, block_size=block_size)
    return recipe_sizes(replace(recipe, weights=weights, draft_weights=draft_weights))
