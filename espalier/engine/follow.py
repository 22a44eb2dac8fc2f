"""The process of a rank other than 0: it runs the launches that rank 0 sends (engine/ranks.py).

It makes the same calls of its executor as rank 0's engine, in the same order.
"""

import os
import queue
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.engine.executor import Executor, Handle, StagedHandle
from espalier.engine.masks import BeamRows
from espalier.engine.ranks import (
    BEAT_S,
    Answered,
    Beat,
    Decided,
    Failed,
    Launched,
    Load,
    Loaded,
    Resumed,
    Settled,
    Unload,
    Wanted,
    decisions_of,
)
from espalier.errors import EspalierError

FAILED = 1


class Source(Protocol):
    """Loads the models of a rank.  It is pickled."""

    def load(self, rank: int) -> Executor:
        """Returns the executor of this rank."""
        ...


class Follower:
    """One rank.  connection: the connection to rank 0.  When the connection is closed, the process ends at once."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self.connection = connection
        self.rank = rank
        self.executor: Executor | None = None
        self.handles: dict[int, Handle] = {}
        self.staged: StagedHandle | None = None
        self.taken = self.num_loaded = 0
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[BeamRows] = queue.SimpleQueue()
        self._sending = threading.Lock()
        for work in (self._receive, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def run(self) -> int:
        """Handles the messages of rank 0 until an error occurs.  Returns the exit code."""
        try:
            self.send(Loaded(0))
            while True:
                self.take(self._messages.get())
        except Exception as error:
            refused = isinstance(error, EspalierError)
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            text = f"{error}" if refused else f"{type(error).__name__}: {error}"
            with suppress(OSError):
                self.send(Failed(f"out of memory: {text}" if is_memory else text, refused, is_memory))
            return FAILED

    def take(self, message: Any) -> None:
        """Handles one message."""
        match message:
            case Exception():
                raise message
            case Load(source):
                self._unload()
                self.num_loaded += 1
                self.executor = source.load(self.rank)
                self.send(Loaded(self.num_loaded))
            case Launched():
                self._launch(message)
            case Resumed(guide):
                assert self.staged is not None
                self.staged.resume(guide, self._ask)
            case Settled(masks):
                assert self.staged is not None
                self.staged.trees()
                self.staged.settle(masks)
                self.staged = None
            case Wanted(number):
                self.send(Decided(number, decisions_of(self.handles.pop(number).result())))
            case Unload():
                self._unload()

    def send(self, message: Any) -> None:
        with self._sending:
            self.connection.send(message)

    def _launch(self, message: Launched) -> None:
        if message.number != self.taken + 1:
            raise RuntimeError(f"it has taken up launch {self.taken}, and then got launch {message.number}")
        assert self.executor is not None
        self.taken = message.number
        if message.launch_input.is_staged:
            self.staged = self.handles[self.taken] = self.executor.launch_staged(message.launch_input)
        else:
            self.handles[self.taken] = self.executor.launch(message.launch_input)

    def _ask(self, tokens: Tensor, ancestor_bits: Tensor) -> BeamRows:
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
                if isinstance(message, Answered):
                    self._answers.put(message.beams)
                else:
                    self._messages.put(message)
        except (EOFError, OSError):
            # The main thread may wait for another rank, forever.
            os._exit(0)
        except Exception as error:  # of unpickling, which may import anything
            self._messages.put(error)

    def _beat(self) -> None:
        ended = threading.Event()
        with suppress(OSError):
            while True:
                self.send(Beat(self.taken))
                ended.wait(BEAT_S)
