"""Regular expressions mean what they mean in Python, or are refused by name, with the position."""

import json
import random
import re
from contextlib import suppress
from itertools import product

import jsonschema
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.grammar import Grammar, regex_tree
from espalier.grammar.regex import REFUSED_ESCAPES, pattern_node
from espalier.grammar.regex_tree import MAX_CHARS_IN_BLOCKS, MAX_UNROLLED, Chars, regex_of, repeat
from espalier.grammar.tag import check_grammar
from tests.grammar.vocabulary import TooLong, accepts, compiled, random_text
from tests.pairwise import fewer

LETTERS = "ab1_ -.é€😀\u2028"
CLASSES = (r"\d", r"\w", r"\s", r"\D", r"\W", r"\S")
ESCAPED = (r"\.", r"\-", r"\/", r"\x41", r"\x61b", r"\u00e9", r"\U0001f600", r"\^", r"\]", r"\é")
INSIDE = (
    "a",
    "b-y",
    r"\d",
    r"\W",
    "é",
    "€-😀",
    r"\x30-\x39f",
    r"\]",
    "^",
    "-",
    ".",
    " ",
    r"\S",
    r"\n",
    "_",
    "\\[",
    "$",
)
TIMES = ("*", "+", "?", "{2}", "{1,3}", "{0,2}", "{1,}", "*?", "{2,3}?")
BREAKS = (r"\n", '"', r"\\", r"\t")


def random_regex(rng: random.Random, depth: int = 0, breaks: tuple[str, ...] = BREAKS) -> str:
    """breaks: parts that JSON escapes."""
    kinds = ["letter"] * 4 + ["class", "set", "set", "escaped", "dot", "break"] + ["group"] * (5 - 2 * depth)
    made = ""
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(kinds)
        if kind == "letter":
            part = rng.choice("ab1é€😀")
        elif kind == "set":
            part = f"[{rng.choice(('', '', '^'))}{'a' * rng.randint(0, 1)}{''.join(rng.sample(INSIDE, 2))}]"
            part = part.replace("[^^", "[^").replace("[^]", "[^a]")
        elif kind == "group":
            branches = (random_regex(rng, depth + 1, breaks) for _ in range(rng.randint(1, 2)))
            part = rng.choice(("(", "(?:")) + "|".join(branches) + ")"
        else:
            part = rng.choice({"class": CLASSES, "escaped": ESCAPED, "dot": (".",), "break": breaks or ("b",)}[kind])
        made += part + (rng.choice(TIMES) if rng.random() < 0.4 else "")
    return made


def random_texts(rng: random.Random, letters: str, form: xgrammar.CompiledGrammar, regex: str) -> list[str]:
    """Some of the letters, and some that the grammar allows, or nearly."""
    made = ["".join(rng.choices(letters, k=rng.randint(0, 4))) for _ in range(12)]
    for text in ended_texts(form, (regex + " a1").encode(), 3, 8):
        made += [text, text[:-1], text + rng.choice(letters)]
    return made


def ended_texts(form: xgrammar.CompiledGrammar, often: bytes, walks: int, most: int) -> list[str]:
    """Of random walks, those that ended soon: Python's re takes exponential time."""
    found = []
    for walk in range(walks):
        with suppress(TooLong):
            found.append(random_text(form, random.Random(walk), most=most, often=often).decode())
    return found


def compare_with_python(seeds: range) -> int:
    """How many texts of both kinds were compared."""
    matched = refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        regex = random_regex(rng)
        if rng.random() < 0.2:
            regex = f"^{regex}$|{random_regex(rng)}"
        try:
            form = compiled(Grammar("regex", regex))
        except EspalierError as error:
            assert "allows no text" in str(error) or "range" in str(error), (regex, str(error))
            continue
        for text in random_texts(rng, LETTERS + 'Aby\n\r"\\', form, regex):
            found = accepts(form, text)
            # \d, \w, \s, and what they leave out, are what all dialects agree on.
            assert not found or all(re.fullmatch(regex, text, flags) for flags in (0, re.ASCII)), (regex, text)
            if text.isascii() and not re.search(r"[\x1c-\x1f]", text):
                assert found == bool(re.fullmatch(regex, text, re.ASCII)), (regex, text)
            elif not any(each in regex for each in CLASSES):
                assert found == bool(re.fullmatch(regex, text)), (regex, text)
            matched, refused = matched + found, refused + (not found)
    return min(matched, refused)


