"""`espalier serve MODEL`: runs the OpenAI-compatible server."""

import asyncio
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.chat import require_template
from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.learn.folder import LearnConfig
from espalier.learn.folder import flag_of as learn_flag
from espalier.server import logs
from espalier.server.logs import LOG_LEVELS
from espalier.terminal.console import read_text
from espalier.terminal.flags import add_engine_flags, add_key_flag, add_plain_flag, api_keys, engine_settings, flag_of

if TYPE_CHECKING:
    from espalier.server.frontend import FrontendOptions
    from espalier.server.run import ServeOptions

SEND_TIMEOUT_S = 60.0


def add_chat_flags(group: _ArgumentGroup) -> None:
    """Add the flags about chat templates, tool calls and reasoning, which frontend_options_from_flags reads."""
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="replaces the tokenizer's chat template")
    group.add_argument(
        "--allow-special-tokens-in-messages",
        action="store_true",
        help="the text of a special token in a message becomes that token; message authors can then forge turns",
    )
    group.add_argument(
        "--tool-format",
        default="auto",
        metavar="X",
        help="how the model writes tool calls; none: they stay text (auto: by the chat template)",
    )
    group.add_argument(
        "--reasoning-format",
        default="auto",
        metavar="X",
        help="how the model marks its reasoning; none: it stays text (auto: by the chat template)",
    )


def _add_batch_flags(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--batch-dir",
        type=Path,
        metavar="DIR",
        help="keep files and batches there, and serve /v1/files and /v1/batches; by default neither is served",
    )
    group.add_argument(
        "--max-file-bytes", type=int, metavar="N", help="with --batch-dir: largest upload of a file (209715200)"
    )


def _add_learn_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("online learning (docs/server.md)")
    group.add_argument(
        "--learn",
        metavar="DIR",
        help="keep a sample of the served texts there, and train the draft further from it; by default nothing is kept",
    )
    for f in fields(LearnConfig)[1:]:
        about = f"with --learn: {f.metadata['help']} ({f.default})"
        group.add_argument(learn_flag(f.name), type=int, metavar="N", help=about)


def _learn_settings(args: Namespace, num_api_keys: int) -> dict[str, Any] | None:
    """Returns the fields of LearnConfig; None without --learn.  Raises EspalierError."""
    names = [f.name for f in fields(LearnConfig)[1:]]
    learn_flags = {name: value for name in names if (value := getattr(args, f"learn_{name}")) is not None}
    if args.learn is None:
        if learn_flags:
            raise EspalierError(f"{learn_flag(next(iter(learn_flags)))} is for --learn; give that too, or leave it out")
        return None
    if num_api_keys > 1:
        raise EspalierError(
            "--learn trains one draft from all clients' texts, and several --api-key keep clients apart: give one key, "
            "or leave out --learn"
        )
    if args.replicas is not None:
        raise EspalierError("--learn is for one engine; leave out --replicas")
    return asdict(LearnConfig(args.learn, **learn_flags))


