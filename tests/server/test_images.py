"""What the command of a container becomes: the flags of its image, and its own; and where its health is asked."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from espalier.cli.main import parse

DOCKER = Path(__file__).parents[2] / "docker"
DEVICE = "EngineConfig.device"


def of_image(name: str, command: str, tmp_path: Path) -> list[str]:
    """The arguments that `espalier` gets in a container."""
    return given_to("espalier", program_of(name, r"^ENTRYPOINT (.+)$"), shlex.split(command), tmp_path)


def program_of(name: str, line: str) -> list[str]:
    [program] = re.findall(line, (DOCKER / name).read_text(), re.M)
    return [part.replace("/src/docker", str(DOCKER)) for part in json.loads(program)]


def given_to(called: str, program: list[str], arguments: list[str], tmp_path: Path) -> list[str]:
    """The arguments that a program gives to the command `called`."""
    command = tmp_path / called
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    command.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([*program, *arguments], env={"PATH": path}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("command", "host", "device"),
    [
        ("bundled", "0.0.0.0", ""),
        ("bundled --host 127.0.0.1", "127.0.0.1", ""),
        ("--host=:: bundled --device=cpu", "::", "cpu"),
        ("bundled --device cuda:1 --log-json", "0.0.0.0", "cuda:1"),
        ("--draft 'my draft' --served-model-name ''", "0.0.0.0", ""),
    ],
)
@pytest.mark.parametrize(("name", "its_device"), [("Dockerfile.cpu", "auto"), ("Dockerfile.cuda", "cuda")])
def test_a_container_may_replace_the_flags_of_its_image(name, its_device, command, host, device, tmp_path):
    arguments = of_image(name, command, tmp_path)
    args = parse(arguments)
    assert (args.command, args.host, getattr(args, DEVICE)) == ("serve", host, device or its_device)
    assert args.log_json and arguments[-len(shlex.split(command)) :] == shlex.split(command)


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("bundled", "localhost:8000"),
        ("bundled --port 9000 --max-batch 8", "localhost:9000"),
        ("--port=80 bundled --host=::", "localhost:80"),
        ("bundled --host ::1", "[::1]:8000"),
        ("bundled --host 10.0.0.7 --port 1", "10.0.0.7:1"),
    ],
)
@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_the_health_of_a_container_is_asked_where_its_server_listens(name, command, asked, tmp_path):
    running = tmp_path / "cmdline"
    running.write_text("".join(f"{part}\0" for part in ("python", "/bin/espalier", *of_image(name, command, tmp_path))))
    check = program_of(name, r"^HEALTHCHECK .* CMD (.+)$")
    assert given_to("curl", check, [str(running)], tmp_path)[-1] == f"http://{asked}/health"


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_an_image_has_the_scripts_that_it_runs(name):
    text = (DOCKER / name).read_text()
    [copied] = re.findall(r"^COPY ((?:docker/\S+ )+)", text, re.M)
    assert {f"/src/{path}" for path in copied.split()} == set(re.findall(r"/src/docker/[^\"]+", text))
