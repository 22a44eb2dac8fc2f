"""What the command of a container becomes: the flags of its image, and what it gives itself."""

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
    espalier = tmp_path / "espalier"
    espalier.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    espalier.chmod(0o755)
    [entry] = re.findall(r"^ENTRYPOINT (.+)$", (DOCKER / name).read_text(), re.M)
    program = [part.replace("/src/docker", str(DOCKER)) for part in json.loads(entry)]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [*program, *shlex.split(command)], env={"PATH": path}, capture_output=True, text=True, check=True
    )
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


def test_a_synthetic_model_decides_its_device(tmp_path):
    assert getattr(parse(of_image("Dockerfile.cuda", "--shape llama-3.1-8b", tmp_path)), DEVICE) is None
