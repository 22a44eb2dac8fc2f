"""`espalier serve --replicas`: joins or starts a Ray cluster, deploys a service, and ends at a signal."""

import logging
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from espalier.errors import EspalierError, one_line
from espalier.serve_ray.build import Service, application, num_gpus_of, require_ray
from espalier.server.run import bind_listener

log = logging.getLogger("espalier.server")
APP_NAME = "espalier"
# The size of Ray's object store in a new cluster: small, because messages of replicas do not use the store.
OBJECT_STORE_BYTES = 2**28
# Environment variables of a new cluster.  RAY_SERVE_THROUGHPUT_OPTIMIZED=1 makes Serve's processes use gRPC, which
# halves the cost of a streamed token (docs/deploy.md).  RAY_worker_niceness=0 gives the processes normal priority.
OWN_CLUSTER_ENV = MappingProxyType(
    {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        # Otherwise replicas log only to files.
        "RAY_SERVE_LOG_TO_STDERR": "1",
        "RAY_worker_niceness": "0",
    }
)
CONNECT_TIMEOUT_S = 10.0
# The time for Ray Serve to kill replicas that still run after drain_timeout_s.
KILL_TIMEOUT_S = 20.0
# Finds in the traceback of a replica why it refused to start.
REFUSAL_PATTERN = re.compile(r"EspalierError: (.+)")


def serve_replicas(service: Service, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM.  port: 0 for a free port.  Raises EspalierError if the service cannot start."""
    ray_serve = require_ray()
    import ray

    shutdown_event = threading.Event()
    is_own_cluster = _connect(ray, host, port)
    # The handlers are set after ray.init, because ray.init sets handlers that end the process with a stack trace.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: shutdown_event.set())
    try:
        _require_gpus(ray, service)
        port = _start_proxy(ray_serve, host, port)
        if APP_NAME in ray_serve.status().applications:
            raise EspalierError(
                f"another `espalier serve --replicas` runs on this Ray cluster; end it (or `serve delete {APP_NAME}`), "
                "or serve several models with one Serve config file (docs/deploy.md)"
            )
        try:
            _deploy(ray_serve, service, shutdown_event)
            if not shutdown_event.is_set():
                names = ", ".join(model.name for model in service.models)
                counts = (dict.fromkeys((m.replicas.min_replicas, m.replicas.max_replicas)) for m in service.models)
                replicas = " and ".join(" to ".join(map(str, each)) for each in counts)
                log.info("serving %s at http://%s:%d/v1 with %s replicas", names, host, port, replicas)
                shutdown_event.wait()
                log.info("draining")
        finally:
            _delete_app(ray_serve, service.drain_timeout_s)
    finally:
        if is_own_cluster:
            ray_serve.shutdown()
        ray.shutdown()


def _connect(ray: Any, host: str, port: int) -> bool:
    """Connect to the Ray cluster of RAY_ADDRESS, else to the cluster on this machine, else start a cluster.

    RAY_ADDRESS=local always starts a cluster.  Returns whether a cluster was started.  Raises EspalierError.  Before
    a cluster is started, the port is checked, because starting a cluster takes ten seconds."""
    log_options = {"logging_level": logging.WARNING}
    address = os.environ.get("RAY_ADDRESS")
    if address != "local":
        if address is not None:
            _require_listening(address)
        try:
            ray.init(address=address or "auto", **log_options)
            log.info("joined the Ray cluster at %s", ray.get_runtime_context().gcs_address)
            return False
        except (ConnectionError, ValueError, RuntimeError) as error:
            if address is not None:
                raise _no_cluster_error(address, error) from None
    _bindable_port(host, port)
    for name, value in OWN_CLUSTER_ENV.items():
        os.environ.setdefault(name, value)
    ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **log_options)
    log.info("started a Ray cluster on this machine")
    return True


def _require_listening(address: str) -> None:
    """Refuse an address HOST:PORT where nothing listens, because Ray would wait for minutes.  Raises EspalierError."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()) or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster_error(address, error) from None


def _no_cluster_error(address: str, error: Exception) -> EspalierError:
    return EspalierError(
        f"there is no Ray cluster at RAY_ADDRESS={address} ({one_line(error)}); correct it, or unset it to start a "
        "cluster on this machine"
    )


def _require_gpus(ray: Any, service: Service) -> None:
    """Refuse a cluster with too few GPUs.  All GPUs of a replica must be on one machine.  Raises EspalierError."""
    replicas = [model for model in service.models for _ in range(model.replicas.max_replicas)]
    needed = sorted(filter(None, (num_gpus_of(model.settings) for model in replicas)), reverse=True)
    free_gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]] or [0]
    total, num_placed = sum(free_gpus), 0
    for gpus in needed:
        node = free_gpus.index(max(free_gpus))
        free_gpus[node] -= gpus
        num_placed += free_gpus[node] >= 0
    if num_placed < len(needed):
        ranks = f" with --tensor-parallel {needed[0]}" if needed[0] > 1 else ""
        place = f", {needed[0]} on one machine for each," if ranks else ""
        raise EspalierError(
            f"--replicas {len(needed)}{ranks} needs {sum(needed)} GPUs{place} and the Ray cluster has {total}; "
            + (f"use --replicas {num_placed}" if num_placed else "use a smaller one" if total else "use --device cpu")
            + ", or add nodes with GPUs"
        )


