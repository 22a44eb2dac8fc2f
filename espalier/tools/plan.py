"""What the tools and the formats of one conversation make of its prompt, its parameters and its output.

LLM.chat and the server's endpoints share it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from espalier.errors import EspalierError
from espalier.request import ResolvedParams
from espalier.text import Tokenizer
from espalier.tools.definitions import Tools
from espalier.tools.forced import output_grammar
from espalier.tools.formats import TOOL_FORMATS, Formats
from espalier.tools.parser import OutputParser

# Tokens at the prompt's end that are searched for an open reasoning mark.
TAIL = 16


class ChatPlan:
    """One conversation.  Raises EspalierError if the model cannot call the tools."""

    def __init__(self, tokenizer: Tokenizer | None, formats: Formats, tools: Tools):
        self.tokenizer = tokenizer
        self.tools = tools
        self._takes_text = formats.tools is not None and formats.tools.takes_text
        calls = bool(tools.callable)
        if calls and (tokenizer is None or not tokenizer.shows("tools")):
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
        """Whether the output has parts that are not content."""
        return self.formats.tools is not None or self.formats.reasoning is not None

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages as this model's chat template takes them."""
        return [self._message(each) for each in messages]

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        changed: dict[str, Any] = {}
        if self._takes_text and message.get("tool_calls"):
            changed["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        reasoning = self.formats.reasoning
        if (
            reasoning is not None
            and reasoning.whole
            and message.get("reasoning_content")
            and not message.get("content")
        ):
            changed["thinking"] = message["reasoning_content"]
        return {**message, **changed} if changed else message

    def params(self, params: ResolvedParams, prompt: Sequence[int]) -> ResolvedParams:
        """The parameters with the grammar of the calls, and with the special tokens that the parser reads.

        Raises EspalierError.
        """
        if not self.has_parser or self.tokenizer is None:
            return params
        names = {name for each in (self.formats.tools, self.formats.reasoning) if each for name in each.special_tokens}
        return replace(
            params, grammar=self._grammar(params, prompt), shown_special_tokens=self.tokenizer.special_ids(names)
        )

    def _grammar(self, params: ResolvedParams, prompt: Sequence[int]) -> Any:
        reasoning, tools, answer = self.formats.reasoning, self.formats.tools, params.grammar
        # A grammar that says when it begins begins there.
        after = None if answer is None else answer.after
        reasons = reasoning is not None and after is None and self._reasons(prompt)
        if reasoning is not None and reasons and self._is_open(prompt):
            after, reasons = reasoning.end, False
        if tools is None and not reasons:
            return None if answer is None else replace(answer, after=after)
        return output_grammar(self.tools, tools, answer, reasoning if reasons else None, after)

    def _reasons(self, prompt: Sequence[int]) -> bool:
        """Whether the model is expected to reason before its answer."""
        reasoning = self.formats.reasoning
        if reasoning is None or self.tokenizer is None:
            return False
        if reasoning.whole or self._is_open(prompt):
            return True
        is_closed = self._tail(prompt).endswith(reasoning.end)
        return not is_closed and any(map(self.tokenizer.shows, reasoning.switches))

    def _is_open(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt has opened the reasoning."""
        reasoning = self.formats.reasoning
        return reasoning is not None and bool(reasoning.begin) and self._tail(prompt).endswith(reasoning.begin)

    def _tail(self, prompt: Sequence[int]) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()

    def parser(self, prompt: Sequence[int]) -> OutputParser | None:
        """A parser for one output, None if all of it is content."""
        if not self.has_parser:
            return None
        return OutputParser(self.formats, self.tools.schemas, self.tokenizer is not None and self._is_open(prompt))


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are JSON text."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}}
