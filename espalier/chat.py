"""From a conversation to a prompt: the chat template, and what of its text is a special token.

Special tokens are the template's to write.  Where a message spells one, it stays text: a user cannot end his turn and
begin the assistant's.  Which is which is found by rendering twice, the second time with a mark after the first
character of whatever in a message may become a special token; one with a mark in it is the message's.  If there are
any, those of the template get names that no text holds, and the prompt is encoded by a copy of the tokenizer that knows
them by these alone.
"""

import inspect
import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypedDict

from espalier.errors import EspalierError, one_line

# Some models' tokens of turns are no special ones by their files, and look like all others.
CONTROL = re.compile(r"<[|｜].*[|｜]>")
Messages = Sequence[Mapping[str, Any]]


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt, beside its messages.

    chat_template_kwargs: variables of the chat template, such as Qwen3's enable_thinking; one that it does not read is
    refused.  continue_final_message: the last message is left open, and goes on.  add_generation_prompt: end with where
    the assistant begins to answer; None: unless the last message goes on.  tools: definitions, as the template takes
    them; one that does not read them leaves them out.  add_special_tokens: also those that the tokenizer adds to plain
    text, beside the template's.  allow_special_tokens_in_messages: where a message spells one, it becomes one.
    """

    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    add_special_tokens: bool | None
    allow_special_tokens_in_messages: bool | None


FLAGS = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "allow_special_tokens_in_messages")


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, which may have none."""

    def __init__(self, hf: Any):
        self.hf = hf

    @cached_property
    def special(self) -> "SpecialTokens":
        return SpecialTokens(self.hf)

    def reads(self, variable: str) -> bool:
        """Whether a variable beside the messages changes anything."""
        return bool(getattr(self.hf, "chat_template", None)) and variable in _variables_of(self.hf.get_chat_template())

    def tokens(self, messages: Messages, options: ChatOptions, check: Callable[[str], None] | None = None) -> list[int]:
        """Token ids of a conversation.  check: called with its text before that is tokenized.  Raises EspalierError."""
        if not getattr(self.hf, "chat_template", None):
            raise EspalierError("this model has no chat template: use /v1/completions, or generate with a prompt")
        if any(message.get("tool_calls") for message in messages) and "tool_calls" not in self.hf.get_chat_template():
            raise EspalierError("messages with tool_calls are not shown by this model's chat template; leave them out")
        variables = self._variables(options)
        tools, adds = options.get("tools"), bool(options.get("add_special_tokens"))
        said = [dict(message) for message in messages]
        text, mark = self._render(said, tools, variables), _unguessable()
        if check is not None:
            check(text)
        # A role is the template's own word, which some write tokens with.
        marked = [self.special.marked(each, mark) | ({"role": each["role"]} if "role" in each else {}) for each in said]
        marked_tools = self.special.marked(tools, mark)
        if options.get("allow_special_tokens_in_messages") or (marked, marked_tools) == (said, tools):
            return self._encode(text, adds)
        prompt = self.special.apart(self._render(marked, marked_tools, variables), mark)
        if prompt.names == self.special.names_in(text):
            return self._encode(text, adds)
        return self.special.encode(prompt, adds)

    def _variables(self, options: ChatOptions) -> dict[str, Any]:
        """What apply_chat_template takes beside messages and tools.  Raises EspalierError."""
        for name in FLAGS:
            if not isinstance(value := options.get(name), bool | None):
                raise EspalierError(f"{name}={value!r} is not supported; use True or False")
        goes_on, begins = bool(options.get("continue_final_message")), options.get("add_generation_prompt")
        if goes_on and begins:
            raise EspalierError("continue_final_message with add_generation_prompt has no meaning; set one of them")
        own = options.get("chat_template_kwargs")
        given = {} if own is None else own
        try:
            self._check_template_kwargs(given)
        except EspalierError:
            raise
        except Exception as error:  # a template that cannot be parsed
            raise _refused(error) from None
        begins = not goes_on if begins is None else begins
        return {**given, "add_generation_prompt": begins, "continue_final_message": goes_on}

    def _render(self, messages: Messages, tools: Any, variables: Mapping[str, Any]) -> str:
        try:
            return str(self.hf.apply_chat_template(messages, tools=tools or None, tokenize=False, **variables))
        except Exception as error:  # a template raises whatever it likes
            raise _refused(error) from None

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def _check_template_kwargs(self, given: Mapping[str, Any]) -> None:
        """Refuse names that transformers takes for itself, and those that would do nothing.  Raises EspalierError."""
        if not isinstance(given, Mapping):
            raise EspalierError(f"chat_template_kwargs={given!r} is not supported; use a dict from name to value")
        if not given:
            return
        parameters = inspect.signature(self.hf.apply_chat_template).parameters.values()
        taken = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} | {"messages", "conversations"}
        read = _variables_of(self.hf.get_chat_template())
        for name in given:
            if name in ChatOptions.__annotations__:
                raise EspalierError(f"chat_template_kwargs entry={name!r} is a field of its own; set it beside them")
            if name in taken:
                raise EspalierError(f"chat_template_kwargs entry={name!r} is for the engine to set; leave it out")
            if name not in read:
                raise EspalierError(
                    f"chat_template_kwargs entry={name!r} is not read by this model's chat template; leave it out"
                )


def _refused(error: Exception) -> EspalierError:
    return EspalierError(f"the chat template refuses these messages: {one_line(error)}")


