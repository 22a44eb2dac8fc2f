"""Engines of a model's files for a load, in each way to decode."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from espalier.bench.drive import contexts
from espalier.config import EngineConfig, ResolvedConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.llm import LLM, prepare
from espalier.startup.load import find
from espalier.terminal.console import print_header, require_writable
from espalier.terminal.flags import engine_settings, with_minimum

# A way to decode: the settings of LLM that it changes.
Way = Mapping[str, Any]
AS_SET: Way = {}
PLAIN_WAY: Way = {"speculation": None}
WAYS = (AS_SET, PLAIN_WAY)


@dataclass(frozen=True)
class BenchEngine:
    """A running engine in its LLM.  prompts: token ids for prompts of the given lengths."""

    llm: LLM
    prompts: Callable[[Sequence[int]], list[list[int]]]

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    @property
    def config(self) -> ResolvedConfig:
        return self.llm.config


class BenchEngines(Protocol):
    """settings: of LLM.  positions: of the model; the most tokens of a request."""

    settings: Mapping[str, Any]

    @property
    def positions(self) -> int: ...

    def config(self, way: Way = AS_SET) -> ResolvedConfig:
        """The configuration of `open(way)`, before anything is loaded.  num_pages is an estimate."""
        ...

    def open(self, way: Way = AS_SET) -> AbstractContextManager[BenchEngine]:
        """An engine that decodes this way.  It closes at the end of the block.

        Its memory is free only when the caller has dropped the BenchEngine too.
        """
        ...


class OfModel:
    """settings: of LLM."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @property
    def positions(self) -> int:
        return find(EngineConfig(**self.settings)).target.max_position

    def config(self, way: Way = AS_SET) -> ResolvedConfig:
        return prepare(EngineConfig(**{**self.settings, **way})).resolved

    @contextmanager
    def open(self, way: Way = AS_SET) -> Iterator[BenchEngine]:
        with LLM(**{**self.settings, **way}) as llm:

            def prompts(lengths: Sequence[int]) -> list[list[int]]:
                longest = contexts(llm, len(lengths), max(lengths))
                return [prompt[:length] for prompt, length in zip(longest, lengths, strict=True)]

            yield BenchEngine(llm, prompts)


def compared_ways(made: BenchEngines) -> dict[str, Way]:
    """The ways to decode that are compared, by name: plain decoding alone where no tree is set."""
    return {"tree": AS_SET, "plain": PLAIN_WAY} if made.config().layout.steps else {"plain": PLAIN_WAY}


def load_sizes(batch: int, context: int) -> dict[str, Any]:
    """Defaults of `engines_of` for a load: an engine for this batch and context, without a prefix cache."""
    return {"max_batch": batch, "max_context": context, "prefix_cache": False}


def require_positions(positions: int, needed: int, *asked: str) -> None:
    """Refuse a request of more tokens than the model has positions.  asked: the flags with their values, as given.

    Raises EspalierError.
    """
    if needed > positions:
        raise EspalierError(
            f"{' and '.join(asked)} need {needed} tokens a request, and the model takes at most {positions}; "
            "ask for less"
        )


def engines_of(args: Namespace, defaults: Mapping[str, Any], **least: int) -> BenchEngines:
    """Engines of the model that the flags name.

    defaults: of settings whose flags were not given; least: the smallest value that each size may have.
    Raises EspalierError for a size that is too small.
    """
    require_writable("--json", args.json)
    made = OfModel(with_minimum(engine_settings(args), defaults, **least))
    print_header()
    return made
