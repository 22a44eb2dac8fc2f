"""Foundry casts do what is planted: text by the rule, probabilities, acceptance as foretold, rows that count."""

import copy
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import LLM, SamplingParams, SpeculationConfig
from espalier.bench.shapes import GPT_OSS_FIELDS, LLAMA_FIELDS, QWEN3_FIELDS, SHAPES, Shape, find_shape
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.models import load_target
from espalier.models.from_transformers.target import TransformersTarget
from espalier.models.rope import RopeTables
from espalier.startup.build import LoadedModels, assemble_engine, config_without_files
from lab.__main__ import main as lab
from lab.synthetic import checkpoint as foundry
from lab.synthetic.chain import PROBABILITIES, predicted_accept_length
from lab.synthetic.checkpoint import Recipe, build_models, write_checkpoint
from lab.synthetic.rope import MIN_SCORE_DROP, make_lag_code
from tests.checkpoints import load_pair
from tests.harness import CPU, request
from tests.lab.shapes import greedy_continuation
from tests.models.reference import load_reference, reference_logits
from tests.oracles.dense import DensePass

REACH = 24
PROMPT = 32
POSITIONS = 512
PLAIN = (0, 1, 1)


def tiny(family: dict[str, Any] = LLAMA_FIELDS, hot: int = 256, **sizes: int) -> Shape:
    fields = {
        **family,
        "vocab_size": hot + 64,
        "hidden_size": 320,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "bos_token_id": hot + 62,
        "eos_token_id": hot + 63,
        **sizes,
    }
    return Shape("tiny", "nobody", hot + 62, hot, fields)


@lru_cache
def models(recipe: Recipe, dtype: torch.dtype = torch.float64):
    return build_models(recipe, dtype, CPU, POSITIONS)


def a_recipe(**changes: Any) -> Recipe:
    return Recipe(**{"shape": SHAPE, "reach": REACH, **changes})


SHAPE = tiny()
# In billions, with an lm_head apart.
PARAMETERS = {
    "llama-3.1-8b": 8.03,
    "qwen3-8b": 8.19,
    "llama-3.1-70b": 70.55,
    "llama-3.2-1b": 1.50,
    "qwen3-30b-a3b": 30.53,
    "deepseek-v2-lite": 15.71,
    "deepseek-v3-1gpu": 48.47,
    "deepseek-v3-cut": 28.37,
    "deepseek-v3.2-cut": 28.48,
    "gpt-oss-20b": 20.91,
    "gemma-4-31b": 32.11,
    "gemma-4-26b-a4b": 25.97,
    "ministral3-14b": 13.51,
    "phi-4": 14.66,
    # Without the vision part and the MTP layer of the published 27B and 35B.
    "qwen3.6-27b": 26.90,
    "qwen3.6-35b-a3b": 34.66,
    "nemotron-30b-a3b": 31.58,
}
# Its ring is long enough for a few hundred rounds to be a fair sample of places.
LONG = tiny(hot=1024)


