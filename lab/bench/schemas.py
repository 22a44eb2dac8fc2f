"""Random JSON schemas whose values are all of bounded size: for tests, and for the bench of grammars."""

import random
from typing import Any

MAX_DEPTH = 3
ENUM_WORDS = "red green blue small large north south open closed draft final high low".split()
PROPERTY_NAMES = "name kind size color count price unit state first last owner city code level".split()


def random_schema(seed: int) -> dict[str, Any]:
    """An object with enums, integers, numbers, short strings, arrays, nested objects, unions and references."""
    rng = random.Random(seed)
    definitions = {f"d{i}": _value_schema(rng, MAX_DEPTH - 1, ()) for i in range(rng.randrange(3))}
    schema = _object_schema(rng, 0, tuple(definitions))
    return schema | ({"$defs": definitions} if definitions else {})


def _object_schema(rng: random.Random, depth: int, definitions: tuple[str, ...]) -> dict[str, Any]:
    names = rng.sample(PROPERTY_NAMES, rng.randint(1, 4))
    properties = {name: _value_schema(rng, depth + 1, definitions) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value_schema(rng: random.Random, depth: int, definitions: tuple[str, ...]) -> dict[str, Any]:
    simple = [_enum_schema, _integer_schema, _number_schema, _string_schema, _boolean_schema]
    if depth < MAX_DEPTH:
        nested = [_object_schema, _array_schema, _union_schema, _reference_schema]
        if rng.random() < 0.4:
            return rng.choice(nested)(rng, depth, definitions)
    return rng.choice(simple)(rng)


def _enum_schema(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(ENUM_WORDS, rng.randint(1, 4))}


def _integer_schema(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-20, 200)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _number_schema(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-5, 5)
    return {"type": "number", "minimum": least, "maximum": least + rng.randint(1, 50)}


def _string_schema(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"type": "string", "pattern": rng.choice(("^[A-Z]{2}-[0-9]{3}$", "^(yes|no|later)$", "^[a-z]{1,8}$"))}
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 16)}


def _boolean_schema(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", ["boolean", "null"]))}


def _array_schema(rng: random.Random, depth: int, definitions: tuple[str, ...]) -> dict[str, Any]:
    least = rng.randint(0, 1)
    items = _value_schema(rng, depth + 1, definitions)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(1, 3)}


def _union_schema(rng: random.Random, depth: int, definitions: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_value_schema(rng, depth + 1, definitions) for _ in range(2)]}


def _reference_schema(rng: random.Random, depth: int, definitions: tuple[str, ...]) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{rng.choice(definitions)}"} if definitions else _enum_schema(rng)
