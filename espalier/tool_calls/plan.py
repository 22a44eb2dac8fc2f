"""Plans a chat request: how its tools and the model's formats change the prompt, the parameters and the parsing of the
output.  LLM.chat and the server's endpoints use this module.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.grammar.spec import Grammar
from espalier.grammar.tag import format_of_tag
from espalier.request import OutputForm, ResolvedParams
from espalier.text import Tokenizer
from espalier.tool_calls.base import ReasoningFormat, ToolFormat
from espalier.tool_calls.definitions import ANY_OBJECT, RequestTools
from espalier.tool_calls.formats import TOOL_FORMATS, Formats
from espalier.tool_calls.parser import OutputParser
from espalier.tool_calls.reader import BrokenCall, decode_json

GrammarNode = dict[str, Any]


def output_grammar(
    tools: RequestTools,
    format: ToolFormat | None,
    answer: Grammar | None,
    reasoning: ReasoningFormat | None = None,
    after: str | None = None,
) -> Grammar | None:
    """Returns the grammar of an output that may or must have tool calls; None for an unrestricted output.

    format: how the model writes calls.  answer: the grammar of an answer without calls, None for free text.  reasoning:
    the format of reasoning that may come before the answer; None for no reasoning.  after: the text after which the
    grammar begins to apply; None for the output's start.  Raises EspalierError."""
    node = None if answer is None else _answer_node(answer, reasoning)
    if format is not None and tools.callable_functions:
        # A named tool must be called exactly once.
        is_single = tools.is_named or not tools.parallel or format.call_ends_output
        if tools.is_forced and answer is not None:
            raise EspalierError("tool_choice with response_format or another grammar is not supported; use one of them")
        if tools.is_forced:
            node = _calls_node(tools, format, is_single)
        elif node is not None:
            node = {"type": "or", "elements": [_calls_node(tools, format, is_single), node]}
        elif any(each.get("strict") for each in tools.callable_functions) or not (
            tools.parallel or format.call_ends_output
        ):
            # The free text of this grammar includes reasoning, so there is no node for reasoning.
            return _structural_tag(_free_text_with_calls(tools, format, is_single), True, after)
    if node is None:
        return None
    if reasoning is not None:
        begin, end = reasoning.begin_marker, reasoning.end_marker
        thoughts = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
        node = {"type": "sequence", "elements": [{"type": "optional", "content": thoughts}, node]}
    return _structural_tag(node, True if answer is None else answer.strict, after)


def _answer_node(grammar: Grammar, reasoning: ReasoningFormat | None) -> GrammarNode:
    """Returns the node of an answer without calls, after the reasoning format's answer_marker if it has one."""
    node = _grammar_node(grammar)
    if reasoning is None or not reasoning.answer_marker:
        return node
    return {"type": "sequence", "elements": [{"type": "const_string", "value": reasoning.answer_marker}, node]}


def _structural_tag(node: GrammarNode, strict: bool, after: str | None) -> Grammar:
    """Returns the grammar that consists of `node`.  strict, after: fields of Grammar."""
    text = json.dumps({"type": "structural_tag", "format": node}, ensure_ascii=False)
    return Grammar("structural_tag", text, strict=strict, after=after)


def _call_tags(tools: RequestTools, format: ToolFormat) -> list[GrammarNode]:
    """Returns a grammar node for each callable function: a call of this function."""
    syntax = format.syntax
    return [
        {
            "type": "tag",
            "begin": f"{syntax.before_name}{function['name']}{syntax.after_name}",
            "content": _arguments_node(_arguments_schema(tools, function), syntax.arguments_style),
            "end": syntax.after_arguments,
        }
        for function in tools.callable_functions
    ]


def _arguments_node(schema: Mapping[str, Any], style: str) -> GrammarNode:
    """Returns the grammar node of a call's arguments.  style: xgrammar's name for their form."""
    node = {"type": "json_schema", "json_schema": schema, "style": style}
    # Without this limit, xgrammar allows any white space between tags, and a model might write it without end.
    return node if style == "json" else {**node, "max_whitespace_cnt": 2}


