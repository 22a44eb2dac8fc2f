"""Planted block drafts: they are accepted as the tables say, at every depth, in every shape and dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import LLM, SamplingParams, SpeculationConfig
from espalier.errors import EspalierError
from lab.__main__ import main as lab
from lab.shape_flags import acceptance_by_depth
from lab.synthetic.chain import predicted_accept_length
from lab.synthetic.checkpoint import Recipe, build_models, write_checkpoint
from lab.synthetic.fading import MAX_FAVOUR_NATS
from tests.harness import CPU
from tests.lab.shapes import greedy_continuation
from tests.lab.synthetic.mixtures import SUPPORTED, mixture
from tests.lab.synthetic.test_checkpoint import LONG, a_recipe, an_engine, generate, prompts, tiny


def block(size: int, fade: float, **changes: Any) -> Recipe:
    return a_recipe(**{"shape": LONG, "skill": 0.75, "block_size": size, "block_fade": fade, **changes})


@pytest.mark.parametrize(
    ("size", "fade", "tree"),
    [
        (8, 0.93, (7, 4, 16)),
        pytest.param(7, 1.0, (7, 4, 16), marks=pytest.mark.full),
        pytest.param(8, 0.93, (7, 1, 8), marks=pytest.mark.full),
        pytest.param(16, 0.96, (15, 4, 32), marks=pytest.mark.full),
        pytest.param(8, 0.93, (7, 8, 64), marks=pytest.mark.full),
        pytest.param(16, 0.97, (15, 8, 256), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_block_draft_gives_what_its_tables_say(size: int, fade: float, tree: tuple[int, int, int]) -> None:
    """Acceptance through the whole engine, against the prediction from tables alone."""
    recipe = block(size, fade)
    engine = an_engine(recipe, tree, torch.float32, batch=8)
    starts = prompts(recipe, 8)
    assert generate(engine, starts, 80) == [greedy_continuation(recipe.chain(), start, 80) for start in starts]
    # About 160 rounds of deviation 2.
    predicted = predicted_accept_length(recipe.chain(), *tree, samples=1024)
    assert engine.totals.accept_length == pytest.approx(predicted, abs=0.3)


# Acceptance at each depth where the one before was accepted, and the same as accept lengths by draft length.
CURVE = (0.8, 0.75, 0.75, 0.6)
LENGTHS = {"1": 1.8, "2": 2.4, "3": 2.85, "4": 3.12}


@pytest.mark.full
@pytest.mark.parametrize("rates", [tuple(0.8 * 0.9**depth for depth in range(6)), CURVE], ids=["fade", "curve"])
def test_a_chain_is_accepted_depth_by_depth_as_chosen(rates: tuple[float, ...]) -> None:
    """The accept table that was asked for: the skill at depth d, given that all depths before were right."""
    recipe = block(len(rates), 1.0, shape=tiny(hot=2048)).with_acceptance(rates)
    engine = an_engine(recipe, (len(rates), 1, len(rates) + 1), torch.float32, batch=16)
    starts = prompts(recipe, 16)
    assert generate(engine, starts, 200) == [greedy_continuation(recipe.chain(), start, 200) for start in starts]
    for rate, (tried, accepted) in zip(rates, engine.totals.acceptance_by_depth, strict=True):
        assert tried > 90 and accepted / tried == pytest.approx(rate, abs=4 * (0.25 / tried) ** 0.5)


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("content", [CURVE, LENGTHS], ids=["rates", "lengths"])
def test_a_curve_of_a_file_is_planted(tmp_path: Path, size: int, content: Any) -> None:
    (tmp_path / "curve.json").write_text(json.dumps(content))
    rates = acceptance_by_depth(tmp_path / "curve.json")
    assert rates == pytest.approx(CURVE)
    recipe = a_recipe(shape=LONG, block_size=size).with_acceptance(rates)
    assert predicted_accept_length(recipe.chain(), 4, 1, 5, samples=2048) == pytest.approx(LENGTHS["4"], abs=0.15)


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        ("[0.8, 1.5]", [], "holds no acceptance"),
        ("[]", [], "holds no acceptance"),
        ('{"1": 1.8, "3": 2}', [], "holds no acceptance"),
        ('{"1": 1.5, "2": 2.4}', [], "holds no acceptance"),
        ('{"1": 1}', [], "holds no acceptance"),
        ("[" * 99_999, [], "holds no acceptance"),
        ("[0.8]", ["--block-size", "2"], "--accept-lengths has 1 depths, and --block-size=2; lower it"),
        ("[0.7, 0.8]", ["--block-size", "2"], "out of reach of a block draft"),
        ("[0.8]", ["--accept-length", "2"], "leave one out"),
        ("[0.8]", ["--skill", "0.5"], "leave out --skill"),
        (None, [], "cannot be read"),
    ],
)
def test_a_curve_that_cannot_be_planted_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: Any,
    flags: Any,
    says: str,
) -> None:
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: tiny())
    file = tmp_path / "curve.json"
    if content is not None:
        file.write_text(content)
    given = ["foundry", "--shape", "tiny", "--out", str(tmp_path / "out"), "--accept-lengths", str(file), *flags]
    assert lab(given) == 2 and says in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_cannot_be_planted_is_refused() -> None:
    with pytest.raises(EspalierError, match="at depth 6 is out of reach of a block draft"):
        block(8, 0.85).chain()
    with pytest.raises(EspalierError, match="has 40 heads; lower block_size=41"):
        block(41, 1.0).tensors(torch.float32, CPU)
    with pytest.raises(EspalierError, match="steps=5 is above block_size=4 of the draft"):
        predicted_accept_length(block(4, 1.0).chain(), 5, 2, 8)


def test_depths_fade_as_asked() -> None:
    chain = block(8, 0.95).chain()
    assert chain.fading is not None
    by_depth = [float((logp.argmax(1) == 0).double().mean()) for logp in chain.fading.logp(chain.draft_logp, 8)]
    assert by_depth == pytest.approx([chain.skill * 0.95**depth for depth in range(8)], abs=0.01)
    assert 0 < chain.fading.nats_by_depth[-1] < MAX_FAVOUR_NATS and chain.fading.nats_by_depth.diff().min() >= 0


@pytest.mark.parametrize("name", SUPPORTED)
def test_any_shape_takes_a_block_draft(name: str) -> None:
    recipe = Recipe(mixture(name), block_size=4, skill=0.9, block_fade=0.9)
    _, tensors = recipe.tensors(torch.float32, CPU)
    _, draft = build_models(recipe, torch.float32, CPU, 64)
    assert draft.spec.max_steps == 4 and all(tuple(tensors.tensor(n).shape) == s for n, s in tensors.shapes.items())


def test_from_files_through_the_public_door(tmp_path: Path) -> None:
    recipe = block(6, 1.0, shape=tiny())
    target, draft = write_checkpoint(recipe, tmp_path, torch.float32)
    [start] = prompts(recipe, 1)
    tree = SpeculationConfig(steps=6, topk=4, num_draft_tokens=16)
    with LLM(str(target), draft=str(draft), max_context=256, max_batch=2, speculation=tree) as llm:
        [out] = llm.generate([start], SamplingParams(temperature=0.0, max_tokens=40))
        assert llm.config.algorithm == "block" and llm.engine.totals.accept_length > 2
    assert list(out.token_ids) == greedy_continuation(recipe.chain(), start, 40)


@pytest.mark.full
@pytest.mark.parametrize("shift", [-1, pytest.param(1, marks=pytest.mark.full)])
def test_layers_that_are_one_off_raise_the_alarm(
    shift: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong pairing that is easiest to make: two publishers count layers differently."""
    monkeypatch.setattr("espalier.llm.ROUNDS_BEFORE_WARNING", 64)
    recipe = block(6, 1.0, shape=tiny())
    target, draft = write_checkpoint(recipe, tmp_path, torch.float32)
    starts = prompts(recipe, 4)
    params = SamplingParams(temperature=0.0, max_tokens=25)
    tree = SpeculationConfig(steps=6, topk=4, num_draft_tokens=16)
    config = json.loads((draft / "config.json").read_text())
    for wrong in (False, True):
        caplog.clear()
        ids = [layer + shift * wrong for layer in config["target_layer_ids"]]
        (draft / "config.json").write_text(json.dumps({**config, "target_layer_ids": ids}))
        with LLM(str(target), draft=str(draft), max_context=256, max_batch=6, speculation=tree) as llm:
            outputs = [list(out.token_ids) for out in llm.generate(starts, params)]
            accept_length = llm.engine.totals.accept_length
        # The text is right in any case.
        assert outputs == [greedy_continuation(recipe.chain(), start, 25) for start in starts]
        warned = [record.getMessage() for record in caplog.records if "accept length is" in record.getMessage()]
        assert bool(warned) is wrong and (accept_length < 1.05 if wrong else accept_length > 2)
    assert "check the target layers that it reads (target_layer_ids name their outputs" in warned[0]


