"""Builds Ray Serve's deployments: one for the API server, and one for the engine replicas of each model.

Ray is imported only to build deployments, so a server without --replicas does not need Ray.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from espalier.chat import require_template
from espalier.config import EngineConfig, SpeculationConfig
from espalier.errors import (
    EspalierError,
    install_command,
    require_int,
    shown,
    unknown_name_error,
    whole_number,
)
from espalier.server.api import ApiOptions
from espalier.server.client import ClientOptions
from espalier.server.frontend import FrontendOptions
from espalier.server.logs import LOG_LEVELS
from espalier.server.run import check_options

# The default of ReplicaOptions.tokens_per_replica.
TOKENS_PER_REPLICA = 16384
DEFAULT_ROUTER = "espalier.serve_ray.router.PrefixRouter"
# Options of a Serve config file (`args` of parse_service) that are also fields of the server's option classes.  An
# option X_timeout is the field X_timeout_s.
FRONTEND_FIELDS = (
    *("max_queue", "request_timeout", "strict_fields", "allow_special_tokens_in_messages"),
    *("tool_format", "reasoning_format"),
)
CLIENT_FIELDS = ("engine_timeout", "load_timeout")
API_FIELDS = ("api_key", "max_body_bytes", "body_timeout")
REPLICA_OPTIONS = ("tokens_per_replica", "resources", "autoscaling", "router")
MODEL_OPTIONS = (*FRONTEND_FIELDS, *CLIENT_FIELDS, *REPLICA_OPTIONS, "served_model_name", "chat_template", "replicas")
SERVICE_OPTIONS = (*API_FIELDS, "cors_origin", "fronts", "drain_timeout", "log_level", "log_json")
RAY_VERSION = "2.60"
# This number is so large that Ray Serve never limits the open requests.  The API server already limits them.
MAX_ONGOING_REQUESTS = 65536
# Health checks find a replica that hangs.  A replica whose engine has ended exits by itself.
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 30.0
# Ray Serve logs no requests, because the API server logs each request with its id.
NO_ACCESS_LOG = MappingProxyType({"enable_access_log": False})


@dataclass(frozen=True)
class ReplicaOptions:
    """The number of engine replicas of a model, from `min_replicas` to `max_replicas`, and their options.

    tokens_per_replica: autoscaling changes the number of replicas so that each has about this many tokens still to
    compute (EngineReplica.open_tokens).  resources: what Ray reserves for a replica (ray_actor_options); with None, a
    GPU for each rank, and nothing on a CPU.  autoscaling: further fields of Ray's AutoscalingConfig.  router: the
    import path of a subclass of Ray's RequestRouter."""

    min_replicas: int
    max_replicas: int
    tokens_per_replica: int = TOKENS_PER_REPLICA
    resources: Mapping[str, Any] | None = None
    autoscaling: Mapping[str, Any] = field(default_factory=dict)
    router: str = DEFAULT_ROUTER

    @property
    def is_autoscaled(self) -> bool:
        return self.min_replicas < self.max_replicas


@dataclass(frozen=True)
class ServedModel:
    """One model of a service.  settings: the keyword arguments of EngineConfig, as JSON values."""

    settings: dict[str, Any]
    frontend: FrontendOptions
    client: ClientOptions
    replicas: ReplicaOptions

    @property
    def name(self) -> str:
        """The model's first served name.  If no name was given, the setting `draft`."""
        return self.frontend.names[0] if self.frontend.names else str(self.settings["draft"])


@dataclass(frozen=True)
class Service:
    """The parsed options of a Ray Serve application.  models: at least one.  num_api_servers: how many API servers run.
    drain_timeout_s: how long requests may go on when a replica must end."""

    models: tuple[ServedModel, ...]
    api: ApiOptions
    num_api_servers: int = 1
    drain_timeout_s: float = 60.0
    log_level: str = "info"
    log_json: bool = False


def parse_replicas(text: int | str, **other_options: Any) -> ReplicaOptions:
    """Parses the number of replicas, N or "MIN:MAX".  other_options: of ReplicaOptions.  Raises EspalierError."""
    low, _, high = str(text).partition(":")
    try:
        least, most = whole_number(low), whole_number(high or low)
        require_int("", least, 1, most)
    except ValueError:
        raise EspalierError(
            f"replicas={shown(text)} is not supported; use a whole number, 1 or more, or MIN:MAX such as 1:4"
        ) from None
    return ReplicaOptions(least, most, **other_options)


