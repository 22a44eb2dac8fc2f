"""Held-out texts, in tokens: those that the tokenizer makes of the whole text, whatever crosses the border."""

from hypothesis import example, given
from hypothesis import strategies as st

from espalier.bench.drive import heldout_texts, split_tokens
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.text import load_tokenizer
from tests.test_text import BYTE_LEVEL

some_text = st.text(st.sampled_from("abé "), min_size=1, max_size=8)


@example(prompt="a", reference="b")
@given(prompt=some_text, reference=some_text)
def test_the_two_parts_are_the_tokens_of_the_text(prompt: str, reference: str) -> None:
    """ "ab" is one token, and "a" then "b" are two."""

    def encode(text: str) -> list[int]:
        return BYTE_LEVEL.encode(text).ids

    first, second = split_tokens(encode, prompt, reference)
    assert first + second == encode(prompt + reference)
    assert len(encode(prompt + reference)) == 1 or (first and second)
    # The first part is in the prompt, and lacks no more of it than a token can cross the border with.
    text = BYTE_LEVEL.decode(first)
    assert len(first) == 1 or (prompt.startswith(text) and len(prompt) - len(text) <= 2)


def test_all_held_out_texts() -> None:
    tokenizer = load_tokenizer(BUNDLED_FILES / "target", 6144)
    assert tokenizer is not None
    for entry in heldout_texts():
        first, second = split_tokens(tokenizer.encode, entry["prompt"], entry["reference"])
        assert first + second == tokenizer.encode(entry["prompt"] + entry["reference"]) and len(first) > 8 < len(second)
