"""Rank 0's connections to the other ranks: messages to the ranks, answers of the ranks, and failed ranks.

Only rank 0 has a scheduler.  Rank 0 sends each launch as plain values, and the grammar masks that the launch needs.
Every rank runs the same launches and samples the same tokens, so rank 0 need not send sampled tokens.  As a check, each
other rank sends its tokens and trees (Decisions) to rank 0.  A difference from rank 0's tokens and trees is an error.

A thread watches the other ranks.  If a rank fails, the thread ends all processes and reports one reason.  A rank has
failed if its process has ended, if it has sent no heartbeat for MAX_SILENCE_S (the process is stopped, or hangs), or if
it has not started the last launch for MAX_LAG_S.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.engine.masks import BeamMasks, DraftGuideRows, NodeMasks
from espalier.errors import EspalierError

# In seconds: the time between two heartbeats, and the longest silence and lag of a rank that has not failed.
HEARTBEAT_S, MAX_SILENCE_S, MAX_LAG_S = 0.5, 10.0, 10.0
# One failure causes others.  The thread waits this long for further failures, and reports the first cause.
FAILURE_GRACE_S = 0.5
# MAX_STARTUP_S: the limit for the first heartbeat, because a process first imports PyTorch.  MAX_SHUTDOWN_S: the limit
# for ending a process.
MAX_STARTUP_S, MAX_SHUTDOWN_S = 120.0, 5.0


class RankFailed(RuntimeError):
    """A rank has ended, is stopped, is too slow, or has sampled other tokens than rank 0.  All ranks are ended."""


# Messages from rank 0.


class LoadModels(NamedTuple):
    """Load the models.  source: an object that can be pickled.  Its method `load` takes a rank's number, loads the
    models and returns the rank's executor."""

    source: Any


class StartLaunch(NamedTuple):
    """Start a launch.  launch_number: counts the launches from 1.  A staged launch waits for `ResumeRound` after its
    first stage."""

    launch_number: int
    launch_input: LaunchInput


# Start the propose and the verify stage of the staged launch.
class ResumeRound(NamedTuple):
    guide: DraftGuideRows | None


class BeamAnswer(NamedTuple):
    """The answer to the draft's next question."""

    beam_masks: BeamMasks


# Start the settle stage of the staged launch.  masks: the tokens that may follow each node.
class SettleRound(NamedTuple):
    masks: NodeMasks


class SendDecisions(NamedTuple):
    """Send the decisions of this launch.  Rank 0 sends this message when it reads the result of the launch."""

    launch_number: int


class UnloadModels(NamedTuple):
    """Free the models and the executor."""


# Messages to rank 0.


class Heartbeat(NamedTuple):
    """A message that shows that the process runs.  last_launch: the number of the last launch that the rank started."""

    last_launch: int


class ModelsLoaded(NamedTuple):
    """The rank has loaded its models.  number: how often it has loaded models; 0 if only its process has started."""

    number: int


class Decisions(NamedTuple):
    """The tokens and trees of a launch.  number: the launch's number.  decisions: the result of `decisions_of`."""

    number: int
    decisions: bytes


class FailureReport(NamedTuple):
    """The rank has failed.  error: the text of the error.  is_refusal: whether the error was an EspalierError.
    is_out_of_memory: whether memory ran out."""

    error: str
    is_refusal: bool
    is_out_of_memory: bool = False


def decisions_of(results: Sequence[RequestResult]) -> bytes:
    """Returns tokens, log-probabilities and checksums of the trees as bytes.  Ranks that agree have equal bytes."""
    encoded = []
    for result in results:
        encoded.append(repr((result.tokens, result.is_finite, result.tree_checksum)).encode())
        encoded += [rows.tobytes() for rows in (result.logprobs, result.prompt_logprobs) if rows is not None]
    return b"|".join(encoded)


