"""The grammar of tool calls: where the answer must be one, where a tool is strict, or where only one call is allowed.

The grammar is a structural tag of xgrammar, made from the format's CallSyntax.
"""

import json
from collections.abc import Mapping
from typing import Any

from espalier.errors import EspalierError
from espalier.grammar.spec import Grammar
from espalier.tools.base import ToolFormat
from espalier.tools.definitions import ANY_OBJECT, Tools

Node = dict[str, Any]


def call_grammar(tools: Tools, format: ToolFormat, answer: Grammar | None, after: str | None) -> Grammar | None:
    """The grammar of an answer that may or must have calls; None if it is free.

    answer: the form of an answer without calls.  after: text after which the grammar begins.  Raises EspalierError.
    """
    if not tools.callable:
        return answer
    # A named tool is called once.
    is_single = tools.is_named or not tools.parallel or format.one_call
    if tools.is_forced:
        if answer is not None:
            raise EspalierError("tool_choice with response_format or another grammar is not supported; use one of them")
        return _tag(_calls(tools, format, is_single), after)
    if answer is not None:
        return _tag({"type": "or", "elements": [_calls(tools, format, is_single), _node_of(answer)]}, after)
    is_strict = any(each.get("strict") for each in tools.callable)
    if not is_strict and (tools.parallel or format.one_call):
        return None
    return _tag(_triggered(tools, format, is_single), after)


def _tag(node: Node, after: str | None) -> Grammar:
    text = json.dumps({"type": "structural_tag", "format": node}, ensure_ascii=False)
    return Grammar("structural_tag", text, after=after)


def _tags(tools: Tools, format: ToolFormat) -> list[Node]:
    syntax = format.syntax
    return [
        {
            "type": "tag",
            "begin": f"{syntax.before_name}{function['name']}{syntax.after_name}",
            "content": {"type": "json_schema", "json_schema": _schema(tools, function), "style": syntax.style},
            "end": syntax.end,
        }
        for function in tools.callable
    ]


def _schema(tools: Tools, function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that the arguments follow.  Where a call is free, only a strict tool's is enforced."""
    is_enforced = function.get("strict") is not False if tools.is_forced else function.get("strict")
    return function.get("parameters") or ANY_OBJECT if is_enforced else ANY_OBJECT


def _calls(tools: Tools, format: ToolFormat, is_single: bool) -> Node:
    """One call or several, and nothing else."""
    syntax = format.syntax
    calls = {
        "type": "tags_with_separator",
        "tags": _tags(tools, format),
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }
    if not syntax.opening:
        return calls
    texts = [{"type": "const_string", "value": text} for text in (syntax.opening, syntax.closing)]
    return {"type": "sequence", "elements": [texts[0], calls, texts[1]]}


def _triggered(tools: Tools, format: ToolFormat, is_single: bool) -> Node:
    """Free text, in which calls have their form."""
    syntax = format.syntax
    tags = _tags(tools, format)
    if syntax.opening:
        calls = {**_calls(tools, format, is_single)["elements"][1]}
        tags = [{"type": "tag", "begin": syntax.opening, "content": calls, "end": syntax.closing}]
    return {
        "type": "triggered_tags",
        "triggers": [syntax.opening or syntax.before_name],
        "tags": tags,
        "stop_after_first": is_single,
    }


def _node_of(grammar: Grammar) -> Node:
    """A grammar as a part of a structural tag."""
    spec = grammar.spec
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": spec}
    if grammar.kind == "ebnf":
        return {"type": "grammar", "grammar": spec}
    if grammar.kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in json.loads(spec)]}
    if grammar.kind == "structural_tag":
        return json.loads(spec)["format"]
    return {"type": "json_schema", "json_schema": json.loads(spec) if spec else ANY_OBJECT}
