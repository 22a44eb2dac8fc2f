"""Each planted fault is caught by a property that does not know of it: the very function that holds when nothing is
planted."""

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from espalier.cache.pages import PageDefect
from espalier.errors import EspalierError
from espalier.guard.faults import FAULTS, find, plant, plant_from_environment
from espalier.request import Request, SamplingParams
from tests.harness import Setup, prompts, request
from tests.properties import watch as held
from tests.properties.layouts import reference_of
from tests.properties.summary import FAULT
from tests.properties.watch import PROPERTIES, Watch, run_watched

SETUP = Setup(steps=4, topk=3, num_draft_tokens=24, page_size=2, max_batch=3, max_context=48, chunk_size=16)


def traffic() -> list[Request]:
    """Ragged and mixed, two requests more than slots, the last a repetition of the first: all of its pages are
    found."""
    drawn = prompts(17, [7, 3, 12, 5])
    temperatures = (6.0, 0.0, 1.0, 2.0, 6.0)
    return [
        request(i, prompt, SamplingParams(temperature=temperatures[i], max_tokens=20))
        for i, prompt in enumerate([*drawn, drawn[0]])
    ]


def holds(*properties: str, setup: Setup = SETUP) -> None:
    """Run the traffic and hold these properties over it.  Raises AssertionError where one fails."""
    run_watched(Watch(setup.engine(), setup.algorithm, reference_of(setup), properties), traffic())


def caught(property: str) -> bool:
    try:
        holds(property)
    except PageDefect:
        # The pool's own books, which anything that lets go of a page may trip over: that is conservation's catch alone.
        return property == held.CONSERVED
    except AssertionError:
        return True
    return False


# The property that is there to catch it.  Others may, too; the summary lists them all.
CATCHES = {
    "sibling-committed": held.INCREMENTAL,
    "extend-one-short": held.INCREMENTAL,
    "wrong-ancestor": held.PROPOSAL,
    "rows-without-topk": held.PROPOSAL,
    "table-column-off": held.INCREMENTAL,
    "stale-hidden": held.READY,
    "packed-stride": held.INCREMENTAL,
    "per-branch-reserve": held.RESERVE,
    "parent-noise": held.TOKENS,
    "page-freed-twice": held.CONSERVED,
}


@pytest.mark.parametrize("overlap", [False, True])
def test_unbroken_every_property_holds(overlap):
    holds(*PROPERTIES, setup=replace(SETUP, overlap=overlap))


@pytest.mark.parametrize("name", FAULTS)
def test_a_property_catches(name, put_on_record):
    with plant(name) as fault:
        noticed = [property for property in PROPERTIES if caught(property)]
    assert CATCHES[name] in noticed
    first = [CATCHES[name], *(property for property in noticed if property != CATCHES[name])]
    put_on_record(FAULT, [name, " ".join(fault.reports) or "-", ", ".join(first)])


# What it takes for a fault to show at all: without it, the broken path is the right one and nobody may complain.
HARMLESS: dict[str, dict] = {
    "wrong-ancestor": {"topk": 1, "num_draft_tokens": 5},
    "rows-without-topk": {"topk": 1, "num_draft_tokens": 5},
    "packed-stride": {"max_batch": 1},
    "table-column-off": {"page_size": 64},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_where_a_fault_changes_nothing_no_property_fails(name):
    with plant(name):
        holds(*PROPERTIES, setup=replace(SETUP, **HARMLESS[name]))


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "page-freed-twice"])
def test_a_fault_never_raises(name):
    """page-freed-twice apart: the pool itself refuses when the rightful holder lets go."""
    with plant(name):
        holds()


def test_what_was_planted_is_gone_afterwards():
    for name in FAULTS:
        with plant(name):
            pass
    holds(*PROPERTIES)


REPORTS = ("27460", "27338", "27428", "27360", "22832", "21987", "19807", "26972", "26866")


@pytest.mark.parametrize("number", REPORTS)
def test_a_report_is_a_name_too(number):
    assert number in find(number).reports
    assert [fault.name for fault in FAULTS.values() if number in fault.reports] == [find(number).name]


def test_an_unknown_fault_is_refused_by_name():
    with pytest.raises(EspalierError, match="'12345' is unknown; use one of sibling-committed, "):
        find("12345")


@pytest.fixture
def unplanted(monkeypatch) -> Callable[[Collection[str]], None]:
    """Put right again, at the end, what these faults break for good."""
    import importlib

    def keep(names: Collection[str]) -> None:
        for name in names:
            module, _, path = FAULTS[name].where.partition(":")
            assert "." not in path
            owner = importlib.import_module(module)
            monkeypatch.setattr(owner, path, getattr(owner, path))

    return keep


def test_the_environment_plants_a_fault_once(monkeypatch, caplog, unplanted):
    from espalier.speculate.drafters import autoregressive

    unplanted(["wrong-ancestor"])
    monkeypatch.delenv("ESPALIER_FAULT", raising=False)
    assert plant_from_environment() is None
    monkeypatch.setenv("ESPALIER_FAULT", "wrong-ancestor")
    assert plant_from_environment() is FAULTS["wrong-ancestor"]
    planted = autoregressive.grow
    assert plant_from_environment() is FAULTS["wrong-ancestor"] and autoregressive.grow is planted
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "wrong on purpose" in caplog.text
    assert caught(held.PROPOSAL)
