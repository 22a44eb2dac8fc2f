"""Ray Serve's deployments: one of the front, and one of engine replicas for each model.

Ray is imported only when something is built, so a server without --replicas does not need it.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from espalier.errors import EspalierError, install_command, shown
from espalier.serve_ray.settings import ServedModel, Service, service_of

RAY_VERSION = "2.60"
# Above any queue: the front limits open requests, not Ray Serve.
MAX_ONGOING = 65536
# Health checks find a replica that hangs.  A replica whose engine ended exits by itself.
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 30.0
# Ray Serve writes no line for each request, because the front does, with its id.
NO_ACCESS_LOG = MappingProxyType({"enable_access_log": False})


def require_ray() -> Any:
    """The module ray.serve.  Raises EspalierError."""
    remedy = f"in the clone, run {install_command('ray')}"
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise EspalierError(f"replicas need Ray Serve, which is not installed ({error}); {remedy}") from None
    if not ray.__version__.startswith(f"{RAY_VERSION}."):
        raise EspalierError(f"Ray {ray.__version__} is not supported; use {RAY_VERSION}: {remedy}")
    return serve


def app(args: dict[str, Any]) -> Any:
    """The application of a Serve config file: `import_path: espalier.serve_ray:app`.  args: see settings.service_of."""
    return application(service_of(args))


def application(service: Service) -> Any:
    """Ray Serve's Application.  Raises EspalierError."""
    serve = require_ray()
    from espalier.serve_ray.ingress import Ingress

    front = serve.deployment(serve.ingress()(Ingress)).options(
        name="front",
        num_replicas=service.num_fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=service.drain_timeout_s,
        # A new front starts before the old one ends.
        max_surge_percent=100,
        logging_config=dict(NO_ACCESS_LOG),
    )
    names = [_deployment_name(model, len(service.models)) for model in service.models]
    engines = [_engines(serve, model, service, name) for model, name in zip(service.models, names, strict=True)]
    return front.bind(service, engines)


def _engines(serve: Any, model: ServedModel, service: Service, name: str) -> Any:
    """The bound deployment of a model's replicas."""
    from ray.serve.config import RequestRouterConfig

    from espalier.serve_ray.replica import EngineReplica

    deployment = serve.deployment(EngineReplica).options(
        name=name,
        **_scaling(model),
        ray_actor_options=resources_of(model),
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=service.drain_timeout_s,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class=model.replicas.router),
        # A configuration that a replica refuses is refused again at every try.
        max_constructor_retry_count=1,
        logging_config=dict(NO_ACCESS_LOG),
    )
    return deployment.bind(model.settings, model.client)


def _scaling(model: ServedModel) -> dict[str, Any]:
    replicas = model.replicas
    if not replicas.is_autoscaled:
        return {"num_replicas": replicas.low}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    policy = AutoscalingPolicy(
        policy_function="espalier.serve_ray.replica_chooser:OpenTokens",
        policy_kwargs={"tokens_per_replica": replicas.tokens_per_replica},
    )
    return {
        "num_replicas": "auto",
        "autoscaling_config": AutoscalingConfig(
            min_replicas=replicas.low, max_replicas=replicas.high, policy=policy, **replicas.autoscaling
        ),
    }


def resources_of(model: ServedModel) -> dict[str, Any]:
    """The resources that Ray reserves for a replica: a GPU for each rank; nothing for the CPU, whose cores replicas may
    share.

    Ray takes an actor's resources from one machine.  Raises EspalierError for fewer GPUs than ranks.
    """
    wanted = gpus_of(model.settings)
    if model.replicas.resources is None:
        return {"num_cpus": 0, "num_gpus": wanted}
    given = dict(model.replicas.resources)
    if wanted > 1 and given.get("num_gpus") != wanted:
        raise EspalierError(
            f"resources has num_gpus={shown(given.get('num_gpus'))}, but tensor_parallel={wanted} needs {wanted}; "
            "correct one of them"
        )
    return given


def gpus_of(settings: Mapping[str, Any]) -> int:
    """The GPUs of a replica, all of one machine."""
    return int(settings.get("tensor_parallel", 1)) if uses_gpu(settings) else 0


def uses_gpu(settings: Mapping[str, Any]) -> bool:
    """Whether a replica needs a GPU: `device` says so; "auto" means yes if the cluster has a GPU."""
    import ray

    device = settings.get("device", "auto")
    if device == "auto":
        return ray.cluster_resources().get("GPU", 0) > 0
    return device == "cuda"


def _deployment_name(model: ServedModel, num_models: int) -> str:
    """ "engine", or with several models "engine-" and the model's name."""
    if num_models == 1:
        return "engine"
    return "engine-" + re.sub(r"[^\w.-]", "-", model.name)
