"""Espalier: an LLM inference engine that decodes with lossless tree speculation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from espalier.cores import limit_spinning

if TYPE_CHECKING:
    from espalier.config import EngineConfig, SpeculationConfig
    from espalier.errors import EspalierError
    from espalier.grammar.spec import Grammar
    from espalier.llm import LLM
    from espalier.request import Output, OutputChunk, SamplingParams
    from espalier.stats import SpeculationStats, Usage

    __version__: str

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


limit_spinning()

PUBLIC_NAMES = {
    "LLM": "llm",
    "EngineConfig": "config",
    "EspalierError": "errors",
    "Grammar": "grammar.spec",
    "Output": "request",
    "OutputChunk": "request",
    "SamplingParams": "request",
    "SpeculationConfig": "config",
    "SpeculationStats": "stats",
    "Usage": "stats",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use.  So the command line starts at once, and Ctrl-C prints no traceback."""
    if name == "__version__":
        value = _version()
    elif name in PUBLIC_NAMES:
        value = getattr(import_module(f"espalier.{PUBLIC_NAMES[name]}"), name)
    else:
        raise AttributeError(f"module 'espalier' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("espalier-llm")
    except PackageNotFoundError:  # run from a checkout
        return "0.0.0"