def test_a_regex_means_what_it_means_in_python():
    assert compare_with_python(range(160)) > 500


def small_regex(rng: random.Random, depth: int = 0) -> str:
    """Of two letters, with repetitions within each other."""
    parts = []
    for _ in range(rng.randint(1, 2)):
        is_group = depth < 2 and rng.random() < 0.6
        branches = "|".join(small_regex(rng, depth + 1) for _ in range(rng.randint(1, 2))) if is_group else ""
        parts.append((f"({branches})" if is_group else rng.choice("ab")) + rng.choice(("", *TIMES[:7], "{2,}")))
    return "".join(parts)


def small_choice(rng: random.Random) -> str:
    """Of three branches, which often begin alike."""
    return "|".join(small_regex(rng, depth=1) for _ in range(3))


def often_regex(rng: random.Random) -> str:
    """With a part of which xgrammar makes a rule of its own, because it may come often."""
    branches = "|".join(rng.sample(["a", "a(bb)?", "ba", "aa(bb)?", "bab"], 3))
    return f"({branches}){{{rng.randint(0, 2)},{rng.randint(129, 200)}}}{rng.choice(('', 'b'))}"


def language_up_to(form: xgrammar.CompiledGrammar, letters: str, most: int) -> set[str]:
    """The grammar's texts of these letters, of at most this length."""
    matcher, found = xgrammar.GrammarMatcher(form), set()

    def walk(text: str) -> None:
        if matcher.is_completed():
            found.add(text)
        for letter in letters if len(text) < most else "":
            if matcher.accept_string(letter):
                walk(text + letter)
                matcher.rollback(1)

    walk("")
    return found


# What was found wrong once: a first state within a loop, and texts that end in several states.
FOUND = [
    "(b(ac)*a)*d*",
    "a|a{1,2}|ab",
    "(b{0,2}a{2,})*|b|(a+|b{1,3}){0,2}",
    "b?|(b{2,})*(a*a{2}|b{1,}){1,}|(b?|a){0,2}",
    "(a|a(bb)?|ba){0,150}",
]


@pytest.mark.parametrize(("make", "count"), [(small_regex, 60), (small_choice, 200), (often_regex, 15)])
def test_all_short_texts_of_two_letters_are_those_of_python(make, count):
    """Where a part may end and also go on, and where branches begin alike, an automaton is easily wrong."""
    check_short_texts([make(random.Random(seed)) for seed in range(count)])


def test_all_short_texts_of_what_was_found_wrong_are_those_of_python():
    check_short_texts(FOUND, "abcd")


