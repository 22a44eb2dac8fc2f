"""Messages between the front and the engine process: typed structs, encoded with msgpack, one per ZeroMQ frame.

ResolvedParams, OutputChunk, Usage and SpeculationStats are sent as they are, so no field is declared twice.
Log-probabilities are sent as rows of numbers (espalier/logprobs.py).  The front binds a PAIR socket and starts the
engine process, which connects to it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from espalier.inputs import ModelFacts
from espalier.logprobs import TokenLogprobs
from espalier.request import OutputChunk, ResolvedParams
from espalier.stats import LearnFigures, SpeculationStats, Usage


class Start(msgspec.Struct, tag=True):
    """The first message.

    settings: what the worker loads, for a model the keywords of EngineConfig; heartbeat_s: seconds between messages of
    an idle engine; learn: the fields of LearnConfig, None for an engine that does not learn.
    """

    settings: dict[str, Any]
    heartbeat_s: float
    log_level: str
    log_json: bool
    learn: dict[str, Any] | None = None


class Submit(msgspec.Struct):
    """A prompt with n samples.

    detokenize: the engine process makes the text, which stop strings need; client: its name; the prompts of several
    clients take turns; streamed: whether somebody reads the tokens as they come; private: never part of what an engine
    learns from.
    """

    name: str
    prompt: list[int]
    params: ResolvedParams
    priority: int
    detokenize: bool
    client: str = ""
    streamed: bool = False
    private: bool = False

    def each_of(self, prompts: Sequence[list[int]], first: int) -> "list[Submit]":
        """This with each of the prompts, named by the prompt's number from `first` on behind the name."""
        named = ((f"{self.name}-{number}", prompt) for number, prompt in enumerate(prompts, first))
        return [msgspec.structs.replace(self, name=name, prompt=prompt) for name, prompt in named]


class Submits(msgspec.Struct, tag=True):
    """Prompts that arrived together."""

    prompts: list[Submit]


class Abort(msgspec.Struct, tag=True):
    """End the samples of a name.  A name that has already ended is ignored: the messages may cross."""

    name: str


class Shutdown(msgspec.Struct, tag=True):
    """End at once: the front has drained already, or does not wait."""


ToEngine = Start | Submits | Abort | Shutdown


class Ready(msgspec.Struct, tag=True):
    """The engine is loaded.  config: the resolved configuration."""

    facts: ModelFacts
    config: dict[str, Any]


class Refused(msgspec.Struct, tag=True):
    """A submitted name that does not run, and why.  busy: it may run if it is submitted again later."""

    name: str
    error: str
    busy: bool = False


class Part(msgspec.Struct, array_like=True):
    """An output chunk of one sample.  usage and speculation: the sample's totals, only with its last chunk."""

    name: str
    output: OutputChunk
    usage: Usage | None = None
    speculation: SpeculationStats | None = None


class Report(msgspec.Struct):
    """The engine's state.

    harvests: engine steps so far; pages_owned: pages of running requests that are not in the prefix cache; rounds:
    (bucket, whether a CUDA graph ran them, number of rounds); trees: (sizes of a tree, number of rounds);
    tree_changes: TreeChooser.num_changes; by_source: rows of Guesses.by_source by name;
    abort_steps: for each abort that was completed since the
    last report, the engine steps from its arrival to the release of its pages; learning: None if the engine does not.
    """

    harvests: int = 0
    waiting: int = 0
    running: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_owned: int = 0
    preempted: int = 0
    rounds: list[tuple[int, bool, int]] = []
    trees: list[tuple[str, int]] = []
    tree_changes: int = 0
    by_source: dict[str, list[float]] = {}
    totals: SpeculationStats = msgspec.field(default_factory=SpeculationStats)
    low_acceptance: bool = False
    abort_steps: list[int] = []
    learning: LearnFigures | None = None


class Harvest(msgspec.Struct, tag=True):
    """The output of one engine step.  Without parts it is a heartbeat.

    report: None if the engine is busy and the last report is younger than worker.REPORT_S.
    """

    parts: list[Part]
    report: Report | None = None


class Failed(msgspec.Struct, tag=True):
    """The last message of an engine process that cannot go on.  refused: the settings are wrong, not the engine."""

    error: str
    refused: bool


FromEngine = Ready | Refused | Harvest | Failed


def _plain(value: Any) -> Any:
    """Log-probabilities as bytes: the front builds their objects, not the engine process."""
    if isinstance(value, TokenLogprobs):
        rows = value.joined()
        return value.of_prompt, rows.shape[1], rows.tobytes()
    raise NotImplementedError(f"{type(value).__name__} has no plain form")


def _from_plain(kind: Any, value: Any) -> Any:
    of_prompt, width, data = value
    return TokenLogprobs((np.frombuffer(data, np.int64).reshape(-1, width),), of_prompt)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_from_plain).decode
