"""Turns a conversation into a prompt with the chat template, and protects special tokens against injection.

Only the template may write special tokens.  The text of a special token in a message stays text.  Otherwise a user
could end the user's turn and forge the assistant's turn.  To find special tokens that come from messages, the
conversation is rendered twice.  In the second rendering, each part of a message that could become part of a special
token has a mark, a random number, after its first character.  So a special token with a mark inside comes from a
message.  If there is one, the template's special tokens get random names, and a tokenizer in which only these names are
special encodes the prompt."""

import inspect
import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypedDict, get_type_hints

from espalier.errors import EspalierError, convert_tokenizer_panics, one_line

# Some tokenizers do not declare their turn tokens as special.  The names of these turn tokens match this pattern.
CONTROL_TOKEN_PATTERN = re.compile(r"<[|｜].*[|｜]>")
Messages = Sequence[Mapping[str, Any]]
# A function that refuses a rendered text that is too long.  It is called before the text is tokenized.
TextCheck = Callable[[str], None]
MAX_RENDERED_CHARS = 2**24
LIMIT_ERROR = (
    "the chat template is not finished within {} for these messages; send fewer or shorter ones, or correct it"
)
REPLACE_1_AND_2 = str.maketrans("12", "89")


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt.

    chat_template_kwargs: variables of the chat template, such as Qwen3's enable_thinking.  A variable that the template
    does not read is refused.
    continue_final_message: the output continues the last message.
    add_generation_prompt: end the prompt with the start of an assistant turn.  None: do so unless
    continue_final_message is set.
    tools: tool definitions for the template; ignored if the template reads no tools.
    add_special_tokens: add the special tokens that a plain text gets, such as BOS, to those that the template writes.
    allow_special_tokens_in_messages: the text of a special token in a message becomes that token."""

    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    add_special_tokens: bool | None
    allow_special_tokens_in_messages: bool | None


BOOLEAN_OPTIONS = tuple(name for name, kind in get_type_hints(ChatOptions).items() if kind == bool | None)


class Rendering(NamedTuple):
    """The arguments of one rendering of a chat template.  The values are plain, so that JSON can carry them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]


# A generator that turns a conversation into token ids.  The generator yields each Rendering, is sent the rendered text,
# and returns the token ids.  So the caller can render the template in another process.
RenderLoop = Generator[Rendering, str, list[int]]


def run_steps(steps: RenderLoop, render: Callable[[Rendering], str]) -> list[int]:
    """Runs the generator `steps`; `render` makes each rendered text.  Returns the token ids.  Raises EspalierError."""
    try:
        rendering = next(steps)
        while True:
            rendering = steps.send(render(rendering))
    except StopIteration as end:
        return list(end.value)