@given(st.integers(0, MAX_CHARS_IN_BLOCKS), st.one_of(st.none(), st.integers(0, MAX_CHARS_IN_BLOCKS)))
def test_no_character_has_a_count_that_makes_masks_slow(least, most):
    least, most = (least, None) if most is None else sorted((least, most))
    text = regex_of(repeat(Chars(((97, 97),)), least, most))
    assert max(map(int, re.findall(r"\d+", text))) <= MAX_UNROLLED
    last = 3 * MAX_CHARS_IN_BLOCKS if most is None else most
    lengths = {least - 1, least, (least + last) // 2, last, last + 1} - {-1}
    assert {size for size in lengths if re.fullmatch(text, "a" * size)} == {
        size for size in lengths if least <= size and (most is None or size <= most)
    }


def test_blocks_of_a_character_mean_what_the_character_means(monkeypatch):
    monkeypatch.setattr(regex_tree, "MAX_UNROLLED", 3)
    monkeypatch.setattr(regex_tree, "BLOCK_CHARS", 2)
    regexes = [blocks_regex(random.Random(seed)) for seed in range(75)]
    texts = ["".join(text) for size in range(9) for text in product("ab", repeat=size)]
    for regex in regexes:
        form = compiled.__wrapped__(Grammar("regex", regex))
        assert language_up_to(form, "ab", 8) == {text for text in texts if re.fullmatch(regex, text)}, regex


def blocks_regex(rng: random.Random) -> str:
    parts = [f"{rng.choice(('a', 'b', '[ab]'))}{{{rng.randint(0, 5)},{rng.choice(('', *'5678'))}}}" for _ in range(2)]
    return rng.choice(("{0}{1}", "a?{0}", "({0}|b{1})", "({0}b)*a", "{0}a", "(a{0}|b)?{1}")).format(*parts)


@pytest.mark.full
def test_all_short_texts_of_many_choices_are_those_of_python():
    check_short_texts([small_choice(random.Random(seed)) for seed in range(1000, 21_000)])


def check_short_texts(regexes: list[str], letters: str = "ab") -> None:
    texts = ["".join(text) for size in range(6) for text in product(letters, repeat=size)]
    for regex in regexes:
        form, right = compiled(Grammar("regex", regex)), re.compile(regex)
        assert language_up_to(form, letters, 5) == {text for text in texts if right.fullmatch(text)}, regex


@pytest.mark.full
def test_many_regexes_mean_what_they_mean_in_python():
    assert compare_with_python(range(1000, 5000)) > 10_000


def compare_pattern(seed: int) -> int:
    """How many outputs of the pattern were compared with jsonschema."""
    rng = random.Random(seed)
    ends = rng.choice(("^", "")), rng.choice(("$", ""))
    pattern = f"{ends[0]}{random_regex(rng)}{ends[1]}"
    schema = {"type": "string", "pattern": pattern, **({"maxLength": 6} if rng.random() < 0.3 else {})}
    try:
        form = compiled(Grammar.of_json_schema(schema))
    except EspalierError as error:
        assert "allows no text" in str(error) or "range" in str(error), (pattern, str(error))
        return 0
    texts = ended_texts(form, (pattern + ' a1"').encode(), 4, 40)
    for text in texts:
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), (pattern, text)
    if "maxLength" in schema:
        return len(texts)
    plain = "ab1_ -.Aby"
    for text in ("".join(rng.choices(plain, k=rng.randint(0, 4))) for _ in range(12)):
        assert accepts(form, f'"{text}"') == bool(re.search(pattern, text, re.ASCII)), (pattern, text)
    return len(texts)


@pytest.mark.parametrize(
    "seeds", fewer([range(start, start + 50) for start in range(0, 200, 50)], lambda seeds: seeds.start < 50), ids=str
)
def test_a_pattern_is_searched_for_and_the_string_is_json(seeds):
    assert sum(map(compare_pattern, seeds)) > 50


@pytest.mark.full
def test_many_patterns_are_searched_for():
    assert sum(map(compare_pattern, range(1000, 4000))) > 4000


def test_both_readers_of_xgrammar_read_a_pattern_alike():
    """A pattern of too many states is rewritten by another reader than the usual one."""
    for seed in range(20):
        rng = random.Random(seed)
        try:
            regex = random_regex(rng, breaks=())
            text = regex_of(pattern_node(f"^{regex}$"))
        except EspalierError:
            continue
        usual = compiled(Grammar("ebnf", f'root ::= Regex("{text}")'.replace("\\", "\\\\")))
        other = xgrammar.Grammar.from_regex(text)
        for found in random_texts(rng, LETTERS + "^]-[", usual, regex):
            assert accepts(usual, found) == xgrammar.testing._is_grammar_accept_string(other, found), (text, found)


