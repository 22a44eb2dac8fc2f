"""Planted faults of layers that attend to chosen rows."""

from dataclasses import replace

import torch

from espalier.kernels.attention.ancestor_bits import self_only_bits
from lab.faults.base import Fault


def _selection_of_parent(original):
    """Rows are in the order of their depths, so a node's parent is the last of its ancestors."""

    def select(plan, layer, queries, keys, rows, held):
        chosen, seen = original(plan, layer, queries, keys, rows, held), plan.nodes.visible_rows(None)
        if plan.nodes.ancestor_bits is None or seen.shape[1] != seen.shape[2]:
            return chosen
        itself = torch.eye(seen.shape[1], dtype=torch.bool)
        place = torch.arange(seen.shape[2])
        parents = torch.where(seen & ~itself, place, 0).amax(2)
        return chosen._replace(mask=chosen.mask.gather(1, parents[..., None].expand_as(chosen.mask)))

    return select


def _selection_of_sibling(original):
    """Siblings have adjacent rows in the tree."""

    def select(plan, layer, queries, keys, rows, held):
        nodes = plan.nodes
        if nodes.ancestor_bits is None:
            return original(plan, layer, queries, keys, rows, held)
        count, words = nodes.ancestor_bits.shape[1:]
        siblings = self_only_bits(1, count, words, nodes.ancestor_bits.device)
        plan.nodes = replace(nodes, ancestor_bits=nodes.ancestor_bits | siblings)
        chosen = original(plan, layer, queries, keys, rows, held)
        plan.nodes = nodes
        return chosen

    return select


def _selection_one_layer_late(original):
    def selected(p, layer, plan, planes):
        chooses, before = p._index_queries is not None, p._selection
        if not chooses and getattr(p, "_earlier", None) is not None:
            p._selection = p._earlier
        chosen = original(p, layer, plan, planes)
        if chooses:
            p._earlier = before
        return chosen

    return selected


def _index_rows_without_topk(original):
    """Reads the index key of beam b of level l from row l + b; its row is l · topk + b."""

    def selected(p, layer, plan, planes):
        queries = p.tokens.shape[1]
        if p._index_queries is not None and queries != p.staged_width:
            rows = torch.arange(planes[1].shape[1])
            wrong_rows = torch.div(rows, max(queries, 1), rounding_mode="floor") + rows % max(queries, 1)
            planes = (planes[0], planes[1][:, wrong_rows])
        return original(p, layer, plan, planes)

    return selected


SELECTION_FAULTS = (
    Fault(
        "selection-of-parent",
        "a node of a tree attends to the rows that its parent chose",
        "espalier.attention.base:AttentionPlan.select_by_mask",
        _selection_of_parent,
    ),
    Fault(
        "sibling-selected",
        "a node of a tree may choose the row of its sibling",
        "espalier.attention.base:AttentionPlan.select_by_mask",
        _selection_of_sibling,
    ),
    Fault(
        "shared-selection-one-off",
        "a layer that shares a selection takes that of the layer before the last one that chose",
        "espalier.attention.forward:Pass._selection_of",
        _selection_one_layer_late,
    ),
    Fault(
        "index-row-without-topk",
        "the row of a beam's index key lacks the factor topk, so branches choose by each other's keys",
        "espalier.attention.forward:Pass._selection_of",
        _index_rows_without_topk,
    ),
)
