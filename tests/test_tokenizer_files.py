"""A tokenizer loads whatever model it belongs to; code of a checkpoint never runs, and no pattern runs without end."""

import builtins
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from espalier.errors import EspalierError
from espalier.models.families import FAMILIES
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.text import Tokenizer, load_tokenizer
from espalier.tokenizer_files import find_exponential_pattern, may_be_exponential
from espalier.train.data import read_prompts
from tests.pairwise import in_turn_params
from tests.test_text import BYTE_LEVEL

RAN = "RAN"
CODE = f"open({RAN!r}, 'w').write('')\nclass T: pass\n"
# As checkpoints spell it.
AUTO_MAPS: list[Any] = [{"AutoTokenizer": ["own.T", "own.T"]}, {"AutoTokenizer": [None, "own.T"]}, ["own.T", None]]


def directory(path: Path, config: dict[str, Any], declared: dict[str, Any] | None = None) -> Path:
    BYTE_LEVEL.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(config))
    if declared is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(declared))
    return path


@pytest.fixture
def nobody_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    def asked(*_: object) -> str:
        raise AssertionError("a question")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize("tokenizer_class", ["T", "PreTrainedTokenizerFast", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("auto_map", AUTO_MAPS, ids=str)
def test_a_tokenizer_that_is_code_is_refused_by_name(
    auto_map: Any, tokenizer_class: str | None, nobody_asks: Path
) -> None:
    for model_type in ("llama", "qwen2", "own"):
        path = directory(nobody_asks, {"model_type": model_type}, {"auto_map": auto_map})
        if tokenizer_class is not None:
            (path / "tokenizer_config.json").write_text(
                json.dumps({"auto_map": auto_map, "tokenizer_class": tokenizer_class})
            )
        with pytest.raises(EspalierError, match=r"tokenizer_config.json names code .*never runs; remove auto_map"):
            load_tokenizer(path, 300)
    assert not (nobody_asks / RAN).exists()


def test_code_that_is_named_elsewhere_is_not_asked_for(nobody_asks: Path) -> None:
    """The config of a published DeepSeek-V3 names code; Espalier has its own."""
    own = {"AutoConfig": "own.T", "AutoModelForCausalLM": "own.T", "AutoTokenizer": ["own.T", "own.T"]}
    for model_type in ("llama", "deepseek_v3", "own"):
        path = directory(nobody_asks, {"model_type": model_type, "auto_map": own}, {})
        for name in ("generation_config", "processor_config", "preprocessor_config"):
            (path / f"{name}.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "own.T"}}))
        tokenizer = load_tokenizer(path, 300)
        assert tokenizer is not None and tokenizer.encode("ab") == BYTE_LEVEL.encode("ab").ids
    assert not (nobody_asks / RAN).exists()


SCALINGS: list[Any] = [
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "own"},
    "own",
]


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    in_turn_params(
        [*(family.model_type for family in FAMILIES.values()), "own_type", "", None, 3],
        [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast"],
    ),
)
def test_a_tokenizer_does_not_depend_on_what_transformers_knows_of_the_model(
    model_type: object, tokenizer_class: str | None, tmp_path: Path
) -> None:
    declared = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    for scaling in SCALINGS:
        config = {"model_type": model_type, "rope_scaling": scaling, "hidden_size": 10**12, "num_hidden_layers": 10**9}
        tokenizer = load_tokenizer(directory(tmp_path, config, declared), 300)
        assert tokenizer is not None and tokenizer.encode("abéb") == BYTE_LEVEL.encode("abéb").ids


def ids_of(tokenizer: Any, text: str) -> list[int] | str:
    """The ids, or the error: Gemma's class needs tokens that this file lacks."""
    try:
        return list(tokenizer(text).input_ids)
    except Exception as error:
        return str(error)


CLASSES = ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2TokenizerFast")


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen2", "own_type"])
@pytest.mark.parametrize("file", ["tokenizer_config", "config"])
@pytest.mark.parametrize("tokenizer_class", CLASSES)
def test_the_class_that_is_named_loads_it(tokenizer_class: str, file: str, model_type: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedConfig

    path = directory(tmp_path, {"model_type": model_type}, {})
    fields = json.loads((path / f"{file}.json").read_text())
    (path / f"{file}.json").write_text(json.dumps({**fields, "tokenizer_class": tokenizer_class}))
    config = PreTrainedConfig()
    config.model_type, config.tokenizer_class = model_type, tokenizer_class
    expected = AutoTokenizer.from_pretrained(str(path), config=config)
    tokenizer = load_tokenizer(path, 300)
    assert tokenizer is not None
    for text in ("ab", " a b\n", "abéb", "<bos>a"):
        assert ids_of(tokenizer.hf, text) == ids_of(expected, text)


def test_the_trainer_loads_it_alike(nobody_asks: Path) -> None:
    config = json.loads((BUNDLED_FILES / "target" / "config.json").read_text())
    path = directory(nobody_asks, config, {"auto_map": AUTO_MAPS[0]})
    (path / "data.jsonl").write_text('{"text": "ab"}\n')
    with pytest.raises(EspalierError, match=r"names code .*; give \"token_ids\" in --data"):
        read_prompts(path / "data.jsonl", path)


# Of GPT-2, Llama 3, GPT-4o, BLOOM, DeepSeek-V3 and Kimi, and possessive and atomic ones.
END = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)",
    " ?[^(\\s|[.,!?…。，、।۔،])]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+",
    r"[\p{Han}]+|[\p{Lu}\p{Lm}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+(?i:'s|'t)?",
    *(" {2,}", r"\p{N}{1,3}(?=(?:\p{N}{3})*)", "(?>a+)+b", "(a+)++b", "(?:ab)+", r"(\(\+)+", "[(a+)+]+"),
]
ENDLESS = [
    *("(a+)+$", "(a|aa)+$", "(a*)*b", "(.*)*x", r"(\w+\s?)+$", "((a)+)*b", "(?:a{1,30}){1,30}b", "(?:[^x]+)*y"),
    *("(?<n>a+)+b", "(?i:(x+x+)+)y", "(a{2,})*b", r"(?:\(+)*b", "([]a]+)*b", r"(\x{61}+)+b", "(?=(a+)+b)", "(a+){12}b"),
]


@pytest.mark.parametrize(("patterns", "refused"), [(END, False), (ENDLESS, True)])
def test_patterns_that_may_not_end_are_told_from_those_that_do(patterns: list[str], refused: bool) -> None:
    assert [pattern for pattern in patterns if may_be_exponential(pattern) != refused] == []


@pytest.mark.parametrize("where", ["normalizer", "pre_tokenizer", "decoder"])
def test_a_tokenizer_with_such_a_pattern_is_refused(where: str, tmp_path: Path) -> None:
    state = json.loads(BYTE_LEVEL.to_str())
    step: dict[str, Any] = {"type": "Replace", "pattern": {"Regex": ENDLESS[0]}, "content": "b"}
    if where == "pre_tokenizer":
        step = {"type": "Split", "pattern": {"Regex": ENDLESS[0]}, "behavior": "Isolated", "invert": False}
    kinds = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    state[where] = {"type": "Sequence", kinds[where]: [step]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(EspalierError, match=r"reads text by the pattern '\(a\+\)\+\$'"):
        load_tokenizer(tmp_path, 300)


@pytest.mark.parametrize("where", ["normalizer", "decoder"])
@pytest.mark.parametrize("sizes", [[10**6], [30] * 4, [3] * 20], ids=str)
def test_a_tokenizer_whose_replacements_grow_is_refused(sizes: list[int], where: str, tmp_path: Path) -> None:
    state, names = json.loads(BYTE_LEVEL.to_str()), {"normalizer": "normalizers", "decoder": "decoders"}
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "b" * size} for size in sizes]
    state[where] = {"type": "Sequence", names[where]: steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    if max(sizes) < 5:
        load_tokenizer(tmp_path, 300)
        return
    with pytest.raises(EspalierError, match="more than 1000 characters of one; use another model"):
        load_tokenizer(tmp_path, 300)


def splitting_by(pattern: str) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    backend = Backend.from_str(BYTE_LEVEL.to_str())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, BYTE_LEVEL.pre_tokenizer])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_match_that_takes_too_long_is_an_error_of_the_text() -> None:
    """The library ends it with an exception that is no Exception."""
    tokenizer = splitting_by("a+a+a+a+a+a+a+[bc]")
    assert find_exponential_pattern(tokenizer.backend) is None
    with pytest.raises(EspalierError, match=r"the text cannot be tokenized .*retry-limit"):
        tokenizer.encode("a" * 99 + "!")


part = st.sampled_from(["a", "b", "ab", "[ab]", "a?", "b*", "a+"])
some_pattern = st.recursive(
    part, lambda inner: st.builds("(?:{}{}){}".format, inner, inner, st.sampled_from(["", "?", "*", "+", "{2}"]))
)


@given(pattern=some_pattern)
def test_what_is_not_refused_ends_soon(pattern: str) -> None:
    if not may_be_exponential(pattern):
        backend = splitting_by(f"{pattern}c").backend
        begun = time.thread_time()
        backend.pre_tokenizer.pre_tokenize_str("ab" * 12 + "a" * 24 + "b" * 24)
        assert time.thread_time() - begun < 1
