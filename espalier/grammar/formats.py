"""The "format" values of JSON Schema strings, each as a regular expression.

The expressions are exact: dates follow the calendar, and IPv4 addresses have no leading zeros.  Some expressions allow
less than their standard, so that every parser accepts the text: no leap second, no quoted mail address.  Host names,
mail addresses and URIs have no length limit, except in the variants for strings with a maxLength (_SHORT_FORMATS).
"""

from collections.abc import Mapping
from functools import lru_cache

from espalier.grammar.regex import format_node
from espalier.grammar.regex_tree import Node

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
# Multiples of 4 from 04 to 96: the last two digits of a leap year, or the first two of a leap year that ends in 00.
_LEAP_TWO_DIGITS = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP_TWO_DIGITS}|{_LEAP_TWO_DIGITS}00)"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:{_DAY}|29|3[01]|30)|(?:0[469]|11)-(?:{_DAY}|29|30)|02-{_DAY})"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+\-]{_HOUR_AND_MINUTE})"
_DIGITS = "[0-9]{1,9}"
_DURATION_TIME = f"T(?:{_DIGITS}H(?:{_DIGITS}M(?:{_DIGITS}S)?)?|{_DIGITS}M(?:{_DIGITS}S)?|{_DIGITS}S)"
_DURATION_DATE = f"(?:{_DIGITS}Y(?:{_DIGITS}M(?:{_DIGITS}D)?)?|{_DIGITS}M(?:{_DIGITS}D)?|{_DIGITS}D)"
_IPV4_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_IPV4_BYTE}(?:\.{_IPV4_BYTE}){{3}}"
_IPV6_GROUP = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Returns an IPv6 address's regex: eight groups, or fewer with one "::".  The last two may be an IPv4 address."""
    tails = [f"{_IPV6_GROUP}(?::{_IPV6_GROUP}){{{count - 1}}}" for count in range(1, 8)]
    dotted = [f"(?:{_IPV6_GROUP}:){{{count}}}{_IPV4}" for count in range(6)]
    alternatives = [f"{_IPV6_GROUP}(?::{_IPV6_GROUP}){{7}}", f"(?:{_IPV6_GROUP}:){{6}}{_IPV4}"]
    for before in range(8):
        head = f"{_IPV6_GROUP}(?::{_IPV6_GROUP}){{{before - 1}}}" if before else ""
        endings = [*tails[: 7 - before], *dotted[: max(0, 6 - before)]]
        alternatives.append(f"{head}::" + (f"(?:{'|'.join(endings)})?" if endings else ""))
    return f"(?:{'|'.join(alternatives)})"


def _uuid(version: str = "[0-9a-fA-F]", variant: str = "[0-9a-fA-F]") -> str:
    """Returns a UUID's regex.  version, variant: the regexes of the digits for the version and the variant."""
    digit = "[0-9a-fA-F]"
    return f"{digit}{{8}}-{digit}{{4}}-{version}{digit}{{3}}-{variant}{digit}{{3}}-{digit}{{12}}"


def _base64(last_characters: str) -> str:
    """Returns the regex of Base64 text.  last_characters: the last two of the 64 characters, such as "+/"."""
    char = f"[A-Za-z0-9{last_characters}]"
    return f"(?:{char}{{4}})*(?:{char}[AQgw]==|{char}{{2}}[AEIMQUYcgkosw048]=)?"


# The lengths of these parts are not bounded, because each character of a bounded part adds a state to the grammar, and
# each state takes some 10 ms to compile.
_HOST_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9])*"
_HOST = rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*"
_MAIL_CHAR = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]"
_MAIL = rf"{_MAIL_CHAR}(?:\.?{_MAIL_CHAR})*@(?:{_HOST_LABEL}\.)+[A-Za-z]{{2,}}"

