"""Chooses which sources propose tokens beside the draft, and whether requests may share the rows of a verify pass."""

from collections.abc import Sequence
from typing import Any

import torch

from espalier.cache.layer_spec import LayerSpec, RecurrentState
from espalier.config import SpeculationConfig, is_unresolved
from espalier.errors import EspalierError
from espalier.layout import TreeShape
from espalier.slots import SOURCES

# The most token sequences that join a tree: from the request's own text, and from the host's other sources.
TEXT_PATHS, SENT_PATHS = 2, 2
INDEX_BYTES = 2**26


def can_share_rows(layer_specs: Sequence[LayerSpec], model_impl: str, device: torch.device) -> bool:
    """Whether the requests of a batch may share the rows of a verify pass (TreeShape.shared_rows).
    Recurrent layers and sparse attention need all nodes of a request's tree.  GPUs are excluded, because shared rows
    have not been timed on GPUs."""
    needs_own_rows = any(isinstance(spec.cache_spec, RecurrentState) or spec.topk is not None for spec in layer_specs)
    return device.type == "cpu" and model_impl == "native" and not needs_own_rows


def source_sizes(sources: Sequence[str], searches_on_host: bool) -> dict[str, Any]:
    """Returns the fields of RoundLayout that depend on the sources.  searches_on_host: whether the host searches the
    requests' own texts; if not, the device does."""
    num_text_paths = TEXT_PATHS * ("text" in sources)
    num_sent_paths = SENT_PATHS * ("prediction" in sources or "index" in sources) + num_text_paths * searches_on_host
    return {"num_text_paths": num_text_paths * (not searches_on_host), "num_sent_paths": num_sent_paths}


def choose_sources(
    speculation: SpeculationConfig, algorithm: str, tree: TreeShape, device: torch.device
) -> tuple[str, ...]:
    """Returns the sources that propose tokens in addition to the drafter.  Raises EspalierError if the user's setting
    names an unknown source, or does not fit the algorithm or the tree."""
    if is_unresolved(speculation.sources):
        return ("prediction",) if tree.steps and device.type == "cpu" else ()
    names = [name.strip() for name in speculation.sources.split(",")]
    if names == ["none"]:
        return ()
    if unknown_names := [name for name in names if name not in SOURCES]:
        raise EspalierError(f"sources={unknown_names[0]!r} is not supported; use {', '.join(SOURCES)}, or none alone")
    if not tree.steps:
        raise EspalierError(f"sources={speculation.sources!r} needs a tree, and this is {tree}; leave it out")
    if algorithm == "ngram" and "text" in names:
        raise EspalierError("sources='text' is what algorithm='ngram' drafts with; leave it out of sources")
    return tuple(name for name in SOURCES if name in names)