@pytest.mark.full
def test_models_in_bfloat16_are_accepted_alike() -> None:
    recipe, tree = block(8, 0.95), (8, 4, 32)
    engine = an_engine(recipe, tree, torch.bfloat16, batch=4)
    starts = prompts(recipe, 4)
    assert generate(engine, starts, 50) == [greedy_continuation(recipe.chain(), start, 50) for start in starts]
    assert engine.totals.accept_length == pytest.approx(predicted_accept_length(recipe.chain(), *tree), abs=0.5)


def test_the_command_writes_a_block_draft(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: tiny())
    flags = ["foundry", "--shape", "tiny", "--out", str(tmp_path), "--dtype", "float32", "--block-size", "4"]
    assert lab([*flags, "--accept-length", "2.5"]) == 2
    assert "--tree has 5 steps, above --block-size=4; lower it" in capsys.readouterr().err
    assert lab([*flags, "--mtp-layers", "1"]) == 2 and "name two drafts" in capsys.readouterr().err
    assert lab([*flags, "--block-fade", "0"]) == 2 and "use above 0 to 1" in capsys.readouterr().err
    assert lab([*flags, "--block-fade", "0.95", "--accept-length", "2.5", "--tree", "4,2,8"]) == 0
    # Trees that are deeper than the block are left out.
    printed = capsys.readouterr().out
    assert "4, 2, 8" in printed and "3, 2, 8" in printed and "5, 8, 64" not in printed
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (config["block_size"], config["architectures"]) == (4, ["Qwen3DSparkModel"])
