"""The output of LLM.chat: an Output and the message that was read from its text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from espalier.request import Output
from espalier.tool_calls.message_stream import MessageStream
from espalier.tool_calls.parser import Message, message_of
from espalier.tool_calls.plan import ChatPlan


@dataclass(frozen=True)
class ChatOutput(Output):
    """The answer to a conversation.

    text: all of it, as the model wrote it, with the special tokens of calls and reasoning, and with a stop string that
    ended the content; message: its parts.
    finish_reason: also "tool_calls", for an answer that ended by itself and has calls.
    """

    message: Message = field(default_factory=Message)


def chat_output(
    plan: ChatPlan, prompt: Sequence[int], output: Output, new_stream: Callable[[], MessageStream] | None = None
) -> ChatOutput:
    """The output with its message, and likewise each of its choices.

    new_stream: reads the output's tokens, where stop strings end the content; else its text is read.
    """
    values = {f.name: getattr(output, f.name) for f in fields(Output)}
    choices = [chat_output(plan, prompt, each, new_stream) for each in output.choices]
    message, parser = Message(content=output.text), plan.parser(prompt)
    if new_stream is not None:
        stream = new_stream()
        message = message_of(stream.read(output))
        values["finish_reason"], values["stop_reason"] = stream.ends(output)
    elif parser is not None:
        message = message_of(parser.feed(output.text) + parser.finish(is_cut=output.finish_reason != "stop"))
    if message.tool_calls and values["finish_reason"] == "stop":
        values["finish_reason"] = "tool_calls"
    return ChatOutput(**values | {"choices": choices}, message=message)
