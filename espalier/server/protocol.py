"""What the front and the engine process say to each other: small typed messages, msgpack, one a ZeroMQ frame.

The records that requests consist of (ResolvedParams, OutputChunk, Usage, SpeculationStats) cross as they are: no
field is written down a second time.  The front binds a PAIR socket and starts the process, which connects.
"""

from typing import Any

import msgspec

from espalier.inputs import ModelFacts
from espalier.request import OutputChunk, ResolvedParams, Usage
from espalier.stats import SpeculationStats


class Start(msgspec.Struct, tag=True):
    """The first message.

    settings: keywords of EngineConfig; front: its process, which the engine does not outlive; heartbeat_s: how often an
    engine with nothing to do speaks.
    """

    settings: dict[str, Any]
    front: int
    heartbeat_s: float
    log_level: str
    log_json: bool


class Submit(msgspec.Struct, tag=True):
    """A prompt and how its n samples are continued.  detokenize: stop strings are looked for there, and text comes."""

    name: str
    prompt: list[int]
    params: ResolvedParams
    priority: int
    detokenize: bool


class Abort(msgspec.Struct, tag=True):
    """End what was submitted under a name; a name that has ended is ignored, as both may cross."""

    name: str


class Shutdown(msgspec.Struct, tag=True):
    """Leave at once."""


ToEngine = Start | Submit | Abort | Shutdown


class Ready(msgspec.Struct, tag=True):
    """The engine is loaded.  config: the resolved configuration."""

    facts: ModelFacts
    config: dict[str, Any]


class Refused(msgspec.Struct, tag=True):
    """A submitted name that can never run, and why."""

    name: str
    error: str


class Part(msgspec.Struct, array_like=True):
    """A piece of one sample.  usage, speculation: of the sample, with its last piece."""

    name: str
    piece: OutputChunk
    usage: Usage | None = None
    speculation: SpeculationStats | None = None


class Report(msgspec.Struct):
    """What the engine looks like after a harvest.

    pages_owned: by running requests alone, not the prefix cache; rounds: (bucket, whether a graph ran it, how many);
    aborts: for each name whose abort was carried out since the last report, the engine steps from its arrival to the
    release of its pages.
    """

    harvests: int = 0
    waiting: int = 0
    running: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_owned: int = 0
    preempted: int = 0
    rounds: list[tuple[int, bool, int]] = []
    totals: SpeculationStats = msgspec.field(default_factory=SpeculationStats)
    low_acceptance: bool = False
    aborts: list[int] = []


class Harvest(msgspec.Struct, tag=True):
    """What one engine step decided.  Without parts it is a heartbeat."""

    parts: list[Part]
    report: Report


class Failed(msgspec.Struct, tag=True):
    """The last message of an engine process that cannot go on.  refused: it is what was asked for that is wrong."""

    error: str
    refused: bool


FromEngine = Ready | Refused | Harvest | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
