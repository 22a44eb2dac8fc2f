"""OpenAI's objects of files and batches, and the body that creates a batch."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from espalier.server.openai import MAX_METADATA, Body, Refused, at_most

WINDOW_S = 24 * 3600
INPUT, OUTPUT = "batch", "batch_output"
# A batch in one of these changes no more.
ENDED = ("failed", "completed", "expired", "cancelled")


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(MAX_METADATA)
]


class StoredFile(msgspec.Struct):
    """purpose: INPUT or OUTPUT; created_at: in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    expires_at: int | None = None


class Counts(msgspec.Struct):
    """total: lines of the input; completed: those answered with status 200; failed: those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Fault(msgspec.Struct):
    """Why a batch failed before its start."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Faults(msgspec.Struct):
    data: list[Fault]
    object: str = "list"


class Batch(msgspec.Struct):
    """Times are in seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    object: str = "batch"
    status: str = "validating"
    completion_window: str = "24h"
    errors: Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)


class BatchRequest(Body):
    """POST /v1/batches"""

    input_file_id: str = Field(description="a file from /v1/files with purpose batch")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"] = Field(
        description="the url of every line"
    )
    completion_window: Literal["24h"] = Field(description="24h; lines without an answer by then get an error")
    metadata: Metadata | None = Field(
        None, description=f"returned as it is; {MAX_METADATA} names of 64 characters with values of 512 at most"
    )
    output_expires_after: Annotated[Any, Refused("files stay until they are deleted; leave it out")] = None
