"""Planted faults: named ways to break the real path that never raise, so that a property has to notice.

Each replaces one function by a wrong one, while it is planted; the house itself holds no switch.  A fault is reached by
its name or by the number of a report whose mechanism it plants again (docs/seeds.md).  ESPALIER_FAULT plants one for a
whole process.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from espalier.errors import EspalierError

Wrong = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Fault:
    """what: the mechanism in a sentence; where: "module:owner.attribute"; wrong: makes the broken function from the
    right one; reports: numbers of the reports that name the mechanism."""

    name: str
    what: str
    where: str
    wrong: Wrong
    reports: tuple[str, ...] = ()


def _sibling_committed(right):
    """Rows of the path are taken one node further: what is committed is a neighbour, never the accepted node."""

    def commit(r, slots, path):
        last = r.layout.num_draft_tokens - 1
        siblings = torch.where(path.rows > 0, (path.rows + 1).clamp(max=last), 0)
        right(r, slots, replace(path, rows=siblings))

    return commit


def _extend_short(right):
    return lambda offsets, length: right(offsets, length - 1)


def _wrong_ancestor(right):
    return lambda ancestors, parents: ancestors


def _stale_hidden(right):
    return lambda slots, name, value: right(
        slots, name, torch.where(slots.prefix_len[:, None] % 2 == 0, slots.carried(name), value)
    )


def _parent_noise(right):
    return lambda tree: tree.depths.gather(1, tree.parents)


def _freed_twice(right):
    """The last page of a request goes back to the free list although somebody still holds it."""

    def release(pool, pages):
        right(pool, pages)
        if pages and pool.references(pages[-1]):
            right(pool, pages[-1:])

    return release


def _per_branch_reserve(right):
    """Pages for each branch of the tree, as where a branch is a sequence of its own."""
    return lambda layout, num_seen, rounds, end: right(layout, num_seen, rounds, end) + 2 * layout.topk


def _packed_stride(right):
    """The extend reads features packed by accept length where they stand at a uniform stride."""

    def along(values, rows):
        batch, width = rows.shape
        if batch < 2 or values.dim() != 3:
            return right(values, rows)
        taken = right(values, rows)
        flat = taken.flatten(0, 1)
        shifted = (
            torch.arange(batch * width, device=rows.device)
            - (torch.arange(batch, device=rows.device)[:, None] > 0).expand(batch, width).flatten().long()
        )
        return flat[shifted].view_as(taken)

    return along


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "sibling-committed",
            "a sibling's rows are committed in place of the accepted node's",
            "espalier.speculate.round:commit",
            _sibling_committed,
            ("26972", "26866"),
        ),
        Fault(
            "extend-one-short",
            "the draft's extend keeps one row less than was decided",
            "espalier.speculate.drafters.eagle3:extend_rows",
            _extend_short,
            ("27360",),
        ),
        Fault(
            "wrong-ancestor",
            "beams that were selected again attend to the rows of the beam that stood in their place before",
            "espalier.speculate.drafters.eagle3:inherit",
            _wrong_ancestor,
            ("27460", "27338", "27428"),
        ),
        Fault(
            "stale-hidden",
            "the slot keeps the hidden state of an earlier round",
            "espalier.slots:Slots.carry",
            _stale_hidden,
            ("22832",),
        ),
        Fault(
            "parent-noise",
            "a node's token is drawn with the noise of its parent's position",
            "espalier.speculate.draws:noise_offsets",
            _parent_noise,
        ),
        Fault(
            "page-freed-twice",
            "a page that somebody still holds is released once more",
            "espalier.cache.pages:PagePool.release",
            _freed_twice,
        ),
        Fault(
            "packed-stride",
            "the extend's features are read packed where they stand at a uniform stride",
            "espalier.speculate.round:along",
            _packed_stride,
            ("21987", "19807"),
        ),
        Fault(
            "per-branch-reserve",
            "every branch of the tree reserves pages of its own",
            "espalier.layout:RoundLayout.reserve",
            _per_branch_reserve,
            ("26972",),
        ),
    )
}


def find(name: str) -> Fault:
    """The fault of that name or report number.  Raises EspalierError naming those there are."""
    for fault in FAULTS.values():
        if name == fault.name or name in fault.reports:
            return fault
    raise EspalierError(f"fault {name!r} is unknown; use one of {', '.join(FAULTS)}, or a report's number")


@contextmanager
def plant(name: str) -> Iterator[Fault]:
    """Break the real path while the context lasts, and put it right again."""
    fault = find(name)
    owner, attribute = _resolve(fault.where)
    right = owner.__dict__[attribute] if isinstance(owner, type) else getattr(owner, attribute)
    setattr(owner, attribute, fault.wrong(right))
    try:
        yield fault
    finally:
        setattr(owner, attribute, right)


def _resolve(where: str) -> tuple[Any, str]:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for name in parents:
        owner = getattr(owner, name)
    return owner, attribute