class Prompt:
    """A rendered conversation.  own: where the template wrote special tokens, as (start, end); names: which."""

    def __init__(self, text: str, own: Sequence[tuple[int, int]]):
        self.text = text
        self.own = own
        self.names = [text[start:end] for start, end in own]


class SpecialTokens:
    """A tokenizer's special tokens, and others that look like them (CONTROL)."""

    def __init__(self, hf: Any):
        self.backend = getattr(hf, "backend_tokenizer", None)
        added = list(getattr(hf, "added_tokens_decoder", {}).values())
        self.names = {each.content for each in added if each.special or CONTROL.fullmatch(each.content)}
        # Others are matched too: where one holds a special token, it is the longer that is a token.
        self._any = _one_of(each.content for each in added)
        self._first = _one_of(name[0] for name in self.names)
        # Of the first character alone: the next may be the first of another.
        self._first_two = re.compile(f"(?={_one_of(name[:2] for name in self.names).pattern}).", re.DOTALL)
        self._last = re.compile(rf"{self._first.pattern}(?=\s*\Z)")
        self._rest = _one_of(name[1:] for name in self.names if name[1:])
        self._joined = "\n".join(self.names)

    def marked(self, value: Any, mark: str) -> Any:
        """A message, or what it holds, with marks in all that may become part of a special token."""
        if isinstance(value, str):
            return self._marked(value, mark)
        if isinstance(value, Mapping):
            return {self.marked(name, mark): self.marked(each, mark) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(each, mark) for each in value]
        return value

    def _marked(self, text: str, mark: str) -> str:
        """Whole ones, and pieces: templates join texts, and cut out what stands between."""
        begins = self._first if self._first.search(text) and self._rest.search(text) else self._first_two
        places = {found.start() + 1 for pattern in (begins, self._last) for found in pattern.finditer(text)}
        head = text.strip()
        if self._rest.match(head) or (len(head) > 1 and head in self._joined):
            places.add(text.index(head[0]))
        edges = [0, *sorted(places), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(edges)) if places else text

    def names_in(self, text: str) -> list[str]:
        return [found[0] for found in self._any.finditer(text) if found[0] in self.names]

    def apart(self, rendered: str, mark: str) -> Prompt:
        """The text without its marks, and which of its special tokens had none."""
        parts = rendered.split(mark)
        marks, text = list(accumulate(len(part) for part in parts[:-1])), "".join(parts)
        found = [each.span() for each in self._any.finditer(text) if each[0] in self.names]
        return Prompt(text, [(start, end) for start, end in found if not _any_between(marks, start, end)])

    def encode(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        """Token ids, of which only the prompt's own are special.  Raises EspalierError."""
        if self.backend is None:
            raise EspalierError(
                "the messages spell special tokens, which this model's tokenizer cannot keep as text; leave them out, "
                "or allow special tokens in messages"
            )
        renamed, at, parts = self._renamed, 0, []
        for start, end in prompt.own:
            parts += [prompt.text[at:start], renamed.names[prompt.text[start:end]]]
            at = end
        text = "".join([*parts, prompt.text[at:]])
        # Unlike `encode`, this lets other threads run meanwhile.
        [encoded] = renamed.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    @cached_property
    def _renamed(self) -> "Renamed":
        return Renamed(self.backend, sorted(self.names))


class Renamed:
    """A copy of a tokenizer (of the library tokenizers) in which special tokens have names that no text holds.

    names: of each, the new one.  Their ids, and how all else is tokenized, are the same.
    """

    def __init__(self, backend: Any, names: Sequence[str]):
        secret = _unguessable()
        self.names = {name: f"{secret}{at:06d}" for at, name in enumerate(names)}
        whole = json.loads(backend.to_str())
        for token in whole["added_tokens"]:
            if token["content"] in self.names:
                token |= {"content": self.names[token["content"]], "normalized": False}
        self._rename_pieces(whole["model"])
        self.backend = type(backend).from_str(json.dumps(whole))
        self.backend.no_truncation()
        self.backend.no_padding()

    def _rename_pieces(self, model: dict[str, Any]) -> None:
        pieces = model["vocab"]
        if isinstance(pieces, dict):
            model["vocab"] = {self.names.get(piece, piece): token for piece, token in pieces.items()}
        else:
            model["vocab"] = [[self.names.get(piece, piece), score] for piece, score in pieces]
        if (unknown := model.get("unk_token")) is not None:
            model["unk_token"] = self.names.get(unknown, unknown)
        if "merges" in model:
            pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
            model["merges"] = [merge for merge, (one, two) in pairs if not {one, two, one + two} & self.names.keys()]


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest that matches; nothing where there are none."""
    each = sorted(set(texts), key=lambda text: (-len(text), text))
    return re.compile("(?:" + "|".join(map(re.escape, each)) + ")" if each else "(?!)")


def _any_between(places: Sequence[int], start: int, end: int) -> bool:
    """places: in ascending order; start and end are not between."""
    return bisect_right(places, start) < bisect_left(places, end)


def _unguessable() -> str:
    """Digits: templates trim, split, quote and change the case of what a message says, and leave them as they are.

    No other begins within it: it has a 1 first, a 2 last and none of these between.
    """
    return "1" + "".join(secrets.choice("03456789") for _ in range(24)) + "2"


@lru_cache(4)
def _variables_of(template: str) -> set[str]:
    """What a chat template reads and does not itself set."""
    from jinja2 import Environment, meta
    from jinja2.ext import Extension

    class Generation(Extension):
        """A tag of transformers' own, around what the assistant says."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=("jinja2.ext.loopcontrols", Generation))
    return meta.find_undeclared_variables(environment.parse(template))
