"""Text as it comes: whole characters, nothing of a stop string, and in sum what decoding all at once gives."""

import json
import subprocess
import sys
from itertools import cycle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from espalier.errors import EspalierError
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.text import (
    ByteDetokenizer,
    Detokenizer,
    TextStream,
    Tokenizer,
    load_tokenizer,
)
from espalier.tokenizer_files import GENERIC_MODEL_TYPES, tokenizer_class

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("a", "b"), ("Ã", "©")]
BYTE_LEVEL = Backend(
    models.BPE(vocab={c: i for i, c in enumerate([*BYTES, *("".join(m) for m in MERGES)])}, merges=MERGES)
)
BYTE_LEVEL.decoder = decoders.ByteLevel()
BYTE_LEVEL.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

PIECES = ["▁", "▁the", "▁a", "b", "!", "日", *(f"<0x{byte:02X}>" for byte in range(256))]
SENTENCEPIECE = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[], byte_fallback=True))
SENTENCEPIECE.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}


def spelled(name: str, text: str) -> list[int]:
    """Tokens that spell a text, byte by byte where there is no piece."""
    if name == "byte-level":
        return BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    return [token for c in text for token in _pieces(c.replace(" ", "▁"))]


def _pieces(character: str) -> list[int]:
    if character in PIECES:
        return [PIECES.index(character)]
    return [PIECES.index(f"<0x{byte:02X}>") for byte in character.encode()]


def taken(decode, prompt, tokens, takes) -> list[str]:
    """What is handed out, taking after each token for which `takes` says so, and at the end."""
    stream = Detokenizer(decode, prompt)
    out = []
    for token, take in zip(tokens, takes, strict=True):
        stream.push_token(token)
        if take:
            out.append(stream.take_text(final=False))
    return [*out, stream.take_text(final=True)]


some_text = st.text(st.sampled_from("ab é日🎉!\n "), min_size=1, max_size=24)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(prompt=some_text, text=some_text, data=st.data())
def test_pieces_are_whole_characters_and_add_up(name, prompt, text, data):
    decode = TOKENIZERS[name].decode
    before, tokens = spelled(name, prompt), spelled(name, text)
    takes = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    pieces = taken(decode, before, tokens, takes)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def parted(text: str, sizes: list[int]) -> list[bytes]:
    """A text's bytes, so many at a time, in turn."""
    spelling, parts = text.encode(), []
    for size in cycle(sizes):
        if not spelling:
            return parts
        parts.append(spelling[:size])
        spelling = spelling[size:]
    return parts


@example(prompt="a", text="日" * 9, sizes=[1, 3, 3, 3], always=True)
@example(prompt="日é", text="🎉" * 5, sizes=[1, 1, 1, 2], always=True)
@given(
    prompt=some_text, text=some_text, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8), always=st.booleans()
)
def test_a_token_may_end_a_character_and_begin_the_next(prompt, text, sizes, always):
    """Byte-level vocabularies have such tokens, of bytes that often stand side by side."""
    before, after = parted(prompt, sizes), parted(text, sizes)
    words = before + after

    def decode(tokens):
        return b"".join(words[token] for token in tokens).decode(errors="replace")

    tokens = range(len(before), len(words))
    pieces = taken(decode, range(len(before)), tokens, [always or token % 3 == 0 for token in tokens])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data())
def test_bytes_that_are_no_text_are_handed_out_too(data):
    tokens = data.draw(st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=16))
    takes = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    decode = BYTE_LEVEL.decode
    handed_out = "".join(taken(decode, spelled("byte-level", "ab"), tokens, takes))
    # Where bytes are no UTF-8 the number of replacement characters is a matter of taste; what is readable is not.
    assert handed_out.replace("\ufffd", "") == decode(tokens).replace("\ufffd", "")


def test_bytes_that_never_become_a_character_are_not_held_for_ever():
    stray = BYTE_LEVEL.token_to_id("\u0142")  # byte 0xA0: goes on a character that nothing began
    stream = Detokenizer(BYTE_LEVEL.decode)
    handed_out = ""
    for _ in range(8):
        stream.push_token(stray)
        handed_out += stream.take_text(final=False)
    assert len(handed_out) >= 4


def with_added_tokens() -> Tokenizer:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(BYTE_LEVEL.to_str()), eos_token="<end>")
    tokenizer.add_tokens(["<think>", "日本", "é"])
    return Tokenizer(tokenizer)


WITH_ADDED = with_added_tokens()
ADDED_IDS = WITH_ADDED.hf.convert_tokens_to_ids(["<end>", "<think>", "日本", "é"])
some_tokens = st.lists(st.sampled_from(ADDED_IDS) | st.integers(0, WITH_ADDED.num_tokens - 1), max_size=12)


