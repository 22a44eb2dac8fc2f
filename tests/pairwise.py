"""Arrays in which every two factors take every two of their values together: most bugs need no third."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(
    factors: Mapping[str, Sequence[Any]], impossible: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Rows in which every two factors take every two values that go together.  Greedy and deterministic."""
    pairs = {
        frozenset({(f, v), (g, w)}): {f: v, g: w}
        for f, g in combinations(factors, 2)
        for v, w in product(factors[f], factors[g])
        if not impossible({f: v, g: w})
    }
    rows: list[dict[str, Any]] = []
    while pairs:
        row = next(iter(pairs.values()))
        for factor in factors:
            if factor not in row:
                values = [value for value in factors[factor] if not impossible({**row, factor: value})]
                # Ties go to the value that the fewest rows have so far, so that the array is balanced too.
                row[factor] = max(
                    values, key=lambda value: (gain(pairs, row, factor, value), -used(rows, factor, value))
                )
        for pair in combinations(row.items(), 2):
            pairs.pop(frozenset(pair), None)
        rows.append(row)
    return rows


def gain(pairs: Container[frozenset], row: Mapping[str, Any], factor: str, value: Any) -> int:
    """Pairs that the row would newly cover with this value."""
    return sum(frozenset({(factor, value), known}) in pairs for known in row.items())


def used(rows: list[dict[str, Any]], factor: str, value: Any) -> int:
    return sum(row[factor] == value for row in rows)


def rows_of(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def product_params(*factors: Sequence[Any], marks: Any = ()) -> list[Any]:
    """The whole product, for pytest.mark.parametrize."""
    return [pytest.param(*values, marks=marks, id=cell_id(values)) for values in product(*factors)]


def pairwise_params(*factors: Sequence[Any]) -> list[Any]:
    """The whole product, for pytest.mark.parametrize; what the pairwise array leaves out has the marker `full`."""
    places = {str(i): range(len(values)) for i, values in enumerate(factors)}
    kept = {tuple(row[name] for name in places) for row in pairwise(places, lambda _: False)}
    return [
        pytest.param(*values, marks=() if at in kept else pytest.mark.full, id=cell_id(values))
        for at, values in zip(product(*places.values()), product(*factors), strict=True)
    ]


def in_turn_params(*factors: Sequence[Any]) -> list[Any]:
    """The whole product, for pytest.mark.parametrize.  One cell for each value of the longest factor stays, with each
    value of the other factors in at least one of them; all other cells have the marker `full`.

    For a test whose file has other tests in which every pair of values meets.
    """
    longest, period = max(factors, key=len), 1
    places: list[list[int]] = []
    for values in factors:
        turn = 1 if values is longest else period
        period *= 1 if values is longest else len(values)
        places.append([i // turn % len(values) for i in range(len(longest))])
    kept = set(zip(*places, strict=True))
    assert all(len(set(column)) == len(values) for column, values in zip(places, factors, strict=True))
    return [
        pytest.param(*values, marks=() if at in kept else pytest.mark.full, id=cell_id(values))
        for at, values in zip(product(*(range(len(each)) for each in factors)), product(*factors), strict=True)
    ]


def fewest_params(cells: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Cells by their factors, for pytest.mark.parametrize.  As few stay as hold every value of every factor; all others
    have the marker `full`.

    For the array of what another test's array covers pair by pair.
    """
    missing = {(name, str(value)) for cell in cells for name, value in cell.items()}
    kept = set()
    while missing:
        held = [missing & {(name, str(value)) for name, value in cell.items()} for cell in cells]
        at = max(range(len(cells)), key=lambda i: len(held[i]))
        kept.add(at)
        missing -= held[at]
    return [
        pytest.param(cell, marks=() if i in kept else pytest.mark.full, id=cell_id(list(cell.values())))
        for i, cell in enumerate(cells)
    ]


def fewer(cases: Iterable[Any], is_usual: Callable[..., bool]) -> list[Any]:
    """The cases, for pytest.mark.parametrize; those whose values are not usual have the marker `full`."""
    marked = []
    for case in cases:
        param = case if isinstance(case, type(pytest.param())) else None
        values = param.values if param else case if isinstance(case, tuple) else (case,)
        if is_usual(*values):
            marked.append(case)
        else:
            marks = (*(param.marks if param else ()), pytest.mark.full)
            marked.append(pytest.param(*values, marks=marks, id=param.id if param else None))
    return marked


def cell_id(values: Sequence[Any]) -> str:
    """The same in every process: a function is known by its name, for its str holds an address."""
    return "-".join(getattr(value, "__name__", str(value)) for value in values)
