"""The tokenizer, and the stream that turns output tokens into text.

The stream never returns an incomplete character or a part of a stop string.

A byte-level tokenizer's tokens are bytes of UTF-8, so new tokens are decoded alone (ByteDetokenizer).  The text of
other tokens can depend on the tokens before them, such as a leading space.  So other tokens are decoded in a window
that begins a few tokens before the first new token (Detokenizer)."""

import codecs
import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from espalier.chat import ChatTemplate
from espalier.errors import convert_tokenizer_panics
from espalier.model_files import is_gguf, read_gguf
from espalier.tokenizer_files import load_hugging_face_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
INCOMPLETE_CHAR = "\ufffd"
# UTF-8 has at most 4 bytes per character, so an incomplete character has at most 3 tokens.
MAX_TOKENS_PER_CHARACTER = 4
# How many of the prompt's tokens a Detokenizer's window begins with, and the most tokens that it keeps as context.
CONTEXT_TOKENS, MAX_CONTEXT_TOKENS = 6, 32
log = logging.getLogger("espalier")

BYTE_PIECE_PATTERN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Decode = Callable[[Sequence[int]], str]
Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class StopStringFinder:
    """Finds the first stop string in a growing text, and cuts the text there.

    stop: the stop strings.  found_stop: the stop string that was found.  keep_stop: whether the text includes it."""

    def __init__(self, stop: Sequence[str], keep_stop: bool = False):
        self.stop = tuple(stop)
        self.keep_stop = keep_stop
        self.found_stop: str | None = None
        self._ready_text = ""
        self._held_text = ""

    def add(self, text: str, is_searched: bool = True, next_text: str = "") -> None:
        """Adds text.  is_searched: whether to search it for stop strings.  next_text: the characters after `text`
        that are known so far; a stop string may end there."""
        if not is_searched:
            self._ready_text += text
            return
        self._held_text += text
        self._end_at_stop(next_text if self.stop else "")

    def take_text(self, final: bool) -> str:
        """Returns the text that no earlier call returned.  Unless `final`, keeps text that may begin a stop string."""
        num_held = 0 if final or self.found_stop or not self.stop else self._possible_stop_length()
        text = self._ready_text + self._held_text[: len(self._held_text) - num_held]
        self._ready_text, self._held_text = "", self._held_text[len(self._held_text) - num_held :]
        return text

    def _end_at_stop(self, next_text: str) -> None:
        """Cuts the text at its first stop string, if any.  If several begin at one place, the shortest one counts."""
        text = self._held_text + next_text
        matches = [(start, len(stop), stop) for stop in self.stop if (start := text.find(stop)) >= 0]
        if matches:
            start, size, self.found_stop = min(matches)
            self._held_text = text[: start + size if self.keep_stop else start]

    def _possible_stop_length(self) -> int:
        """Returns how many characters at the end of the held text may begin a stop string."""
        longest = max(len(text) for text in self.stop)
        for size in range(min(longest - 1, len(self._held_text)), 0, -1):
            tail = self._held_text[-size:]
            if any(text.startswith(tail) for text in self.stop):
                return size
        return 0


class TokenBytes(NamedTuple):
    """The bytes of a single token.  is_text: False for a special token; its bytes are the token's name."""

    bytes: bytes
    is_text: bool