def _arguments_schema(tools: RequestTools, function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema for a call's arguments.  If calls are optional, only strict tools must obey their schema."""
    is_enforced = function.get("strict") is not False if tools.is_forced else function.get("strict")
    return function.get("parameters") or ANY_OBJECT if is_enforced else ANY_OBJECT


def _calls_node(tools: RequestTools, format: ToolFormat, is_single: bool) -> GrammarNode:
    """Returns a grammar node for one or several calls without other text.  is_single: for exactly one."""
    syntax = format.syntax
    calls = {
        "type": "tags_with_separator",
        "tags": _call_tags(tools, format),
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }
    if not syntax.calls_begin:
        return calls
    texts = [{"type": "const_string", "value": text} for text in (syntax.calls_begin, syntax.calls_end)]
    return {"type": "sequence", "elements": [texts[0], calls, texts[1]]}


def _free_text_with_calls(tools: RequestTools, format: ToolFormat, is_single: bool) -> GrammarNode:
    """Returns the grammar node of any text, which may contain calls.  is_single: at most one call."""
    syntax = format.syntax
    tags = _call_tags(tools, format)
    if syntax.calls_begin:
        calls = {**_calls_node(tools, format, is_single)["elements"][1]}
        tags = [{"type": "tag", "begin": syntax.calls_begin, "content": calls, "end": syntax.calls_end}]
    return {
        "type": "triggered_tags",
        "triggers": [syntax.calls_begin or syntax.before_name],
        "tags": tags,
        "stop_after_first": is_single,
    }


def _grammar_node(grammar: Grammar) -> GrammarNode:
    """Returns a request's grammar as a node of a structural tag (xgrammar's JSON form of a grammar)."""
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


def with_decoded_arguments(message: Mapping[str, Any], arguments_as_text: bool) -> dict[str, Any]:
    """Returns the message with its calls' arguments as objects, or as JSON text if arguments_as_text.

    A call whose arguments are no JSON object counts as cut off, and its text becomes content.  The parser of the
    model's output does the same.  Raises EspalierError for an entry of tool_calls that is no call."""
    calls, texts, content = [], [], message.get("content") or ""
    for call in message["tool_calls"]:
        function = _called_function(call)
        arguments = function.get("arguments")
        value = _decoded_object(arguments)
        if value is not None:
            is_sent = isinstance(arguments, str) and arguments.strip()
            text = arguments if is_sent else json.dumps(value, ensure_ascii=False)
            calls.append({**call, "function": {**function, "arguments": text if arguments_as_text else value}})
        elif str(arguments) not in str(content):
            texts.append(f"{function['name']} {arguments}")
    changed = {**message, "tool_calls": calls}
    if not calls:
        del changed["tool_calls"]
    if isinstance(content, str):
        return {**changed, "content": "\n".join(filter(None, (content, *texts)))}
    return {**changed, "content": [*content, *({"type": "text", "text": text} for text in texts)]}


def _called_function(call: Any) -> Mapping[str, Any]:
    """Returns the object `function` of an entry in tool_calls.  Raises EspalierError for an invalid entry."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise EspalierError(
            f"tool_calls entry={shown(call)} is not supported; use "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        )
    return function


def _decoded_object(arguments: Any) -> Mapping[str, Any] | None:
    """Returns a call's arguments as an object; None if they are no object.  arguments: an object or JSON text."""
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments) if arguments.strip() else None
        except BrokenCall:
            return None
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, Mapping) else None


# If a prompt has no turn token (ChatPlan._last_turn_text), a reasoning marker is searched in this number of tokens at
# the prompt's end.
MAX_SEARCHED_TOKENS = 16


