"""Parses a request's tokens into the deltas of a message, and finds stop strings in the content.

The engine process and the API server each run a MessageStream over the same tokens.  The engine process ends the
request at the token that completes a stop string.  The API server ends the content before the stop string.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from espalier.request import Output, OutputChunk, OutputForm, ResolvedParams
from espalier.text import StopStringFinder, TextStream
from espalier.tool_calls.base import Delta
from espalier.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS, Formats
from espalier.tool_calls.parser import Message, OutputParser, message_of
from espalier.tool_calls.plan import ChatPlan


class MessageStream:
    """Makes pieces of a message (deltas) from tokens.  Implements request.IncrementalDetokenizer.  Finds stop strings
    only in the content.

    text_stream: makes text from tokens.  num_reasoning_tokens: the number of reasoning tokens so far."""

    def __init__(self, text_stream: TextStream, parser: OutputParser, params: ResolvedParams):
        self.text_stream = text_stream
        self.parser = parser
        self.stop_string_finder = StopStringFinder(params.stop, params.include_stop_str_in_output)
        self.min_tokens = params.min_tokens
        self.keep_stop = params.include_stop_str_in_output
        self.num_reasoning_tokens = 0
        self._texts: list[str] = []
        self._deltas: list[Delta] = []

    def push_token(self, token_id: int) -> str | None:
        """Add a token.  Returns the stop string that the token completes in the content, else None."""
        was_reasoning = self.parser.in_reasoning
        self.text_stream.push_token(token_id)
        self._parse_text(final=False)
        self.num_reasoning_tokens += was_reasoning or self.parser.in_reasoning
        return self.stop_string_finder.found_stop

    def take_text(self, final: bool) -> str:
        """Returns all text since the last call, also of reasoning, calls, markers.  final: whether no text follows."""
        self._parse_text(final)
        text, self._texts, self._deltas = "".join(self._texts), [], []
        return text

    def read_deltas(self, output: OutputChunk | Output) -> list[Delta]:
        """Returns an output's deltas, up to a stop string in the content.  A stop token is skipped unless keep_stop."""
        is_last = output.finish_reason is not None
        ends_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        tokens = output.token_ids[:-1] if ends_by_token and not self.keep_stop else output.token_ids
        if self.stop_string_finder.stop or self.parser.may_reason:
            for token in tokens:
                self.push_token(token)
            self.num_reasoning_tokens += len(output.token_ids[len(tokens) :]) * self.parser.in_reasoning
        else:
            self.text_stream.push_tokens(tokens)
        self._parse_text(is_last)
        if is_last:
            self._add_deltas(self.parser.finish(is_cut_off=output.finish_reason != "stop"))
            self._end_content_piece()
        deltas, self._texts, self._deltas = self._deltas, [], []
        return deltas

    def finish_reasons(self, output: OutputChunk | Output) -> tuple[str | None, int | str | None]:
        """Returns (finish_reason, stop_reason) of an output after `read_deltas`.

        The text of a broken call becomes content.  If this text has a stop string, the reasons may differ from the
        reasons in `output`."""
        if self.stop_string_finder.found_stop and output.finish_reason in ("stop", "length"):
            return "stop", self.stop_string_finder.found_stop
        return output.finish_reason, output.stop_reason

    def _parse_text(self, final: bool) -> None:
        """Parse the text of the new tokens.  final: whether the output has ended."""
        text = self.text_stream.take_text(final)
        self._texts.append(text)
        self._add_deltas(self.parser.feed(text))

    def _add_deltas(self, deltas: Sequence[Delta]) -> None:
        """Add the parser's deltas to the message, up to a stop string in the content."""
        for delta in deltas:
            if self.stop_string_finder.found_stop:
                return
            if delta.kind == "content":
                self.stop_string_finder.add(delta.text, is_searched=self.text_stream.num_pushed > self.min_tokens)
                self._add_content(self.stop_string_finder.take_text(final=False))
                continue
            if delta.kind == "call":
                # A stop string may not begin before a call and end after it.
                self._end_content_piece()
            self._deltas.append(delta)

    def _end_content_piece(self) -> None:
        """Release the content that was held back because a stop string might begin in it."""
        self._add_content(self.stop_string_finder.take_text(final=True))

    def _add_content(self, content: str) -> None:
        if content:
            self._deltas.append(Delta("content", content))


def parser_for_form(form: OutputForm) -> OutputParser:
    """Returns the parser for an output.  form: the names of the formats, the tools' schemas and the answer's start."""
    formats = Formats(TOOL_FORMATS.get(form.tool_format), REASONING_FORMATS.get(form.reasoning_format))
    return OutputParser(formats, form.schemas, form.answer_start)


@dataclass(frozen=True)
class ChatOutput(Output):
    """The answer to a conversation.

    text: the model's whole text, with the special tokens of calls and reasoning, and with the stop string that ended
    the content.  message: the parsed answer.  finish_reason: "tool_calls" instead of "stop" for an answer with calls.
    """

    message: Message = field(default_factory=Message)


def chat_output(
    plan: ChatPlan, prompt: Sequence[int], output: Output, new_stream: Callable[[], MessageStream] | None = None
) -> ChatOutput:
    """Returns the output with its parsed message.  Each choice in output.choices gets its own message too.

    new_stream: returns a stream that parses the output's tokens, up to a stop string; None to parse the output's text.
    """
    values = {f.name: getattr(output, f.name) for f in fields(Output)}
    choices = [chat_output(plan, prompt, each, new_stream) for each in output.choices]
    message, parser = Message(content=output.text), plan.new_parser(prompt)
    if new_stream is not None:
        stream = new_stream()
        message = message_of(stream.read_deltas(output))
        values["finish_reason"], values["stop_reason"] = stream.finish_reasons(output)
    elif parser is not None:
        message = message_of(parser.feed(output.text) + parser.finish(is_cut_off=output.finish_reason != "stop"))
    if message.tool_calls and values["finish_reason"] == "stop":
        values["finish_reason"] = "tool_calls"
    return ChatOutput(**values | {"choices": choices}, message=message)
