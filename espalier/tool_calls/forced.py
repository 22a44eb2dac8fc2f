"""The grammar of outputs with tool calls: where one is forced, where a tool is strict, or where one call is the most.

The grammar is a structural tag of xgrammar, made from the format's CallSyntax.
"""

import json
from collections.abc import Mapping
from typing import Any

from espalier.errors import EspalierError
from espalier.grammar.spec import Grammar
from espalier.grammar.tag import format_of_tag
from espalier.tool_calls.base import ReasoningFormat, ToolFormat
from espalier.tool_calls.definitions import ANY_OBJECT, Tools

Node = dict[str, Any]


def output_grammar(
    tools: Tools,
    format: ToolFormat | None,
    answer: Grammar | None,
    reasoning: ReasoningFormat | None = None,
    after: str | None = None,
) -> Grammar | None:
    """The grammar of an output that may or must have calls; None if it is free.

    answer: the form of an answer without calls.  reasoning: what may come first, in a model that decides that itself.
    after: text after which the grammar begins.  Raises EspalierError.
    """
    node = None if answer is None else _answer(answer, reasoning)
    if format is not None and tools.callable:
        # A named tool is called once.
        is_single = tools.is_named or not tools.parallel or format.one_call
        if tools.is_forced and answer is not None:
            raise EspalierError("tool_choice with response_format or another grammar is not supported; use one of them")
        if tools.is_forced:
            node = _calls(tools, format, is_single)
        elif node is not None:
            node = {"type": "or", "elements": [_calls(tools, format, is_single), node]}
        elif _has_strict(tools) or not (tools.parallel or format.one_call):
            # Its free text may be reasoning.
            return _tag(_triggered(tools, format, is_single), True, after)
    if node is None:
        return None
    if reasoning is not None:
        thoughts = {"type": "tag", "begin": reasoning.begin, "content": {"type": "any_text"}, "end": reasoning.end}
        node = {"type": "sequence", "elements": [{"type": "optional", "content": thoughts}, node]}
    return _tag(node, True if answer is None else answer.strict, after)


def _answer(grammar: Grammar, reasoning: ReasoningFormat | None) -> Node:
    node = _node_of(grammar)
    if reasoning is None or not reasoning.answer:
        return node
    return {"type": "sequence", "elements": [{"type": "const_string", "value": reasoning.answer}, node]}


def _has_strict(tools: Tools) -> bool:
    return any(each.get("strict") for each in tools.callable)


def _tag(node: Node, strict: bool, after: str | None) -> Grammar:
    text = json.dumps({"type": "structural_tag", "format": node}, ensure_ascii=False)
    return Grammar("structural_tag", text, strict=strict, after=after)


def _tags(tools: Tools, format: ToolFormat) -> list[Node]:
    syntax = format.syntax
    return [
        {
            "type": "tag",
            "begin": f"{syntax.before_name}{function['name']}{syntax.after_name}",
            "content": _arguments(_schema(tools, function), syntax.style),
            "end": syntax.end,
        }
        for function in tools.callable
    ]


def _arguments(schema: Mapping[str, Any], style: str) -> Node:
    node = {"type": "json_schema", "json_schema": schema, "style": style}
    # Between tags xgrammar allows any white space, of which a model may find no end.
    return node if style == "json" else {**node, "max_whitespace_cnt": 2}


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
    """A grammar that was checked, as a part of a structural tag."""
    spec = grammar.spec
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": spec}
    if grammar.kind == "ebnf":
        return {"type": "grammar", "grammar": spec}
    if grammar.kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in json.loads(spec)]}
    if grammar.kind == "structural_tag":
        return format_of_tag(spec)
    return {"type": "json_schema", "json_schema": json.loads(spec) if spec else ANY_OBJECT}
