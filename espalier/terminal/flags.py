"""Generates command-line flags from the fields of EngineConfig, SpeculationConfig and SamplingParams."""

import codecs
import json
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args, get_origin

from espalier.config import EngineConfig, SpeculationConfig, annotation_kinds, is_unresolved
from espalier.errors import NUMBER_PARSERS, EspalierError, whole_number, without_duplicate_keys
from espalier.request import PARAMS_WITH_FLAGS, ResolvedParams, SamplingParams

NOT_GIVEN = None
# The environment variable for the API key.  It is safer than a flag, which all users can see in the list of processes.
KEY_VARIABLE = "ESPALIER_API_KEY"
PLAIN_FLAG = "--no-speculation"


def add_engine_flags(parser: ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add the flags of EngineConfig (except `speculation` and the fields in `leave_out`) and of SpeculationConfig."""
    engine = parser.add_argument_group("engine (by default the engine chooses; `espalier doctor` shows what)")
    for f in fields(EngineConfig):
        if f.name not in ("speculation", *leave_out):
            _add_flag(engine, f)
    tree = parser.add_argument_group("speculation")
    for f in fields(SpeculationConfig):
        _add_flag(tree, f)


def add_plain_flag(parser: ArgumentParser) -> None:
    """Add the flag --no-speculation, which sets EngineConfig.speculation=None."""
    parser.add_argument(
        PLAIN_FLAG,
        action="store_true",
        dest="no_speculation",
        help="plain decoding for all requests; no draft is loaded",
    )


def add_json_flag(parser: ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")


def add_key_flag(parser: ArgumentParser | _ArgumentGroup, help_text: str, several: bool = False) -> None:
    """Add the flag --api-key, which api_key reads.  several: the flag may be repeated; read it with api_keys."""
    action = "append" if several else "store"
    parser.add_argument("--api-key", metavar="X", action=action, help=f"{help_text} (${KEY_VARIABLE})")


def api_keys(args: Namespace) -> tuple[str, ...]:
    """Returns the keys of the repeated flag, or the key in the environment.  Raises EspalierError as api_key does."""
    flag_values = args.api_key or [None]
    keys = [api_key(Namespace(api_key=value)) for value in flag_values]
    return tuple(key for key in dict.fromkeys(keys) if key is not None)


def api_key(args: Namespace) -> str | None:
    """Returns the key in the flag or in the environment; None if neither has a key.

    Raises EspalierError for an empty flag, because `--api-key "$KEY"` with KEY unset must not start a server without a
    key.  Raises EspalierError also for a key that no HTTP header can have, such as a key with a line end."""
    if args.api_key == "":
        raise EspalierError(f"--api-key is empty; give the key, set {KEY_VARIABLE}, or leave the flag out")
    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is not None and (key != key.strip() or not key.isprintable()):
        source = "--api-key" if args.api_key else KEY_VARIABLE
        raise EspalierError(
            f"{source} begins or ends with a space, or has an end of line or another character that no HTTP header "
            "has; correct it"
        )
    return key


def add_sampling_flags(parser: ArgumentParser, max_tokens: int) -> None:
    """Add the flags of SamplingParams.  max_tokens: the command's default, for the help text."""
    sampling = parser.add_argument_group("sampling (in brackets: defaults, unless generation_config.json has others)")
    defaults = {f.name: f.default for f in fields(ResolvedParams) if type(f.default) in (int, float)}
    for f in PARAMS_WITH_FLAGS:
        about = f.metadata["help"]
        if f.name == "max_tokens":
            about = f"{about.partition(';')[0]} ({max_tokens})"
        elif f.name in defaults:
            about = f"{about} ({defaults[f.name]:g})"
        _add_flag(sampling, f, about)


def engine_settings(args: Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of LLM for the flags that were given."""
    engine_fields = _given_fields(args, EngineConfig)
    tree_fields = _given_fields(args, SpeculationConfig)
    if getattr(args, "no_speculation", False):
        if tree_fields or "draft" in engine_fields:
            tree_flag = next(iter(tree_fields), "draft")
            raise EspalierError(f"{PLAIN_FLAG} is beside {flag_of(tree_flag)}, which is for a tree; leave one out")
        return {**engine_fields, "speculation": None}
    return {**engine_fields, "speculation": SpeculationConfig(**tree_fields)} if tree_fields else engine_fields


def given_flags(args: Namespace) -> list[str]:
    """Returns the field names of EngineConfig and SpeculationConfig whose flags were given."""
    return [*_given_fields(args, EngineConfig), *_given_fields(args, SpeculationConfig)]


def named_models(args: Namespace) -> dict[str, str]:
    """Returns the model and the draft that a command loads, by setting name.

    The flags are the command's own, or those of EngineConfig.  Returns {} if --url is given, because then the command
    uses a server that has loaded the model."""
    if getattr(args, "url", None):
        return {}
    given = {
        name: getattr(args, _destination(EngineConfig, name), None) or getattr(args, name, None)
        for name in ("model", "draft")
    }
    return {name: value for name, value in given.items() if value and not is_unresolved(value)}


def with_minimum(settings: Mapping[str, Any], defaults: Mapping[str, Any], **minimum: int) -> dict[str, Any]:
    """Returns the settings, with `defaults` in place of "auto" and of missing settings.  minimum: the smallest allowed
    value, by setting name.  Raises EspalierError for a smaller value."""
    for name, low in minimum.items():
        given: Any = settings.get(name)
        if not is_unresolved(given) and given < low:
            raise EspalierError(
                f"{flag_of(name)}={given} is too small for this measurement; use {low} or more, or leave it out"
            )
    return {
        **defaults,
        **{name: value for name, value in settings.items() if name not in defaults or not is_unresolved(value)},
    }


def sampling_params(args: Namespace) -> SamplingParams:
    """Returns the SamplingParams of the given flags.  Raises EspalierError."""
    given = _given_fields(args, SamplingParams)
    for text in given.get("stop", ()):
        require_readable(text, "--stop", sys.getfilesystemencoding())
    return SamplingParams(**given)


def require_readable(text: str, description: str, encoding: str) -> str:
    """Returns `text`.  Raises EspalierError for lone surrogates, which Python makes from undecodable bytes.
    description: names the text in the message.  encoding: the encoding from which Python decoded the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        is_utf8 = codecs.lookup(encoding).name == "utf-8"
        remedy = "write it in UTF-8" if is_utf8 else "set a UTF-8 locale, LANG=C.UTF-8"
        raise EspalierError(f"{description} is not valid {encoding}; {remedy}") from None
    return text


def whole_numbers(text: str) -> list[int]:
    """Parses a flag's value such as 1,8."""
    return [whole_number(part) for part in text.split(",")]


whole_numbers.__name__ = "list of whole numbers, such as 1,8"


def require_at_least_one(args: Namespace, *names: str) -> None:
    """Raises EspalierError if a flag of `names` has a number below 1, alone or in a list."""
    for name in names:
        value = getattr(args, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < 1:
            raise EspalierError(f"{flag_of(name)}={flag_text(value)} is not supported; use 1 or more")


def flag_text(value: Any) -> str:
    """Returns a flag's value in the form of the command line: N,N for a list."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def flag_of(name: str) -> str:
    """Returns the flag of a config field: --max-batch for max_batch."""
    return "--" + name.replace("_", "-")


def _given_fields(args: Namespace, config: type) -> dict[str, Any]:
    """Returns {field name: value} of the fields of the class `config` whose flags were given."""
    names = [f.name for f in fields(config)]
    return {
        name: value for name in names if (value := getattr(args, _destination(config, name), None)) is not NOT_GIVEN
    }


def _destination(config: type, name: str) -> str:
    """Returns argparse's `dest` of the flag of `config`'s field `name`.  Two classes may have fields of one name."""
    return f"{config.__name__}.{name}"


def _add_flag(group: _ArgumentGroup, field: Field, help_text: str | None = None) -> None:
    """Add the flag of a field.  help_text: the help text; None for the field's help."""
    kinds = annotation_kinds(field.type)
    config = next(c for c in (EngineConfig, SpeculationConfig, SamplingParams) if field in fields(c))
    help_text = help_text or field.metadata["help"]
    options: dict[str, Any] = {"dest": _destination(config, field.name), "default": NOT_GIVEN, "help": help_text}
    if bool in kinds:
        # The help text explains the values true and false of an API field.  Here they are flags: --NAME and --no-NAME.
        help_text = help_text.replace("true: ", f"{flag_of(field.name)}: ")
        options["help"] = help_text.replace("false: ", f"{flag_of('no_' + field.name)}: ")
        group.add_argument(flag_of(field.name), action=BooleanOptionalAction, **options)
    elif Sequence in kinds:
        options["help"] += "; may be repeated"
        group.add_argument(flag_of(field.name), action="append", type=_element_type(field.type), metavar="X", **options)
    else:
        group.add_argument(
            flag_of(field.name), type=_value_reader(field, kinds), metavar=_metavar(field, kinds), **options
        )


def _metavar(field: Field, types: set[Any]) -> str:
    """Returns what stands for the flag's value in the help text.  types: the types in the field's annotation."""
    if choices := field.metadata.get("choices"):
        return "{" + ",".join(choices) + "}"
    if {Mapping, str} <= types:
        return "FILE|JSON"
    return "JSON" if Mapping in types else "N" if int in types else "X"


def _value_reader(field: Field, types: set[Any]) -> Callable[[str], Any]:
    """Returns the function that parses a flag's value.  types: the types in the field's annotation."""
    if Mapping in types:
        read = _mapping_reader(whole_number if field.name == "logit_bias" else str)
        return _json_or_text(read) if str in types else read
    if int in types:
        return _number_reader(int, field.default == "auto")
    if float in types:
        return _number_reader(float, False)
    return str


def _number_reader(number_type: type, allows_auto: bool) -> Callable[[str], Any]:
    def parse_number(text: str) -> Any:
        return text if allows_auto and text == "auto" else NUMBER_PARSERS[number_type](text)

    parse_number.__name__ = "whole number" if number_type is int else "number"
    return parse_number


def _mapping_reader(read_key: Callable[[str], Any]) -> Callable[[str], dict[Any, Any]]:
    """Returns the function that parses a flag's JSON object.  read_key: parses a key of the object."""
    kind, example = ("a JSON object of token ids", "27") if read_key is whole_number else ("a JSON object", "name")

    def parse_mapping(text: str) -> dict[Any, Any]:
        try:
            value = json.loads(text, object_pairs_hook=without_duplicate_keys)
            return {read_key(name): item for name, item in value.items()}
        except EspalierError as error:
            raise ArgumentTypeError(str(error)) from None
        except (ValueError, AttributeError):
            raise ArgumentTypeError(f"{text!r} is not {kind}, such as '{{\"{example}\": 1}}'") from None

    return parse_mapping


def _json_or_text(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a function that parses a JSON object with `read`, and returns other text (a file name, "auto") as is."""
    return lambda text: read(text) if text.lstrip().startswith("{") else text


def _element_type(annotation: Any) -> type:
    """Returns the type of the items of a list field."""
    for part in get_args(annotation):
        if get_origin(part) is Sequence:
            return get_args(part)[0]
    return str