class Tokenizer:
    """Wraps a Hugging Face tokenizer with the functions that the engine uses.

    hf: the tokenizer of transformers.  backend: its tokenizer of the tokenizers library; None if it is in Python."""

    def __init__(self, tokenizer: Any):
        self.hf = tokenizer
        self.num_tokens = len(tokenizer)
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        self._added_tokens = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        self._byte_of_char = _byte_alphabet() if self._decoder_has_type("ByteLevel") else None
        self._is_byte_level = self._decoder_types()[:1] == ["ByteLevel"]
        self._has_byte_pieces = self._decoder_has_type("ByteFallback")
        self._has_space_pieces = self._has_byte_pieces or self._decoder_has_type("Metaspace")
        self._bytes_of_token: dict[int, TokenBytes] = {}
        self.template = ChatTemplate(tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the cache _bytes_of_token, because another thread may write to it.  A copy gets an empty cache."""
        return {**vars(self), "_bytes_of_token": {}}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.  add_special_tokens: add the tokenizer's special tokens, such as BOS."""
        with convert_tokenizer_panics():
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens, spaces unchanged.  Special tokens are skipped, or written as their names."""
        if self.backend is not None:
            return self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return self.hf.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def token_name(self, token: int) -> str:
        """Returns the text of one token; for a special token, its name.  An incomplete character becomes U+FFFD."""
        return self.hf.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def bytes_of(self, token: int) -> TokenBytes:
        """Returns the bytes that a token adds to a text; for a special token, the bytes of its name.  Cached."""
        cached = self._bytes_of_token.get(token)
        if cached is None:
            cached = self._bytes_of_token[token] = self._token_bytes(token)
        return cached

    def _token_bytes(self, token: int) -> TokenBytes:
        # The decoder treats added tokens that are not special like ordinary tokens.
        if (added := self._added_tokens.get(token)) is not None and added.special:
            return TokenBytes(added.content.encode(), False)
        piece = None if self.backend is None else self.backend.id_to_token(token)
        if piece is not None and self._byte_of_char is not None and all(c in self._byte_of_char for c in piece):
            return TokenBytes(bytes(self._byte_of_char[c] for c in piece), True)
        if piece is not None and self._has_byte_pieces and (byte := BYTE_PIECE_PATTERN.fullmatch(piece)):
            return TokenBytes(bytes([int(byte[1], 16)]), True)
        if piece is not None and self._has_space_pieces:
            # Decoding the single token would strip its leading space.
            return TokenBytes(piece.replace("\u2581", " ").encode(), True)
        return TokenBytes(self.token_name(token).encode(), True)

    def _decoder_has_type(self, kind: str) -> bool:
        """Whether the backend's decoder, or a step of it, has the type `kind`, such as "ByteLevel"."""
        return kind in self._decoder_types()

    def _decoder_types(self) -> list[str]:
        """Returns the type of the backend's decoder, then the types of its steps."""
        if self.backend is None or self.backend.decoder is None:
            return []
        decoder = json.loads(self.backend.decoder.__getstate__())
        return [decoder["type"], *(step["type"] for step in decoder.get("decoders", ()))]

    def text_stream(
        self,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
        visible_ids: Sequence[int] = (),
    ) -> "TextStream":
        """Returns a stream that turns the tokens after a request's `prompt` into text.

        keep_stop: the text includes the stop string.  visible_ids: special tokens that are never skipped."""
        return TextStream(self._detokenizer(prompt, skip_special_tokens, visible_ids), stop, min_tokens, keep_stop)

    def special_ids(self, names: Collection[str]) -> tuple[int, ...]:
        """Returns the ids of the special tokens with these names.  Names that the tokenizer lacks are left out."""
        return tuple(sorted(id for id, token in self._added_tokens.items() if token.special and token.content in names))

    def last_turn(self, prompt: Sequence[int], ignored_tokens: Collection[str]) -> str | None:
        """Returns the prompt's text from its last special token on.

        Returns None if the prompt has no special token, or if the last special token is the tokenizer's BOS or EOS.
        ignored_tokens: names of special tokens that do not count."""
        names = self.template.special_tokens.names
        ids = {
            id
            for id, token in self._added_tokens.items()
            if token.content in names and token.content not in ignored_tokens
        }
        last_special = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i] in ids), None)
        if last_special is None or prompt[last_special] in (self.hf.bos_token_id, self.hf.eos_token_id):
            return None
        return self.decode(prompt[last_special:], skip_special_tokens=False)

    def _detokenizer(
        self, prompt: Sequence[int], skip_special_tokens: bool, visible_ids: Sequence[int]
    ) -> "Detokenizer | ByteDetokenizer":
        """Returns a decoder of the output after `prompt`.  visible_ids: special tokens that are not skipped."""
        if self._is_byte_level and skip_special_tokens:
            # If the prompt ends inside a character, only a Detokenizer can decode the rest of the character.
            detokenizer = ByteDetokenizer(self.bytes_of, visible_ids)
            for token in prompt[-CONTEXT_TOKENS:]:
                detokenizer.push_token(token)
            detokenizer.take_text(final=False)
            if detokenizer.is_between_characters:
                return detokenizer
        if not (skip_special_tokens and visible_ids):
            return Detokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), prompt)
        skipped = {id for id, token in self._added_tokens.items() if token.special and id not in visible_ids}
        return Detokenizer(lambda tokens: self.decode([t for t in tokens if t not in skipped], False), prompt)