def parse_service(args: Mapping[str, Any]) -> Service:
    """Parses the `args` of a Serve config file.  Raises EspalierError.

    `args` has either one `model` with its settings, or `models`, a list of such objects that share the other settings.
    """
    shared = {name: value for name, value in args.items() if name not in ("models", *SERVICE_OPTIONS)}
    models = args.get("models", [{}])
    if not (isinstance(models, list) and models and all(isinstance(each, Mapping) for each in models)):
        raise EspalierError("models is not supported with this value; use a list of objects, each with its `model`")
    for name in (name for model in models for name in model if name in SERVICE_OPTIONS):
        raise EspalierError(f"{name} is the API server's, and all models have one API server; put it beside `models`")
    log_level = _option_or(args, "log_level", "info")
    if log_level not in LOG_LEVELS:
        raise EspalierError(f"log_level={shown(log_level)} is not supported; use {', '.join(LOG_LEVELS)}")
    check_options(args)
    api_key = args.get("api_key")
    if api_key is not None and not (isinstance(api_key, str) and api_key):
        raise EspalierError("api_key is empty, or is no text; give the key, or leave it out")
    log_options = {"log_level": log_level, "log_json": _option_or(args, "log_json", False)}
    return Service(
        tuple(_parse_model({**shared, **model}, log_options) for model in models),
        ApiOptions(**_option_fields(args, API_FIELDS), cors_origins=tuple(_list_of_texts(args, "cors_origin"))),
        _option_or(args, "fronts", 1),
        _option_or(args, "drain_timeout", 60.0),
        **log_options,
    )


def _parse_model(args: dict[str, Any], log_options: dict[str, Any]) -> ServedModel:
    """Returns one model of the service.  args: its options by name.  log_options: fields of ClientOptions."""
    engine_fields = [f.name for f in fields(EngineConfig)]
    for name in args:
        if name not in (*engine_fields, *MODEL_OPTIONS):
            raise unknown_name_error("args", name, [*engine_fields, *MODEL_OPTIONS, *SERVICE_OPTIONS, "models"])
    check_options(args)
    settings = {name: args[name] for name in engine_fields if name in args}
    if settings.setdefault("model", "auto") == "auto" and "draft" not in settings:
        raise EspalierError("model is missing in args; name a directory, a Hugging Face id or 'bundled'")
    check_settings(settings)
    names = _list_of_texts(args, "served_model_name", *(() if settings["model"] == "auto" else (settings["model"],)))
    frontend = _option_fields(args, FRONTEND_FIELDS)
    if args.get("chat_template") is not None:
        frontend["chat_template"] = _read_template(args["chat_template"])
    replica_options = {name: args[name] for name in REPLICA_OPTIONS if args.get(name) is not None}
    return ServedModel(
        settings,
        FrontendOptions(tuple(names), **frontend),
        ClientOptions(**_option_fields(args, CLIENT_FIELDS), **log_options),
        parse_replicas(_option_or(args, "replicas", 1), **replica_options),
    )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check the settings of an engine before a replica starts.  settings: as in ServedModel.  Raises EspalierError."""
    tree = settings.get("speculation")
    EngineConfig(**{**settings, "speculation": SpeculationConfig(**tree)} if isinstance(tree, Mapping) else settings)
    if (device := str(settings.get("device", "auto"))).startswith("cuda:"):
        raise EspalierError(f"device={device} is not supported with replicas: Ray chooses each one's GPU; use cuda")


def _option_or(args: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the option `name` of `args`, or `default` if the option is missing or null."""
    return default if args.get(name) is None else args[name]


