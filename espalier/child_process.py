"""Makes the environment variables of child processes, so that they import the same espalier as their parent."""

import os
from pathlib import Path


def environment(**changes: str) -> dict[str, str]:
    """Returns a copy of os.environ with changes.

    `python -m` imports from the working directory first, which may hold another espalier, such as a clone.
    """
    is_here = Path(__file__).parents[1] == Path.cwd()
    return {**os.environ, **({} if is_here else {"PYTHONSAFEPATH": "1"}), **changes}
