"""Drafters, and the checkpoint formats of their draft models."""

from espalier.speculate.drafters.base import Drafter, DraftFormat
from espalier.speculate.drafters.registry import (
    DRAFT_FORMATS,
    WITHOUT_FILES,
    algorithms,
    draft_algorithm,
    format_of,
    load_draft,
    make_drafter,
    own_draft,
    read_draft,
    what_to_check,
)

__all__ = [
    "DRAFT_FORMATS",
    "WITHOUT_FILES",
    "DraftFormat",
    "Drafter",
    "algorithms",
    "draft_algorithm",
    "format_of",
    "load_draft",
    "make_drafter",
    "own_draft",
    "read_draft",
    "what_to_check",
]
