"""What `serve --replicas` does before it starts a cluster, with a Ray that is none."""

import socket
from types import SimpleNamespace

import pytest

from espalier.errors import EspalierError
from espalier.serve_ray.cluster import _join


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
            _join(SimpleNamespace(init=init), "127.0.0.1", port)
    assert "local" not in asked
    assert _join(SimpleNamespace(init=init), "127.0.0.1", port) and asked[-1] == "local"
