"""Formats are exact: what comes is a date of the calendar, an address, a length that the schema allows."""

import base64
import datetime
import ipaddress
import json
import random
import re
import uuid
from email import headerregistry
from itertools import product
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

from espalier.grammar import Grammar
from espalier.grammar.formats import ANNOTATION_FORMATS, FORMATS, INTEGER_BOUNDS, node_of_format
from espalier.grammar.regex_tree import Chars, Repeat, Seq
from tests.grammar.vocabulary import TooLong, accepts, compiled, random_text

pydantic = pytest.importorskip("pydantic")


def form_of(**rules):
    return compiled(Grammar.of_json_schema({"type": "string", **rules}))


def holds(read, text) -> bool:
    try:
        return bool(read(text))
    except ValueError:
        return False


def has_format(name: str, text: str) -> bool:
    return accepts(form_of(format=name), json.dumps(text))


def test_dates_are_those_of_the_calendar():
    form = form_of(format="date")
    for year, month, day in product((0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999), range(14), range(33)):
        text = f"{year:04}-{month:02}-{day:02}"
        assert accepts(form, f'"{text}"') == holds(datetime.date.fromisoformat, text), text


@pytest.mark.parametrize("seed", range(10))
def test_addresses_are_those_that_python_reads(seed):
    rng = random.Random(seed)
    for _ in range(60):
        parts = [rng.choice(("0", "1", "01", "255", "256", "9", "00", "")) for _ in range(rng.choice((3, 4, 4, 4, 5)))]
        four = ".".join(parts)
        assert has_format("ipv4", four) == holds(ipaddress.IPv4Address, four), four
        groups = [rng.choice(("0", "ab", "F00d", "12345")) for _ in range(rng.randint(0, 8))]
        groups = [group for group in groups if group != "12345" or rng.random() < 0.1]
        six = rng.choice((":", "::")).join((":".join(groups[:3]), ":".join(groups[3:])))
        six += rng.choice(("", "", "::", ":1.2.3.4", ":01.2.3.4"))
        assert has_format("ipv6", six) == holds(ipaddress.IPv6Address, six), six


@pytest.mark.parametrize(
    ("name", "text", "is_right"),
    [
        ("time", "23:59:59Z", True),
        ("time", "23:59:60Z", False),
        ("time", "12:00:60+01:00", False),
        ("time", "24:00:00Z", False),
        ("time", "12:00:00", False),
        ("time", "12:00:00.5-23:59", True),
        ("time", "12:00:00+24:00", False),
        ("time", "12:00:00+01:60", False),
        ("date-time", "2024-02-29T00:00:00Z", True),
        ("date-time", "2023-02-29T00:00:00Z", False),
        ("date-time", "2024-02-29 00:00:00Z", False),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", True),
        ("uuid", "123e4567e89b12d3a456426614174000", False),
        ("uuid4", "123e4567-e89b-12d3-a456-426614174000", False),
        ("uuid4", "123e4567-e89b-42d3-a456-426614174000", True),
        ("hostname", "a-b.example", True),
        ("hostname", "-a.example", False),
        ("hostname", "a-.example", False),
        ("hostname", "a..b", False),
        ("hostname", "a_b", False),
        ("email", "a.b+c@d-e.org", True),
        ("email", ".a@d.org", False),
        ("email", "a..b@d.org", False),
        ("email", "a@d", False),
        ("email", "a@d.1", False),
        ("email", "a@d-.org", False),
        ("email", "a.@d.org", False),
        ("email", "a b@d.org", False),
        ("duration", "P1Y2M3DT4H5M6S", True),
        ("duration", "P3W", True),
        ("duration", "P", False),
        ("duration", "PT", False),
        ("duration", "P1D2Y", False),
        ("byte", "aGk=", True),
        ("byte", "aGk", False),
        ("byte", "aGl=", False),
        ("ipv4interface", "1.2.3.4/33", False),
        ("uri", "https://user@[::1]:80/a%20b?c#d", True),
        ("uri", "mailto:a@b.c", True),
        ("uri", "/a", False),
        ("uri", "http://a b", False),
        ("uri", "http://a/%zz", False),
        ("uri-reference", "../a?b#c", True),
        ("uri-reference", "a b", False),
        ("uri-template", "/a{?b,c*}", True),
        ("uri-template", "/a{b", False),
        ("json-pointer", "/a~1b/0", True),
        ("json-pointer", "a", False),
        ("json-pointer", "/~2", False),
        ("relative-json-pointer", "1/a", True),
        ("relative-json-pointer", "01/a", False),
    ],
)
def test_a_format_has_the_texts_of_its_standard(name, text, is_right):
    assert has_format(name, text) == is_right


