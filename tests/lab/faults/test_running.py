"""A command with a planted fault runs to its end: it shows wrong output, and no error."""

import pytest

from lab.faults.planted import plant
from tests.harness import run
from tests.properties.test_faults import OF_ONE_RANK, SETUP, SHOWN_BY, traffic


@pytest.mark.parametrize("name", [name for name in OF_ONE_RANK if name != "page-freed-twice"])
def test_a_fault_never_raises(name):
    """Where it shows.  page-freed-twice apart: the pool itself refuses when the rightful holder lets go."""
    with plant(name):
        run(SHOWN_BY.get(name, SETUP).engine(), traffic()[:3], check=False)
