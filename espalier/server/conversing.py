"""From the body of a conversation to a prompt: for chat completions, responses and /tokenize."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from espalier.chat import ChatOptions, Steps
from espalier.errors import EspalierError
from espalier.inputs import InputProcessor
from espalier.request import ResolvedParams
from espalier.server.errors import refusal
from espalier.server.front import Front
from espalier.server.messages import Message
from espalier.server.openai import ChatRequest
from espalier.text import Tokenizer
from espalier.tool_calls.plan import ChatPlan


@dataclass(frozen=True)
class Conversation:
    """A conversation that may start.  ignored: fields without effect."""

    ignored: list[str]
    prompt: list[int]
    params: ResolvedParams
    plan: ChatPlan

    @property
    def answer_arguments(self) -> tuple[ResolvedParams, list[list[int]], Tokenizer | None, ChatPlan]:
        """The last arguments of a ChatAnswer or ResponsesAnswer."""
        return self.params, [self.prompt], self.plan.tokenizer, self.plan


@contextmanager
def refusing() -> Iterator[None]:
    """Raise the ApiError of an EspalierError."""
    try:
        yield
    except EspalierError as error:
        raise refusal(error) from None


async def converse(front: Front, body: ChatRequest) -> Conversation:
    """Check a conversation and make its prompt.  Raises ApiError."""
    with refusing():
        body.check()
        asked = body.params()
        params = front.resolve(asked)
        plan = ChatPlan(front.inputs.tokenizer, front.formats, body.tool_use())
    unread = [name for name in ("reasoning_effort", "tools") if getattr(body, name) and not plan.shows(name)]
    front.check_effect(ignored := body.without_effect() + unread)
    if body.prediction is not None:
        guessed = body.prediction.text
        asked_for = InputProcessor.predicted, params, guessed
        params = await front.lanes.run(*asked_for, size=len(guessed), field="prediction")
    if "reasoning_effort" in unread:
        body = body.model_copy(update={"reasoning_effort": None})
    with front.entering(params.n):
        check = front.require_tokenizable
        size = num_characters([body.messages, body.tools, body.chat_template_kwargs])
        prompt = await front.rendered(_prompt, body, plan, check, size=size)
    with refusing():
        front.inputs.require_room(prompt, asked, body.limit_name)
        params = front.inputs.planned(plan, params, prompt)
    return Conversation(ignored, prompt, params, plan)


def _prompt(inputs: InputProcessor, body: ChatRequest, plan: ChatPlan, check: Callable[[str], None]) -> Steps:
    """To the token ids of a conversation.  Raises EspalierError."""
    keep = body.truncate_prompt_tokens
    check = inputs.require_fit if keep is None else check
    tokens = yield from chat_steps(inputs, body.messages, body.options(), check, plan)
    return inputs.tokens(tokens, keep_last=keep)


def chat_steps(
    inputs: InputProcessor,
    messages: Sequence[Message],
    options: ChatOptions,
    check: Callable[[str], None],
    plan: ChatPlan,
) -> Steps:
    """To the token ids of messages.  Raises EspalierError."""
    return inputs.chat_steps(plan.messages([message.turn() for message in messages]), check=check, **options)


def num_characters(value: Any) -> int:
    """The characters of all texts in a value that was read from a body."""
    count, open_values = 0, [value]
    while open_values:
        inner = open_values.pop()
        if isinstance(inner, str):
            count += len(inner)
        elif isinstance(inner, list):
            open_values += inner
        elif isinstance(inner, dict):
            open_values += [*inner, *inner.values()]
        elif not isinstance(inner, bool | int | float | None):
            open_values += vars(inner).values()  # a record
    return count
