"""Espalier: an LLM inference engine that decodes with lossless tree speculation."""

import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from espalier.config import EngineConfig, SpeculationConfig
from espalier.errors import EspalierError
from espalier.grammar.spec import Grammar
from espalier.request import Output, OutputChunk, SamplingParams, Usage
from espalier.stats import SpeculationStats

if TYPE_CHECKING:
    from espalier.llm import LLM

try:
    __version__ = version("espalier-llm")
except PackageNotFoundError:  # run from a checkout
    __version__ = "0.0.0"

__all__ = [
    "LLM",
    "EngineConfig",
    "EspalierError",
    "Grammar",
    "Output",
    "OutputChunk",
    "SamplingParams",
    "SpeculationConfig",
    "SpeculationStats",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import LLM at its first use: it imports PyTorch, which is slow and not needed for `espalier --help`."""
    if name == "LLM":
        from espalier.llm import LLM

        return LLM
    if name == "Piece":
        warnings.warn("espalier.Piece is now espalier.OutputChunk", DeprecationWarning, stacklevel=2)
        return OutputChunk
    raise AttributeError(f"module 'espalier' has no attribute {name!r}")
