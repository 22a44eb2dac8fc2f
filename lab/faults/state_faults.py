"""Planted faults of layers that keep a state."""

from dataclasses import replace

import torch

from espalier.cache.states import ZERO_ROW
from espalier.kernels.ops.recurrence import conv_tail_after
from lab.faults.base import Fault


def _sibling_state_kept(original):
    """Siblings have adjacent rows in the tree, the more likely one first."""

    def commit(table, access, source):
        last = next(iter(table.states.values())).staged_inputs.shape[0] - 1
        original(table, access, torch.where(source > source[:, :1], (source + 1).clamp(max=last), source))

    return commit


def _state_one_row_short(original):
    def commit(table, access, source):
        original(table, replace(access, length=(access.length - 1).clamp(min=0)), source)

    return commit


def _conv_tail_kept(original):
    """The tail ends in the last row of the tree's width, whether or not that row was accepted."""

    def commit(table, access, source):
        tails = {layer: states.conv_tail[access.slots] for layer, states in table.states.items()}
        original(table, access, source)
        lengths = torch.full_like(access.length, source.shape[1])
        for layer, states in table.states.items():
            path = access.path_rows(source, source.shape[1], table.spare_row)
            path.store_states(states.conv_tail, conv_tail_after(tails[layer], states.staged_inputs[source], lengths))

    return commit


def _snapshot_of_wrong_page(original):
    def use(snapshots, page):
        others = [other for other in snapshots._row_of_page if other != page]
        return original(snapshots, others[-1] if others else page)

    return use


def _state_not_cleared(original):
    return lambda keeper: tuple(pair for pair in original(keeper) if pair[0] != ZERO_ROW)


STATE_FAULTS = (
    Fault(
        "sibling-state",
        "a state takes in the sibling of an accepted node in its place",
        "espalier.cache.states:StateTable.commit",
        _sibling_state_kept,
    ),
    Fault(
        "state-one-short",
        "a state is committed one node short of the accepted path",
        "espalier.cache.states:StateTable.commit",
        _state_one_row_short,
    ),
    Fault(
        "tail-not-rolled-back",
        "the tail of a convolution ends in rejected nodes",
        "espalier.cache.states:StateTable.commit",
        _conv_tail_kept,
    ),
    Fault(
        "snapshot-of-wrong-page",
        "a request begins with the snapshot of another page",
        "espalier.cache.pages:SnapshotRows.mark_used",
        _snapshot_of_wrong_page,
    ),
    Fault(
        "state-carried-over",
        "a slot keeps the state of the request that had it before",
        "espalier.engine.state_keeper:StateKeeper.take_state_copies",
        _state_not_cleared,
    ),
)
