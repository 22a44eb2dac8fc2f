"""A bound on text refuses nothing that fits, whatever a tokenizer's steps take away, and something where it can."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from espalier.inputs import TextLimit
from tests.pairwise import fewer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LONG = "a" * 24
BYTE_PIECES = ["▁", "a", "b", LONG, *(f"<0x{byte:02X}>" for byte in range(256))]


MERGES = [*(("a" * size, "a" * size) for size in (1, 2, 4, 8)), ("a" * 16, "a" * 8)]


def byte_level(pieces=BYTES, merges=MERGES, **steps) -> Backend:
    vocab = dict.fromkeys([*pieces, *("".join(pair) for pair in merges)])
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(vocab)}, merges=merges))
    backend.pre_tokenizer = steps.get("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    if "normalizer" in steps:
        backend.normalizer = steps["normalizer"]
    backend.add_tokens(steps.get("added", []))
    return backend


def sentencepiece(*more, **options) -> Backend:
    vocab = {piece: i for i, piece in enumerate(BYTE_PIECES)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], ignore_merges=True, byte_fallback=True, **options))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), *more])
    return backend


def swallowing(**options) -> AddedToken:
    return AddedToken("<end>", lstrip=True, rstrip=True, **options)


BOUNDED = {
    "byte-level": byte_level(),
    "composed": byte_level(merges=[], normalizer=normalizers.NFC()),
    "split and digits": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
                pre_tokenizers.Digits(),
                pre_tokenizers.ByteLevel(use_regex=False),
            ]
        )
    ),
    "swallows spaces": byte_level(merges=[], added=[swallowing(normalized=False)]),
    "a long added token": byte_level(added=[AddedToken("<" + "-" * 40 + ">")]),
    "sentencepiece": sentencepiece(),
}
UNBOUNDED = {
    "compatibility": byte_level(normalizer=normalizers.NFKC()),
    "strips": byte_level(normalizer=normalizers.Strip()),
    "joins spaces": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "shortens": byte_level(normalizer=normalizers.Replace("  ", " ")),
    "swallows hidden": byte_level(normalizer=normalizers.NFC(), added=[swallowing(normalized=True)]),
    "removes": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    ),
    "bytes are missing": byte_level([piece for piece in BYTES if piece != "b"]),
    "unknown ones join": Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
}
# What some step takes away, joins or swallows; and what is one long token.
texts = st.lists(
    st.sampled_from(
        [" ", "a", "b", "é", "e\u0301", "\u1100\u1161\u11a8", "\u1f80", "α\u0313\u0301\u0345", "<end>", LONG]
    )
    | st.text(max_size=2)
    | st.integers(1, 60).flatmap(lambda count: st.sampled_from([" " * count, "b" * count, "<" + "-" * 40 + ">"])),
    max_size=12,
).map("".join)


# Without a bound nothing exceeds it: one stands for all, as test_where_text_may_vanish_there_is_no_bound has each.
@pytest.mark.parametrize("name", fewer([*BOUNDED, *UNBOUNDED], lambda name: name in BOUNDED or name == "strips"))
@settings(max_examples=settings.default.max_examples // 2)
@given(text=texts)
@example(text="α\u0313\u0301\u0345" * 9)
@example(text="<end>" + " " * 60)
def test_nothing_that_fits_exceeds_the_bound(name, text):
    backend = (BOUNDED | UNBOUNDED)[name]
    assert not TextLimit(backend).exceeds(text, len(backend.encode(text).ids))


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_far_too_long_exceeds_it(name):
    bound = TextLimit(BOUNDED[name])
    assert bound.exceeds("b " * 40_000, 100)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_text_may_vanish_there_is_no_bound(name):
    assert TextLimit(UNBOUNDED[name]).max_chars_per_token is None


def test_a_tokenizer_of_another_kind_has_no_bound():
    assert not TextLimit(None).exceeds("b" * 10**6, 0)