_PERCENT_HEX = "%[0-9A-Fa-f]{2}"
_UNRESERVED = r"A-Za-z0-9._~\-"
_DELIMITERS = "!$&'()*+,;="
_SEGMENT_CHAR = f"(?:[{_UNRESERVED}{_DELIMITERS}:@]|{_PERCENT_HEX})"
_AUTHORITY = (
    rf"(?:(?:[{_UNRESERVED}{_DELIMITERS}:]|{_PERCENT_HEX})*@)?"
    rf"(?:\[(?:{_IPV6_GROUP}(?::{_IPV6_GROUP}){{7}}|::(?:{_IPV6_GROUP}(?::{_IPV6_GROUP}){{0,5}})?)\]|(?:[{_UNRESERVED}{_DELIMITERS}]|{_PERCENT_HEX})*)(?::[0-9]*)?"
)
_PATH = f"(?:/{_SEGMENT_CHAR}*)*"
_QUERY_AND_FRAGMENT = rf"(?:\?(?:{_SEGMENT_CHAR}|[/?])*)?(?:#(?:{_SEGMENT_CHAR}|[/?])*)?"
_PATH_FROM_ROOT = f"(?://{_AUTHORITY}{_PATH}|/(?:{_SEGMENT_CHAR}+{_PATH})?)"
_URI = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{_PATH_FROM_ROOT}|{_SEGMENT_CHAR}+{_PATH})?{_QUERY_AND_FRAGMENT}"
_NO_COLON_CHAR = f"(?:[{_UNRESERVED}{_DELIMITERS}@]|{_PERCENT_HEX})"
_URI_REFERENCE = rf"(?:{_URI}|(?:{_PATH_FROM_ROOT}|{_NO_COLON_CHAR}+{_PATH})?{_QUERY_AND_FRAGMENT})"
_TEMPLATE_VARIABLE = (
    rf"(?:[A-Za-z0-9_]|{_PERCENT_HEX})(?:\.?(?:[A-Za-z0-9_]|{_PERCENT_HEX}))*(?::[1-9][0-9]{{0,3}}|\*)?"
)
_TEMPLATE_CHAR = f"(?:[{_UNRESERVED}{_DELIMITERS}:@/?#\\[\\]]|{_PERCENT_HEX})"
_URI_TEMPLATE = rf"(?:{_TEMPLATE_CHAR}|\{{[+#./;?&]?{_TEMPLATE_VARIABLE}(?:,{_TEMPLATE_VARIABLE})*\}})*"
_SHORT_URI = (
    rf"[A-Za-z][A-Za-z0-9+.\-]{{0,9}}://[{_UNRESERVED}]{{1,40}}(?::[0-9]{{1,5}})?"
    rf"(?:/(?:{_SEGMENT_CHAR}|/){{0,80}})?(?:\?(?:{_SEGMENT_CHAR}|[/?]){{0,40}})?"
)
_SHORT_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,11}"
_SHORT_ATOM = f"{_MAIL_CHAR}{{1,24}}"
# By format: a regex with bounded lengths, for strings with a maxLength.
_SHORT_FORMATS: Mapping[str, str] = {
    "uri": _SHORT_URI,
    "uri-reference": _SHORT_URI,
    "hostname": rf"{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{0,3}}",
    "email": rf"{_SHORT_ATOM}(?:\.{_SHORT_ATOM})?@(?:{_SHORT_LABEL}\.){{1,2}}[A-Za-z]{{2,10}}",
}
_JSON_POINTER = "(?:/(?:[^/~]|~[01])*)*"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DIGITS}W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})",
    "email": _MAIL,
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "ipvanyaddress": f"(?:{_IPV4}|{_ipv6()})",
    "ipv4interface": f"{_IPV4}/(?:3[0-2]|[12]?[0-9])",
    "ipv6interface": f"{_ipv6()}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])",
    "base64": _base64("+/"),
    "byte": _base64("+/"),
    "base64url": _base64("_\\-"),
    "uuid": _uuid(),
    **{f"uuid{version}": _uuid(str(version), "[89abAB]") for version in (1, 3, 4, 5, 6, 7, 8)},
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "uri-template": _URI_TEMPLATE,
    "json-pointer": _JSON_POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_JSON_POINTER})",
}
# Formats that do not limit a value, but only describe its use.
ANNOTATION_FORMATS: Mapping[str, frozenset[str]] = {
    "string": frozenset("binary password path file-path directory-path".split()),
    "integer": frozenset(("time-delta",)),
    "number": frozenset("float double decimal time-delta".split()),
}
# (lowest, highest) value of each integer format.
INTEGER_BOUNDS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
}


@lru_cache
def node_of_format(name: str, is_short: bool = False) -> Node:
    """Returns the parsed regex of the format `name` in FORMATS.  is_short: whether to prefer _SHORT_FORMATS."""
    return format_node(_SHORT_FORMATS.get(name, FORMATS[name]) if is_short else FORMATS[name])
