"""Drafters by the name that users give."""

from espalier.speculate.drafters.base import Drafter, NoDrafter
from espalier.speculate.drafters.eagle3 import Eagle3Drafter
from espalier.speculate.drafters.ngram import NgramDrafter

DRAFTERS: dict[str, type[NoDrafter] | type[NgramDrafter] | type[Eagle3Drafter]] = {
    drafter.algorithm: drafter for drafter in (Eagle3Drafter, NgramDrafter, NoDrafter)
}

__all__ = ["DRAFTERS", "Drafter", "Eagle3Drafter", "NgramDrafter", "NoDrafter"]
