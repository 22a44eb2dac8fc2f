"""The messages of a conversation, as clients send them and as the server's own answers go back in."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from espalier.server.fields import CACHE, CACHE_MARKS, FIRST, FUNCTIONS, TEXT_ONLY, Body, NoEffect, Nothing
from espalier.tool_calls.definitions import MAX_TOOLS

CACHE_CONTROL: Any = Annotated[Any, NoEffect(CACHE)]
COPIED = NoEffect("the text of the reasoning is read from reasoning_content")


class TextPart(Body):
    type: Literal["text"] = Field(description="this server supports only text")
    text: str
    cache_control: CACHE_CONTROL = None
    prompt_cache_breakpoint: CACHE_CONTROL = None


class FunctionCall(Body):
    """arguments: JSON as text.  Those of a call that was cut off are no JSON, and come back all the same."""

    name: str
    arguments: str | None = None


class ToolCall(Body):
    """A tool call in an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int | None, NoEffect("the order of the list is used")] = None

    def turn(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.model_dump()}


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is passed to the chat template as system; tool needs a template that supports it"
    )
    content: str | Annotated[list[TextPart], FIRST] | None = Field(
        None, description="text, or a list of text parts, which are joined; null is empty text"
    )
    name: str | None = Field(None, description="passed to the chat template")
    tool_calls: Annotated[list[ToolCall], FIRST, Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="the assistant's tool calls, passed to the chat template"
    )
    tool_call_id: str | None = Field(
        None, description="the call that a tool message answers, passed to the chat template"
    )
    reasoning_content: str | None = Field(
        None, description="the reasoning of an earlier answer, passed to the chat template"
    )
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    refusal: str | None = Field(None, description="an earlier refusal; the text of a message without content")
    cache_control: CACHE_CONTROL = None
    prompt_cache_breakpoint: CACHE_CONTROL = None
    reasoning_details: Annotated[Any, COPIED] = None
    thinking_blocks: Annotated[Any, COPIED] = None
    provider_specific_fields: Annotated[Any, NoEffect("describes the answer of another server")] = None
    function_call: Annotated[None, FUNCTIONS] = None
    audio: Annotated[None, TEXT_ONLY] = None
    annotations: Annotated[Nothing | None, TEXT_ONLY] = None

    @model_validator(mode="before")
    @classmethod
    def _check_content(cls, value: Any) -> Any:
        """Only a message with tool_calls may leave content out."""
        if isinstance(value, dict) and "content" not in value and not value.get("tool_calls"):
            raise ValueError("content is missing; give text, or null for none")
        return value

    @model_validator(mode="after")
    def _check_reasoning(self) -> "Message":
        if None not in (self.reasoning, self.reasoning_content) and self.reasoning != self.reasoning_content:
            raise ValueError("reasoning and reasoning_content are the same text but differ; send only one")
        return self

    @property
    def text(self) -> str:
        parts = self.content or self.refusal or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)

    def join_parts(self) -> None:
        """Replace the parts of the content by their text."""
        if isinstance(self.content, list):
            for name in CACHE_MARKS:
                marks = [mark for part in self.content if (mark := getattr(part, name)) is not None]
                if marks and getattr(self, name) is None:
                    setattr(self, name, marks[0])
            self.content = self.text

    def turn(self) -> dict[str, Any]:
        """In the form that chat templates read.  Arguments of calls are text."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            turn["tool_calls"] = [call.turn() for call in self.tool_calls]
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return turn | {name: value for name, value in optional.items() if value is not None}