def _add_timeout_flags(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--body-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds in which a request's headers must arrive, and then its body; 0 for no limit (60)",
    )
    group.add_argument(
        "--send-timeout",
        type=float,
        metavar="S",
        help="seconds after which a client that reads nothing is disconnected; 0 for no limit (60)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that running requests have to finish after SIGTERM (60)",
    )
    group.add_argument(
        "--restart-engine",
        action=BooleanOptionalAction,
        help="start a new engine process when the old one is gone (yes); where none can be started, the server ends "
        "with status 1",
    )
    group.add_argument(
        "--engine-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds without a message after which the engine process counts as gone (120)",
    )
    group.add_argument(
        "--load-timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds to load the model; 0 for no limit (1800)",
    )


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="auto", help=EngineConfig.__dataclass_fields__["model"].metadata["help"]
    )
    http = parser.add_argument_group("server")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (127.0.0.1)")
    http.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on; 0 chooses a free one (8000)"
    )
    http.add_argument(
        "--served-model-name", action="append", metavar="X", help="the model's name in the API; may be repeated (MODEL)"
    )
    add_key_flag(http, "bearer token that clients must send; may be repeated, one for each client", several=True)
    http.add_argument(
        "--cors-origin", action="append", metavar="X", help="origin whose pages may call the server; may be repeated"
    )
    http.add_argument(
        "--strict-fields", action="store_true", help="refuse fields that have no effect, such as user and metadata"
    )
    add_chat_flags(http)
    http.add_argument(
        "--max-queue",
        type=int,
        default=256,
        metavar="N",
        help="samples (outputs of requests) that may wait for a slot (256)",
    )
    http.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one request; 0 for no limit (600)",
    )
    http.add_argument(
        "--max-body-bytes", type=int, default=4 * 2**20, metavar="N", help="largest request body (4194304)"
    )
    _add_batch_flags(http)
    _add_timeout_flags(http)
    http.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="lowest level that is logged (info)")
    http.add_argument("--log-json", action="store_true", help="log a JSON object per line")
    _add_replica_flags(parser)
    _add_learn_flags(parser)
    add_engine_flags(parser, leave_out=("model",))
    add_plain_flag(parser)


def _add_replica_flags(parser: ArgumentParser) -> None:
    ray = parser.add_argument_group("several engines, with Ray Serve (docs/deploy.md)")
    ray.add_argument(
        "--replicas",
        metavar="N",
        help="number of engines, or MIN:MAX: as many as the open tokens need; they run on the Ray cluster of "
        "$RAY_ADDRESS or of this machine, or on one that is started",
    )
    ray.add_argument(
        "--tokens-per-replica",
        type=int,
        metavar="N",
        help="with MIN:MAX: open tokens (those not computed yet) for which one engine is enough (16384)",
    )
    ray.add_argument("--fronts", type=int, metavar="N", help="replicas of the API server (1)")


def run(args: Namespace) -> int:
    return serve_worker(args, *_model_settings(args))


def serve_worker(args: Namespace, settings: dict[str, Any], name: str, worker: str | None = None) -> int:
    """Run a server with an engine process that loads `settings`.  Returns the exit status.

    name: the model's name in the API.  worker: the module that the engine process runs; None for the module that loads
    a model from files.
    Raises EspalierError."""
    # These imports are slow, and other commands do not need them.
    from espalier.server.api import ApiOptions
    from espalier.server.client import ENGINE_PROCESS_MODULE, ClientOptions
    from espalier.server.run import ServeOptions, check_options, serve

    check_options(vars(args), flag_of)
    if not args.host:  # an empty address means all: `--host "$HOST"` with HOST unset must not open the server to others
        raise EspalierError("--host is empty; give an address, such as 127.0.0.1, or 0.0.0.0 for all, or leave it out")
    if args.batch_dir is None:
        _refuse_flags(args, ("max_file_bytes",), "is for --batch-dir; give that too, or leave it out")
    keys = api_keys(args)
    learn = _learn_settings(args, len(keys))
    if learn is not None and worker is not None:
        raise EspalierError("--learn trains from a model's files; a synthetic model has none: leave it out")
    # For the model "auto" with a draft, the server's default name is the name of the target's directory.
    names = args.served_model_name or [name for name in [name] if name != "auto"]
    options = ServeOptions(
        host=args.host,
        port=args.port,
        drain_timeout_s=args.drain_timeout,
        send_timeout_s=SEND_TIMEOUT_S if args.send_timeout is None else args.send_timeout or None,
        client=ClientOptions(
            # A replica ends with its engine, and Ray Serve starts the next replica.
            restart=args.replicas is None and args.restart_engine is not False,
            engine_timeout_s=args.engine_timeout,
            load_timeout_s=args.load_timeout or None,
            log_level=args.log_level,
            log_json=args.log_json,
            worker_module=worker or ENGINE_PROCESS_MODULE,
            learn=learn,
        ),
        frontend=frontend_options_from_flags(
            args, names, args.max_queue, args.request_timeout or None, args.strict_fields
        ),
        api=ApiOptions(
            keys[0] if keys else None,
            args.cors_origin or (),
            args.max_body_bytes,
            args.body_timeout or None,
            args.max_file_bytes or ApiOptions.max_file_bytes,
            keys[1:],
        ),
        batch_dir=args.batch_dir,
    )
    logs.set_up_logging(args.log_level, args.log_json)
    if args.replicas is not None:
        _serve_replicas(args, settings, options)
        return 0
    _refuse_flags(args, ("tokens_per_replica", "fronts"), "is for several engines; give --replicas, or leave it out")
    try:
        return int(not asyncio.run(serve(settings, options)))
    except asyncio.CancelledError:  # SIGTERM while the model was being loaded
        return 0