READERS = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: datetime.time.fromisoformat(text).tzinfo is not None,
    "date-time": lambda text: datetime.datetime.fromisoformat(text).tzinfo is not None,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "ipv4interface": ipaddress.IPv4Interface,
    "ipv6interface": ipaddress.IPv6Interface,
    "ipvanyaddress": ipaddress.ip_address,
    "base64": lambda text: base64.b64encode(base64.b64decode(text, validate=True)).decode() == text,
    "base64url": lambda text: base64.urlsafe_b64encode(base64.urlsafe_b64decode(text)).decode() == text,
    "hostname": lambda text: all(re.fullmatch("(?!-)[a-zA-Z0-9-]+(?<!-)", label) for label in text.split(".")),
    "email": lambda text: headerregistry.Address(addr_spec=text).domain.rpartition(".")[2].isalpha(),
    "uri": lambda text: urlsplit(text).scheme,
    "json-pointer": lambda text: not re.search("~(?![01])", text),
    **{name: lambda text: uuid.UUID(text) for name in FORMATS if name.startswith("uuid")},
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_random_walks_of_a_format_are_read_elsewhere(name):
    ended = 0
    for seed in range(12):
        try:
            text = json.loads(random_text(form_of(format=name), random.Random(seed), often=b'"'))
        except TooLong:
            continue
        ended += 1
        assert holds(READERS.get(name, lambda text: True), text) or name.startswith("json-p"), text
        assert has_format(name, text)
    assert ended > 3


BOUNDED = {
    "hostname": lambda text: len(text) <= 253 and all(1 <= len(label) <= 63 for label in text.split(".")),
    "email": lambda text: len(text.split("@")[0]) <= 64 and BOUNDED["hostname"](text.split("@")[1]),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_beside_a_length_host_names_keep_to_their_standard(name):
    form = form_of(format=name, maxLength=250)
    texts = [json.loads(random_text(form, random.Random(seed), often=b"abcdefgh")) for seed in range(12)]
    assert all(map(BOUNDED[name], texts)) and all(has_format(name, text) for text in texts)


def wide_states(node) -> int:
    """Places of a text that any word of the vocabulary may begin at: each costs a walk over all tokens."""
    if isinstance(node, Repeat):
        return wide_states(node.repeated) * max(node.minimum, node.maximum or 1)
    if isinstance(node, Chars):
        return sum(last - first + 1 for first, last in node.ranges) >= 52
    return sum(map(wide_states, node.parts if isinstance(node, Seq) else node.branches))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_compiles_about_as_fast_as_a_plain_pattern(name):
    assert wide_states(node_of_format(name)) <= 20


def test_a_time_keeps_to_its_zone():
    assert READERS["time"]("12:00:00Z") and not holds(READERS["time"], "12:00:00")


LENGTHS = [
    ({"pattern": "^[a-z]+$"}, 3, 5),
    ({"pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"}, 1, 20),
    ({"pattern": "^[^@]+@[^@]+$"}, 0, 9),
    ({"pattern": "^(ab)*(é|\\d{2,})?$"}, 4, 7),
    ({"pattern": "^(abc)*$"}, 4, 12),
    ({"pattern": "a"}, 0, 4),
    ({"pattern": "^(a|bb|ccc){2,}$"}, 5, 9),
    ({"pattern": "^([a-f]|b{7})$"}, 0, 3),
    ({"pattern": "^a?(bc?)*$"}, 3, None),
    ({"format": "uri"}, 1, 2083),
    ({"format": "email"}, 10, 20),
    ({"format": "hostname"}, 0, 12),
    ({"format": "path"}, 1, 4),
    ({}, 2, 3),
]


@pytest.mark.parametrize(("rules", "least", "most"), LENGTHS, ids=[json.dumps(each[0]) for each in LENGTHS])
def test_a_length_holds_beside_a_pattern_or_format(rules, least, most):
    lengths = {"minLength": least} | ({} if most is None else {"maxLength": most})
    form, free, found = form_of(**rules, **lengths), form_of(**rules), set()
    for seed in range(30):
        try:
            text = random_text(form, random.Random(seed), often=b'"a@.')
        except TooLong:
            continue
        value = json.loads(text)
        assert least <= len(value) <= (most or 10**6) and accepts(free, text), value
        found.add(value)
    assert len(found) > 1


def test_a_single_part_that_varies_loses_nothing():
    """Lengths are exact where no other part shares them."""
    form = form_of(pattern="^a[b-d]*e$", minLength=3, maxLength=5)
    for count in range(6):
        assert accepts(form, f'"a{"c" * count}e"') == (3 <= count + 2 <= 5)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in sorted(ANNOTATION_FORMATS) for name in sorted(ANNOTATION_FORMATS[kind])]
)
def test_a_format_that_only_annotates_changes_nothing(kind, name):
    text = {"string": '"a\\"b"', "integer": "12", "number": "1.5"}[kind]
    for schema in ({"type": kind, "format": name}, {"type": ["null", kind], "format": name}):
        assert accepts(compiled(Grammar.of_json_schema(schema)), text)


