"""GPT-OSS's format (harmony): messages in channels.

A message in the channel `analysis` is reasoning, a message to functions.NAME is a call, and other messages are content.
GPT-OSS sometimes addresses a message for the user to `assistant`.

The package openai-harmony is not used, because it reads token ids of its own vocabulary, which it downloads.
"""

import re

from espalier.tool_calls.arguments import call_ends_here, read_arguments
from espalier.tool_calls.base import CallSyntax, CallWriter, DeltaWriter, ReasoningFormat, ToolFormat, read_call
from espalier.tool_calls.reader import BrokenCall, Markers, Steps, TextReader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
SPECIAL_TOKENS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
# The start of the next message also ends a message.
MESSAGE_ENDS = Markers(END, CALL, RETURN, START, CHANNEL)
HEADER_ENDS = Markers(MESSAGE, END, CALL, RETURN)
RECIPIENT_NAME_PATTERN = re.compile(r"\bto=([^\s<]+)")
CHANNEL_NAME_PATTERN = re.compile(re.escape(CHANNEL) + r"(\w+)")
RECIPIENT_REGEX = r"(?: *to=[^\s<]*)?"
HEADER_PATTERN = re.compile(
    rf"^(?:{re.escape(START)})?\w*{RECIPIENT_REGEX}(?:{re.escape(CHANNEL)}\w*)?{RECIPIENT_REGEX}"
    rf"(?: *{re.escape(CONSTRAIN)}\w*| json)?"
)
FUNCTIONS_PREFIX = "functions."
# A message to one of these recipients is no tool call.
NON_TOOL_RECIPIENTS = ("assistant", "user", "system", "developer", "all")


def parse(reader: TextReader, writer: DeltaWriter) -> Steps[None]:
    """Parses an output.  The prompt ends with <|start|>assistant, so the output begins inside a message's header."""
    opening_marker = yield from reader.read_literal(CHANNEL, START, " to=")
    while True:
        if opening_marker is None:
            # Text outside messages is content.
            opening_marker = yield from reader.read_until(MESSAGE_ENDS, writer.add_content)
        if opening_marker is None:
            return
        if opening_marker in (END, CALL, RETURN):
            opening_marker = yield from reader.read_literal(CHANNEL, START)
        else:
            opening_marker = yield from _read_message(reader, writer, opening_marker)


def _read_message(reader: TextReader, writer: DeltaWriter, opening_marker: str) -> Steps[str | None]:
    """Read a message.  Returns the marker at its end; None if plain text follows.  opening_marker: already read."""
    parts = [opening_marker]
    marker = yield from reader.read_until(HEADER_ENDS, parts.append)
    header = "".join(parts)
    recipient, channel = RECIPIENT_NAME_PATTERN.search(header), CHANNEL_NAME_PATTERN.search(header)
    if recipient is not None and recipient[1] not in NON_TOOL_RECIPIENTS:
        return (yield from _read_call(reader, writer, header, marker, recipient[1]))
    if marker != MESSAGE:
        # A header without a message is dropped.  Other text is content.
        if text := HEADER_PATTERN.sub("", header, count=1):
            writer.add_content(text)
        return marker
    writer.in_reasoning = channel is not None and channel[1] == "analysis"
    marker = yield from reader.read_until(
        MESSAGE_ENDS, writer.add_reasoning if writer.in_reasoning else writer.add_content
    )
    writer.in_reasoning = False
    return marker


def _read_call(
    reader: TextReader, writer: DeltaWriter, header: str, marker: str | None, recipient: str
) -> Steps[str | None]:
    """Read a call after its header.  marker: the marker that ended the header, None at the end of the output.

    Returns the marker at the call's end; None if plain text follows."""

    def read_body(call: CallWriter) -> Steps[None]:
        call.write_name(recipient.removeprefix(FUNCTIONS_PREFIX))
        if marker is None:
            yield from call_ends_here(reader)
        if marker != MESSAGE:
            return
        yield from reader.read_space()
        yield from read_arguments(reader, call, *MESSAGE_ENDS.texts)
        yield from reader.read_space()
        if (yield from reader.peek()) not in ("", "<"):
            raise BrokenCall("the tool call goes on after its arguments")

    if not (yield from read_call(reader, writer, header + (marker or ""), read_body)):
        return None
    return marker if marker != MESSAGE else (yield from reader.read_literal(*MESSAGE_ENDS.texts))


TOOL_FORMAT = ToolFormat(
    name="harmony",
    template_signs=(CHANNEL, START),
    special_tokens=SPECIAL_TOKENS,
    parse=parse,
    syntax=CallSyntax(f"{CHANNEL}commentary to={FUNCTIONS_PREFIX}", f" {CONSTRAIN}json{MESSAGE}", ""),
    call_ends_output=True,
)
REASONING_FORMAT = ReasoningFormat(
    name="harmony",
    template_signs=(CHANNEL, START),
    special_tokens=SPECIAL_TOKENS,
    begin_marker=f"{CHANNEL}analysis{MESSAGE}",
    end_marker=f"{END}{START}assistant",
    answer_marker=f"{CHANNEL}final{MESSAGE}",
    includes_calls=True,
    message_marker=f"{START}assistant",
)