def prompts(recipe: Recipe, count: int) -> list[list[int]]:
    """Random tokens, special ones too, then a hot one, so that what follows is the chain's."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(0, recipe.shape.target.vocab_size, (count, PROMPT), generator=generator)
    last = recipe.chain().hot[torch.arange(count) * 11]
    return torch.cat((drawn, last[:, None]), 1).tolist()


def an_engine(recipe: Recipe, tree: tuple[int, int, int], dtype: torch.dtype, batch: int = 4) -> Engine:
    target, draft = models(recipe, dtype)
    steps, topk, nodes = tree
    spec = recipe.draft_config.spec
    layout = RoundLayout(
        batch, steps, topk, nodes, 16, 256, spec.num_recomputed_tokens, 256, block_rows=spec.block_rows
    )
    config = config_without_files(layout, spec.algorithm if steps else "none", "sdpa", dtype, CPU)
    return assemble_engine(LoadedModels(config, target, draft if steps else None))


def generate(engine: Engine, starts: list[list[int]], count: int) -> list[list[int]]:
    requests = [request(i, p, SamplingParams(temperature=0.0, max_tokens=count)) for i, p in enumerate(starts)]
    for r in requests:
        engine.add(r)
    while engine.has_work:
        engine.step()
    engine.close()
    return [r.output for r in requests]


def followed_rule(recipe: Recipe, tmp_path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """From files: the same logits in both, and the greedy token that the rule names.  Returns (tokens, logits)."""
    path, _ = write_checkpoint(recipe, tmp_path, torch.float64)
    [start] = prompts(recipe, 1)
    text = start + greedy_continuation(recipe.chain(), start, 60)
    tokens = torch.tensor([text])
    logits, _ = reference_logits(load_reference(path, torch.float64), tokens)
    target = load_target(path, dtype=torch.float64, device=CPU, position_rows=POSITIONS)
    own = target.logits(target(DensePass(tokens, target.layer_specs, torch.arange(len(text))[None])).hidden)
    torch.testing.assert_close(own, logits, rtol=0, atol=1e-9)
    assert logits[0, PROMPT:-1].argmax(-1).tolist() == text[PROMPT + 1 :]
    return tokens[0], logits[0]


@pytest.mark.parametrize("family", [LLAMA_FIELDS, QWEN3_FIELDS], ids=["llama", "qwen3"])
@pytest.mark.parametrize("mode", ["chain", "copy"])
def test_transformers_and_espalier_follow_the_rule(family: dict[str, Any], mode: str, tmp_path: Path) -> None:
    """The tokens also have the probabilities that the rule gives them."""
    recipe = a_recipe(shape=tiny(family), mode=mode)
    tokens, logits = followed_rule(recipe, tmp_path)
    given = logits[PROMPT:].softmax(-1).gather(1, recipe.chain().successors(tokens[PROMPT:]))
    if mode == "chain":
        # Layers disturb each logit by a few tenths at this size; in the mean that cancels.
        torch.testing.assert_close(given.mean(0).float(), torch.tensor(PROBABILITIES), atol=0.02, rtol=0)
        assert given[:, 0].min() > 0.5
    else:
        assert given.max(1).values.min() > 0.99


def test_directories_are_ordinary_and_what_build_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded or not, from disk or without files: the same weights, so the same logits to the bit."""
    recipe = a_recipe(mode="copy")
    monkeypatch.setattr(foundry, "SHARD_BYTES", 2_000_000)
    path, draft_path = write_checkpoint(recipe, tmp_path, torch.float32)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 3 and all(shard.stat().st_size < 2_100_000 for shard in shards)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [shard.name for shard in shards]
    loading = {"dtype": torch.float32, "device": CPU, "position_rows": POSITIONS}
    target, draft = load_pair(path, draft_path, **loading)
    made, made_draft = models(recipe, torch.float32)
    assert (made.captured_layers, made.layer_specs, made_draft.layer_specs) == (
        target.captured_layers,
        target.layer_specs,
        draft.layer_specs,
    )
    tokens = torch.tensor(prompts(recipe, 2))
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    out, again = (m(DensePass(tokens, m.layer_specs, positions)) for m in (target, made))
    assert torch.equal(target.logits(out.hidden), made.logits(again.hidden))
    heads = [
        d.logits(d(DensePass(tokens, d.layer_specs, positions), d.fuse(out.captured))) for d in (draft, made_draft)
    ]
    assert torch.equal(*heads) and torch.equal(draft.d2t, made_draft.d2t)
    with pytest.raises(EspalierError, match="already holds"):
        write_checkpoint(recipe, tmp_path, torch.float32)


def test_a_target_by_transformers_is_the_same(tmp_path: Path) -> None:
    """From the same tensors, with the same captured inputs."""
    recipe = a_recipe()
    native, _ = models(recipe, torch.float32)
    hosted, _ = build_models(replace(recipe, model_impl="transformers"), torch.float32, CPU, POSITIONS)
    assert isinstance(hosted, TransformersTarget)
    tokens = torch.tensor(prompts(recipe, 2))
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    plain = copy.copy(hosted)  # as SyntheticModels has it, for engines without a draft
    plain.captured_layers = ()
    of_plain = plain.logits(plain(DensePass(tokens, plain.layer_specs, positions)).hidden)
    one, other = (m(DensePass(tokens, m.layer_specs, positions)) for m in (native, hosted))
    assert torch.equal(of_plain, hosted.logits(other.hidden))
    assert native.captured_layers == hosted.captured_layers and native.layer_specs != ()
    torch.testing.assert_close(hosted.logits(other.hidden), native.logits(one.hidden), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other.captured, one.captured, atol=1e-4, rtol=1e-4)


def test_the_first_layers_are_those_of_the_whole() -> None:
    whole = Shape(
        "tiny", "nobody", 318, 256, {**GPT_OSS_FIELDS, **SHAPE.config_fields, "layer_types": ["sliding_attention"] * 4}
    )
    assert whole.with_layers(2).config_json["layer_types"] == ["sliding_attention"] * 2
    cut = SHAPE.with_layers(3)
    assert (cut.name, cut.target.num_layers) == ("tiny, 3 of 4 layers", 3)
    few, all_of = (Recipe(shape).tensors(torch.float32, "meta")[0].shapes for shape in (cut, SHAPE))
    assert few == {name: size for name, size in all_of.items() if not name.startswith("model.layers.3")}