class ChatPlan:
    """How the tools of one chat request change its prompt, parameters and output.  Raises EspalierError if the request
    has tools and the model cannot call them."""

    def __init__(self, tokenizer: Tokenizer | None, formats: Formats, tools: RequestTools):
        self.tokenizer = tokenizer
        self.tools = tools
        # The last result of _last_turn_text: (prompt, text).
        self._cached_turn: tuple[Sequence[int], str] | None = None
        self._arguments_as_text = formats.tools is not None and formats.tools.arguments_as_text
        calls = bool(tools.callable_functions)
        if calls and not self.template_reads("tools"):
            raise EspalierError(
                "tools needs a chat template that reads them, and this model's does not; give one with "
                '--chat-template, or send tool_choice="none"'
            )
        if calls and formats.tools is None:
            raise EspalierError(
                "tools needs a format of tool calls, and this model's chat template has no known one; name it with "
                f'--tool-format ({", ".join(TOOL_FORMATS)}), or send tool_choice="none"'
            )
        self.formats = formats if calls else Formats(None, formats.reasoning)

    @property
    def has_parser(self) -> bool:
        """True if the output may have tool calls or reasoning."""
        return self.formats.tools is not None or self.formats.reasoning is not None

    def template_reads(self, variable: str) -> bool:
        return self.tokenizer is not None and self.tokenizer.template.reads_variable(variable)

    def template_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the messages in the form for this model's chat template."""
        return [self._template_message(each) for each in messages]

    def _template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a message in the form for this model's chat template."""
        if message.get("tool_calls"):
            message = with_decoded_arguments(message, self._arguments_as_text)
        reasoning, thoughts = self.formats.reasoning, message.get("reasoning_content")
        if reasoning is not None and reasoning.includes_calls and thoughts and not message.get("content"):
            return {**message, "thinking": thoughts}
        return message

    def params_with_grammar(self, params: ResolvedParams, prompt: Sequence[int]) -> ResolvedParams:
        """Returns the parameters with the output's grammar and the fields for the parser.  Raises EspalierError."""
        if not self.has_parser or self.tokenizer is None:
            return params
        formats = self.formats.tools, self.formats.reasoning
        tools, reasoning = (each.name if each else "" for each in formats)
        special_tokens = {token for each in formats if each for token in each.special_tokens}
        return replace(
            params,
            grammar=self._output_grammar(params, prompt),
            shown_special_tokens=self.tokenizer.special_ids(special_tokens),
            output_form=OutputForm(tools, reasoning, self.tools.schemas, self.answer_start(prompt))
            if params.stop
            else None,
        )

    def _output_grammar(self, params: ResolvedParams, prompt: Sequence[int]) -> Any:
        """Returns the grammar of the output after a prompt.  params: the request's, with its own grammar."""
        reasoning, tools, answer = self.formats.reasoning, self.formats.tools, params.grammar
        # If the user's grammar sets `after`, the user's value is kept.
        after = None if answer is None else answer.after
        may_reason = reasoning is not None and after is None and self._will_reason(prompt)
        if reasoning is not None and may_reason and self._is_in_reasoning(prompt):
            # In a format with includes_calls, further reasoning messages may come before the answer.
            after, may_reason = reasoning.end_marker, reasoning.includes_calls
        if tools is None and not may_reason:
            return None if answer is None else replace(answer, after=after)
        return output_grammar(self.tools, tools, answer, reasoning if may_reason else None, after)

    def _will_reason(self, prompt: Sequence[int]) -> bool:
        """Returns whether the model may begin or continue reasoning before its answer."""
        reasoning = self.formats.reasoning
        if reasoning is None or self.tokenizer is None:
            return False
        if self._is_in_reasoning(prompt):
            return True
        if reasoning.includes_calls:
            return not self.answer_start(prompt)
        is_closed = reasoning.end_marker in self._last_turn_text(prompt)
        return not is_closed and any(map(self.tokenizer.template.reads_variable, reasoning.template_switches))

    def _is_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Returns whether the prompt ends inside the reasoning."""
        parser = self.new_parser(prompt)
        return parser is not None and parser.in_reasoning

    def answer_start(self, prompt: Sequence[int]) -> str:
        """Returns the text at the prompt's end with which the answer begins, such as "<think>"; "" if there is none.

        The text is reasoning that has not ended.  In a format with includes_calls, it is the start of a message."""
        reasoning = self.formats.reasoning
        if reasoning is None or not reasoning.begin_marker or self.tokenizer is None:
            return ""
        turn = self._last_turn_text(prompt)
        if reasoning.includes_calls:
            return turn.removeprefix(reasoning.message_marker) if turn.startswith(reasoning.message_marker) else ""
        start = turn.rfind(reasoning.begin_marker)
        return "" if start < 0 or reasoning.end_marker in turn[start:] else turn[start:]

    def _last_turn_text(self, prompt: Sequence[int]) -> str:
        """Returns the prompt's text from its last turn token on.  The turn token is the last special token that is no
        marker of calls or reasoning; the token that begins message_marker may be the turn token too.

        For a prompt without a turn token, returns the reasoning marker at the prompt's end, or "" if the prompt ends
        with other text.  Earlier markers do not count, because they may be the user's text."""
        if self._cached_turn is None or self._cached_turn[0] is not prompt:
            self._cached_turn = prompt, self._find_last_turn(prompt)
        return self._cached_turn[1]

    def _find_last_turn(self, prompt: Sequence[int]) -> str:
        """Returns the text that _last_turn_text describes.  prompt: token ids."""
        reasoning, tokenizer = self.formats.reasoning, self.tokenizer
        assert reasoning is not None and tokenizer is not None
        markers = {*reasoning.special_tokens, *(self.formats.tools.special_tokens if self.formats.tools else ())}
        last_turn = tokenizer.last_turn(prompt, {m for m in markers if not reasoning.message_marker.startswith(m)})
        if last_turn is not None:
            return last_turn
        tail = tokenizer.decode(prompt[-MAX_SEARCHED_TOKENS:], skip_special_tokens=False)
        at_end = (marker for marker in (reasoning.begin_marker, reasoning.end_marker) if tail.rstrip().endswith(marker))
        return next((tail[tail.rindex(marker) :] for marker in at_end), "")

    def new_parser(self, prompt: Sequence[int]) -> OutputParser | None:
        """Returns a parser for one output; None if all output is content."""
        return OutputParser(self.formats, self.tools.schemas, self.answer_start(prompt)) if self.has_parser else None
