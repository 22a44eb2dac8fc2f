"""What flags repeat of modules that import PyTorch is what stands there."""

import pytest

from espalier.bench.flags import DRAFT_WEIGHTS, SHAPE_WEIGHTS
from espalier.bench.shapes import SHAPES
from espalier.models.mtp import HIDDEN_SOURCES
from espalier.models.quantisers import QUANTISERS
from espalier.startup.resolve import DEFAULT_PAGE_SIZE
from lab.__main__ import main, make_parser
from lab.bench import generate, prefill, shaped
from lab.shape_flags import SHAPE_NAMES
from lab.synthetic.chain import MODES
from lab.synthetic.checkpoint import Recipe

FOUNDRY = ("foundry", "--shape", "llama-3.1-8b", "--out", "x")


def test_the_names_are_all_that_there_are():
    assert tuple(SHAPES) == SHAPE_NAMES
    assert tuple(QUANTISERS) == SHAPE_WEIGHTS
    assert tuple(name for name, each in QUANTISERS.items() if not each.quantises_only_experts) == DRAFT_WEIGHTS


@pytest.mark.parametrize(("flag", "values"), [("mode", MODES), ("mtp_form", HIDDEN_SOURCES)])
def test_foundry_takes_every_mode_and_form(flag, values):
    for value in values:
        assert getattr(make_parser().parse([*FOUNDRY, "--" + flag.replace("_", "-"), value]), flag) == value


def test_defaults_in_the_help_are_those_of_the_modules(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse(["round", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"page of the cache ({DEFAULT_PAGE_SIZE})" in text and f"rounds to time ({shaped.TIMED_ROUNDS})" in text
    with pytest.raises(SystemExit):
        make_parser().parse(["foundry", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"first guess is right ({Recipe.skill})" in text and f"in mode copy ({Recipe.reach})" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mtp-form", "target"], "--mtp-form is for an MTP head"),
        (["--mtp-layers", "99"], "--mtp-layers=99 is not supported"),
        (["--block-size", "1"], "--block-size=1 is not supported"),
        (["--block-fade", "0.5"], "--block-fade=0.5 is not supported"),
        (["--reach", "7"], "--reach is for --mode copy"),
        (["--weights", "mxfp4"], "mxfp4"),
    ],
)
def test_foundry_refuses_what_it_would_ignore(flags, says, monkeypatch, capsys):
    monkeypatch.setattr("lab.bench.checkpoint.write_checkpoint", pytest.fail)
    assert main([*FOUNDRY, *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_batch_that_the_requests_cannot_fill_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("lab.bench.sharing.record_pools", pytest.fail)
    assert main(["sharing", "--requests", "63"]) == 2
    assert "--requests=63 is not supported; use 64 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "of_shape", "of_model"),
    [
        ("generate", generate.SHAPE_PROMPTS, generate.MODEL_PROMPTS),
        ("prefill", prefill.DEFAULT_PROMPTS[True], prefill.DEFAULT_PROMPTS[False]),
    ],
)
def test_the_help_names_the_prompts_that_are_the_default(command, of_shape, of_model, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse([command, "--help"])
    shape, model = (" ".join(f"{n}x{length}" for n, length in groups) for groups in (of_shape, of_model))
    assert f"(with --shape: {shape}; of a model: {model})" in " ".join(capsys.readouterr().out.split())
