"""Formats the server's log lines as text or JSON, each line with its request id."""

import json
import logging
import random
import sys
from contextvars import ContextVar

LOG_LEVELS = ("debug", "info", "warning", "error")
NO_REQUEST_ID = "-"
request_id: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST_ID)
# The name of the client whose request is handled: "key N" for the Nth API key if the server has several keys, else the
# address.  Invalid keys make no names, because a client could use many invalid keys to get many shares of the queue.
client_name: ContextVar[str] = ContextVar("client_name", default="")


def new_request_id() -> str:
    """Returns an id for a request whose client sent none."""
    return f"req-{random.getrandbits(128):032x}"


def _add_request_id(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", NO_REQUEST_ID),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(level: str, as_json: bool) -> None:
    """Configure logging: all log lines of this process go to stderr in one format.  as_json: as JSON objects."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")
    handler.setFormatter(_JsonFormatter() if as_json else text)
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # httpx would log a line for each request to the model hub.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # transformers warns about prompts longer than the model's context, which the server refuses anyway.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)


def log_extra(name: str) -> dict[str, str]:
    """Returns the argument `extra` of a log call outside a request's context.  name: logged as the request id."""
    return {"request_id": name}


class LogLimiter:
    """Limits the log lines of a frequent event to one line a minute."""

    def __init__(self) -> None:
        self._next_at = float("-inf")
        self._count = 0

    def num_to_report(self, now: float) -> int:
        """Count an event.  If a log line is due, returns the number of events since the last log line, else 0.

        now: the time in seconds."""
        self._count += 1
        if now < self._next_at:
            return 0
        count, self._count, self._next_at = self._count, 0, now + 60.0
        return count
