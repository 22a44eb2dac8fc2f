"""What a planted fault is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FaultMaker = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Fault:
    """what: the defect in one sentence; where: "module:owner.attribute" of the function that is replaced; wrong: makes
    the wrong function from the right one; reports: numbers of the bug reports with this defect."""

    name: str
    defect: str
    target: str
    make_wrong: FaultMaker
    reports: tuple[str, ...] = ()
