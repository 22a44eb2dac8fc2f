"""Earlier messages of the assistant, as a chat template takes them."""

import json
from collections.abc import Mapping
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.tool_calls.reader import Broken, decoded


def with_calls(message: Mapping[str, Any], takes_text: bool) -> dict[str, Any]:
    """A message with tool_calls whose arguments are objects, or their JSON text if the template takes that.

    A call whose arguments are no JSON object, such as one that was cut off, is content, as it was in the answer.
    Raises EspalierError for an entry that is no call.
    """
    calls, texts, content = [], [], message.get("content") or ""
    for call in message["tool_calls"]:
        function = _function(call)
        arguments = function.get("arguments")
        value = _object(arguments)
        if value is not None:
            is_sent = isinstance(arguments, str) and arguments.strip()
            text = arguments if is_sent else json.dumps(value, ensure_ascii=False)
            calls.append({**call, "function": {**function, "arguments": text if takes_text else value}})
        elif str(arguments) not in str(content):
            texts.append(f"{function['name']} {arguments}")
    changed = {**message, "tool_calls": calls}
    if not calls:
        del changed["tool_calls"]
    if isinstance(content, str):
        return {**changed, "content": "\n".join(filter(None, (content, *texts)))}
    return {**changed, "content": [*content, *({"type": "text", "text": text} for text in texts)]}


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise EspalierError(
            f"tool_calls entry={shown(call)} is not supported; use "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        )
    return function


def _object(arguments: Any) -> Mapping[str, Any] | None:
    """The arguments of a call, which may be JSON text; None if they are no object."""
    if isinstance(arguments, str):
        try:
            arguments = decoded(arguments) if arguments.strip() else None
        except Broken:
            return None
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, Mapping) else None
