"""What `serve --replicas` does before it starts a cluster, with a Ray that is none."""

import socket
import sys
from types import SimpleNamespace

import pytest

from espalier.errors import EspalierError
from espalier.serve_ray.build import parse_service, ray_resources
from espalier.serve_ray.cluster import _connect, _require_gpus


@pytest.mark.parametrize("address", [None, "local"])
def test_a_port_in_use_is_refused_before_a_cluster_is_started(address, monkeypatch):
    asked = []

    def init(address, **options):
        asked.append(address)
        if address == "auto":
            raise ConnectionError("no cluster runs here")

    monkeypatch.setattr("espalier.serve_ray.cluster.OWN_CLUSTER_ENV", {})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EspalierError, match=f"--port {port} cannot be used .*; choose another"):
            _connect(SimpleNamespace(init=init), "127.0.0.1", port)
    assert "local" not in asked
    assert _connect(SimpleNamespace(init=init), "127.0.0.1", port) and asked[-1] == "local"


def cluster(monkeypatch, *gpus):
    """A Ray whose machines have these GPUs, and one that has ended."""
    nodes = [{"Alive": True, "Resources": {"GPU": float(count)} if count else {}} for count in gpus]
    ray = SimpleNamespace(
        nodes=lambda: [*nodes, {"Alive": False, "Resources": {"GPU": 8.0}}],
        cluster_resources=lambda: {"CPU": 4.0, **({"GPU": float(sum(gpus))} if sum(gpus) else {})},
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def service(ranks, replicas, device="auto", **more):
    args = {"model": "bundled", "tensor_parallel": ranks, "replicas": replicas, "device": device, **more}
    return parse_service(args)


@pytest.mark.parametrize(
    ("ranks", "replicas", "device", "gpus", "reserved"),
    [
        (1, 3, "auto", (2, 1), 1),
        (2, 3, "auto", (4, 3), 2),
        (4, "1:2", "cuda", (4, 0, 4), 4),
        (2, 2, "cpu", (1,), 0),
        (2, 2, "auto", (0,), 0),
    ],
)
def test_a_replica_has_a_gpu_for_each_rank(ranks, replicas, device, gpus, reserved, monkeypatch):
    ray, asked = cluster(monkeypatch, *gpus), service(ranks, replicas, device)
    _require_gpus(ray, asked)
    assert ray_resources(asked.models[0]) == {"num_cpus": 0, "num_gpus": reserved}


@pytest.mark.parametrize(
    ("ranks", "replicas", "device", "gpus", "says"),
    [
        (1, 2, "cuda", (0,), "--replicas 2 needs 2 GPUs and the Ray cluster has 0; use --device cpu, or add"),
        (1, 4, "auto", (2, 1), "--replicas 4 needs 4 GPUs and the Ray cluster has 3; use --replicas 3, or add"),
        # Six GPUs, but no machine has two more.
        (2, 3, "auto", (3, 3), "--replicas 3 with --tensor-parallel 2 needs 6 GPUs, 2 on .* has 6; use --replicas 2"),
        (4, "1:1", "cuda", (2, 2), "--tensor-parallel 4 needs 4 GPUs, 4 on one machine .* has 4; use a smaller one"),
    ],
)
def test_more_gpus_than_the_machines_have_are_refused(ranks, replicas, device, gpus, says, monkeypatch):
    ray = cluster(monkeypatch, *gpus)
    with pytest.raises(EspalierError, match=says):
        _require_gpus(ray, service(ranks, replicas, device))


def test_reserved_gpus_that_are_not_those_of_the_ranks_are_refused(monkeypatch):
    cluster(monkeypatch, 8)
    with pytest.raises(EspalierError, match="resources has num_gpus=1, but tensor_parallel=2 needs 2; correct one"):
        ray_resources(service(2, 1, resources={"num_gpus": 1}).models[0])
    [model] = service(2, 1, resources={"num_gpus": 2, "num_cpus": 1}).models
    assert ray_resources(model) == {"num_gpus": 2, "num_cpus": 1}
