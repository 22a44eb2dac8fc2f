"""Turns user input into engine input: texts and conversations into tokens, SamplingParams into ResolvedParams.

LLM and the API server share this module, so that a prompt gives the same tokens offline and over HTTP.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Unpack

from tokenizers import pre_tokenizers

from espalier.chat import ChatOptions, Messages, RenderLoop, TextCheck, run_steps
from espalier.errors import EspalierError, output_too_long, prompt_too_long, require_text, shown, unknown_name_error
from espalier.grammar.tag import check_grammar
from espalier.request import ResolvedParams, SamplingParams, check_prompt
from espalier.text import TextStream, Tokenizer
from espalier.tool_calls.definitions import checked_tools
from espalier.tool_calls.formats import AUTO, find_formats
from espalier.tool_calls.message_stream import MessageStream, parser_for_form
from espalier.tool_calls.parser import OutputParser
from espalier.tool_calls.plan import ChatPlan

Step = Mapping[str, Any]
# For each normalization step, the largest possible ratio of the text's length before the step to its length after it.
# NFC leaves at least a quarter of the length: a character decomposes into at most 4 (Unicode Standard Annex 15).
MAX_SHRINK_BY_STEP: Mapping[str, int] = MappingProxyType({"NFC": 4, "NFD": 1, "Prepend": 1, "ByteLevel": 1})
# These steps of a pre-tokenizer keep all characters of a text.
LOSSLESS_STEPS = frozenset({"ByteLevel", "Metaspace", "Digits"})
# These steps of a pre-tokenizer keep all characters unless their behavior is "Removed".
SPLITTING_STEPS = frozenset({"Split", "Punctuation"})
Prompt = str | Sequence[int]


class TextLimit:
    """Finds out, before a text is tokenized, whether the text certainly has too many tokens.

    max_chars_per_token: the most characters of a text that one token can stand for; None if unknown.
    space_matching_tokens: added tokens that also match any number of adjacent spaces.  A text that contains one of them
    is never refused."""

    def __init__(self, backend: Any):
        """backend: a tokenizer of the tokenizers library, None for any other tokenizer."""
        self.max_chars_per_token: int | None = None
        self.space_matching_tokens: tuple[str, ...] = ()
        if backend is None:
            return
        normalizer, splitter = (_serialized_steps(step) for step in (backend.normalizer, backend.pre_tokenizer))
        added_tokens = list(backend.get_added_tokens_decoder().values())
        space_matching_tokens = [token for token in added_tokens if token.lstrip or token.rstrip]
        # An added token that is matched after normalization may match a text that does not contain the token literally.
        hidden = bool(normalizer) and any(token.normalized for token in space_matching_tokens)
        shrink = _max_shrink(normalizer)
        if shrink is None or hidden or not _keeps_text(splitter) or not _covers_text(backend, normalizer + splitter):
            return
        normalized = backend.normalizer.normalize_str if normalizer else str
        pieces = [*backend.get_vocab(with_added_tokens=True), *(normalized(token.content) for token in added_tokens)]
        self.max_chars_per_token = shrink * max(map(len, pieces), default=1)
        self.space_matching_tokens = tuple(token.content for token in space_matching_tokens)

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a text certainly has more than num_tokens tokens."""
        if self.max_chars_per_token is None or len(text) <= num_tokens * self.max_chars_per_token:
            return False
        return not any(token in text for token in self.space_matching_tokens)


def _serialized_steps(component: Any) -> list[Step]:
    """Returns the steps of a normalizer or pre-tokenizer.  A step that is written in Python gets the type "unknown"."""
    if component is None:
        return []
    try:
        return _flat_steps(json.loads(component.__getstate__()))
    except Exception:  # a custom component in Python has no serialized state
        return [{"type": "unknown"}]


def _flat_steps(step: Step) -> list[Step]:
    """Returns the step itself, or the steps inside it if its type is "Sequence"."""
    inner_steps = step.get("normalizers") or step.get("pretokenizers") or []
    return [step for part in inner_steps for step in _flat_steps(part)] if step["type"] == "Sequence" else [step]