REFUSED = [
    (r"a\Ab", r"'\\A', the start of the text at position 1", "leave it out, or write ^"),
    (r"\Z", r"'\\Z', the end", "write $"),
    (r"\p{L}+", r"'\\p{L}', a Unicode property at position 0", "[A-Za-z]"),
    (r"[\P{Lu}]", r"'\\P{Lu}'", "class"),
    (r"\x{41}", r"'\\x' without 2 hex digits", r"\x41"),
    (r"\u{41}", r"'\\u' without 4 hex digits", r"\u0041"),
    (r"\U00110000", "no character", "0010ffff"),
    (r"(a)\1", r"'\\1', a back reference at position 3", "again"),
    (r"[\b]", r"'\\b' in a class", r"\x08"),
    (r"\y", r"'\\y', an unknown escape", r"\\"),
    ("a\\", "unknown escape", r"\\"),
    (r"\ud83d", "surrogate", "8 hex digits"),
    ("(?=a)", "lookaround", "part"),
    ("(?<!a)b", "lookaround", "part"),
    ("(?i)a", "a flag", "both cases"),
    ("(?i:a)", "a flag", "both cases"),
    ("(?>a)", "atomic", "(?:"),
    ("(?#a)", "comment", "leave"),
    ("(?P<n>a)(?P=n)", "back reference", "again"),
    ("(?P<n>a)(?P<n>b)", "name", "without a name"),
    ("a++", "'++', a second or possessive repetition at position 1", "a group"),
    ("a{1,3}+", "'}+'", "a group"),
    ("a**", "'**'", "a group"),
    ("*a", "'*' with nothing to repeat at position 0", r"\*"),
    ("a{,3}", "'{' without counts", "{0,3}"),
    ("a{3,1}", "above its most", "swap"),
    ("a{200000}", "more than", "lower"),
    ("((a{1000}){1000})", "repetitions of more than", "lower"),
    (r"\W" * 1000, "classes of more than", "repeat"),
    ("^*a", "repetition of '^'", "repeat"),
    ("a^b", "'^' in the middle at position 1", r"\^"),
    ("a$b", "'$' in the middle at position 1", r"\$"),
    ("[]a]", "'[]'", r"\]"),
    ("[^]", "'[^]'", r"\]"),
    ("[a[:alpha:]]", "'[:alpha:]', a class in a class at position 2", "a-z"),
    ("[a&&b]", "'&&'", r"\&"),
    ("[b-a]", "'b-a'", "swap"),
    (r"[a-\d]", "class at its end", r"\-"),
    ("[a", "'[' that is not closed at position 0", r"\["),
    ("(a", "'(' that is not closed", r"\("),
    ("a)", "')' without '('", r"\)"),
    ("(" * 80 + ")" * 80, "groups within", "flatten"),
    (r"[^\s\S]", "allows no text", "write"),
]


@pytest.mark.parametrize(("regex", "named", "instead"), REFUSED, ids=[regex[:20] for regex, _, _ in REFUSED])
def test_what_is_not_in_the_dialect_is_refused_by_name(regex, named, instead):
    tag = json.dumps({"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": regex}]}})
    for grammar in (
        Grammar("regex", regex),
        Grammar("structural_tag", tag),
        Grammar.of_json_schema({"type": "string", "pattern": regex}),
    ):
        with pytest.raises(EspalierError) as caught:
            check_grammar(grammar)
        assert named.replace("\\\\", "\\") in str(caught.value).replace("\\\\", "\\")
        assert instead.replace("\\\\", "\\") in str(caught.value).replace("\\\\", "\\")


def test_every_letter_behind_a_backslash_is_read_as_python_does_or_refused():
    for letter in map(chr, range(33, 127)):
        try:
            form = compiled(Grammar("regex", "\\" + letter))
        except EspalierError as error:
            assert f"\\{letter}" in str(error).replace("\\\\", "\\")
            assert letter in REFUSED_ESCAPES or letter in "xuUyYijlmqTVCFIJLMO123456789", letter
            continue
        for code in range(1, 127):
            if not 0x1C <= code <= 0x1F:
                assert accepts(form, chr(code)) == bool(re.fullmatch("\\" + letter, chr(code), re.ASCII)), letter


@pytest.mark.parametrize("regex", ["^ab$|^12$", "(^ab|^12)$", "(?P<n>ab|12)", "^(^(ab|12)$)$", "a{1}b{1,1}|1(?:2)"])
def test_anchors_and_groups_at_the_ends_say_nothing(regex):
    form = compiled(Grammar("regex", regex))
    assert {random_text(form, random.Random(seed)) for seed in range(20)} == {b"ab", b"12"}