@given(prompt=some_tokens, tokens=some_tokens, ends_whole=st.booleans(), data=st.data())
def test_bytes_are_decoded_alone_unless_the_prompt_ends_inside_a_character(prompt, tokens, ends_whole, data):
    prompt += [WITH_ADDED.encode("a")[0]] * ends_whole
    sink = WITH_ADDED.text_stream(prompt)
    before = WITH_ADDED.decode(prompt)
    assert isinstance(sink.decoder, ByteDetokenizer) or before.endswith("\ufffd")
    text = ""
    for token in tokens:
        sink.push_token(token)
        if data.draw(st.booleans()):
            text += sink.take_text(final=False)
            # Only the bytes of a character that is not complete are withheld.
            assert not ends_whole or WITH_ADDED.decode(prompt + tokens).startswith(before + text)
    text += sink.take_text(final=True)
    assert not ends_whole or before + text == WITH_ADDED.decode(prompt + tokens)


@pytest.mark.parametrize("piece, text", [("©", "é"), ("x", "x")])
def test_an_output_may_complete_the_prompts_last_character_or_not(piece, text):
    sink = WITH_ADDED.text_stream([WITH_ADDED.backend.token_to_id("Ã")])
    sink.push_token(WITH_ADDED.backend.token_to_id(piece))
    assert sink.take_text(final=True) == text


def test_a_leading_space_survives_the_border_of_prompt_and_output():
    stream = Detokenizer(SENTENCEPIECE.decode, prompt=[PIECES.index("▁the")])
    stream.push_token(PIECES.index("▁a"))
    assert stream.take_text(final=False) == " a"


def test_a_token_that_is_not_shown_does_not_cost_the_next_its_space():
    shown = Backend.from_str(SENTENCEPIECE.to_str())
    shown.add_special_tokens(["<end>"])
    stream = Detokenizer(lambda tokens: shown.decode(tokens, skip_special_tokens=True), prompt=[PIECES.index("▁the")])
    stream.push_token(shown.token_to_id("<end>"))
    assert stream.take_text(final=False) == ""
    stream.push_token(PIECES.index("▁a"))
    assert stream.take_text(final=False) == " a"


def insert_marks(backend: Backend) -> Tokenizer:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(backend.to_str()), eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>", "</call>"]})
    return Tokenizer(tokenizer)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=some_text, data=st.data())
def test_special_tokens_that_a_parser_reads_are_shown_and_the_others_not(name, text, data):
    """Text and marks in any order: their texts in this order, but for one leading space of sentencepiece."""
    tokenizer = insert_marks(TOKENIZERS[name])
    shown = tokenizer.special_ids(["<call>", "</call>", "<end-of-nothing>"])
    assert [tokenizer.token_name(token) for token in shown] == ["<call>", "</call>"]
    parts = data.draw(st.lists(st.sampled_from(["<call>", "</call>", "<end>", text]), max_size=8))
    ids = {mark: tokenizer.hf.convert_tokens_to_ids(mark) for mark in ("<call>", "</call>", "<end>")}
    prompt = spelled(name, "a")
    tokens = [token for part in parts for token in ([ids[part]] if part in ids else spelled(name, part))]
    sink, found = tokenizer.text_stream(prompt, visible_ids=shown), ""
    for token in tokens:
        sink.push_token(token)
        if data.draw(st.booleans()):
            found += sink.take_text(final=False)
    found += sink.take_text(final=True)
    assert found == "".join(part for part in parts if part != "<end>")


def stopped(tokens, stop, min_tokens=0, takes=None, keep_stop=False, decode=BYTE_LEVEL.decode):
    """(text handed out, tokens pushed, the stop string that ended it); takes after each token by default."""
    stream = TextStream(Detokenizer(decode), stop, min_tokens, keep_stop)
    text, pushed = "", 0
    for i, token in enumerate(tokens):
        pushed += 1
        done = stream.push_token(token)
        if takes is None or takes[i] or done:
            text += stream.take_text(final=done)
        if done:
            return text, pushed, done
    return text + stream.take_text(final=True), pushed, None


@given(
    text=st.text(st.sampled_from("abé"), max_size=16),
    stop=st.text(st.sampled_from("abé"), min_size=1, max_size=4),
    keep_stop=st.booleans(),
    data=st.data(),
)
def test_text_ends_at_the_first_stop_string_wherever_tokens_part(text, stop, keep_stop, data):
    tokens = spelled("byte-level", text)
    takes = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    handed_out, pushed, found = stopped(tokens, [stop], takes=takes, keep_stop=keep_stop)
    assert handed_out == text.split(stop)[0] + (stop if keep_stop and stop in text else "")
    assert found == (stop if stop in text else None)
    if found:
        assert stop in BYTE_LEVEL.decode(tokens[:pushed])
        assert stop not in BYTE_LEVEL.decode(tokens[: pushed - 1])


