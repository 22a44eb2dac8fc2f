"""The description of a planted fault."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FaultMaker = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Fault:
    """A fault that replaces one function of the engine.

    defect: the defect in one sentence; target: "module:owner.attribute" of the replaced function; make_wrong: makes the
    wrong function from the right one; reports: numbers of the bug reports with this defect.
    """

    name: str
    defect: str
    target: str
    make_wrong: FaultMaker
    reports: tuple[str, ...] = ()