class ChatTemplate:
    """The chat template of `hf`, a transformers tokenizer.  Without a template, only `encode_steps` raises an error."""

    def __init__(self, hf: Any):
        self.hf = hf

    @cached_property
    def special_tokens(self) -> "SpecialTokens":
        return SpecialTokens(self.hf)

    @property
    def source(self) -> str:
        """The template's text, or "" without a template.  If the model has several templates, that for tool calls."""
        return self.hf.get_chat_template(tools=[{}]) if getattr(self.hf, "chat_template", None) else ""

    def reads_variable(self, variable: str) -> bool:
        """Whether the template reads this variable; False for a template that cannot be parsed."""
        try:
            return variable in _variables_of(self.source)
        except Exception:  # the template cannot be parsed; `render` reports it
            return False

    def encode_steps(self, messages: Messages, options: ChatOptions, check_text: TextCheck | None = None) -> RenderLoop:
        """Turns a conversation into token ids, one step for each rendering (see RenderLoop).

        check_text: called with the rendered text before tokenization.  The steps raise EspalierError."""
        if not getattr(self.hf, "chat_template", None):
            raise EspalierError("this model has no chat template; use /v1/completions, or generate with a prompt")
        if any(message.get("tool_calls") for message in messages) and "tool_calls" not in self.source:
            raise EspalierError("messages with tool_calls need a chat template that reads them; leave them out")
        if options.get("continue_final_message") and messages and messages[-1].get("tool_calls"):
            # transformers cuts the text after the content, so the calls would be lost.
            raise EspalierError("continue_final_message cannot continue a message with tool_calls; leave one out")
        variables = self._variables(options)
        tools_option = options.get("tools")
        tools, adds_special_tokens = (
            None if tools_option is None else list(tools_option),
            bool(options.get("add_special_tokens")),
        )
        unmarked = [dict(message) for message in messages]
        text, mark = (yield Rendering(unmarked, tools, variables)), _random_digits()
        if check_text is not None:
            check_text(text)
        # Roles get no marks, because some templates build special tokens from roles.
        marked = [
            self.special_tokens.insert_marks(message, mark) | ({"role": message["role"]} if "role" in message else {})
            for message in unmarked
        ]
        marked_tools = self.special_tokens.insert_marks(tools, mark)
        if options.get("allow_special_tokens_in_messages") or (marked, marked_tools) == (unmarked, tools):
            return self._encode(text, adds_special_tokens)
        prompt = self.special_tokens.remove_marks((yield Rendering(marked, marked_tools, variables)), mark)
        if prompt.names == self.special_tokens.find_special_tokens(text):
            return self._encode(text, adds_special_tokens)
        return self.special_tokens.encode(prompt, adds_special_tokens)

    def _variables(self, options: ChatOptions) -> dict[str, Any]:
        """Returns the variables for apply_chat_template, beside messages and tools.  Raises EspalierError."""
        for name in BOOLEAN_OPTIONS:
            if not isinstance(value := options.get(name), bool | None):
                raise EspalierError(f"{name}={value!r} is not supported; use True or False")
        continues, generates = bool(options.get("continue_final_message")), options.get("add_generation_prompt")
        if continues and generates:
            raise EspalierError("continue_final_message excludes add_generation_prompt; set only one of them")
        kwargs = options.get("chat_template_kwargs")
        kwargs = {} if kwargs is None else kwargs
        try:
            self._check_template_kwargs(kwargs)
        except EspalierError:
            raise
        except Exception as error:  # the template cannot be parsed
            raise _template_error(error) from None
        generates = not continues if generates is None else generates
        return {**kwargs, "add_generation_prompt": generates, "continue_final_message": continues}

    def render(self, rendering: Rendering) -> str:
        """Returns the text that the template makes from `rendering`.  Raises EspalierError."""
        messages, tools, variables = rendering
        try:
            text = str(self.hf.apply_chat_template(messages, tools=tools or None, tokenize=False, **variables))
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            raise _template_error(error) from None
        if len(text) > MAX_RENDERED_CHARS:
            raise EspalierError(LIMIT_ERROR.format(f"{MAX_RENDERED_CHARS} characters"))
        # The arguments of a tool call may contain half of a surrogate pair, which becomes its escape, such as \ud800.
        return text.encode(errors="backslashreplace").decode()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with convert_tokenizer_panics():
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def _check_template_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Refuses a name that is a field of ChatOptions, is a parameter of apply_chat_template, or is not read by the
        template.  kwargs: chat_template_kwargs of ChatOptions."""
        if not isinstance(kwargs, Mapping):
            raise EspalierError(f"chat_template_kwargs={kwargs!r} is not supported; use a dict from name to value")
        if not kwargs:
            return
        parameters = inspect.signature(self.hf.apply_chat_template).parameters.values()
        reserved = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} | {"messages", "conversations"}
        template_variables = _variables_of(self.hf.get_chat_template())
        for name in kwargs:
            if name in ChatOptions.__annotations__:
                raise EspalierError(
                    f"chat_template_kwargs entry={name!r} is not a template variable here; set the field {name} instead"
                )
            if name in reserved:
                raise EspalierError(f"chat_template_kwargs entry={name!r} is set by the engine; leave it out")
            if name not in template_variables:
                raise EspalierError(
                    f"chat_template_kwargs entry={name!r} is not read by this model's chat template; leave it out"
                )


def _template_error(error: Exception) -> EspalierError:
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return EspalierError(
            f"this model's chat template is no Jinja template ({one_line(error)}); correct it, or use serve "
            "--chat-template"
        )
    return EspalierError(f"the chat template refuses these messages: {one_line(error)}")


class RenderedPrompt:
    """A rendered conversation.  spans: (start, end) of the special tokens that the template wrote, in characters;
    names: the texts of these tokens."""

    def __init__(self, text: str, spans: Sequence[tuple[int, int]]):
        self.text = text
        self.spans = spans
        self.names = [text[start:end] for start, end in spans]


class SpecialTokens:
    """The special tokens of `hf`, a transformers tokenizer, and added tokens that look like turn tokens
    (CONTROL_TOKEN_PATTERN).  mark: digits that are inserted into the texts of messages, so that special tokens in these
    texts differ from the template's."""

    def __init__(self, hf: Any):
        self.backend = getattr(hf, "backend_tokenizer", None)
        added = list(getattr(hf, "added_tokens_decoder", {}).values())
        self.names = {
            token.content for token in added if token.special or CONTROL_TOKEN_PATTERN.fullmatch(token.content)
        }
        # The pattern has all added tokens, because the tokenizer reads an added token as one token even if the name of
        # a special token is inside it.
        self._added_token_pattern = _pattern_of(token.content for token in added)
        self._first_char_pattern = _pattern_of(name[0] for name in self.names)
        # The second character is in a lookahead, since it may also be the first character of another match.
        self._two_chars_pattern = re.compile(f"(?={_pattern_of(name[:2] for name in self.names).pattern}).", re.DOTALL)
        self._last_char_pattern = re.compile(rf"{self._first_char_pattern.pattern}(?=\s*\Z)")
        self._rest_chars_pattern = _pattern_of(name[1:] for name in self.names if name[1:])
        self._joined_names = "\n".join(self.names)

    def insert_marks(self, value: Any, mark: str, path: tuple[str, ...] = ()) -> Any:
        """Returns `value`, a message or a part of a message, with marks in each text that may become part of a special
        token.  path: the names of the entries that lead from the message to `value`."""
        if isinstance(value, str):
            # Templates compare a type with fixed texts, such as "text", so a type gets no mark.
            is_type = path[-1:] == ("type",) and value.isidentifier()
            return value if is_type else self._insert_marks_in_text(value, mark)
        if isinstance(value, Mapping):
            # Templates print the names of arguments and parameters, so these names get marks.  Templates look up all
            # other names, so the other names must stay unchanged.
            prints_names = "arguments" in path or path[-1:] == ("properties",)
            return {
                self.insert_marks(name, mark) if prints_names or not str(name).isidentifier() else name: (
                    self.insert_marks(item, mark, (*path, name))
                )
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.insert_marks(item, mark, path) for item in value]
        return value

    def _insert_marks_in_text(self, text: str, mark: str) -> str:
        """Marks special tokens, and beginnings and ends of special tokens, because a template may join or cut texts."""
        has_split_token = self._first_char_pattern.search(text) and self._rest_chars_pattern.search(text)
        start_pattern = self._first_char_pattern if has_split_token else self._two_chars_pattern
        patterns = (start_pattern, self._last_char_pattern)
        positions = {match.start() + 1 for pattern in patterns for match in pattern.finditer(text)}
        stripped = text.strip()
        if self._rest_chars_pattern.match(stripped) or (len(stripped) > 1 and stripped in self._joined_names):
            positions.add(text.index(stripped[0]))
        edges = [0, *sorted(positions), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(edges)) if positions else text

    def find_special_tokens(self, text: str) -> list[str]:
        return [match[0] for match in self._added_token_pattern.finditer(text) if match[0] in self.names]

    def remove_marks(self, rendered: str, mark: str) -> RenderedPrompt:
        """Returns the rendered text without marks, and the spans of the special tokens that had no mark inside."""
        parts = rendered.split(mark)
        mark_positions, text = list(accumulate(len(part) for part in parts[:-1])), "".join(parts)
        spans = [match.span() for match in self._added_token_pattern.finditer(text) if match[0] in self.names]
        # A span has a mark inside if fewer marks are at or before its start than before its end.
        template_spans = [
            span for span in spans if bisect_right(mark_positions, span[0]) >= bisect_left(mark_positions, span[1])
        ]
        return RenderedPrompt(text, template_spans)

    def encode(self, prompt: RenderedPrompt, add_special_tokens: bool) -> list[int]:
        """Returns token ids in which special tokens of messages are plain text.  Raises EspalierError."""
        if self.backend is None:
            raise EspalierError(
                "the messages contain special tokens, which this model's tokenizer cannot keep as text; remove them, "
                "or set allow_special_tokens_in_messages"
            )
        renamed, position, pieces = self._renamed_tokenizer, 0, []
        for start, end in prompt.spans:
            pieces += [prompt.text[position:start], renamed.new_names[prompt.text[start:end]]]
            position = end
        text = "".join([*pieces, prompt.text[position:]])
        # encode_batch, because it releases the GIL and `encode` does not.
        with convert_tokenizer_panics():
            [encoded] = renamed.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    @cached_property
    def _renamed_tokenizer(self) -> "RenamedTokenizer":
        return RenamedTokenizer(self.backend, sorted(self.names))


