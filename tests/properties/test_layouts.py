"""Every property in every layout: the three equalities, the tokens, and the pages, after every launch."""

from itertools import combinations, product

import pytest

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

# Of the hosted ones: windows and scaled embeddings, and one that has no native family.
SOME_HOSTED = [cell for cell in one_a_hosted_family() if cell.hosted in ("gemma3", "starcoder2")]
DEFAULT = list(dict.fromkeys([*pairwise_cells(FEW_LAYOUTS), *gemma_cells()[:4], *family_cells()[:1], *SOME_HOSTED]))
ALL_FAMILIES = [*family_cells(), *gemma_cells(), *one_a_hosted_family(), *hosted_cells(LAYOUTS)]
MORE = [*pairwise_cells(ARRAY_LAYOUTS), *pairwise_cells(LAYOUTS), *all_cells(), *latent_cells(), *ALL_FAMILIES]
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
