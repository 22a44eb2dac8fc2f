"""`espalier serve MODEL`: an OpenAI-compatible server."""

import asyncio
import os
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.server import logs
from espalier.server.logs import LEVELS
from espalier.terminal.console import read_text
from espalier.terminal.flags import add_engine_flags, engine_settings

# Read where no --api-key is given: a flag stands in every list of processes.
KEY_VARIABLE = "ESPALIER_API_KEY"


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="auto", help=EngineConfig.__dataclass_fields__["model"].metadata["help"]
    )
    http = parser.add_argument_group("server")
    http.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all (127.0.0.1)")
    http.add_argument("--port", type=int, default=8000, metavar="N", help="0 for one that is free (8000)")
    http.add_argument(
        "--served-model-name", action="append", metavar="X", help="name in the API; may be several (the model as given)"
    )
    http.add_argument("--api-key", metavar="X", help=f"what clients must send as a bearer token (${KEY_VARIABLE})")
    http.add_argument("--chat-template", type=Path, metavar="FILE", help="in place of the tokenizer's own")
    http.add_argument("--cors-origin", action="append", metavar="X", help="origin whose pages may call; may be several")
    http.add_argument(
        "--strict-fields", action="store_true", help="refuse fields that have no effect, such as user and metadata"
    )
    http.add_argument(
        "--allow-special-tokens-in-messages",
        action="store_true",
        help="where a message spells a special token, it becomes one; whoever writes messages can then forge turns",
    )
    http.add_argument("--max-queue", type=int, default=256, metavar="N", help="samples that may wait for a slot (256)")
    http.add_argument("--request-timeout", type=float, default=600.0, metavar="S", help="seconds; 0 for none (600)")
    http.add_argument("--max-body-bytes", type=int, default=4 * 2**20, metavar="N", help="of one request (4194304)")
    http.add_argument(
        "--body-timeout", type=float, default=60.0, metavar="S", help="seconds to read headers, or a body; 0: none (60)"
    )
    http.add_argument(
        "--send-timeout", type=float, default=60.0, metavar="S", help="seconds a reader may take nothing; 0: none (60)"
    )
    http.add_argument("--drain-timeout", type=float, default=60.0, metavar="S", help="seconds after SIGTERM (60)")
    http.add_argument("--restart-engine", action="store_true", help="start the engine process again when it is gone")
    http.add_argument(
        "--engine-timeout", type=float, default=120.0, metavar="S", help="silence after which it counts as gone (120)"
    )
    http.add_argument(
        "--load-timeout", type=float, default=1800.0, metavar="S", help="seconds to load a model; 0 for none (1800)"
    )
    http.add_argument("--log-level", choices=LEVELS, default="info", help="(info)")
    http.add_argument("--log-json", action="store_true", help="a JSON object a line")
    add_engine_flags(parser, leave_out=("model",))


def run(asked: Namespace) -> int:
    # What serving needs is imported here: other commands start without it.
    from espalier.server.api import ApiOptions
    from espalier.server.client import ClientOptions
    from espalier.server.front import FrontOptions
    from espalier.server.run import ServeOptions, serve

    for name in (
        "port",
        "max_queue",
        "request_timeout",
        "body_timeout",
        "send_timeout",
        "load_timeout",
        "drain_timeout",
    ):
        _require(name, getattr(asked, name), 0)
    for name in ("max_body_bytes", "engine_timeout"):
        _require(name, getattr(asked, name), 1)
    settings = engine_settings(asked) | {"model": asked.model}
    if asked.model == "auto" and "draft" not in settings:
        settings["model"] = "bundled"
    # A target that its draft names is called as its directory.
    names = asked.served_model_name or [name for name in [settings["model"]] if name != "auto"]
    template = None if asked.chat_template is None else read_text("--chat-template", asked.chat_template)
    options = ServeOptions(
        host=asked.host,
        port=asked.port,
        drain_timeout_s=asked.drain_timeout,
        send_timeout_s=asked.send_timeout or None,
        client=ClientOptions(
            restart=asked.restart_engine,
            timeout_s=asked.engine_timeout,
            load_timeout_s=asked.load_timeout or None,
            log_level=asked.log_level,
            log_json=asked.log_json,
        ),
        front=FrontOptions(
            tuple(names),
            template,
            asked.max_queue,
            asked.request_timeout or None,
            asked.strict_fields,
            asked.allow_special_tokens_in_messages,
        ),
        api=ApiOptions(
            asked.api_key or os.environ.get(KEY_VARIABLE) or None,
            asked.cors_origin or (),
            asked.max_body_bytes,
            asked.body_timeout or None,
        ),
    )
    settings = sendable(settings)
    logs.set_up(asked.log_level, asked.log_json)
    try:
        asyncio.run(serve(settings, options))
    except asyncio.CancelledError:  # SIGTERM while the model was loaded
        return 0
    return 0


def sendable(settings: dict[str, Any]) -> dict[str, Any]:
    """Engine settings as plain values, checked.  Raises EspalierError."""
    EngineConfig(**settings)
    tree = settings.get("speculation")
    if tree is None or isinstance(tree, str):
        return settings
    return {**settings, "speculation": asdict(tree)}


def _require(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise EspalierError(f"--{name.replace('_', '-')}={value} is not supported; use {low} or more")
