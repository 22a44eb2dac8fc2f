"""Text to tokens, and tokens back to text as they come: never half a character, never part of a stop string.

Tokens are decoded a window at a time, from a little before the first that has not been handed out, since what a token
reads as may depend on the one before it (a leading space, the other bytes of a character).
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from espalier.chat import ChatOptions, ChatTemplate
from espalier.errors import EspalierError, one_line

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
INCOMPLETE = "\ufffd"
MOST_TOKENS_A_CHARACTER = 4
CONTEXT_TOKENS = 6
MOST_CONTEXT_TOKENS = 32
log = logging.getLogger("espalier")

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Decode = Callable[[Sequence[int]], str]


class TokenBytes(NamedTuple):
    """One token, apart from those around it.  is_text: special ones have a name and add nothing to a text."""

    bytes: bytes
    is_text: bool


class Tokenizer:
    """A Hugging Face tokenizer, as much of it as the house needs."""

    def __init__(self, tokenizer: Any):
        self.hf = tokenizer
        self.size = len(tokenizer)
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        self._added = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        self._alphabet = _byte_alphabet() if self._decodes_by("ByteLevel") else None
        self._has_byte_pieces = self._decodes_by("ByteFallback")
        self._has_space_pieces = self._has_byte_pieces or self._decodes_by("Metaspace")
        self._bytes: dict[int, TokenBytes] = {}
        self._template = ChatTemplate(tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.  add_special_tokens: with those that the tokenizer itself adds."""
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens, spaces as they are; special tokens have none, or are their names."""
        if self.backend is not None:
            return self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return self.hf.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def name(self, token: int) -> str:
        """What one token reads as alone, special ones too; bytes that are no character read as U+FFFD."""
        return self.hf.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def bytes_of(self, token: int) -> TokenBytes:
        """What a token adds to a text, or a special one's name.  Remembered for each token."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> TokenBytes:
        # Added ones that are not special are pieces like any other to a decoder.
        if (added := self._added.get(token)) is not None and added.special:
            return TokenBytes(added.content.encode(), False)
        piece = None if self.backend is None else self.backend.id_to_token(token)
        if piece is not None and self._alphabet is not None and all(c in self._alphabet for c in piece):
            return TokenBytes(bytes(self._alphabet[c] for c in piece), True)
        if piece is not None and self._has_byte_pieces and (byte := BYTE_PIECE.fullmatch(piece)):
            return TokenBytes(bytes([int(byte[1], 16)]), True)
        if piece is not None and self._has_space_pieces:
            # A leading space, which decoding the token alone would strip.
            return TokenBytes(piece.replace("\u2581", " ").encode(), True)
        return TokenBytes(self.name(token).encode(), True)

    def _decodes_by(self, kind: str) -> bool:
        """Whether the backend's decoder is of a kind, or has a step of it."""
        if self.backend is None or self.backend.decoder is None:
            return False
        decoder = json.loads(self.backend.decoder.__getstate__())
        return kind in (decoder["type"], *(step["type"] for step in decoder.get("decoders", ())))

    def shows(self, variable: str) -> bool:
        """Whether the chat template reads a variable beside the messages."""
        return self._template.reads(variable)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        check: Callable[[str], None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Token ids of a conversation (chat.ChatOptions).  check: called with its text before that is tokenized.

        Raises EspalierError.
        """
        return self._template.tokens(messages, options, check)

    def sink(
        self,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> "TextStream":
        """Where a request's tokens become text.  keep_stop: a stop string is part of it."""
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        return TextStream(decode, prompt, stop, min_tokens, keep_stop)


def load_tokenizer(path: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer in a model's directory, None where there is none: prompts are then token ids.

    Raises EspalierError for files that cannot be read.
    """
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        log.info("%s holds no tokenizer: prompts are token ids and outputs have no text", path)
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(str(path), local_files_only=True))
    except Exception as error:  # transformers raises many kinds, some of many lines
        raise EspalierError(
            f"the tokenizer in {path} cannot be loaded ({one_line(error)}); "
            "restore its files, or remove them and give token ids"
        ) from None
    if tokenizer.size > vocab_size:
        log.warning(
            "the tokenizer of %s knows %d tokens and the model %d: a prompt that uses the others is refused",
            path,
            tokenizer.size,
            vocab_size,
        )
    return tokenizer


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes of Latin-1 stand for themselves, the others for the characters from 256 on, in order."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TextStream:
    """A request's text (request.TextSink).

    Until min_tokens are there, stop strings are text like any other.  keep_stop: the text ends with the stop string,
    not before.
    """

    def __init__(
        self, decode: Decode, prompt: Sequence[int], stop: Sequence[str], min_tokens: int = 0, keep_stop: bool = False
    ):
        self.decoder = Detokenizer(decode, prompt)
        self.stop = tuple(stop)
        self.min_tokens = min_tokens
        self.keep_stop = keep_stop
        self.pushed = 0
        self.ready = ""
        self.held = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str | None:
        """Take a token in; the stop string, once one is complete."""
        self.pushed += 1
        self.decoder.push(token_id)
        if self.stop and not self.stopped:
            self._read(final=False)
        return self.stopped

    def take(self, final: bool) -> str:
        """Text that is safe to hand out since the last take."""
        if not self.stopped:
            self._read(final)
        keep = 0 if final or self.stopped else self._may_begin_stop()
        text = self.ready + self.held[: len(self.held) - keep]
        self.ready, self.held = "", self.held[len(self.held) - keep :]
        return text

    def _read(self, final: bool) -> None:
        text = self.decoder.take(final)
        if self.pushed <= self.min_tokens:
            self.ready += text
        else:
            self.held += text
            self._cut(self.decoder.ahead() if self.stop else "")

    def _cut(self, ahead: str) -> None:
        """End the text at the first stop string in it, if there is one; of those that begin together, the shortest.

        ahead: what is whole of the tokens that wait, where one may end.
        """
        text = self.held + ahead
        found = [(at, len(stop), stop) for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            at, size, self.stopped = min(found)
            self.held = text[: at + size if self.keep_stop else at]

    def _may_begin_stop(self) -> int:
        """Characters at the end of what is held that a stop string may begin with."""
        longest = max((len(text) for text in self.stop), default=0)
        for size in range(min(longest - 1, len(self.held)), 0, -1):
            tail = self.held[-size:]
            if any(text.startswith(tail) for text in self.stop):
                return size
        return 0


class Detokenizer:
    """Tokens in, whole characters out.  What is taken adds up to what decoding all tokens at once gives."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        self.decode = decode
        self.window = self._context(list(prompt))
        self.read = len(self.window)

    def _context(self, prompt: list[int]) -> list[int]:
        """The prompt's last tokens, from where a character begins: bytes without their first may spoil those after."""
        for size in range(CONTEXT_TOKENS, CONTEXT_TOKENS - MOST_TOKENS_A_CHARACTER, -1):
            context = prompt[-size:]
            if not self.decode(context).startswith(INCOMPLETE):
                break
        return context

    def push(self, token_id: int) -> None:
        self.window.append(token_id)

    def take(self, final: bool) -> str:
        """Text of the tokens since the last take, up to the last whole character unless final."""
        if self.read == len(self.window):
            return ""
        end, whole = (len(self.window), self.decode(self.window)) if final else self._whole_characters()
        text = _beyond(self.decode(self.window[: self.read]), whole)
        # What has just been handed out is the next window's context, if it can be seen; else the one before still is.
        drop = self.read if text else max(0, end - MOST_CONTEXT_TOKENS)
        self.window = self.window[drop:]
        self.read = end - drop
        return text

    def ahead(self) -> str:
        """What take would hand out next if the last token did not also begin a character that is not whole."""
        if self.read == len(self.window):
            return ""
        return _beyond(self.decode(self.window[: self.read]), self.decode(self.window).rstrip(INCOMPLETE))

    def _whole_characters(self) -> tuple[int, str]:
        """Where the last whole character ends, and the text up to there.

        Bytes that lack others read as U+FFFD.  No unfinished character takes four tokens, so of four the first is done,
        or its character is with those after it: then the text ends before that character, within a token.
        """
        first = max(self.read, len(self.window) - MOST_TOKENS_A_CHARACTER + 1)
        text = whole = self.decode(self.window)
        if not whole.endswith(INCOMPLETE):
            return len(self.window), whole
        for end in range(len(self.window) - 1, first - 1, -1):
            text = self.decode(self.window[:end])
            if not text.endswith(INCOMPLETE):
                return end, text
        return first, text[: _shared(text, whole)]


def _beyond(before: str, whole: str) -> str:
    """What `whole` adds to `before`, whose last bytes may have become a character since."""
    if whole.startswith(before):
        return whole[len(before) :]
    # Before the window begins there may be bytes of one of its characters, which stay what they are.
    return whole[max(_shared(before, whole), len(before.rstrip(INCOMPLETE))) :]


def _shared(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    differ = (at for at, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its)
    return next(differ, min(len(one), len(other)))
