"""An API server whose engine process loads for ever, busy all the time.  Arguments: the socket's path, a file for its
pid."""

import os
import sys
import time
from pathlib import Path

import zmq

from espalier.server import protocol
from espalier.server.worker import main


def load(settings):
    Path(settings["pid_file"]).write_text(str(os.getpid()))
    while True:
        pass


if __name__ == "__main__":
    address, api_server_pid = f"ipc://{sys.argv[1]}", os.getpid()
    if os.fork() == 0:
        sys.exit(main(address, api_server_pid, load))
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.bind(address)
        socket.send(protocol.encode(protocol.StartEngine({"pid_file": sys.argv[2]}, 1.0, "info", False)))
        time.sleep(600)
