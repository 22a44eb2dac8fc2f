"""The process of a rank other than 0: it runs the launches that rank 0 sends (engine/ranks.py).

The executor of this process gets the same calls, in the same order, as the executor of rank 0 gets from the engine.
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


class FollowerRank:
    """The process of one rank.  connection: to rank 0.  When rank 0 closes the connection, the process ends at once."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self.connection = connection
        self.rank = rank
        self.executor: Executor | None = None
        self.launch_handles: dict[int, LaunchHandle] = {}
        self.staged_round: StagedRoundHandle | None = None
        self.last_launch = self.num_loaded = 0
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._beam_answers: queue.SimpleQueue[BeamMasks] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        for work in (self._receive, self._send_heartbeats):
            threading.Thread(target=work, daemon=True).start()

    def run(self) -> int:
        """Handles the messages of rank 0 until an error occurs.  Returns the exit code."""
        try:
            self.send(ModelsLoaded(0))
            while True:
                self.handle_message(self._messages.get())
        except Exception as error:
            is_refusal = isinstance(error, EspalierError)
            is_out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            text = f"{error}" if is_refusal else f"{type(error).__name__}: {error}"
            with suppress(OSError):
                self.send(
                    FailureReport(f"out of memory: {text}" if is_out_of_memory else text, is_refusal, is_out_of_memory)
                )
            return FAILED_EXIT_CODE

    def handle_message(self, message: Any) -> None:
        """Does what a message of rank 0 asks, such as StartLaunch.  Raises the message if it is an exception."""
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
                assert self.staged_round is not None
                self.staged_round.resume(guide, self._wait_for_answer)
            case SettleRound(masks):
                assert self.staged_round is not None
                self.staged_round.trees()
                self.staged_round.settle(masks)
                self.staged_round = None
            case SendDecisions(launch_number):
                self.send(Decisions(launch_number, decisions_of(self.launch_handles.pop(launch_number).result())))
            case UnloadModels():
                self._unload()

    def send(self, message: Any) -> None:
        """Sends a message, such as FailureReport, to rank 0.  Thread-safe."""
        with self._send_lock:
            self.connection.send(message)

    def _launch(self, message: StartLaunch) -> None:
        """Starts a launch of rank 0 on this rank too.  Launches must come in the order of their numbers."""
        if message.launch_number != self.last_launch + 1:
            raise RuntimeError(
                f"it has taken up launch {self.last_launch}, and then got launch {message.launch_number}"
            )
        assert self.executor is not None
        self.last_launch = message.launch_number
        self.launch_handles[self.last_launch] = handle = self.executor.launch(message.launch_input)
        if message.launch_input.is_staged:
            self.staged_round = cast(StagedRoundHandle, handle)

    def _wait_for_answer(self, tokens: Tensor, ancestor_bits: Tensor) -> BeamMasks:
        """Returns the masks that the draft asks for.  Rank 0 computes these masks and sends them (BeamAnswer)."""
        return self._beam_answers.get()

    def _unload(self) -> None:
        if self.executor is not None:
            self.executor.close()
        self.executor = self.staged_round = None
        self.launch_handles.clear()

    def _receive(self) -> None:
        try:
            while True:
                message = self.connection.recv()
                if isinstance(message, BeamAnswer):
                    self._beam_answers.put(message.beam_masks)
                else:
                    self._messages.put(message)
        except (EOFError, OSError):
            # Without this exit, the main thread could wait for another rank forever.
            os._exit(0)
        except Exception as error:  # unpickling may import any module, so it may raise any error
            self._messages.put(error)

    def _send_heartbeats(self) -> None:
        ended = threading.Event()
        with suppress(OSError):
            while True:
                self.send(Heartbeat(self.last_launch))
                ended.wait(HEARTBEAT_S)