def _start_proxy(ray_serve: Any, host: str, port: int) -> int:
    """Start Ray Serve's HTTP proxy and return its port.  Raises EspalierError if the port cannot be used."""
    from ray.serve.config import HTTPOptions
    from ray.serve.context import _get_global_client

    serve_client = _get_global_client(raise_if_no_controller_running=False)
    if serve_client is None:
        port = _bindable_port(host, port)
        ray_serve.start(http_options=HTTPOptions(host=host, port=port))
        return port
    http_config = serve_client.http_config
    if port not in (0, http_config.port):
        raise EspalierError(
            f"Ray Serve runs on this cluster already and listens at {http_config.host}:{http_config.port}, not at port "
            f"{port}; use --port {http_config.port}, or end it with `serve shutdown`"
        )
    return int(http_config.port)


def _bindable_port(host: str, port: int) -> int:
    """Returns `port`, or a free port if `port` is 0.  Raises EspalierError if this machine cannot listen there."""
    with bind_listener(host, port) as probe:
        return int(probe.getsockname()[1])


def _delete_app(ray_serve: Any, drain_timeout_s: float) -> None:
    """Delete the application.  Its replicas have drain_timeout_s to finish their requests."""
    end = time.monotonic() + drain_timeout_s + KILL_TIMEOUT_S
    # `delete` waits only one minute, but drain_timeout_s may be longer.
    with suppress(TimeoutError):
        ray_serve.delete(APP_NAME)
    while APP_NAME in ray_serve.status().applications:
        if time.monotonic() > end:
            log.warning("requests did not finish within %g s: ending them", drain_timeout_s)
            return
        time.sleep(0.2)


def _deploy(ray_serve: Any, service: Service, shutdown_event: threading.Event) -> None:
    """Deploy, and wait until all replicas are ready or `shutdown_event` is set.  Raises EspalierError for a failure."""
    try:
        target = ray_serve.RunTarget(application(service), name=APP_NAME, route_prefix="/")
        ray_serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    except Exception as error:
        raise EspalierError(_reason_of_failure(str(error))) from None
    while not shutdown_event.wait(0.2):
        app = ray_serve.status().applications[APP_NAME]
        if app.status == "RUNNING":
            return
        if app.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [app.message, *(each.message for each in app.deployments.values())]
            raise EspalierError(_reason_of_failure("\n".join(messages)))


def _reason_of_failure(message: str) -> str:
    """Returns in one line why a deployment failed.  message: Ray Serve's message, which has many lines."""
    reason = REFUSAL_PATTERN.findall(message)
    return (
        f"a replica cannot load: {reason[-1]}" if reason else f"Ray Serve cannot deploy: {one_line(Exception(message))}"
    )