class RankProcess(Protocol):
    """The part of subprocess.Popen that is used here."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


@dataclass
class Peer:
    """Another rank.

    silent_s: seconds since the rank's last message.  lag_s: for how many seconds the rank has not started the last
    launch of rank 0."""

    rank: int
    connection: Connection
    process: RankProcess
    received_messages: dict[tuple[type, int], Any] = field(default_factory=dict)
    silent_s: float = 0.0
    lag_s: float = 0.0
    last_launch: int = 0
    has_sent_message: bool = False
    failure_report: FailureReport | None = None
    is_disconnected: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def kill(self) -> None:
        with suppress(OSError):
            self.process.kill()

    def exit_code(self, timeout_s: float) -> int | None:
        """Waits up to this many seconds for the process to end.  Returns its exit code, None if it still runs."""
        with suppress(Exception):
            self.process.wait(timeout_s)
        return self.process.poll()


class OtherRanks:
    """Ranks 1 to N - 1.

    collectives: rank 0's collectives, which are aborted when a rank fails; None before the ranks are joined.
    rendezvous_folder: holds the files through which ranks find one another."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = tuple(peers)
        self.collectives: Any = None
        self.failure: Exception | None = None
        self.num_launched = self.num_loads_sent = self.num_load_messages = 0
        self.rendezvous_folder = TemporaryDirectory(prefix="espalier-ranks-")
        self._condition = threading.Condition()
        self._is_ending = threading.Event()
        self._wake_receiver, self._wake_sender = Pipe(duplex=False)
        self._watcher = threading.Thread(target=self._watch_peers, name="espalier-ranks", daemon=True)
        self._watcher.start()

    def send(self, message: Any) -> None:
        """Sends a message to every other rank.  Raises the error of a failed rank."""
        for peer in self.peers:
            try:
                peer.connection.send(message)
            except OSError as error:
                raise self.failure_that_caused(error) from None

    def load(self, source: Any) -> None:
        """Tells every other rank to call source.load, which loads the rank's models.  Does not wait."""
        self.num_loads_sent += 1
        self.send(LoadModels(source))

    def join(self, connect: Callable[[], Any]) -> Any:
        """Calls `connect` in a thread.  Returns its result, the collectives of all ranks.

        If a rank fails later, the collectives are aborted.  Raises the error of `connect`, or the failure of a rank.  A
        failure is raised at once, and the thread is abandoned, because it may wait for the failed rank forever."""

        def work() -> None:
            try:
                connected.append(connect())
            except BaseException as error:
                connected.append(error)
            with self._condition:
                self._condition.notify_all()

        connected: list[Any] = []
        threading.Thread(target=work, name="espalier-join", daemon=True).start()
        self._wait_for(lambda: bool(connected))
        if isinstance(connected[0], BaseException):
            raise connected[0]
        with self._condition:
            self.collectives = connected[0]
            if self.failure is None:
                return self.collectives
        self._abort_collectives()
        raise self.failure

    def wait_until_loaded(self) -> None:
        """Waits until every rank has loaded its models.  If `load` was not called, waits until every process has
        started.  Raises RankFailed, or the EspalierError of a rank."""
        if self.num_load_messages <= self.num_loads_sent:
            self.wait_for_messages(ModelsLoaded, self.num_loads_sent)
            self.num_load_messages = self.num_loads_sent + 1

    def launch(self, launch_input: LaunchInput) -> int:
        """Sends a launch to every rank.  Returns the number of the launch."""
        self.num_launched += 1
        self.send(StartLaunch(self.num_launched, launch_input))
        return self.num_launched

    def wait_for_messages(self, message_type: type, number: int = 0) -> list[Any]:
        """Waits until every rank has sent a message of this type with this number.  Returns them in rank order.

        Raises RankFailed, or the EspalierError of a rank."""

        self._wait_for(lambda: all((message_type, number) in peer.received_messages for peer in self.peers))
        return [peer.received_messages.pop((message_type, number)) for peer in self.peers]

    def _wait_for(self, is_met: Callable[[], bool]) -> None:
        """Waits until is_met() is true.  Raises the failure of a rank, if one fails first."""
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None or is_met())
            if self.failure is not None:
                raise self.failure

    def require_equal(self, launch_number: int, results: Sequence[RequestResult]) -> None:
        """Compares the tokens and trees of all ranks for a launch.  Raises RankFailed if a rank differs from rank 0."""
        own = decisions_of(results)
        for peer, answer in zip(self.peers, self.wait_for_messages(Decisions, launch_number), strict=True):
            if answer.decisions != own:
                self._fail_all(RankFailed(f"{peer.name} has decided otherwise than rank 0 in launch {launch_number}"))
                assert self.failure is not None
                raise self.failure

    def failure_that_caused(self, error: BaseException) -> BaseException:
        """Returns the failure of another rank if that failure caused this error of rank 0; else returns the error.

        All ranks are ended in both cases."""
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None, 2 * FAILURE_GRACE_S)
        if self.failure is None:
            self._fail_all(RankFailed(f"rank 0 has failed: {error}"))
            return error
        return self.failure

    def end(self) -> None:
        """Ends the processes, and returns when all have ended.  Idempotent."""
        if self._is_ending.is_set():
            return
        self._is_ending.set()
        self._wake_sender.send(None)
        self._watcher.join()
        for peer in self.peers:
            # A rank's process ends when its connection is closed.
            with suppress(OSError):
                peer.connection.close()
        deadline = time.monotonic() + (MAX_SHUTDOWN_S if self.failure is None else 0)
        for peer in self.peers:
            if peer.exit_code(max(deadline - time.monotonic(), 0)) is None:
                peer.kill()
                peer.exit_code(MAX_SHUTDOWN_S)
        if self.failure is None:
            self._abort_collectives()
        self.rendezvous_folder.cleanup()

    # The watch

    def _watch_peers(self) -> None:
        last = time.monotonic()
        while not self._is_ending.is_set() and self.failure is None:
            self._read_messages(HEARTBEAT_S)
            now = time.monotonic()
            # If the machine or the job was suspended, only the time of two heartbeats counts.
            passed, last = min(now - last, 2 * HEARTBEAT_S), now
            if not self._is_ending.is_set():
                self._check_peers(passed)

    def _read_messages(self, seconds: float) -> None:
        """Processes the messages that arrive within `seconds`."""
        open_peers = {peer.connection: peer for peer in self.peers if not peer.is_disconnected}
        for ready in wait([*open_peers, self._wake_receiver], seconds):
            if ready is self._wake_receiver:
                return
            peer = open_peers[ready]  # type: ignore[index]
            try:
                self._handle_message(peer, peer.connection.recv())
            except (EOFError, OSError):
                peer.is_disconnected = True

    def _handle_message(self, peer: Peer, message: Any) -> None:
        """Records a message of a peer: its progress, its failure, or another message for wait_for_messages."""
        peer.silent_s, peer.has_sent_message = 0.0, True
        if isinstance(message, Heartbeat):
            peer.last_launch = message.last_launch
        elif isinstance(message, FailureReport):
            peer.failure_report = message
        else:
            with self._condition:
                peer.received_messages[type(message), message.number] = message
                self._condition.notify_all()

    def _check_peers(self, elapsed_s: float) -> None:
        """Fails all ranks if one has ended, is silent or lags.  elapsed_s: the seconds since the last check."""
        if any(peer.is_disconnected or peer.failure_report is not None for peer in self.peers):
            deadline = time.monotonic() + FAILURE_GRACE_S
            while (left := deadline - time.monotonic()) > 0 and not all(peer.is_disconnected for peer in self.peers):
                self._read_messages(left)
            if not self._is_ending.is_set():
                self._fail_all(self._first_cause())
            return
        for peer in self.peers:
            peer.silent_s += elapsed_s
            peer.lag_s = peer.lag_s + elapsed_s if peer.last_launch < self.num_launched else 0.0
            limit = MAX_SILENCE_S if peer.has_sent_message else MAX_STARTUP_S
            if peer.silent_s > limit:
                self._fail_all(RankFailed(f"{peer.name} does not answer for {limit:g} s: it is stopped, or hangs"))
            elif peer.lag_s > MAX_LAG_S and peer.silent_s <= 3 * HEARTBEAT_S:
                self._fail_all(RankFailed(f"{peer.name} is behind: it has not taken up launch {self.num_launched}"))

    def _first_cause(self) -> Exception:
        """Returns the failure to report.  A refusal comes first, then memory that ran out, then a process that has
        ended.  Any other error comes last, because the first three kinds may have caused it."""
        causes: list[tuple[int, Exception]] = []
        for peer in self.peers:
            if peer.failure_report is not None:
                precedence = 0 if peer.failure_report.is_refusal else 1 if peer.failure_report.is_out_of_memory else 3
                error = f"rank {peer.rank}: {peer.failure_report.error}"
                causes.append(
                    (precedence, EspalierError(error) if peer.failure_report.is_refusal else RankFailed(error))
                )
            elif peer.is_disconnected:
                causes.append((2, RankFailed(f"{peer.name} has ended{_exit_reason(peer.exit_code(FAILURE_GRACE_S))}")))
        return min(causes, key=lambda cause: cause[0])[1]

    def _fail_all(self, failure: Exception) -> None:
        """Sets `failure` unless it is set, kills the other ranks, and ends waits for them."""
        with self._condition:
            if self.failure is None:
                self.failure = failure
            self._condition.notify_all()
        for peer in self.peers:
            peer.kill()
        self._abort_collectives()

    def _abort_collectives(self) -> None:
        """Aborts the collectives, so that this rank stops waiting for the others."""
        if self.collectives is not None:
            # An error of `abort` is dropped, because `failure` tells more.
            with suppress(Exception):
                self.collectives.abort()


def _exit_reason(code: int | None) -> str:
    """Returns the end of an error text that says how a process ended.  code: its exit code, -n for signal n."""
    if code is None:
        return ""
    return f" with exit code {code}" if code >= 0 else f" by {Signals(-code).name}"
