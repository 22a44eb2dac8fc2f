"""Loads transformers' tokenizer from a model's directory.  Refuses a tokenizer that is code, or that may hang.

Nothing here depends on the architecture, so a tokenizer loads even if transformers does not know the model's type.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Set
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, one_line, shown
from espalier.model_files import is_gguf, read_gguf, read_json, require_files

# For these model types, transformers takes the tokenizer class that tokenizer_config.json names.
GENERIC_MODEL_TYPES = ("llama", "gpt_oss")
# These classes add nothing to tokenizer.json.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# From this number of repetitions on, a repeated part of a pattern counts as repeated without limit.
MIN_UNSAFE_REPEATS = 10
# max_replacement_growth ignores replacement texts up to this length.  No published tokenizer has a longer one.
MAX_SHORT_REPLACEMENT = 4
MAX_REPLACEMENT_GROWTH = 1000
PIPELINE_STEPS = ("normalizer", "pre_tokenizer", "decoder")
# The JSON fields of a tokenizer step that hold a text which the step writes into its output.
REPLACEMENT_FIELDS = ("content", "prepend")
log = logging.getLogger("espalier")
QUANTIFIER_PATTERN = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\})(?P<suffix>[?+]?)")


def load_hugging_face_tokenizer(path: Path) -> Any:
    """Returns transformers' tokenizer for a directory or a GGUF file.  Code in the directory never runs.

    Raises EspalierError for files that cannot be loaded, that name code, or with a pattern that may be exponential."""
    if is_gguf(path):
        return _load_from_gguf(path)
    require_files(path)
    _refuse_code(path)
    tokenizer_type = tokenizer_class(path)
    extra_arguments = {"config": _config_of_type(path)} if tokenizer_type.__name__ == "AutoTokenizer" else {}
    return _load_checked(
        path, partial(tokenizer_type.from_pretrained, str(path), trust_remote_code=False, **extra_arguments)
    )


def _load_from_gguf(path: Path) -> Any:
    """Returns the tokenizer that a GGUF file describes, with its chat template.

    The file names the rule by which its tokenizer splits text.  If transformers does not know the name, it splits the
    text like GPT-2, and a warning is logged."""
    from transformers import PreTrainedTokenizerFast

    metadata = read_gguf(path).metadata
    split_name = metadata.get("tokenizer.ggml.pre")
    if metadata["tokenizer.ggml.model"] == "gpt2" and str(split_name) not in _known_split_names():
        log.warning(
            "%s: transformers does not know the tokenizer's splits %s and takes GPT-2's, so some texts, as of numbers, "
            "may have other tokens than the model was trained with; use the Hugging Face directory, or token ids",
            path,
            shown(split_name),
        )
    load = partial(PreTrainedTokenizerFast.from_pretrained, str(path.parent), gguf_file=path.name)
    return _load_checked(path, load)


def _known_split_names() -> Set[str]:
    """Returns GGUF's names of the pre-tokenizers that transformers knows, and its names of GPT-2's pre-tokenizer."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        raise EspalierError(
            "tokenizers of GGUF files need transformers 5.24 or newer; pip install -U transformers, or use token ids"
        ) from None
    return {str(None), "default", "gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}


def _load_checked(path: Path, load: Callable[..., Any]) -> Any:
    """Calls `load` to load the tokenizer of `path`, and checks it.  Raises EspalierError if it cannot be used."""
    try:
        hf = load(local_files_only=True)
    except Exception as error:  # transformers raises many types
        raise EspalierError(
            f"the tokenizer in {path} cannot be loaded ({one_line(error)}); "
            "restore its files, or remove them and use token ids as prompts"
        ) from None
    backend = getattr(hf, "backend_tokenizer", None)
    if max_replacement_growth(backend) > MAX_REPLACEMENT_GROWTH:
        raise EspalierError(
            f"the tokenizer in {path} makes more than {MAX_REPLACEMENT_GROWTH} characters of one; "
            "use another model, or token ids as prompts without its files"
        )
    if pattern := find_exponential_pattern(backend):
        raise EspalierError(
            f"the tokenizer in {path} reads text by the pattern {shown(pattern)}, whose time may grow exponentially "
            "with the text; use another model, or token ids as prompts without its files"
        )
    return hf


def _refuse_code(path: Path) -> None:
    """Raises EspalierError if the tokenizer is code of the checkpoint."""
    file = path / "tokenizer_config.json"
    auto_map = read_json(file).get("auto_map") if file.exists() else None
    if auto_map:
        raise EspalierError(
            f"{file} names code of the checkpoint (auto_map = {shown(auto_map)}), which Espalier never runs; remove "
            "auto_map if tokenizer.json holds the same tokenizer, or use token ids without the tokenizer's files"
        )


def _config_of_type(path: Path) -> Any:
    """Returns a transformers config with only the fields that decide the tokenizer's class: model_type and
    tokenizer_class.  All other fields are left out, because transformers may refuse a value that Espalier accepts."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    config_fields = _read_fields(path / "config.json")
    model_type = config_fields.get("model_type")
    is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    config = AutoConfig.for_model(model_type) if is_known else PreTrainedConfig()
    config.model_type = model_type if isinstance(model_type, str) else ""
    config.tokenizer_class = config_fields.get("tokenizer_class")
    return config


def tokenizer_class(path: Path) -> Any:
    """Returns the class of transformers that loads the tokenizer in a directory; for any other path, AutoTokenizer.

    If the files name no class, PreTrainedTokenizerFast loads tokenizer.json as it is.  AutoTokenizer would choose a
    class by the model's type, and some of these classes replace what tokenizer.json defines.  AutoTokenizer also takes
    two seconds to import.  So if it would choose PreTrainedTokenizerFast, only PreTrainedTokenizerFast is imported."""
    config = _read_fields(path / "config.json")
    class_name = _read_fields(path / "tokenizer_config.json").get("tokenizer_class") or config.get("tokenizer_class")
    is_self_contained = class_name is None and (path / "tokenizer.json").is_file()
    if is_self_contained or (class_name in GENERIC_CLASSES and config.get("model_type") in GENERIC_MODEL_TYPES):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _read_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of a JSON file; empty if it cannot be read."""
    try:
        return read_json(path)
    except EspalierError:
        return {}


def find_exponential_pattern(backend: Any) -> str | None:
    """Returns the first pattern of a tokenizer (of the tokenizers library) that may take exponential time, or None.

    The library limits the time of each match, but it tries a match at each character of a text."""
    patterns = (part.get("Regex") for name in PIPELINE_STEPS for part in _step_objects(getattr(backend, name, None)))
    return next((pattern for pattern in patterns if isinstance(pattern, str) and may_be_exponential(pattern)), None)


def max_replacement_growth(backend: Any) -> int:
    """Returns the most characters that one character can become if each step replaces all text of the step before."""
    parts = (part for name in PIPELINE_STEPS for part in _step_objects(getattr(backend, name, None)))
    sizes = [len(str(part[name])) for part in parts for name in REPLACEMENT_FIELDS if name in part]
    return prod(size for size in sizes if size > MAX_SHORT_REPLACEMENT)


def _step_objects(step: Any) -> Iterator[dict[str, Any]]:
    """Yields all JSON objects in the serialized form of a tokenizer's step."""
    try:
        remaining = [json.loads(step.__getstate__())]
    except Exception:  # none, or a custom step in Python, which has no serialized state
        return
    while remaining:
        if isinstance(value := remaining.pop(), dict):
            yield value
            remaining += value.values()
        elif isinstance(value, list):
            remaining += value


def may_be_exponential(pattern: str) -> bool:
    """Whether a pattern repeats a part that contains a repetition or alternatives, such as (a+)+ or (a|aa)*.

    Such a pattern can match one text in exponentially many ways.  Possessive and atomic repetitions try only one way.
    The syntax is Oniguruma's.  Published tokenizers have no such pattern."""
    # For each open group: whether it is atomic, and whether it contains a repetition or alternatives.
    groups, index = [[False, False]], 0
    while index < len(pattern):
        index, kind, is_atomic = _read_atom(pattern, index)
        if kind == "(":
            groups.append([is_atomic, False])
            continue
        if kind == "|":
            groups[-1][1] = True
            continue
        varies = False
        if kind == ")" and len(groups) > 1:
            is_group_atomic, varies_inside = groups.pop()
            varies = varies_inside and not is_group_atomic
        index, max_repeats, is_possessive = _read_quantifiers(pattern, index)
        if max_repeats >= MIN_UNSAFE_REPEATS and not is_possessive:
            if varies:
                return True
            varies = True
        groups[-1][1] |= varies
    return False


def _read_atom(pattern: str, index: int) -> tuple[int, str, bool]:
    """Reads the atom, bracket or | at `index` of the pattern.  Returns (its end, its first character, whether it opens
    an atomic group)."""
    first = pattern[index]
    if first == "\\":
        end = index + 2
        if pattern[index + 1 : index + 2] in tuple("pPxuogk") and pattern[end : end + 1] == "{":
            end = pattern.find("}", end) + 1 or len(pattern)
        return end, first, False
    if first == "[":
        return _end_of_class(pattern, index), first, False
    if first == "(" and pattern[index + 1 : index + 2] == "?":
        return index + 2, first, pattern[index + 2 : index + 3] == ">"
    return index + 1, first, False


def _end_of_class(pattern: str, index: int) -> int:
    """Returns the end of the character class whose [ is at `index`.  It may contain other classes.  A ] in the first
    place is a character."""
    depth, index = 1, index + 1
    if pattern[index : index + 1] == "^":
        index += 1
    if pattern[index : index + 1] == "]":
        index += 1
    while index < len(pattern) and depth:
        depth += {"[": 1, "]": -1}.get(pattern[index], 0)
        index += 2 if pattern[index] == "\\" else 1
    return index


def _read_quantifiers(pattern: str, index: int) -> tuple[int, float, bool]:
    """Returns (end, most repetitions, whether possessive) of the quantifiers at `index`.  None: (index, 1, False)."""
    max_repeats, is_possessive = 1.0, False
    while quantifier := QUANTIFIER_PATTERN.match(pattern, index):
        low, comma, high = quantifier["low"], quantifier["comma"], quantifier["high"]
        repeats = 1.0 if quantifier["sign"] == "?" else float(high or "inf") if comma or not low else float(low)
        max_repeats = max(max_repeats, max_repeats * repeats)
        is_possessive |= quantifier["suffix"] == "+" and quantifier["sign"] is not None
        index = quantifier.end()
    return index, max_repeats, is_possessive
