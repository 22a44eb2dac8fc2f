"""The output of LLM.chat: an Output and the message that was read from its text."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from espalier.request import Output
from espalier.tools.parser import Message, message_of
from espalier.tools.plan import ChatPlan


@dataclass(frozen=True)
class ChatOutput(Output):
    """The answer to a conversation.

    text: all of it, as the model wrote it, with the special tokens of calls and reasoning; message: its parts.
    finish_reason: also "tool_calls", for an answer that ended by itself and has calls.
    """

    message: Message = field(default_factory=Message)


def chat_output(plan: ChatPlan, prompt: Sequence[int], output: Output) -> ChatOutput:
    """The output with its message, and likewise each of its choices."""
    values = {f.name: getattr(output, f.name) for f in fields(Output)}
    choices = [chat_output(plan, prompt, each) for each in output.choices]
    message, parser = Message(content=output.text), plan.parser(prompt)
    if parser is not None:
        message = message_of(parser.feed(output.text) + parser.finish(is_cut=output.finish_reason != "stop"))
    if message.tool_calls and output.finish_reason == "stop":
        values["finish_reason"] = "tool_calls"
    return ChatOutput(**values | {"choices": choices}, message=message)
