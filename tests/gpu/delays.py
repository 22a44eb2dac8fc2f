"""Sleeps on the device between the segments of a launch, on its stream and on that of the copies, and on the host."""

import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

import espalier.engine.executor as executing
import espalier.speculate.drafters.autoregressive as autoregressive
import espalier.speculate.round as rounds
from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.engine.launch_buffer import LaunchBuffer
from espalier.engine.launch_input import LaunchInput
from espalier.engine.results import ResultsRing

# Clock ticks of the GPU, some 0.1 ms, and 20 ms, which is longer than a round takes; seconds of the host.
LONGEST_CYCLES = 200_000
VERY_LONG_CYCLES = 40_000_000
LONGEST_SLEEP = 0.001

SEGMENTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (rounds, ("begin", "propose", "verify", "settle", "accept", "commit", "advance", "path_features")),
    (executing, ("decode_round", "prefill", "begin", "propose", "verify", "settle")),
    (LaunchBuffer, ("update_slot_table",)),
    (autoregressive, ("store_carried_field",)),
    (ResultsRing, ("write",)),
)


def sleep(random: Random) -> None:
    """On the current stream; inside a capture it becomes part of the graph."""
    torch.cuda._sleep(random.randrange(LONGEST_CYCLES))


def sleep_between_streams(random: Random) -> None:
    """Now and then for longer than the next round takes."""
    torch.cuda._sleep(random.randrange(VERY_LONG_CYCLES if random.random() < 0.15 else LONGEST_CYCLES))


def delayed(right: Callable[..., Any], random: Random) -> Callable[..., Any]:
    def segment(*args: Any, **kwargs: Any) -> Any:
        sleep(random)
        value = right(*args, **kwargs)
        sleep(random)
        return value

    return segment


def delay_segments(patch: pytest.MonkeyPatch, random: Random) -> None:
    """Of every launch from now on, and of every graph that is captured from now on."""
    for owner, names in SEGMENTS:
        for name in names:
            patch.setattr(owner, name, delayed(getattr(owner, name), random))


def delay_streams(engine: Engine, random: Random) -> None:
    """Before a launch's first work, after its last, and before its results are copied to the host."""
    executor = engine.executor
    assert isinstance(executor, CudaExecutor)
    start_readback = executor.start_readback

    def delayed_launch(launch: Callable[[LaunchInput], Any]) -> Callable[[LaunchInput], Any]:
        def launching(launch_input: LaunchInput) -> Any:
            with torch.cuda.stream(executor.stream):
                sleep_between_streams(random)
            handle = launch(launch_input)
            with torch.cuda.stream(executor.stream):
                sleep_between_streams(random)
            return handle

        return launching

    def starting_late(*args: Any) -> Any:
        with torch.cuda.stream(executor.copy_stream):
            sleep_between_streams(random)
        return start_readback(*args)

    executor.launch = delayed_launch(executor.launch)  # type: ignore[method-assign]
    executor.start_readback = starting_late  # type: ignore[method-assign]


def host_sleep(random: Random) -> None:
    if random.random() < 0.5:
        time.sleep(random.random() * LONGEST_SLEEP)
