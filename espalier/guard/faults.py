"""Planted faults: named ways to break the real path that never raise, so that a property has to notice.

Each replaces one function by a wrong one, while it is planted; the house itself holds no switch.  A fault is reached by
its name or by the number of a report whose mechanism it plants again (docs/seeds.md).  ESPALIER_FAULT plants one for a
whole process: espalier/llm.py asks for `plant_from_environment` where that is set, and for nothing else in this room.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import own_bits

ENVIRONMENT = "ESPALIER_FAULT"
Wrong = Callable[[Callable[..., Any]], Callable[..., Any]]
log = logging.getLogger(__name__)


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
    """Siblings that are both in the tree stand side by side, the better one first."""

    def commit(r, slots, path, count_tokens):
        last = r.layout.num_draft_tokens - 1
        siblings = torch.where(path.rows > 0, (path.rows + 1).clamp(max=last), 0)
        right(r, slots, replace(path, rows=siblings), count_tokens)

    return commit


def _extend_short(right):
    return lambda slots, length, width: right(slots, length - 1, width)


def _wrong_ancestor(right):
    def grow(tokens, scores, ancestor_bits, path, first, num_words):
        grown = right(tokens, scores, ancestor_bits, path, first, num_words)
        if ancestor_bits is None:
            return grown
        return grown._replace(
            ancestor_bits=ancestor_bits | own_bits(first, ancestor_bits.shape[1], num_words, ancestor_bits.device)
        )

    return grow


def _rows_without_topk(right):
    """Beam b of level l is looked for in row l + b, where it stands in row l · topk + b."""

    def rows_of(staging, layer, batch, queries, width, at):
        staged = right(staging, layer, batch, queries, width, at)
        if queries == width:
            return staged
        rows = torch.arange(at + queries, device=staged[0].device)
        found = torch.div(rows, queries, rounding_mode="floor") + rows % queries
        return tuple(value[:, found] for value in staged)

    return rows_of


def _table_column_off(right):
    def page_table_updates(table, appended_pages):
        last = table.layout.table_width - 1
        return right(table, tuple((slot, min(column + 1, last), page) for slot, column, page in appended_pages))

    return page_table_updates


def _stale_hidden(right):
    def carry(slots, name, values, length):
        unchanged = slots.prefix_len[:, None, None] % 2 == 0
        right(slots, name, torch.where(unchanged, slots.carried(name)[:, None], values), length)

    return carry


def _packed_stride(right):
    """A request's features are looked for behind as many rows as were decided before it, not behind whole widths."""

    def extend(drafter, slots, captured, length, last_pieces=None):
        batch, width = captured.shape[:2]
        first = length.cumsum(0) - length
        rows = first[:, None] + torch.arange(width, device=length.device)
        packed = captured.flatten(0, 1)[rows.clamp(max=max(batch * width - 1, 0))]
        right(drafter, slots, packed, length, last_pieces)

    return extend


def _per_branch_reserve(right):
    def reserve(layout, num_known, rounds, end):
        branch = layout.pages_for(layout.page_size - 1 + layout.steps) * layout.page_size
        tokens = 2 * max(branch * layout.topk, layout.num_draft_tokens)
        return min(right(layout, num_known, rounds, end) + layout.pages_for(tokens), layout.table_width)

    return reserve


def _parent_noise(right):
    return lambda tree: tree.depths.gather(1, tree.parents)


def _freed_twice(right):
    def release(pool, pages):
        let_go = list(pages)
        right(pool, let_go)
        right(pool, [page for page in let_go if pool.references(page)][:1])

    return release


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "sibling-committed",
            "the rows of the node beside the accepted one are committed in its place",
            "espalier.speculate.round:commit",
            _sibling_committed,
            ("26866",),
        ),
        Fault(
            "extend-one-short",
            "the draft's extend keeps one row less than was decided",
            "espalier.speculate.drafters.autoregressive:extend_rows",
            _extend_short,
        ),
        Fault(
            "wrong-ancestor",
            "beams that were selected again attend to the rows of the beam that stood in their place before",
            "espalier.speculate.drafters.autoregressive:grow",
            _wrong_ancestor,
        ),
        Fault(
            "rows-without-topk",
            "the index of a beam's row lacks its factor topk, so that branches read each other's rows",
            "espalier.cache.kv:StagedKV.rows_of",
            _rows_without_topk,
            ("27460", "27338", "27428"),
        ),
        Fault(
            "table-column-off",
            "a page that a request grows by is entered one column too far in its page table",
            "espalier.slots:SlotTable.page_table_updates",
            _table_column_off,
            ("27360",),
        ),
        Fault(
            "stale-hidden",
            "the slot keeps the hidden state of an earlier launch",
            "espalier.speculate.drafters.autoregressive:carry",
            _stale_hidden,
            ("22832",),
        ),
        Fault(
            "packed-stride",
            "the extend's features are read packed by length where they stand at a uniform stride",
            "espalier.speculate.drafters.autoregressive:AutoregressiveDrafter.extend",
            _packed_stride,
            ("21987", "19807"),
        ),
        Fault(
            "per-branch-reserve",
            "every branch of the tree reserves pages of its own, twice",
            "espalier.layout:RoundLayout.reserve",
            _per_branch_reserve,
            ("26972",),
        ),
        Fault(
            "parent-noise",
            "a node's token is drawn with the noise of its parent's position",
            "espalier.speculate.sampler:noise_offsets",
            _parent_noise,
        ),
        Fault(
            "page-freed-twice",
            "a page that somebody still holds is released once more",
            "espalier.cache.pages:PagePool.release",
            _freed_twice,
        ),
    )
}


def find(name: str) -> Fault:
    """The fault of that name or report number.  Raises EspalierError naming those there are."""
    for fault in FAULTS.values():
        if name == fault.name or name in fault.reports:
            return fault
    reports = sorted(number for fault in FAULTS.values() for number in fault.reports)
    raise EspalierError(f"fault {name!r} is unknown; use one of {', '.join(FAULTS)}, or a report: {', '.join(reports)}")


@contextmanager
def plant(name: str) -> Iterator[Fault]:
    """Break the real path while the context lasts, and put it right again."""
    fault = find(name)
    owner, attribute = _resolve(fault.where)
    right = vars(owner)[attribute]
    setattr(owner, attribute, _broken(fault, right))
    try:
        yield fault
    finally:
        setattr(owner, attribute, right)


def plant_from_environment() -> Fault | None:
    """Break the real path for good, once a process, if ESPALIER_FAULT names a fault or a report; the log says so."""
    name = os.environ.get(ENVIRONMENT)
    if not name:
        return None
    fault = find(name)
    owner, attribute = _resolve(fault.where)
    right = vars(owner)[attribute]
    if getattr(right, "planted", None) != fault.name:
        log.warning("%s=%s: %s.  Output of this process is wrong on purpose.", ENVIRONMENT, name, fault.what)
        setattr(owner, attribute, _broken(fault, right))
    return fault


def _broken(fault: Fault, right: Callable[..., Any]) -> Callable[..., Any]:
    wrong = fault.wrong(right)
    wrong.planted = fault.name  # type: ignore[attr-defined]
    return wrong


def _resolve(where: str) -> tuple[Any, str]:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for name in parents:
        owner = getattr(owner, name)
    return owner, attribute