@pytest.mark.parametrize("name", sorted(INTEGER_BOUNDS))
def test_an_integer_of_a_format_has_its_bits(name):
    least, most = INTEGER_BOUNDS[name]
    form = compiled(Grammar.of_json_schema({"type": "integer", "format": name}))
    for value in (least, most, 0):
        assert accepts(form, str(value))
    assert not accepts(form, str(most + 1)) and not accepts(form, str(least - 1))
    wide = compiled(Grammar.of_json_schema({"type": "integer", "format": "int8", "minimum": -200, "maximum": 200}))
    assert [accepts(wide, text) for text in ("-129", "-128", "127", "128")] == [False, True, True, False]
    narrow = compiled(Grammar.of_json_schema({"type": "integer", "format": name, "minimum": 1, "exclusiveMaximum": 3}))
    assert [accepts(narrow, str(value)) for value in range(5)] == [False, True, True, False, False]


def test_fields_of_pydantic_are_usable():
    """What pydantic writes for common types, and reads back."""

    class Thing(pydantic.BaseModel):
        link: pydantic.HttpUrl
        place: pydantic.FilePath | None
        folder: Path
        data: bytes
        secret: pydantic.SecretStr
        when: pydantic.AwareDatetime
        day: datetime.date
        key: uuid.UUID
        address: ipaddress.IPv4Address
        slug: str = pydantic.Field(pattern="^[a-z]+(-[a-z]+)*$", max_length=9)
        kinds: set[Literal["a", "b", "c"]]
        flags: set[bool]

    form = compiled(Grammar.of_json_schema(Thing.model_json_schema()))
    value = {
        "link": "https://example.org/a?b=c",
        "place": None,
        "folder": "/tmp",
        "data": "ab",
        "secret": "x",
        "when": "2024-02-29T12:00:00Z",
        "day": "2024-02-29",
        "key": "123e4567-e89b-12d3-a456-426614174000",
        "address": "1.2.3.4",
        "slug": "ab-cd",
    }
    text = json.dumps(value)[:-1] + ', "kinds": ["b","a"], "flags": [true]}'
    assert accepts(form, text)
    assert Thing.model_validate_json(text).kinds == {"a", "b"}
    assert not accepts(form, text.replace('["b","a"]', '["b","b"]'))