def _max_shrink(normalizer: Sequence[Step]) -> int | None:
    """Returns the largest ratio of characters before normalization to characters after it, None if unknown."""
    shrink = 1
    for step in normalizer:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif step["type"] not in MAX_SHRINK_BY_STEP:
            return None
        else:
            shrink *= MAX_SHRINK_BY_STEP[step["type"]]
    return shrink


def _keeps_text(pre_tokenizer: Sequence[Step]) -> bool:
    """Whether no step of the pre-tokenizer drops characters."""
    return all(
        step["type"] in LOSSLESS_STEPS or (step["type"] in SPLITTING_STEPS and step["behavior"] != "Removed")
        for step in pre_tokenizer
    )


def _covers_text(backend: Any, steps: Sequence[Step]) -> bool:
    """Whether the vocabulary is known to have tokens for every character.  backend: of the tokenizers library.

    Without such tokens, a character may be dropped, or fused with others into one token.  steps: the steps of the
    normalizer and of the pre-tokenizer."""
    model = backend.model
    if type(model).__name__ != "BPE":
        return False
    if model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        return True
    has_bytes = any(step["type"] == "ByteLevel" for step in steps)
    return has_bytes and all(model.token_to_id(char) is not None for char in pre_tokenizers.ByteLevel.alphabet())


class ConversationOptions(ChatOptions, total=False):
    """The options of LLM.chat.

    tool_choice: as in OpenAI's API.  parallel_tool_calls: False allows one call at most.
    tool_format, reasoning_format: how the model writes tool calls and reasoning: the name of a format in
    espalier/tool_calls/formats, or "auto" for the format that the chat template uses."""

    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    tool_format: str
    reasoning_format: str


@dataclass(frozen=True)
class ModelInfo:
    """The properties of model and engine by which requests are checked.  All values can be sent to another process.

    model: the model's directory.  max_context: tokens of one request, prompt and output.
    generation_config: the content of the model's generation_config.json, {} without this file.
    max_position: the model's number of positions; None if unknown.
    sources: what proposes draft tokens beside the draft model (see SpeculationConfig.sources)."""

    model: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...] = ()
    generation_config: dict[str, Any] = field(default_factory=dict)
    max_position: int | None = None
    sources: tuple[str, ...] = ()


