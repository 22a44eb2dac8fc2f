"""What flags repeat of modules that import PyTorch is what stands there."""

import pytest

from espalier.bench import generate, prefill, shaped
from espalier.cli.main import parse
from espalier.models.quantisers import QUANTISERS
from espalier.startup.resolve import PAGE_SIZE
from espalier.synthetic.chain import MODES
from espalier.synthetic.checkpoint import Recipe
from espalier.synthetic.mtp import FORMS
from espalier.synthetic.shapes import SHAPES
from espalier.terminal.flags import SHAPE_NAMES, SHAPE_WEIGHTS

FOUNDRY = ("bench", "foundry", "--shape", "llama-3.1-8b", "--out", "x")


def test_the_names_are_all_that_there_are():
    assert tuple(SHAPES) == SHAPE_NAMES
    assert tuple(QUANTISERS) == SHAPE_WEIGHTS


def test_foundry_has_the_defaults_of_a_recipe():
    args = parse(FOUNDRY)
    names = set(Recipe.__dataclass_fields__) - {"shape", "skill"}
    assert {name: getattr(args, name) for name in names} == {name: getattr(Recipe, name) for name in names}


@pytest.mark.parametrize(("flag", "values"), [("mode", MODES), ("mtp_form", FORMS)])
def test_foundry_takes_every_mode_and_form(flag, values):
    for value in values:
        assert getattr(parse([*FOUNDRY, "--" + flag.replace("_", "-"), value]), flag) == value


def test_defaults_in_the_help_are_those_of_the_modules(capsys):
    with pytest.raises(SystemExit):
        parse(["bench", "round", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"page of the cache ({PAGE_SIZE})" in text and f"rounds to time ({shaped.ROUNDS})" in text
    with pytest.raises(SystemExit):
        parse(["bench", "foundry", "--help"])
    assert f"first guess is right ({Recipe.skill})" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("command", "of_shape", "of_model"),
    [
        ("generate", generate.PROMPTS_OF_SHAPE, generate.PROMPTS_OF_MODEL),
        ("prefill", prefill.PROMPTS[True], prefill.PROMPTS[False]),
    ],
)
def test_the_help_names_the_prompts_that_are_the_default(command, of_shape, of_model, capsys):
    with pytest.raises(SystemExit):
        parse(["bench", command, "--help"])
    shape, model = (" ".join(f"{n}x{length}" for n, length in groups) for groups in (of_shape, of_model))
    assert f"(with --shape: {shape}; of a model: {model})" in " ".join(capsys.readouterr().out.split())