def load_tokenizer(path: Path, vocab_size: int) -> Tokenizer | None:
    """Loads the tokenizer from a model's directory or GGUF file.  Raises EspalierError if the files cannot be loaded.

    Returns None if the model has no tokenizer; its prompts must then be token ids."""
    tokenizer_path = _find_tokenizer(path)
    if tokenizer_path is None:
        log.info("%s has no tokenizer: prompts must be token ids, and outputs have no text", path)
        return None
    hf = load_hugging_face_tokenizer(tokenizer_path)
    tokenizer = Tokenizer(hf)
    # Espalier itself limits prompts to max_context.  transformers would print its own warning about a long prompt.
    hf.model_max_length = sys.maxsize
    if tokenizer.num_tokens > vocab_size:
        log.warning(
            "the tokenizer of %s has %d tokens and the model only %d: a prompt with one of the other tokens is refused",
            tokenizer_path,
            tokenizer.num_tokens,
            vocab_size,
        )
    return tokenizer


def _find_tokenizer(path: Path) -> Path | None:
    """Returns the GGUF file or the directory that has the model's tokenizer; None if there is no tokenizer.

    If a GGUF file contains no tokenizer, the tokenizer's files may be in the same directory."""
    if is_gguf(path):
        if read_gguf(path).metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab"):
            return path
        path = path.parent
    return path if any((path / name).exists() for name in TOKENIZER_FILES) else None


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's byte alphabet: printable Latin-1 bytes as themselves, other bytes as characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


class TextStream:
    """Turns a request's tokens into text and finds stop strings.  Implements request.IncrementalDetokenizer.

    decoder: decodes the output's tokens.  stop: the stop strings.  min_tokens: stop strings within the first min_tokens
    tokens do not count.  keep_stop: the text includes the stop string."""

    def __init__(
        self,
        decoder: "Detokenizer | ByteDetokenizer",
        stop: Sequence[str],
        min_tokens: int = 0,
        keep_stop: bool = False,
    ):
        self.decoder = decoder
        self.stop_finder = StopStringFinder(stop, keep_stop)
        self.min_tokens = min_tokens
        self.num_pushed = 0

    def push_token(self, token_id: int) -> str | None:
        """Add a token.  Returns the stop string once one is complete, else None."""
        self.num_pushed += 1
        self.decoder.push_token(token_id)
        if self.stop_finder.stop and not self.stop_finder.found_stop:
            self._read_decoder(final=False)
        return self.stop_finder.found_stop

    def push_tokens(self, token_ids: Sequence[int]) -> None:
        """Add tokens.  Stop strings are searched only at the next take_text."""
        self.num_pushed += len(token_ids)
        self.decoder.push_tokens(token_ids)

    def take_text(self, final: bool) -> str:
        """Returns the new text since the last call.  Unless `final`, text that may begin a stop string is held back."""
        if not self.stop_finder.found_stop:
            self._read_decoder(final)
        return self.stop_finder.take_text(final)

    def _read_decoder(self, final: bool) -> None:
        """Searches new text for stop strings.  final: whether the output has ended."""
        text, counts = self.decoder.take_text(final), self.num_pushed > self.min_tokens
        # A stop string may end in withheld_text(): whole characters that the decoder's take_text has not returned.
        self.stop_finder.add(text, counts, self.decoder.withheld_text() if counts and self.stop_finder.stop else "")


