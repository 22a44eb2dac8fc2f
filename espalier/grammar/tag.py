"""Structural tags: free text in which a tag's begin starts a grammar.  Two spellings, and the schemas inside."""

import json
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.grammar.schema import enforceable


def enforceable_tag(text: str, strict: bool) -> str:
    """A structural tag in xgrammar's form, whose JSON schemas are enforced whole.  Raises EspalierError.

    text: {"type": "structural_tag", "format": ...}, or SGLang's {"structures": [...], "triggers": [...]}.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError):
        raise EspalierError("the structural tag cannot be read; send a JSON object") from None
    if not isinstance(tag, dict):
        raise EspalierError(f"structural tag {shown(tag)} is not supported; use an object")
    if "structures" in tag:
        tag = {"type": "structural_tag", "format": _of_structures(tag)}
    return json.dumps(_with_schemas(tag, strict))


def _of_structures(tag: dict[str, Any]) -> dict[str, Any]:
    try:
        tags = [
            {
                "type": "tag",
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError, AttributeError):
        raise EspalierError(
            'a structural tag needs "structures", each with "begin", "schema" and "end", and "triggers"'
        ) from None


def _with_schemas(value: Any, strict: bool) -> Any:
    if isinstance(value, list):
        return [_with_schemas(each, strict) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema" and "json_schema" in value:
        schema = json.loads(enforceable(json.dumps(value["json_schema"]), strict))
        return {**value, "json_schema": schema}
    return {name: _with_schemas(each, strict) for name, each in value.items()}
