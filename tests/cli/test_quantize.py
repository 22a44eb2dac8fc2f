"""`espalier quantize`: a copy that runs, and a report that tells how far it is from the original."""

import json
import re
import shutil
from math import exp, log

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from espalier.bench.drive import heldout_tokens
from espalier.bench.quantised import compare_accuracy, kl_divergence
from espalier.cli.main import main
from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE
from espalier.llm import LLM
from espalier.models import read_config
from espalier.models.weight_formats.quantised import QuantisedWeight
from espalier.request import SamplingParams
from espalier.startup.checkpoints import BUNDLED_DRAFTS
from lab.synthetic.checkpoint import Recipe, write_checkpoint
from tests.builders import make_eagle3, make_target
from tests.lab.synthetic.test_checkpoint import tiny
from tests.mtp import mtp_directories, without_target
from tests.worded import worded


def test_divergence():
    certain, even = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log()
    assert kl_divergence(even, even) == 0
    assert float(kl_divergence(certain, even)) == pytest.approx(log(2))
    assert kl_divergence(even, certain) == torch.inf


def distributions(path, texts):
    """(log-probabilities of transformers, the token after) at each position of the texts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, reference in texts:
        whole = torch.tensor([prompt + reference])
        with torch.no_grad():
            logprobs = model(whole).logits[0].log_softmax(-1)
        yield from zip(logprobs[:-1], whole[0, 1:], strict=True)


def test_the_figures_are_those_of_whole_distributions(tmp_path):
    """The copy is another model: a 20-likeliest bound would be far below."""
    paths = [shutil.copytree(worded()[0], tmp_path / name) for name in ("original", "copy")]
    weights = load_file(paths[1] / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        tensor += 0.3 * tensor.float().std() * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
    save_file(weights, paths[1] / "model.safetensors", metadata={"format": "pt"})
    advanced = []
    settings = {"device": "cpu", "dtype": "float32"}
    found = compare_accuracy(str(paths[0]), str(paths[1]), settings, 1, 8, lambda: advanced.append(1))
    with LLM(paths[0], **settings) as llm:
        read = heldout_tokens(llm, 1)
    pairs = list(zip(*(distributions(path, read) for path in paths), strict=True))
    kl = [float((one.exp() * (one - other)).sum()) for (one, _), (other, _) in pairs]
    losses = [[-float(logprobs[token]) for logprobs, token in each] for each in zip(*pairs, strict=True)]
    assert found.positions == len(pairs) and len(advanced) == 2
    assert found.kl == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert found.perplexity == pytest.approx([exp(sum(each) / len(each)) for each in losses], rel=1e-3)
    assert found.agreement == sum(int(one.argmax() == other.argmax()) for (one, _), (other, _) in pairs) / len(pairs)


EAGLE3 = str(BUNDLED_DRAFTS["eagle3"])


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr("espalier.cli.quantize.GENERATED_TOKENS", 12)


def test_a_copy_of_the_bundled_model(tmp_path, capsys):
    report = tmp_path / "report.json"
    flags = ["--to", "fp8", "--out", str(tmp_path / "out"), "--texts", "1", "--draft", "bundled", "--json", str(report)]
    assert main(["quantize", "bundled", *flags]) == 0
    shown, said = capsys.readouterr()
    assert "same likeliest token" in shown and "accept length" in shown
    assert f"{tmp_path / 'out'} is whole; comparing it with the original on 1 texts (--texts 0 leaves this out)" in said
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1, "all of it can be read alike"
    results = json.loads(report.read_text())
    accuracy = results["accuracy"]
    assert results["num_matrices"] == 16 * 7 and results["written_bytes"] < 0.6 * results["read_bytes"]
    assert 0.9 < accuracy["agreement"] < 1 and 0 < accuracy["kl"] < 0.03
    assert min(accuracy["accept_length"]) > 2
    with LLM(tmp_path / "out", draft="bundled", device="cpu") as llm:
        both = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}]
        params = [SamplingParams(**style, max_tokens=12, speculation=on) for on in (True, False) for style in both]
        tokens = [output.token_ids for output in llm.generate(["def main():\n"] * 4, params)]
    assert tokens[:2] == tokens[2:]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, 130), (EspalierError("why"), 2)], ids=["Ctrl-C", "error"]
)
def test_a_comparison_that_ends_early_leaves_a_whole_copy(tmp_path, capsys, monkeypatch, error, status):
    def compare(*_):
        raise error

    monkeypatch.setattr("espalier.bench.quantised.compare_accuracy", compare)
    out = tmp_path / "out"
    assert main(["quantize", "bundled", "--to", "fp8", "--out", str(out), "--device", "cpu"]) == status
    said = capsys.readouterr().err
    assert f"espalier: the comparison is left out; {out} is whole" in said or f"{out} is whole, but the comp" in said
    read_config(out)


def test_a_machine_too_small_for_the_comparison_is_told_before_the_copy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("espalier.startup.load.free_memory", lambda device: 2**20)
    flags = ["--to", "fp8", "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["quantize", "bundled", *flags]) == 2
    assert re.search(r"no comparison .* weights .* do not fit .*; --texts 0 leaves it out", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    assert main(["quantize", "bundled", *flags, "--texts", "0"]) == 0


@pytest.mark.full
def test_a_model_without_a_tokenizer_is_compared_on_its_own_text(tmp_path, capsys, monkeypatch):
    """A synthetic chain, which FP8 keeps: both agree everywhere, and accept as many tokens."""
    monkeypatch.setattr("espalier.bench.quantised.GENERATED_LENGTH", 96)
    recipe = Recipe(tiny(), skill=0.8)
    target, draft = write_checkpoint(recipe, tmp_path / "made", torch.bfloat16)
    report = tmp_path / "report.json"
    flags = ["--to", "fp8", "--out", str(tmp_path / "out"), "--texts", "2", "--draft", str(draft)]
    assert main(["quantize", str(target), *flags, "--device", "cpu", "--json", str(report)]) == 0
    assert "of the original's own text" in capsys.readouterr().out
    accuracy = json.loads(report.read_text())["accuracy"]
    # The first token after a prompt is the chain's too.
    assert accuracy["positions"] == 2 * 96 and accuracy["is_own_text"]
    assert accuracy["agreement"] > 0.98 and min(accuracy["accept_length"]) > 1.5
    before, after = accuracy["perplexity"]
    assert 1 < before < 5 and after < 1.2 * before


@pytest.mark.parametrize("positions", [5, 100])
def test_a_model_of_a_short_context_is_compared(tmp_path, positions):
    """It has room for less than the usual prompts and answers."""
    target = make_target(tmp_path / "target", max_position_embeddings=positions)
    flags = ["--to", "fp8", "--out", str(tmp_path / "out"), "--texts", "1", "--json", str(tmp_path / "report.json")]
    draft = make_eagle3(tmp_path / "draft", target)
    assert main(["quantize", str(target), *flags, "--draft", str(draft), "--device", "cpu"]) == 0
    accuracy = json.loads((tmp_path / "report.json").read_text())["accuracy"]
    assert 0 < accuracy["positions"] < positions and min(accuracy["accept_length"]) >= 1


@pytest.mark.full
@pytest.mark.parametrize("model", ["bundled", pytest.param(EAGLE3, marks=pytest.mark.full)], ids=["target", "draft"])
def test_accept_lengths_are_those_of_the_tree_where_plain_decoding_is_as_fast(tmp_path, monkeypatch, model):
    """With plain decoding both would be 1, whatever the copy lost."""
    monkeypatch.setattr("espalier.startup.tree_policy._limit_trees", lambda *_: {1: PLAIN_TREE})
    report = tmp_path / "report.json"
    flags = ["--to", "fp8", "--out", str(tmp_path / "out"), "--texts", "1", "--device", "cpu", "--json", str(report)]
    other = ["--draft", "bundled"] if model == "bundled" else ["--target", "bundled"]
    assert main(["quantize", model, *flags, *other]) == 0
    assert min(json.loads(report.read_text())["accuracy"]["accept_length"]) > 2


@pytest.mark.full
def test_a_copy_of_the_bundled_draft(tmp_path, capsys):
    report, out = tmp_path / "report.json", tmp_path / "out"
    flags = ["--to", "int4", "--out", str(out), "--texts", "1", "--target", "bundled", "--json", str(report)]
    assert main(["quantize", EAGLE3, *flags, "--device", "cpu"]) == 0
    results = json.loads(report.read_text())
    before, after = results["accuracy"]["accept_length"]
    assert f"{before:.2f} -> {after:.2f}" in capsys.readouterr().out
    assert before > after > 2 and results["num_matrices"] == 9
    with LLM("bundled", draft=str(out), device="cpu") as llm:
        assert isinstance(llm.engine.executor.runner.drafter.drafter.draft.head.weight, QuantisedWeight)
        both = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}]
        params = [SamplingParams(**style, max_tokens=12, speculation=on) for on in (True, False) for style in both]
        tokens = [output.token_ids for output in llm.generate(["def main():\n"] * 4, params)]
    assert tokens[:2] == tokens[2:]


def test_a_draft_may_name_its_target(tmp_path, capsys):
    flags = ["--to", "fp8", "--out", str(tmp_path / "out"), "--texts", "1", "--device", "cpu"]
    assert main(["quantize", str(BUNDLED_DRAFTS["mtp"]), *flags]) == 0
    assert "accept length" in capsys.readouterr().out


def test_mtp_layers_without_their_target_are_a_draft(tmp_path, capsys):
    target = mtp_directories("mimo", 1)[0]
    alone = without_target(target, tmp_path / "alone", "model.mtp_layers.")
    flags = ["--to", "fp8", "--out", str(tmp_path / "out"), "--texts", "1", "--device", "cpu"]
    assert main(["quantize", str(alone), *flags]) == 2
    assert "does not name its target" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["quantize", str(alone), *flags, "--target", str(target)]) == 0
    assert "accept length" in capsys.readouterr().out


def test_an_unkndraft_of_target_is_refused_as_such(tmp_path, capsys):
    draft = shutil.copytree(EAGLE3, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    flags = ["--to", "fp8", "--out", str(tmp_path / "out"), "--target", "bundled"]
    for architecture, says in (
        ("EagleLlamaForCausalLM", "holds an EAGLE-3 head"),
        ("Gemma4DSparkModel", "is not supported yet; supported are EAGLE-3 heads"),
    ):
        (draft / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        assert main(["quantize", str(draft), *flags]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_write_that_fails_is_one_line_and_leaves_no_half_copy(tmp_path, capsys, monkeypatch):
    def full(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("espalier.models.weight_files.save_file", full)
    out = tmp_path / "out"
    assert main(["quantize", "bundled", "--to", "int4", "--out", str(out), "--texts", "0"]) == 2
    assert "No space left on device" in (err := capsys.readouterr().err) and err.count("\n") == 1
    assert not list(out.iterdir())


def test_bad_input_is_one_line(tmp_path, capsys):
    for flags, says in (
        (["--texts", "9999"], "--texts=9999 is not supported; use 0 to 64"),
        (["--draft", str(tmp_path / "none")], "none' is not a directory"),
        (["--draft", "bundled", "--texts", "0"], "--draft is for the comparison"),
        (["--json", str(tmp_path / "none" / "x.json")], "cannot be written"),
        (["--device", "cuda:99"], "cuda"),
    ):
        assert main(["quantize", "bundled", "--to", "int4", "--out", str(tmp_path / "out"), *flags]) == 2
        assert says in capsys.readouterr().err
    for flags, says in (
        ([], "does not name its target (speculators_config.verifier); give --target, or --texts 0"),
        (["--draft", "bundled"], "--draft is for a target"),
        (["--target", "bundled", "--texts", "0"], "--target is for the comparison"),
        (["--target", str(tmp_path / "none")], "target='"),
    ):
        assert main(["quantize", EAGLE3, "--to", "int4", "--out", str(tmp_path / "out"), *flags]) == 2
        assert says in capsys.readouterr().err
    assert main(["quantize", "bundled", "--to", "int4", "--out", str(tmp_path / "out"), "--target", "bundled"]) == 2
    assert "--target is for a draft, and bundled is a target" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
