"""The process of a rank other than 0: it runs the launches that rank 0 sends (engine/ranks.py).

The process calls its executor as rank 0's engine calls its own, in the same order.
"""

import os
import queue
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from torch import Tensor

from espalier.engine.executor import Executor, LaunchHandle, StagedRoundHandle
from espalier.engine.masks import BeamMasks
from espalier.engine.ranks import (
    HEARTBEAT_S,
    BeamAnswer,
    Decisions,
    FailureReport,
    Heartbeat,
    LoadModels,
    ModelsLoaded,
    ResumeRound,
    SendDecisions,
    SettleRound,
    StartLaunch,
    UnloadModels,
    decisions_of,
)
from espalier.errors import EspalierError

FAILED_EXIT_CODE = 1


class Follower:
    """The process of one rank.  connection: the connection to rank 0. When it is closed, the process ends at once."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self.connection = connection
        self.rank = rank
        self.executor: Executor | None = None
        self.handles: dict[int, LaunchHandle] = {}
        self.staged: StagedRoundHandle | None = None
        self.last_launch = self.num_loaded = 0
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[BeamMasks] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        for work in (self._receive, self._send_heartbeats):
            threading.Thread(target=work, daemon=True).start()

    def run(self) -> int:
        """Handles the messages of rank 0 until an error occurs.  Returns the exit code."""
        try:
            self.send(ModelsLoaded(0))
            while True:
                self.handle(self._messages.get())
        except Exception as error:
            refused = isinstance(error, EspalierError)
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            text = f"{error}" if refused else f"{type(error).__name__}: {error}"
            with suppress(OSError):
                self.send(FailureReport(f"out of memory: {text}" if is_memory else text, refused, is_memory))
            return FAILED_EXIT_CODE

    def handle(self, message: Any) -> None:
        """Handles one message."""
        match message:
            case Exception():
                raise message
            case LoadModels(source):
                self._unload()
                self.num_loaded += 1
                self.executor = source.load(self.rank)
                self.send(ModelsLoaded(self.num_loaded))
            case StartLaunch():
                self._launch(message)
            case ResumeRound(guide):
                assert self.staged is not None
                self.staged.resume(guide, self._wait_for_answer)
            case SettleRound(masks):
                assert self.staged is not None
                self.staged.trees()
                self.staged.settle(masks)
                self.staged = None
            case SendDecisions(number):
                self.send(Decisions(number, decisions_of(self.handles.pop(number).result())))
            case UnloadModels():
                self._unload()

    def send(self, message: Any) -> None:
        with self._send_lock:
            self.connection.send(message)

    def _launch(self, message: StartLaunch) -> None:
        if message.number != self.last_launch + 1:
            raise RuntimeError(f"it has taken up launch {self.last_launch}, and then got launch {message.number}")
        assert self.executor is not None
        self.last_launch = message.number
        self.handles[self.last_launch] = handle = self.executor.launch(message.launch_input)
        if message.launch_input.is_staged:
            self.staged = cast(StagedRoundHandle, handle)

    def _wait_for_answer(self, tokens: Tensor, ancestor_bits: Tensor) -> BeamMasks:
        """Returns the answer to the draft's question.  Rank 0 asks the same question and sends the answer."""
        return self._answers.get()

    def _unload(self) -> None:
        if self.executor is not None:
            self.executor.close()
        self.executor = self.staged = None
        self.handles.clear()

    def _receive(self) -> None:
        try:
            while True:
                message = self.connection.recv()
                if isinstance(message, BeamAnswer):
                    self._answers.put(message.beams)
                else:
                    self._messages.put(message)
        except (EOFError, OSError):
            # The main thread may wait for another rank, forever.
            os._exit(0)
        except Exception as error:  # of unpickling, which may import anything
            self._messages.put(error)

    def _send_heartbeats(self) -> None:
        ended = threading.Event()
        with suppress(OSError):
            while True:
                self.send(Heartbeat(self.last_launch))
                ended.wait(HEARTBEAT_S)