def _option_fields(args: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns {field name: value} for `names`, without missing and null options.  A timeout of 0 becomes None."""
    options = {name: args[name] for name in names if args.get(name) is not None}
    return {
        f"{name}_s" if name.endswith("_timeout") else name: None if name.endswith("_timeout") and value == 0 else value
        for name, value in options.items()
    }


def _list_of_texts(args: Mapping[str, Any], name: str, *default: str) -> list[str]:
    """Returns the option `name`, a text or a list of texts, as a list.  default: for a missing option."""
    value = _option_or(args, name, list(default))
    texts = [value] if isinstance(value, str) else value
    if not (isinstance(texts, list) and all(isinstance(each, str) for each in texts)):
        raise EspalierError(f"{name}={shown(value)} is not supported; use a text or a list of texts")
    return texts


def _read_template(path: Any) -> str:
    try:
        text = Path(path).read_text()
    except (OSError, ValueError, TypeError) as error:
        raise EspalierError(f"chat_template cannot be read ({error}); give a text file") from None
    require_template(text, f"chat_template {path}")
    return text


def require_ray() -> Any:
    """Imports and returns the module ray.serve.  Raises EspalierError if Ray is missing or not RAY_VERSION."""
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
    """Returns the application for a Serve config file (`import_path: espalier.serve_ray:app`).  args: of this file."""
    return application(parse_service(args))


def application(service: Service) -> Any:
    """Returns Ray Serve's Application for a service.  Raises EspalierError."""
    ray_serve = require_ray()
    from espalier.serve_ray.ingress import ApiServerIngress

    frontend = ray_serve.deployment(ray_serve.ingress()(ApiServerIngress)).options(
        name="front",
        num_replicas=service.num_api_servers,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=service.drain_timeout_s,
        # In an update, new API servers start before old API servers end.
        max_surge_percent=100,
        logging_config=dict(NO_ACCESS_LOG),
    )
    names = [_deployment_name(model, len(service.models)) for model in service.models]
    engines = [
        _replica_deployment(ray_serve, model, service, name) for model, name in zip(service.models, names, strict=True)
    ]
    return frontend.bind(service, engines)


def _replica_deployment(ray_serve: Any, model: ServedModel, service: Service, name: str) -> Any:
    """Returns the deployment of a model's replicas.  ray_serve: the module ray.serve."""
    from ray.serve.config import RequestRouterConfig

    from espalier.serve_ray.replica import EngineReplica

    deployment = ray_serve.deployment(EngineReplica).options(
        name=name,
        **_scaling_options(model),
        ray_actor_options=ray_resources(model),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=service.drain_timeout_s,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class=model.replicas.router),
        # A replica is not started again, because it would refuse the same configuration again.
        max_constructor_retry_count=1,
        logging_config=dict(NO_ACCESS_LOG),
    )
    return deployment.bind(model.settings, model.client)


def _scaling_options(model: ServedModel) -> dict[str, Any]:
    """Returns the options of a deployment that set its number of replicas."""
    options = model.replicas
    if not options.is_autoscaled:
        return {"num_replicas": options.min_replicas}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    policy = AutoscalingPolicy(
        policy_function="espalier.serve_ray.replica_chooser:OpenTokensPolicy",
        policy_kwargs={"tokens_per_replica": options.tokens_per_replica},
    )
    return {
        "num_replicas": "auto",
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.min_replicas, max_replicas=options.max_replicas, policy=policy, **options.autoscaling
        ),
    }


def ray_resources(model: ServedModel) -> dict[str, Any]:
    """Returns the resources that Ray reserves for a replica.

    By default, a GPU for each rank.  On a CPU nothing is reserved, so that replicas share the cores.  All resources of
    a replica are on one machine.  Raises EspalierError if a replica with several ranks gets another number of GPUs."""
    num_gpus = num_gpus_of(model.settings)
    if model.replicas.resources is None:
        return {"num_cpus": 0, "num_gpus": num_gpus}
    resources = dict(model.replicas.resources)
    if num_gpus > 1 and resources.get("num_gpus") != num_gpus:
        raise EspalierError(
            f"resources has num_gpus={shown(resources.get('num_gpus'))}, but tensor_parallel={num_gpus} needs "
            f"{num_gpus}; correct one of them"
        )
    return resources


def num_gpus_of(settings: Mapping[str, Any]) -> int:
    """Returns the number of GPUs for a replica, all on one machine.  device "auto" uses GPUs if the cluster has any."""
    import ray

    device = settings.get("device", "auto")
    uses_gpu = ray.cluster_resources().get("GPU", 0) > 0 if device == "auto" else device == "cuda"
    return int(settings.get("tensor_parallel", 1)) if uses_gpu else 0


def _deployment_name(model: ServedModel, num_models: int) -> str:
    """Returns "engine", or with several models "engine-" and the model's name."""
    if num_models == 1:
        return "engine"
    return "engine-" + re.sub(r"[^\w.-]", "-", model.name)
