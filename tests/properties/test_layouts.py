"""Every property in every layout: the three equalities, the tokens, and the pages, after every launch."""

from itertools import combinations, product

import pytest

from tests.pairwise import fewest
from tests.properties.layouts import (
    AROUND,
    AROUND_NGRAM,
    ARRAY_LAYOUTS,
    FEW_LAYOUTS,
    LAYOUTS,
    Cell,
    all_cells,
    family_cells,
    gemma_cells,
    hosted_cells,
    impossible,
    is_refused,
    latent_cells,
    one_a_hosted_family,
    pairwise_cells,
    reference_of,
    refused_cells,
)
from tests.properties.summary import CELL, REFUSED
from tests.properties.watch import Watch, run_watched

FEW = pairwise_cells(FEW_LAYOUTS)
# The target's pass does not know who proposed its tree: with n-grams every value, with EAGLE-3 every pair of them.
BY_NGRAM = [cell for cell in FEW if cell.algorithm == "ngram"]
FEW_BY_NGRAM = [BY_NGRAM[at] for at in sorted(fewest([vars(cell) for cell in BY_NGRAM]))]
# Heads of different sizes and K as V; rows of earlier layers.  tests/models has soft-caps and a Gemma's experts.
SOME_GEMMAS = [cell for cell in gemma_cells()[:4] if cell.keeps in ("gemma4", "gemma4_e")]
# Of the hosted ones: one that has no native family, with windows.
SOME_HOSTED = [cell for cell in one_a_hosted_family() if cell.hosted == "starcoder2"]
FEW_BY_EAGLE3 = [cell for cell in FEW if cell.algorithm == "eagle3"]
DEFAULT = list(dict.fromkeys([*FEW_BY_EAGLE3, *FEW_BY_NGRAM, *SOME_GEMMAS, *family_cells()[:1], *SOME_HOSTED]))
ALL_FAMILIES = [*family_cells(), *gemma_cells(), *one_a_hosted_family(), *hosted_cells(LAYOUTS)]
MORE = [*FEW, *pairwise_cells(ARRAY_LAYOUTS), *pairwise_cells(LAYOUTS), *all_cells(), *latent_cells(), *ALL_FAMILIES]
FULL = [cell for cell in dict.fromkeys(MORE) if cell not in DEFAULT]


@pytest.mark.parametrize("cell", [*DEFAULT, *(pytest.param(cell, marks=pytest.mark.full) for cell in FULL)], ids=str)
def test_every_property_holds(cell: Cell, put_on_record):
    setup = cell.setup
    watch = Watch(setup.engine(), cell.algorithm, reference_of(setup))
    put_on_record(CELL, run_watched(watch, cell.traffic))


@pytest.mark.parametrize("cell", refused_cells(), ids=str)
def test_a_cell_that_no_tree_fills_is_refused(cell: Cell, put_on_record):
    assert is_refused(cell)
    put_on_record(REFUSED, str(cell))


def test_no_other_cell_is_refused():
    assert [str(cell) for cell in all_cells() if is_refused(cell)] == []


@pytest.mark.parametrize("layouts", [FEW_LAYOUTS, ARRAY_LAYOUTS], ids=["few", "array"])
@pytest.mark.parametrize("algorithm", AROUND["algorithm"])
def test_the_array_holds_every_pair(algorithm, layouts):
    around = {name: values for name, values in AROUND.items() if name != "algorithm"}
    factors = {**layouts, **(around if algorithm == "eagle3" else AROUND_NGRAM)}
    cells = [cell for cell in pairwise_cells(layouts) if cell.algorithm == algorithm]
    for (f, values), (g, others) in combinations(factors.items(), 2):
        there = {(getattr(cell, f), getattr(cell, g)) for cell in cells}
        wanted = {pair for pair in product(values, others) if not impossible({f: pair[0], g: pair[1]})}
        assert there == wanted, f"{f} with {g}"
