"""The files of deploy/ name what there is."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from espalier import serve_ray
from espalier.cli.main import parse
from espalier.serve_ray.build import parse_service
from espalier.server.api import ApiOptions
from espalier.server.connections import KEEP_ALIVE_S

FOLDER = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
def test_a_config_can_be_served(name):
    file = yaml.safe_load((FOLDER / name).read_text())
    config = file if "applications" in file else yaml.safe_load(file["spec"]["serveConfigV2"])
    [application] = config["applications"]
    assert application["import_path"] == "espalier.serve_ray:app" and callable(serve_ray.app)
    service = parse_service(application["args"])
    assert all(model.frontend.names for model in service.models)


def test_pods_outlive_the_requests_that_they_drain():
    spec = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())["spec"]
    args = yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]
    [workers] = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > args["drain_timeout"]
    # A replica takes one GPU, and so does a worker.
    assert parse_service(args).models[0].replicas.max_replicas <= workers["maxReplicas"]


def test_images_have_the_version_of_ray_that_is_supported():
    wanted = next(
        line for line in (FOLDER.parent / "pyproject.toml").read_text().splitlines() if line.startswith("ray =")
    )
    versions = wanted.partition("ray[serve]")[2].partition('"')[0]
    for name in ("Dockerfile.ray", "Dockerfile.ray-cpu"):
        assert f"ray[default]{versions}" in (FOLDER / name).read_text()


def test_the_unit_starts_a_server_and_waits_for_its_end():
    unit = dict(re.findall(r"^(\w+)=(.*)$", (FOLDER / "espalier.service").read_text(), re.M))
    program, *words = shlex.split(unit["ExecStart"])
    args = parse(words)
    assert program.endswith("/espalier") and args.command == "serve"
    assert int(unit["TimeoutStopSec"]) > args.drain_timeout and unit["KillMode"] == "mixed"
    # As main and serve give them (espalier/cli/main.py).
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("on-failure", "2")


def test_the_proxy_lets_through_what_the_server_takes():
    text = (FOLDER / "nginx.conf").read_text()
    sizes = [int(size) * 2**20 for size in re.findall(r"client_max_body_size (\d+)m;", text)]
    assert sizes == [ApiOptions.max_body_bytes, ApiOptions.max_file_bytes]
    seconds = [int(limit) for limit in re.findall(r"proxy_read_timeout (\d+)s;", text)]
    assert min(seconds) > parse(["serve"]).request_timeout
    [idle] = re.findall(r"keepalive_timeout (\d+)s;", text)
    assert int(idle) < KEEP_ALIVE_S
    assert "proxy_buffering off;" in text.partition("location /v1/files")[0]