class ByteDetokenizer:
    """Detokenizer for tokens that are bytes of UTF-8, after a prompt that ends with a whole character.

    Special tokens are skipped, except those in `visible_ids`."""

    def __init__(self, bytes_of: Callable[[int], TokenBytes], visible_ids: Collection[int] = ()):
        self.bytes_of = bytes_of
        self.visible_ids = frozenset(visible_ids)
        self.utf8 = Utf8Decoder("replace")
        self._pending_tokens: list[int] = []

    @property
    def is_between_characters(self) -> bool:
        """Whether the tokens that take_text has decoded so far end with a whole character."""
        return not self.utf8.getstate()[0]

    def push_token(self, token_id: int) -> None:
        self._pending_tokens.append(token_id)

    def push_tokens(self, token_ids: Sequence[int]) -> None:
        self._pending_tokens.extend(token_ids)

    def take_text(self, final: bool) -> str:
        """Returns the text of the tokens since the last take; unless final, only up to the last complete character."""
        parts = [
            part.bytes
            for token in self._pending_tokens
            if (part := self.bytes_of(token)).is_text or token in self.visible_ids
        ]
        self._pending_tokens.clear()
        return self.utf8.decode(b"".join(parts), final)

    def withheld_text(self) -> str:
        """Returns "", because take_text of this class returns every complete character."""
        return ""


class Detokenizer:
    """Decodes tokens to complete characters.  The texts of all take_text calls, joined, are the text of all tokens."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        """window: context tokens, then tokens to decode.  num_taken: how many tokens of the window are context, or were
        already returned as text."""
        self.decode = decode
        self.window = self._context_tokens(list(prompt))
        self.num_taken = len(self.window)

    def _context_tokens(self, prompt: list[int]) -> list[int]:
        """Returns the prompt's last tokens, from the first byte of a character on: they decode without U+FFFD."""
        for size in range(CONTEXT_TOKENS, CONTEXT_TOKENS - MAX_TOKENS_PER_CHARACTER, -1):
            context = prompt[-size:]
            if not self.decode(context).startswith(INCOMPLETE_CHAR):
                break
        return context

    def push_token(self, token_id: int) -> None:
        self.window.append(token_id)

    def push_tokens(self, token_ids: Sequence[int]) -> None:
        self.window.extend(token_ids)

    def take_text(self, final: bool) -> str:
        """Returns the text of the tokens since the last take; unless final, only up to the last complete character."""
        if self.num_taken == len(self.window):
            return ""
        end, full_text = (len(self.window), self.decode(self.window)) if final else self._whole_characters()
        text = _new_text(self.decode(self.window[: self.num_taken]), full_text)
        # If the new tokens have text, they are the next context.  If not, the old context stays in front of them.
        drop = self.num_taken if text else max(0, end - MAX_CONTEXT_TOKENS)
        self.window = self.window[drop:]
        self.num_taken = end - drop
        return text

    def withheld_text(self) -> str:
        """Returns the complete characters that take_text withholds: their token also begins an incomplete one."""
        if self.num_taken == len(self.window):
            return ""
        return _new_text(self.decode(self.window[: self.num_taken]), self.decode(self.window).rstrip(INCOMPLETE_CHAR))

    def _whole_characters(self) -> tuple[int, str]:
        """Returns (number of tokens, their text) up to the last complete character.

        An incomplete character decodes to U+FFFD and has at most 3 tokens, so at most the last 3 tokens are left out.
        If the text before them also ends in U+FFFD, it is cut where it differs from the text of all tokens."""
        first = max(self.num_taken, len(self.window) - MAX_TOKENS_PER_CHARACTER + 1)
        text = full_text = self.decode(self.window)
        if not full_text.endswith(INCOMPLETE_CHAR):
            return len(self.window), full_text
        for end in range(len(self.window) - 1, first - 1, -1):
            text = self.decode(self.window[:end])
            if not text.endswith(INCOMPLETE_CHAR):
                return end, text
        return first, text[: _common_prefix_length(text, full_text)]


def _new_text(old_text: str, full_text: str) -> str:
    """Returns the text that `full_text` adds to `old_text`, whose last character may have been incomplete."""
    if full_text.startswith(old_text):
        return full_text[len(old_text) :]
    # The window may begin inside a character.  The U+FFFD for its bytes are the same in both texts.
    return full_text[max(_common_prefix_length(old_text, full_text), len(old_text.rstrip(INCOMPLETE_CHAR))) :]


def _common_prefix_length(text: str, other_text: str) -> int:
    differ = (i for i, (a, b) in enumerate(zip(text, other_text, strict=False)) if a != b)
    return next(differ, min(len(text), len(other_text)))
