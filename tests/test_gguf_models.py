"""A GGUF file is taken wherever a model's path is: its values, its tokenizer, its template, its speculation."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from espalier import LLM, SamplingParams
from espalier.chat import run_steps
from espalier.cli.main import main
from espalier.errors import EspalierError
from espalier.inputs import InputProcessor, ModelInfo
from espalier.kernels.layers.blocks import BLOCK_TYPES, BlockMatrix, dequantise_blocks
from espalier.models import read_config
from espalier.models.loading import read_raw_config
from espalier.models.weight_files import GGUFTensors
from espalier.startup.checkpoints import find_draft, find_target
from espalier.text import load_tokenizer
from espalier.train.configs import read_target
from tests.builders import make_eagle3, make_target
from tests.gguf import convert, write_gguf

FIXTURE = Path(__file__).parent / "fixtures" / "gguf" / "model.gguf"
SETTINGS: dict[str, Any] = {"device": "cpu", "max_context": 128, "max_batch": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def test_values_have_the_bits_of_the_library() -> None:
    """Of each matrix that the library wrote, as it reads it: the largest difference is 0."""
    tensors, types = GGUFTensors(FIXTURE), read_raw_config(FIXTURE)["quantization_config"]["types"]
    expected = json.loads(FIXTURE.with_name("expected.json").read_text())
    names = {tensors.architecture.hf_name(stored): stored for stored in expected}
    assert {*types.values()} == {*BLOCK_TYPES} and tensors.keys() - names.keys() == {"lm_head.weight"}
    for name, stored in names.items():
        values = tensors[name]
        if (kind := types.get(name.removesuffix(".weight"))) is not None:
            values = dequantise_blocks(BlockMatrix(BLOCK_TYPES[kind], values.flatten(1)))
        content = values.float().contiguous().numpy().tobytes()
        assert hashlib.sha256(content).hexdigest() == expected[stored], name


def test_a_file_without_a_tokenizer_takes_the_one_beside_it(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, {})
    assert load_tokenizer(file, 268) is None
    of_fixture = load_tokenizer(FIXTURE, 268)
    assert of_fixture is not None
    of_fixture.hf.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(file, 268)
    assert tokenizer is not None and tokenizer.encode("hello world") == of_fixture.encode("hello world")
    with pytest.raises(EspalierError, match=r"m\.gguf has none; put its tokenizer.json beside it, or give token ids"):
        InputProcessor(ModelInfo("a/m.gguf", 9, 9), None).require_tokenizer("a text prompt")


def test_the_tokenizer_and_the_template_are_the_files() -> None:
    config = read_config(FIXTURE)
    tokenizer = load_tokenizer(FIXTURE, config.vocab_size)
    assert tokenizer is not None and tokenizer.num_tokens == config.vocab_size == 268
    vocab = {token: number for token, number in tokenizer.hf.get_vocab().items() if not token.startswith("<|")}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("l", "d")]
    made = Tokenizer(models.BPE(vocab, [*merges, ("Ġwor", "ld")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for text in ("hello world", "a hello\n\nworld, é", "shell words"):
        ids = tokenizer.encode(text)
        assert ids == made.encode(text).ids and tokenizer.decode(ids) == text
    end, user, assistant = (vocab_size for vocab_size in range(265, 268))
    assert config.eos_token_ids == (end, user)
    conversation = [{"role": "user", "content": "hello world"}]
    assert run_steps(tokenizer.template.encode_steps(conversation, {}), tokenizer.template.render) == [
        user,
        *made.encode("hello world").ids,
        assistant,
    ]


def test_splits_that_transformers_does_not_know_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    content = FIXTURE.read_bytes()
    assert content.count(b"llama-bpe") == 1
    path.write_bytes(content.replace(b"llama-bpe", b"other-bpe"))
    with caplog.at_level(logging.WARNING):
        load_tokenizer(FIXTURE, 268)
        assert not caplog.records
        load_tokenizer(path, 268)
    assert "splits 'other-bpe' and takes GPT-2's" in caplog.text


def test_a_file_is_served_with_and_without_speculation() -> None:
    found = []
    for speculation in ("auto", None):
        llm = LLM(FIXTURE, speculation=speculation, **SETTINGS)
        found.append([out.token_ids for out in llm.generate(["hello world hello world", "a b a b a b a"], GREEDY)])
        llm.close()
    assert found[0] == found[1] and all(len(tokens) >= 1 for tokens in found[0])


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_draft_reads_a_target_in_blocks(tmp_path: Path, is_directory: bool) -> None:
    """An EAGLE-3 head without an embedding and a head of its own: it takes the target's, whose head is in blocks."""
    target = make_target(tmp_path / "target", layers=4)
    draft = make_eagle3(tmp_path / "draft", target)
    (tmp_path / "gguf").mkdir()
    convert(target, tmp_path / "gguf" / "model.gguf", lambda name: "Q8_0")
    model = tmp_path / "gguf" if is_directory else tmp_path / "gguf" / "model.gguf"
    prompts = [[1, 2, 3, 4, 5], [7, 7, 3]]
    found = []
    for settings in ({"draft": draft}, {"speculation": None}):
        llm = LLM(model, **settings, **SETTINGS)
        assert (llm.config.algorithm == "eagle3") == ("draft" in settings)
        found.append([out.token_ids for out in llm.generate(prompts, GREEDY)])
        llm.close()
    assert found[0] == found[1]


def test_what_takes_no_gguf_names_it(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    for says, call in {
        "in which drafts are not read": lambda: find_draft(FIXTURE),
        "does not exist; give the path of a GGUF file": lambda: find_target("owner/model.gguf"),
        "is a directory, not a regular file": lambda: find_target(tmp_path / "folder.gguf"),
        "from which nothing is trained": lambda: read_target(FIXTURE),
    }.items():
        with pytest.raises(EspalierError, match=says):
            call()


def test_commands_take_a_file_or_name_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--model", str(FIXTURE), "--device", "cpu"]) == 0
    assert str(FIXTURE) in capsys.readouterr().out.replace("\n", "")
    assert main(["quantize", str(FIXTURE), "--to", "fp8", "--out", str(tmp_path / "copy"), "--texts", "0"]) != 0
    assert "is quantised already" in capsys.readouterr().err.replace("\n", " ")


def test_a_file_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    convert(make_target(tmp_path / "target"), tmp_path / "model.gguf")
    assert load_tokenizer(tmp_path / "model.gguf", 16) is None