def test_a_draft_that_stands_is_noticed_before_a_target_is_made(tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors").touch()
    with pytest.raises(EspalierError, match="draft already holds"):
        write_checkpoint(Recipe(tiny()), tmp_path, torch.float32)
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_models_in_bfloat16_follow_the_rule(device: str) -> None:
    for mode in ("chain", "copy"):
        recipe = a_recipe(mode=mode)
        target, _ = build_models(recipe, torch.bfloat16, device, POSITIONS)
        [start] = prompts(recipe, 1)
        text = start + greedy_continuation(recipe.chain(), start, 60)
        tokens = torch.tensor([text], device=device)
        positions = torch.arange(len(text), device=device)[None]
        logits = target.logits(target(DensePass(tokens, target.layer_specs, positions)).hidden)
        assert logits[0, PROMPT:-1].argmax(-1).tolist() == text[PROMPT + 1 :]


def test_the_seed_is_all_that_decides() -> None:
    one, _ = a_recipe(seed=3).tensors(torch.float32, CPU)
    two, _ = a_recipe(seed=3).tensors(torch.float32, CPU)
    other, _ = a_recipe(seed=4).tensors(torch.float32, CPU)
    two.tensor("lm_head.weight")  # the order of making does not matter
    for name in ("model.layers.2.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(one.tensor(name), two.tensor(name))
        assert not torch.equal(one.tensor(name), other.tensor(name))


@pytest.mark.parametrize(
    "tree", [(5, 4, 16), *(pytest.param(tree, marks=pytest.mark.full) for tree in ((4, 1, 5), (5, 8, 64)))], ids=str
)
def test_the_draft_gives_what_its_tables_say_at_every_depth(tree: tuple[int, int, int]) -> None:
    """Acceptance through the whole engine, against the prediction from tables alone."""
    recipe = a_recipe(shape=LONG, skill=0.75)
    engine = an_engine(recipe, tree, torch.float32, batch=8)
    starts = prompts(recipe, 8)
    texts = generate(engine, starts, 80)
    assert texts == [greedy_continuation(recipe.chain(), start, 80) for start in starts]
    # About 170 rounds of deviation 1.7.
    predicted = predicted_accept_length(recipe.chain(), *tree)
    assert engine.totals.accept_length == pytest.approx(predicted, abs=0.15)


@pytest.mark.parametrize(
    ("layers", "form", "tree"),
    [
        (3, "chain", (5, 4, 16)),
        (3, "target", (4, 1, 5)),
        pytest.param(1, "chain", (5, 4, 16), marks=pytest.mark.full),
        pytest.param(3, "target", (5, 4, 16), marks=pytest.mark.full),
    ],
)
def test_mtp_layers_give_what_their_tables_say(layers: int, form: str, tree: tuple[int, int, int]) -> None:
    recipe = a_recipe(shape=LONG, skill=0.75, mtp_layers=layers, mtp_form=form)
    engine = an_engine(recipe, tree, torch.float32, batch=8)
    starts = prompts(recipe, 8)
    assert generate(engine, starts, 70) == [greedy_continuation(recipe.chain(), start, 70) for start in starts]
    assert engine.totals.accept_length == pytest.approx(predicted_accept_length(recipe.chain(), *tree), abs=0.15)


@pytest.mark.full
def test_copied_text_follows_the_rule_with_and_without_a_tree() -> None:
    recipe = a_recipe(mode="copy", shape=LONG)
    starts = prompts(recipe, 4)
    rule = [greedy_continuation(recipe.chain(), start, 80) for start in starts]
    engine = an_engine(recipe, (4, 4, 16), torch.float32)
    assert generate(engine, starts, 80) == rule
    assert engine.totals.accept_length == pytest.approx(predicted_accept_length(recipe.chain(), 4, 4, 16), abs=0.15)
    # Far enough that plain decoding reads rows of its own.
    assert generate(an_engine(recipe, PLAIN, torch.float32), starts, 40) == [text[:40] for text in rule]


@pytest.mark.parametrize("layer", range(4))
def test_a_wrong_committed_row_of_any_layer_changes_the_text(layer: int) -> None:
    """Row p of one layer is overwritten with row p - 1 after its commit: the token that reads it is followed wrongly,
    and until then nothing is wrong."""
    recipe = a_recipe(mode="copy")
    chain = recipe.chain()
    [start] = prompts(recipe, 1)
    rule = greedy_continuation(chain, start, 200)
    engine = an_engine(recipe, (3, 4, 8), torch.float64, batch=1)
    asked = request(0, start, SamplingParams(temperature=0.0, max_tokens=200))
    engine.add(asked)
    reader = 0
    while engine.has_work and not 0 < reader < len(start) + len(asked.output) - 1:
        engine.step()
        root = len(start) + len(asked.output) - 1
        if not reader and 20 < len(asked.output) < 160:
            reader = next((at for at in range(root, root + 40) if reads(chain, start + rule, at, layer, root)), 0)
            if reader:
                corrupt(engine, layer, reader - int(chain.lags[layer]))
    assert reader
    first = next(i for i, (got, due) in enumerate(zip(asked.output, rule, strict=False)) if got != due)
    assert len(start) + first == reader + 1


def reads(chain: Any, text: list[int], at: int, layer: int, root: int) -> bool:
    """The token at `at` looks through this layer at a committed row, whose neighbours are of other kinds."""
    far = at - int(chain.lags[layer])
    kinds = chain.kind[torch.tensor(text[far - 1 : far + 2])].tolist()
    return int(chain.lag_of[text[at]]) == layer and far < root and kinds[1] not in (kinds[0], kinds[2])


def corrupt(engine: Engine, layer: int, position: int) -> None:
    round = engine.executor.runner
    rows = round.pages.rows(round.table.page_table[1:2], torch.tensor([[position, position - 1]]))[0]
    for buffer in round.pages.layers[layer]:
        assert not torch.equal(buffer[rows[0]], buffer[rows[1]])
        buffer[rows[0]] = buffer[rows[1]]


def test_accept_length_is_chosen_by_the_knob() -> None:
    recipe = a_recipe(shape=LONG)
    for wanted in (2.5, 4.5):
        found = recipe.with_accept_length(wanted, 5, 4, 16)
        assert predicted_accept_length(found.chain(), 5, 4, 16) == pytest.approx(wanted, abs=0.08)
    assert predicted_accept_length(recipe.chain(), *PLAIN) == 1.0
    with pytest.raises(EspalierError, match="out of reach"):
        recipe.with_accept_length(4.0, 2, 2, 4)
    with pytest.raises(EspalierError, match="mode 'chain'"):
        replace(recipe, mode="copy").with_accept_length(4.0, 5, 4, 16)


def test_acceptance_from_files_through_the_public_door(tmp_path: Path) -> None:
    target, draft = write_checkpoint(a_recipe(), tmp_path, torch.float32)
    start = prompts(a_recipe(), 1)
    tree = SpeculationConfig(steps=4, topk=2, num_draft_tokens=8)
    with LLM(str(target), draft=str(draft), max_context=256, max_batch=2, speculation=tree) as llm:
        [out] = llm.generate(start, SamplingParams(temperature=0.0, max_tokens=40))
    assert list(out.token_ids) == greedy_continuation(a_recipe().chain(), start[0], 40)


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_parse_and_their_lags_stand_alone(name: str) -> None:
    """Sizes add up to the names, and a peak of one lag is alone, in a model whose keys are turned at all."""
    shape = find_shape(name)
    try:
        config = shape.target
    except EspalierError as error:
        pytest.skip(f"the family is not there: {error}")
    sizes = Recipe(shape).tensors(torch.bfloat16, "meta")[0].shapes.values()
    assert sum(torch.Size(size).numel() for size in sizes) / 1e9 == pytest.approx(PARAMETERS[name], abs=0.01)
    if config.rope.type == "none":
        return
    code = make_lag_code(config.rope, 40000)
    tables = RopeTables(config.rope, 3000, torch.float64, CPU)
    k = turned(code.key().double().expand(3000, -1), tables, torch.arange(3000))
    q = turned(code.query(700).double()[None], tables, torch.tensor([2900]))[0]
    scores = (k @ q) * code.amplitude**2 * code.dim**-0.5
    top = scores.topk(2)
    assert int(top.indices[0]) == 2900 - 700
    assert float(top.values[0] - top.values[1]) > MIN_SCORE_DROP - 0.01


def turned(x: torch.Tensor, tables: RopeTables, positions: torch.Tensor) -> torch.Tensor:
    """x [N, dim] by the rotation of its row's position."""
    return x * tables.cos[positions] + x.roll(x.shape[1] // 2, 1) * tables.sin[positions]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": "loop"}, "mode 'loop'"),
        ({"skill": 1.5}, "skill=1.5"),
        ({"reach": 0}, "reach=0"),
        ({"shape": replace(SHAPE, draft_vocab_size=254)}, "multiple of 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_cast_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(EspalierError, match=says):
        a_recipe(**changes).chain()


def test_the_command_writes_and_foretells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.bench.synthetic_models.find_shape", lambda name: SHAPE)
    flags = ["--shape", "tiny", "--out", str(tmp_path), "--dtype", "float32"]
    assert lab(["foundry", *flags, "--accept-length", "3", "--tree", "4,2,8"]) == 0
    assert "4, 2, 8" in capsys.readouterr().out
    skill = json.loads((tmp_path / "foundry.json").read_text())["skill"]
    assert predicted_accept_length(replace(a_recipe(), skill=skill).chain(), 4, 2, 8) == pytest.approx(3, abs=0.08)
    assert lab(["foundry", *flags, "--mode", "copy", "--skill", "0.5"]) == 2