@example(text="aab", stops=["ab", "aab"])
@given(
    text=st.text(st.sampled_from("ab!"), max_size=16),
    stops=st.lists(st.sampled_from(["ab", "b!", "!", "aab", "ba"]), max_size=3),
)
def test_of_several_stop_strings_the_one_that_begins_first_counts(text, stops):
    tokens = spelled("byte-level", text)
    ends = (BYTE_LEVEL.decode(tokens[:count]) for count in range(len(tokens) + 1))
    ended = next((so_far for so_far in ends if any(stop in so_far for stop in stops)), text)
    before = min((ended.split(stop)[0] for stop in stops), key=len, default=text)
    assert stopped(tokens, stops)[0] == before
    # Of those that begin there the shortest, which was there first.
    found = min((stop for stop in stops if ended[len(before) :].startswith(stop)), key=len, default="")
    kept, _, reason = stopped(tokens, stops, keep_stop=True)
    assert (kept, reason or "") == (before + found, found)


@given(
    text=st.text(st.sampled_from("aé日"), max_size=12),
    stop=st.text(st.sampled_from("aé日"), min_size=1, max_size=2),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    keep_stop=st.booleans(),
    cut=st.integers(0, 40),
)
def test_a_stop_string_is_found_at_its_token_though_that_begins_a_character(text, stop, sizes, keep_stop, cut):
    words = parted(text, sizes)[:cut]

    def decode(tokens):
        return b"".join(words[token] for token in tokens).decode(errors="replace")

    whole = decode(range(len(words)))
    first = next((count for count in range(len(words) + 1) if stop in decode(range(count))), None)
    handed_out, pushed, found = stopped(range(len(words)), [stop], keep_stop=keep_stop, decode=decode)
    assert handed_out == whole.split(stop)[0] + (stop if keep_stop and stop in whole else "")
    assert (pushed, found) == ((len(words), None) if first is None else (first, stop))


def test_before_min_tokens_a_stop_string_is_text_though_what_follows_it_is_not_whole():
    words = [b"a", "日".encode(), "日é".encode()[:4]]

    def decode(tokens):
        return b"".join(words[token] for token in tokens).decode(errors="replace")

    assert stopped(range(3), ["日"], min_tokens=3, decode=decode) == ("a日日\ufffd", 3, None)


def test_what_may_begin_a_stop_string_is_held_back_and_given_out_if_it_does_not():
    stream = TextStream(Detokenizer(BYTE_LEVEL.decode), ["b!"])
    stream.push_token(BYTE_LEVEL.token_to_id("a"))
    stream.push_token(BYTE_LEVEL.token_to_id("b"))
    assert stream.take_text(final=False) == "a"
    stream.push_token(BYTE_LEVEL.token_to_id("a"))
    assert stream.take_text(final=False) == "ba"


def test_before_min_tokens_a_stop_string_is_text():
    tokens = spelled("byte-level", "!a!b")
    assert stopped(tokens, ["!"], min_tokens=1) == ("!a", 3, "!")
    assert stopped(tokens, ["!"], min_tokens=3) == ("!a!b", 4, None)


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path, 10) is None


def test_a_broken_tokenizer_is_refused_in_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(EspalierError) as refused:
        load_tokenizer(tmp_path, 10)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("model_type", GENERIC_MODEL_TYPES)
@pytest.mark.parametrize(
    "declared", [PLAIN, {"tokenizer_class": "TokenizersBackend"}], ids=lambda d: d["tokenizer_class"]
)
def test_a_plain_tokenizer_is_of_the_class_that_transformers_chooses(model_type, declared, tmp_path):
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    assert tokenizer_class(tmp_path) is PreTrainedTokenizerFast is type(AutoTokenizer.from_pretrained(tmp_path))
    assert model_type not in TOKENIZER_MAPPING_NAMES


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"model_type": "qwen2"}, PLAIN),
        ({"model_type": "llama"}, {"tokenizer_class": "LlamaTokenizerFast"}),
        ({"model_type": "llama"}, []),
        ([], PLAIN),
    ],
    ids=str,
)
def test_transformers_chooses_the_class_of_all_others(config, declared, tmp_path):
    assert tokenizer_class(tmp_path) is AutoTokenizer
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tokenizer_class(tmp_path) is AutoTokenizer
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    assert tokenizer_class(tmp_path) is AutoTokenizer


def test_the_front_tokenizes_without_pytorch_and_says_nothing_of_a_long_prompt():
    code = f"""
import sys
from pathlib import Path
import espalier.server.run
from espalier.text import load_tokenizer
load_tokenizer(Path({str(BUNDLED_FILES / "target")!r}), 6144).encode("a b " * 2048)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
