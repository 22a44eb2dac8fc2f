"""Resolves which sources propose tokens beside the draft, and whether requests share the rows of a verify pass."""

from collections.abc import Sequence

import torch

from espalier.cache.layer_spec import LayerSpec, RecurrentState
from espalier.config import SpeculationConfig, is_open
from espalier.errors import EspalierError
from espalier.layout import TreeShape
from espalier.slots import SOURCES

# How many paths are grafted onto a tree: from the request's own text, and from the host's guesses.
TEXT_PATHS, SENT_PATHS = 2, 2
INDEX_BYTES = 2**26


def shared_rows(speculation: SpeculationConfig, layer_specs: Sequence[LayerSpec], model_impl: str) -> int:
    """RoundLayout.shared_rows.  Raises EspalierError for a model that cannot run chosen rows."""
    if is_open(speculation.shared_rows):
        return 0
    if (
        any(isinstance(spec.keeps, RecurrentState) or spec.topk is not None for spec in layer_specs)
        or model_impl != "native"
    ):
        raise EspalierError(
            f"shared_rows={speculation.shared_rows} is not supported for a model with recurrent states or sparse "
            "attention, or run by transformers: all rows of a request run; leave it out"
        )
    return int(speculation.shared_rows)


def source_sizes(
    speculation: SpeculationConfig, sources: Sequence[str], layer_specs: Sequence[LayerSpec], model_impl: str
) -> dict[str, int]:
    """The fields of a RoundLayout for these sources, and shared_rows.  Raises EspalierError as shared_rows does."""
    is_sent = "prediction" in sources or "index" in sources
    paths = {"text_paths": TEXT_PATHS * ("text" in sources), "sent_paths": SENT_PATHS * is_sent}
    return paths | {"shared_rows": shared_rows(speculation, layer_specs, model_impl)}


def choose_sources(
    speculation: SpeculationConfig, algorithm: str, tree: TreeShape, device: torch.device
) -> tuple[str, ...]:
    """The sources beside the drafter of this algorithm.  Raises EspalierError for unknown ones."""
    if is_open(speculation.sources):
        return ("prediction",) if tree.steps and device.type == "cpu" else ()
    named = [name.strip() for name in speculation.sources.split(",")]
    if named == ["none"]:
        return ()
    if unknown := [name for name in named if name not in SOURCES]:
        raise EspalierError(f"sources={unknown[0]!r} is not supported; use {', '.join(SOURCES)}, or none alone")
    if not tree.steps:
        raise EspalierError(f"sources={speculation.sources!r} needs a tree, and this is {tree}; leave it out")
    if algorithm == "ngram" and "text" in named:
        raise EspalierError("sources='text' is what algorithm='ngram' drafts with; leave it out of sources")
    return tuple(name for name in SOURCES if name in named)
