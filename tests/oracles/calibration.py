"""What the draft's nodes score once their scores are survival probabilities, one node after another."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from espalier.slots import NUM_CONFIDENCE_LEVELS, NUM_RANKS, PATH_KINDS
from tests.oracles.reference_round import Node

# As in speculate/sources/calibrate.py.
CONFIDENCE_SCALE, MOST, TIE = 3.5, 0.98, 1e-3


def recalibrated(nodes: Sequence[Node], is_sampled: bool, survival: np.ndarray, skill: float) -> list[Node]:
    """nodes: a parent comes before its children, and siblings are in order; survival, skill: as in SlotTable."""
    said: dict[tuple[int, ...], float] = {(): 0.0}
    made: dict[tuple[int, ...], float] = {(): 0.0}
    siblings: dict[tuple[int, ...], int] = {}
    for node in nodes:
        above = node.path[:-1]
        rank = siblings[above] = siblings.get(above, -1) + 1
        step = min(float(node.score) - said[above], 0.0)
        level = min(int(CONFIDENCE_SCALE * math.sqrt(-step)), NUM_CONFIDENCE_LEVELS - 1)
        kind = PATH_KINDS + (is_sampled * NUM_RANKS + min(rank, NUM_RANKS - 1)) * NUM_CONFIDENCE_LEVELS + level
        chance = min(float(survival[kind, node.depth - 1]) + skill, math.log(MOST))
        said[node.path] = float(node.score)
        made[node.path] = made[above] + chance + TIE * step
    return [replace(node, score=np.float32(made[node.path])) for node in nodes]
