"""A drafter that only docs/development.md knows: the page's example is run as it stands, and so is its test."""

import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from espalier import LLM, SpeculationConfig
from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.models import DraftSpec
from espalier.speculate.drafters import registry
from espalier.speculate.drafters.base import DrafterWithoutFiles
from espalier.startup import load
from tests.harness import directories

PAGE = Path(__file__).parents[2] / "docs" / "development.md"


@pytest.fixture
def example(monkeypatch) -> dict[str, Any]:
    """The names of the page's example, whose drafter is registered."""
    monkeypatch.setattr(registry, "WITHOUT_FILES", dict(registry.WITHOUT_FILES))
    names: dict[str, Any] = {"__name__": "example"}
    for block in re.findall(r"^<!-- example: drafter.*? -->\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_equalities_hold_of_the_pages_drafter(example):
    example["test_the_equalities_hold"]()


def test_a_proposal_that_differs_is_noticed(example):
    def late(tokens, steps, topk):
        yield from example["period"](tokens, min(steps, 2), topk)

    with pytest.raises(AssertionError, match="path"):
        example["check_drafter"]("period", late)


def test_a_user_names_the_algorithm(example):
    target, _ = directories()
    config = {"model": str(target), "device": "cpu", "dtype": "float64", "max_context": 64, "num_pages": 40, "seed": 0}
    with LLM(**config, speculation=SpeculationConfig(algorithm="period")) as llm:
        assert (llm.config.algorithm, llm.config.layout.steps > 0) == ("period", True)
        [out] = llm.generate([[3, 4, 5]])
    with LLM(**config, speculation=None) as plain:
        assert plain.generate([[3, 4, 5]])[0].token_ids == out.token_ids


def test_an_installed_package_brings_one(monkeypatch):
    points = EntryPoints([EntryPoint("installed", f"{__name__}:Installed", registry.ENTRY_POINTS)])
    monkeypatch.setattr(EntryPoint, "load", lambda point: Installed)
    monkeypatch.setattr(registry, "entry_points", points.select)
    config = EngineConfig(model=directories()[0], speculation=SpeculationConfig(algorithm="installed"))
    assert load.find_checkpoint(config).spec == Installed.spec
    with pytest.raises(EspalierError, match=r"algorithm='unheard' is not supported; use .*, none, installed or"):
        load.find_checkpoint(EngineConfig(model=directories()[0], speculation=SpeculationConfig(algorithm="unheard")))


class Installed(DrafterWithoutFiles):
    spec = DraftSpec("installed")


def test_one_that_declares_something_else_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "WITHOUT_FILES", {"other": Installed})
    with pytest.raises(EspalierError, match=r"algorithm='other' .* declares DraftSpec\(algorithm='installed'.*give it"):
        registry.drafter_without_files("other")