class RenamedTokenizer:
    """A copy of a tokenizer (of the tokenizers library) in which the special tokens have random names.

    new_names: the random names, by old name.  Token ids do not change, and all other text gets the same tokens."""

    def __init__(self, backend: Any, old_names: Sequence[str]):
        """backend: the original tokenizer.  old_names: the texts of its special tokens."""
        secret = _random_digits()
        self.new_names = {name: f"{secret}{i:06d}" for i, name in enumerate(old_names)}
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            if token["content"] in self.new_names:
                token |= {"content": self.new_names[token["content"]], "normalized": False}
        self._rename_pieces(state["model"])
        self.backend = type(backend).from_str(json.dumps(state))
        self.backend.no_truncation()
        self.backend.no_padding()

    def _rename_pieces(self, model: dict[str, Any]) -> None:
        """Renames the special tokens in `model`, the object of this name in tokenizer.json."""
        pieces = model["vocab"]
        if isinstance(pieces, dict):
            model["vocab"] = {self.new_names.get(piece, piece): token for piece, token in pieces.items()}
        else:
            model["vocab"] = [[self.new_names.get(piece, piece), score] for piece, score in pieces]
        if (unknown := model.get("unk_token")) is not None:
            model["unk_token"] = self.new_names.get(unknown, unknown)
        if "merges" in model:
            pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
            names = self.new_names.keys()
            model["merges"] = [merge for merge, (left, right) in pairs if not names & {left, right, left + right}]


