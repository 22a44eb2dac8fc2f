"""Processes that find their imports done: copies (fork) of a process that imports for all of them, once.

A process of Python that needs PyTorch takes most of its time for imports.  Where a test is of what happens then, it
starts a copy.  What a user starts is `python -m espalier`, so some tests of each kind start that.
"""

import asyncio
import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
WORKER = "espalier.server.worker"
# What an API server and its engine import.
SERVER = (
    "espalier.cli.main",
    "espalier.cli.serve",
    "espalier.server.run",
    WORKER,
    "transformers.PreTrainedTokenizerFast",
)
COMPILER = ("torch", "triton", "triton.experimental.gluon", "triton.backends.compiler")


class Copy:
    """As much of subprocess.Popen as tests use, of a process that another one started."""

    def __init__(self, told: int):
        """told: a pipe that says the process's id, and at its end its status."""
        self._told = os.fdopen(told, "rb", buffering=0)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self, seconds: float | None = 0.0) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], seconds)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self._told.readline()))
            self._told.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        found = self.poll(timeout)
        if found is None:
            raise subprocess.TimeoutExpired(["a copy"], timeout or 0.0)
        return found

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """A process with these modules imported.  module.name: a name that is imported from a module."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]):
        self.environment = dict(environment)
        self._asks, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with asked:
            command = [sys.executable, "-m", "tests.warm", str(asked.fileno()), *modules]
            self._process = subprocess.Popen(command, cwd=ROOT, env=self.environment, pass_fds=[asked.fileno()])
        atexit.register(self.close)

    def start(
        self,
        module: str,
        args: Sequence[str],
        environment: Mapping[str, str],
        out: IO[Any],
        err: IO[Any],
        constants: Mapping[str, float] | None = None,
    ) -> Copy:
        """Begin `python -m module args`, in the root of the checkout.  constants: of modules, by `module.NAME`."""
        reads, writes = os.pipe()
        message = json.dumps([module, list(args), dict(environment), dict(constants or {})]).encode()
        socket.send_fds(self._asks, [message], [out.fileno(), err.fileno(), writes])
        os.close(writes)
        return Copy(reads)

    def run(self, module: str, *args: str, **environment: str) -> str:
        """What `python -m module args` prints; it must succeed.  environment: what is added to this process's own."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            status = self.start(module, args, self.environment | environment, out, err).wait()
            out.seek(0)
            err.seek(0)
            assert status == 0, err.read()
            return out.read()

    def close(self) -> None:
        self._asks.close()
        self._process.wait()


@cache
def server() -> Warm:
    """For servers, with OMP_NUM_THREADS=1."""
    return Warm(SERVER, os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})


@cache
def compiler() -> Warm:
    """For programs that compile kernels: where they are interpreted, nothing compiles.  Nobody reads which lines of the
    source instructions are of, and to note them takes time."""
    compiles = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return Warm(COMPILER, compiles | {"TRITON_DISABLE_LINE_INFO": "1"})


def main(asked: int, modules: Sequence[str]) -> None:
    """Start copies until nobody asks any more."""
    for name in modules:
        module, _, last = name.rpartition(".")
        try:
            import_module(name)
        except ModuleNotFoundError:
            getattr(import_module(module), last)
    gc.collect()
    gc.freeze()
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    told: dict[int, int] = {}
    with socket.socket(fileno=asked) as asks:
        while True:
            ready, _, _ = select.select([asks, woken], [], [])
            if woken in ready:
                woken.recv(4096)
                _tell_of_ended(told)
            if asks in ready:
                message, given, _, _ = socket.recv_fds(asks, 2**20, 3)
                if not message:
                    return
                pid = os.fork()
                if not pid:
                    _become(*json.loads(message), *given[:2])
                os.write(given[2], f"{pid}\n".encode())
                told[pid] = given[2]
                for descriptor in given[:2]:
                    os.close(descriptor)


def _tell_of_ended(told: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            descriptor = told.pop(found[0])
            with suppress(BrokenPipeError):
                os.write(descriptor, f"{found[1]}\n".encode())
            os.close(descriptor)


def _become(
    module: str, args: list[str], environment: dict[str, str], constants: dict[str, float], out: int, err: int
) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    for name, value in constants.items():
        holder, _, constant = name.rpartition(".")
        assert hasattr(import_module(holder), constant)
        setattr(import_module(holder), constant, value)
    os.environ.clear()
    os.environ.update(environment)
    asyncio.create_subprocess_exec = copied_engines(asyncio.create_subprocess_exec)
    _run(partial(runpy.run_module, module, run_name="__main__", alter_sys=True), [module, *args])


def copied_engines(start: Callable[..., Any]) -> Callable[..., Any]:
    """An API server starts its engine as a copy of itself, its child."""

    def started(*command: str, **options: Any) -> Any:
        if command[1:3] == ("-m", WORKER):
            main = import_module(WORKER).main
            options["preexec_fn"] = partial(_run, lambda: main(command[3], int(command[4])), list(command[2:]))
        return start(*command, **options)

    return started


def _run(program: Callable[[], Any], args: list[str]) -> None:
    """Run a program to its end in a copy, with no more of the process before it than its modules."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # Among these is the pipe by which whoever started this waits for it to become another program.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    asyncio._set_running_loop(None)
    tempfile.tempdir = None
    sys.argv = args
    status: Any = 1
    try:
        status = program()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