class InputProcessor:
    """Turns prompts and parameters into engine input, and refuses input that the model does not support.

    info: the model's limits and tokens.
    tokenizer: None if the model has none; prompts are then token ids.  allow_special_tokens_in_messages: the default of
    ChatOptions.allow_special_tokens_in_messages."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer | None, allow_special_tokens_in_messages: bool = False):
        self.model_info = info
        self.allow_special_tokens_in_messages = allow_special_tokens_in_messages
        self.tokenizer = tokenizer
        self.text_limit = TextLimit(None if tokenizer is None else tokenizer.backend)

    def for_another_thread(self) -> "InputProcessor":
        """Returns a copy with its own tokenizer, since only one thread at a time may use a tokenizer."""
        other = copy.copy(self)
        other.tokenizer = copy.deepcopy(self.tokenizer)
        return other

    def prompt_tokens(self, prompt: Prompt, add_special_tokens: bool = True, keep_last: int | None = None) -> list[int]:
        """Returns the prompt's token ids, checked against the vocabulary and max_context.

        add_special_tokens: add the tokenizer's special tokens, such as BOS, to a text.  keep_last: keep only this many
        tokens, from the prompt's end.  Raises EspalierError."""
        if isinstance(prompt, str):
            require_text("the prompt", prompt)
            tokenizer = self.require_tokenizer("a text prompt")
            if keep_last is None:
                self.require_text_fits(prompt)
            tokens = tokenizer.encode(prompt, add_special_tokens)
        else:
            tokens = list(prompt)
        tokens = tokens if keep_last is None else tokens[-keep_last:]
        check_prompt(tokens, self.model_info.vocab_size, self.model_info.max_context, self.model_info.max_position)
        return tokens

    def require_text_fits(self, text: str) -> None:
        """Refuse a text that certainly has more tokens than fit max_context.  Raises EspalierError."""
        if self.text_limit.exceeds(text, self.model_info.max_context - 1):
            raise prompt_too_long(f"{len(text)} characters", self.model_info.max_context, self.model_info.max_position)

    def chat_tokens(
        self, messages: Messages, check_text: TextCheck | None = None, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Returns the token ids of a conversation.  For the parameters and errors, see chat_steps."""
        return run_steps(
            self.chat_steps(messages, check_text, **options), self.require_tokenizer("a conversation").template.render
        )

    def chat_steps(
        self, messages: Messages, check_text: TextCheck | None = None, **options: Unpack[ChatOptions]
    ) -> RenderLoop:
        """Turns a conversation into token ids.  Each step of the generator renders the template (see chat.RenderLoop).

        check_text: called with the rendered text.  options: see chat.ChatOptions.  Raises EspalierError during a step.
        """
        messages = _checked_messages(messages)
        if options.get("allow_special_tokens_in_messages") is None:
            options["allow_special_tokens_in_messages"] = self.allow_special_tokens_in_messages
        return self.require_tokenizer("a conversation").template.encode_steps(messages, options, check_text)

    def prepare_conversation(
        self, messages: Messages, params: SamplingParams | None, **options: Unpack[ConversationOptions]
    ) -> tuple[list[int], ResolvedParams, ChatPlan]:
        """Returns (prompt, parameters, plan) of a conversation.  The plan says how to parse the output.  Raises
        EspalierError."""
        tokenizer = self.require_tokenizer("a conversation")
        messages = _checked_messages(messages)
        if not isinstance(params, SamplingParams | ResolvedParams | None):
            raise EspalierError(f"params={shown(params)} is not supported; use SamplingParams(...)")
        for name in options:
            if name not in ConversationOptions.__annotations__:
                raise unknown_name_error("LLM.chat", name, list(ConversationOptions.__annotations__))
        tools = checked_tools(options.get("tools"), options.get("tool_choice"), options.get("parallel_tool_calls"))
        names = options.get("tool_format", AUTO), options.get("reasoning_format", AUTO)
        plan = ChatPlan(tokenizer, find_formats(tokenizer.template.source, *names), tools)
        template_options: Any = {name: value for name, value in options.items() if name in ChatOptions.__annotations__}
        template_messages = plan.template_messages(messages)
        prompt = self.prompt_tokens(self.chat_tokens(template_messages, self.require_text_fits, **template_options))
        self.require_room(prompt, params)
        return prompt, self.apply_plan(plan, self.resolve(params or SamplingParams()), prompt), plan

    def require_room(self, prompt: Sequence[int], params: SamplingParams | None, name: str = "max_tokens") -> None:
        """Refuse a max_tokens that does not fit after the prompt.  Raises EspalierError.

        params: the user's parameters.  ResolvedParams are not checked: the user's max_tokens was checked earlier, and
        the model's default for max_tokens need not fit.  name: the user's name for max_tokens."""
        limit = None if params is None or isinstance(params, ResolvedParams) else params.max_tokens
        if limit is not None and len(prompt) + limit > self.model_info.max_context:
            raise output_too_long(name, limit, len(prompt), self.model_info.max_context, self.model_info.max_position)

    def apply_plan(self, plan: ChatPlan, params: ResolvedParams, prompt: Sequence[int]) -> ResolvedParams:
        """Returns `params` with the plan's grammar, and with the special tokens that the plan's parsers must see in the
        text.  Raises EspalierError if this model does not support these parameters."""
        return self.require_supported(plan.params_with_grammar(params, prompt))

    def resolve(self, params: SamplingParams) -> ResolvedParams:
        """Returns the parameters with defaults filled in and values checked.  Raises EspalierError.

        Resolved parameters are returned unchanged."""
        if isinstance(params, ResolvedParams):
            return params
        resolved = self.require_supported(
            params.resolve(self.model_info.generation_config, self.model_info.eos_token_ids)
        )
        return self.with_prediction(resolved, params.prediction) if params.prediction else resolved

    def with_prediction(self, params: ResolvedParams, prediction: str | Sequence[int]) -> ResolvedParams:
        """Returns `params` with the token ids of `prediction`, a text or token ids.

        Raises EspalierError if the engine takes no prediction, or if the prediction is too long."""
        if "prediction" not in self.model_info.sources:
            raise EspalierError(
                "prediction is not supported by this engine, whose sources beside the draft are "
                f"{', '.join(self.model_info.sources) or 'none'}; leave it out, or start the engine with "
                "sources=prediction"
            )
        limit = self.model_info.max_context
        if isinstance(prediction, str):
            tokenizer = self.require_tokenizer("a prediction")
            is_long = self.text_limit.exceeds(prediction, limit)
            size, prediction = f"{len(prediction)} characters", [] if is_long else tokenizer.encode(prediction, False)
        else:
            size, is_long = f"{len(prediction)} tokens", False
        if is_long or len(prediction) > limit:
            raise EspalierError(f"a prediction of {size} is not supported: max_context is {limit} tokens; shorten it")
        return replace(params, prediction=tuple(prediction))

    def require_supported(self, params: ResolvedParams) -> ResolvedParams:
        """Returns `params` unchanged.  Raises EspalierError for values that this model does not support."""
        params.validate(self.model_info.vocab_size, self.tokenizer is not None)
        if params.grammar is not None:
            check_grammar(params.grammar)
        return params

    def require_tokenizer(self, purpose: str) -> Tokenizer:
        """Returns the tokenizer.  Without one, raises EspalierError, which says that `purpose` needs a tokenizer."""
        if self.tokenizer is None:
            model = self.model_info.model
            remedy = "put its tokenizer.json beside it" if model.endswith(".gguf") else "add its tokenizer.json"
            raise EspalierError(f"{purpose} needs a tokenizer, and {model} has none; {remedy}, or give token ids")
        return self.tokenizer


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns the messages.  A content that is a list of text parts becomes one text.  Raises EspalierError."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise EspalierError(
            f'messages={shown(messages)} is not supported; use a list of {{"role": ..., "content": ...}}'
        )
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise EspalierError(f'message {index} has role={shown(role)}; give a text, such as "user" or "assistant"')
        if "content" not in message and not message.get("tool_calls"):
            raise EspalierError(f"message {index} has no content; give text, or None for none")
        for value in message.values():
            if isinstance(value, str):
                require_text("the prompt", value)
    return [
        {**message, "content": _joined_content(index, message["content"])} if "content" in message else {**message}
        for index, message in enumerate(messages)
    ]


def _joined_content(index: int, content: Any) -> str | None:
    """Returns the content of message `index` as one text, or None.  Raises EspalierError for parts other than text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise EspalierError(f"message {index} has content={shown(content)}; give text, or a list of text parts")
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise EspalierError(
                f'message {index} has the part {shown(part)}; only text is supported: {{"type": "text", "text": ...}}'
            )
        require_text("the prompt", part["text"])
    return "".join(part["text"] for part in content)


def make_detokenizer(
    tokenizer: Tokenizer | None, prompt: Sequence[int], params: ResolvedParams
) -> TextStream | MessageStream | None:
    """Returns the stream that turns a request's tokens, after `prompt`, into text; None without a tokenizer."""
    if tokenizer is None:
        return None
    if params.output_form is not None:
        return message_stream(tokenizer, prompt, params, parser_for_form(params.output_form))
    return text_stream(tokenizer, prompt, params, params.stop)


def message_stream(
    tokenizer: Tokenizer, prompt: Sequence[int], params: ResolvedParams, parser: OutputParser
) -> MessageStream:
    """Returns the stream that turns a request's tokens into the deltas of a message, as `parser` splits them."""
    return MessageStream(text_stream(tokenizer, prompt, params, ()), parser, params)


def text_stream(tokenizer: Tokenizer, prompt: Sequence[int], params: ResolvedParams, stop: Sequence[str]) -> TextStream:
    """Returns the stream that turns a request's tokens, after `prompt`, into text and finds stop strings in it."""
    keep, skip = params.include_stop_str_in_output, params.skip_special_tokens
    return tokenizer.text_stream(
        prompt,
        stop,
        params.min_tokens,
        keep_stop=keep,
        skip_special_tokens=skip,
        visible_ids=params.shown_special_tokens,
    )
