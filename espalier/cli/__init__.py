"""The command line.  Each command has a function that adds its flags, and a function `run`.  Most
flags are generated from the fields of EngineConfig, SpeculationConfig and SamplingParams."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from espalier.cli.parser import Parser

INTERRUPTED_STATUS = 130


def start(arguments: Sequence[str] | None = None, make_parser: "Callable[[], Parser] | None" = None) -> int:
    """Runs a command line of `espalier`.  Returns the exit status.

    Ctrl-C prints only one line, even during the imports, which take seconds.
    make_parser: makes the parser of another program, such as `python -m lab`; None for the parser of `espalier`.
    """
    with _terminating_as_interrupting():
        words = sys.argv[1:] if arguments is None else list(arguments)
        try:
            if make_parser is None and words[:1] == ["train"]:
                from espalier.train.command import main as train

                return train(words[1:])
            from espalier.cli.main import main
        except KeyboardInterrupt:
            return interrupted()
        return main(arguments) if make_parser is None else main(arguments, make_parser)


def interrupted() -> int:
    print("espalier: interrupted", file=sys.stderr)
    return INTERRUPTED_STATUS


@contextmanager
def _terminating_as_interrupting() -> Iterator[None]:
    """Makes SIGTERM act like Ctrl-C during the block, so that a command ends its child processes.  The server command
    replaces this handler by its own handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handler = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    # A background job of a shell ignores SIGINT, but must end at SIGTERM.
    if not callable(on_ctrl_c):
        raise KeyboardInterrupt
    on_ctrl_c(signal.SIGINT, frame)
