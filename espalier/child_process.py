"""The environment of processes that run other modules of this package: they import what their parent imports."""

import os
from pathlib import Path


def environment(**changes: str) -> dict[str, str]:
    """Returns a copy of os.environ with changes.

    `python -m` imports from the working directory first, which may hold another espalier, such as a clone beside an
    installed release.
    """
    is_here = Path(__file__).parents[1] == Path.cwd()
    return {**os.environ, **({} if is_here else {"PYTHONSAFEPATH": "1"}), **changes}