def _pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches the longest of `texts` that fits; if `texts` is empty, it matches nothing."""
    ordered = sorted(set(texts), key=lambda text: (-len(text), text))
    return re.compile("(?:" + "|".join(map(re.escape, ordered)) + ")" if ordered else "(?!)")


def _random_digits() -> str:
    """Returns a random number, to use as a mark.  Digits survive a template that trims, splits, quotes or changes case.

    Two marks cannot overlap, because 1 is only the first digit of a mark, and 2 only the last."""
    octal = f"{secrets.randbits(3 * 24):024o}"
    return f"1{octal.translate(REPLACE_1_AND_2)}2"


def require_template(text: str, name: str) -> None:
    """Refuse a chat template that is empty or cannot be parsed.  name: the template's name in the EspalierError."""
    if not text.strip():
        raise EspalierError(f"{name} is empty; give a Jinja template, or leave it out")
    try:
        _variables_of(text)
    except Exception as error:
        raise EspalierError(f"{name} is no Jinja template ({one_line(error)}); correct it, or leave it out") from None


@lru_cache(4)
def _variables_of(template: str) -> set[str]:
    """Returns the variables that a chat template reads and does not set."""
    from jinja2 import Environment, meta, nodes
    from jinja2.ext import Extension
    from jinja2.visitor import NodeTransformer

    class Generation(Extension):
        """Parses the {% generation %} tag, which transformers allows around assistant messages."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class WithoutConstants(NodeTransformer):
        """Keeps Jinja from computing constant expressions: 'a' * 10**10 in a template would take all memory."""

        def visit_Const(self, node: nodes.Const) -> nodes.Node:
            return nodes.ContextReference()

    environment = Environment(extensions=("jinja2.ext.loopcontrols", Generation))
    return meta.find_undeclared_variables(WithoutConstants().visit(environment.parse(template)))
