"""The engine process of `python -m lab server`: synthetic models of a named shape instead of a model's files."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from espalier.llm import LLM
from espalier.server.worker import main, unpack_settings
from espalier.terminal.console import require_gpu
from lab.bench.engines import ShapeEngines
from lab.bench.synthetic_models import recipe_with_accept_length


@contextmanager
def load(sent: dict[str, Any]) -> Iterator[LLM]:
    """sent: {"recipe": the keywords of recipe_with_accept_length, "settings": the settings of LLM}."""
    recipe = recipe_with_accept_length(**sent["recipe"])
    with ShapeEngines(recipe, unpack_settings(sent["settings"]), require_gpu("server --shape")).open() as opened:
        yield opened.llm


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), load))