def frontend_options_from_flags(
    args: Namespace, names: Sequence[str], max_queue: int, request_timeout_s: float | None, strict_fields: bool = False
) -> "FrontendOptions":
    """Returns FrontendOptions from the flags of add_chat_flags.  names: the model's names.  Raises EspalierError."""
    from espalier.server.frontend import FrontendOptions

    template = None if args.chat_template is None else read_text("--chat-template", args.chat_template)
    if template is not None:
        require_template(template, f"--chat-template {args.chat_template}")
    return FrontendOptions(
        names=tuple(names),
        chat_template=template,
        max_queue=max_queue,
        request_timeout_s=request_timeout_s,
        strict_fields=strict_fields,
        allow_special_tokens_in_messages=args.allow_special_tokens_in_messages,
        tool_format=args.tool_format,
        reasoning_format=args.reasoning_format,
    )


def _serve_replicas(args: Namespace, settings: dict[str, Any], options: "ServeOptions") -> None:
    """Run engine replicas in Ray Serve.  Raises EspalierError."""
    from espalier.serve_ray.build import TOKENS_PER_REPLICA, ServedModel, Service, check_settings, parse_replicas
    from espalier.serve_ray.cluster import serve_replicas

    _refuse_flags(args, ("restart_engine",), "has no effect with --replicas: Ray Serve replaces engines; leave it out")
    _refuse_flags(args, ("send_timeout",), "is not supported with --replicas: Ray's proxy sends; leave it out")
    _refuse_flags(args, ("batch_dir",), "is for one engine; leave out --replicas")
    check_settings(settings)
    replicas = parse_replicas(args.replicas, tokens_per_replica=args.tokens_per_replica or TOKENS_PER_REPLICA)
    service = Service(
        (ServedModel(settings, options.frontend, options.client, replicas),),
        options.api,
        args.fronts or 1,
        options.drain_timeout_s,
        args.log_level,
        args.log_json,
    )
    serve_replicas(service, options.host, options.port)


def _refuse_flags(args: Namespace, names: Sequence[str], reason: str) -> None:
    """Raises EspalierError if one of the flags `names` is in `args`.  reason: the message after the flag's name."""
    for name in names:
        if getattr(args, name) is not None:
            raise EspalierError(f"{flag_of(name)} {reason}")


def _model_settings(args: Namespace) -> tuple[dict[str, Any], str]:
    """Returns (the engine process's settings, the model's name).  Raises EspalierError."""
    settings = engine_settings(args) | {"model": args.model}
    if args.model == "auto" and "draft" not in settings:
        settings["model"] = "bundled"
    return plain_settings(settings), settings["model"]


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Check the engine's settings, and return them as plain values, for the engine process.  Raises EspalierError."""
    EngineConfig(**settings)
    tree = settings.get("speculation")
    if tree is None or isinstance(tree, str):
        return settings
    return {**settings, "speculation": asdict(tree)}
